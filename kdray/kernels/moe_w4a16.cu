// moe_w4a16: a layer's routed experts, weights INT4 in groups of 32, for 1 to thousands of rows.
// moe_sum: what each row's experts gave, weighted, and the shared expert's output.
//
//   out      [T, WIDTH] bf16: sum over a row's TOP_K experts, in order, of weight * its output, + shared
//   inner    [P, INNER] bf16: silu(gate) * up of each pair = row * TOP_K + choice (P = T * TOP_K)
//   partial  [P, WIDTH] bf16: a pair's output, unweighted
//   ready    [max_tiles] int32: arrivals at a tile's `inner`; all 0 before moe_w4a16, and after moe_sum
//   x        [T, WIDTH] bf16
//   gate_up  [X, INNER / 16, WIDTH / 32, 576] bytes, down [X, WIDTH / 32, INNER / 32, 576] bytes:
//            moe_layout.py. w = q * scale, unrounded.
//   expert   [P] int64, -1 with weight 0: none;  weight [P] float32, shared [T, WIDTH] bf16 or null
//   tile, sorted, num_tiles   by sort_rows.cu, with TILE_ROWS = 8 * COLUMN_TILES; or, with
//            COLUMN_TILES 1, null: then P <= 32 and T <= 8, and each warp sorts for itself
//
// Grid of moe_w4a16: blocks of 16 warps, one to a multiprocessor and all resident at once; they share
// the work evenly, weights streaming on from unit to unit and from the first half to the second.
//   first   a unit is a tile's 16 columns of gate and of up: each warp multiplies a 16th of the inputs,
//           then four warps add up the 16 parts in order. Weights are the 16-row side of the products,
//           rows of x their 8 columns.
//   second  a unit, of one warp, is a tile's 32 columns of `partial`; it waits for the tile's `inner`.
// Grid of moe_sum: (T, WIDTH / 1024 rounded up), 128 threads of 8 columns.
// Limits: WIDTH and INNER multiples of 32; T * WIDTH and P * INNER < 2^31; dynamic shared memory SHARED_BYTES.
// Products exact, sums float32; inner and partial are rounded once. Neither depends on what else is in
// a tile or on COLUMN_TILES, so a row's bits do not depend on its batch.
// Oracle: reference_moe.moe_w4a16; within 1 % (norm of a row's error over the row's norm).
// Defines: WIDTH, INNER, TOP_K, COLUMN_TILES 1, 2 or 4; SLOTS of SLOT_STEPS steps a warp, PARTS 1 or 2
// buffers to add up in, and SHARED_BYTES, what these take.

#include "moe_w4a16_tiles.cuh"

#include "moe_w4a16_stream.cuh"
#include "overlap.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * WARP;
constexpr int SLICE = 16;  // columns of a unit of the first half
constexpr int SLICES = INNER / SLICE;
constexpr int WIDE_STEPS = WIDTH / STEP, INNER_STEPS = INNER / STEP;
constexpr int SHARE = (WIDE_STEPS + WARPS - 1) / WARPS;  // steps of a warp in the first half
constexpr int SHARES = (WIDE_STEPS + SHARE - 1) / SHARE;
constexpr int ADDERS = 4;  // warps that add up a column tile
constexpr int ARRIVALS = SLICES * ADDERS * COLUMN_TILES;
static_assert(WIDTH % STEP == 0 && INNER % STEP == 0, "whole groups");

struct Shared {
    unsigned char ring[WARPS][SLOTS][SLOT_BYTES];
    float part[PARTS][WARPS][8][WARP];
    u64 landed[WARPS][SLOTS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as launched");

// A tile's number, and the number of 16 or 32 columns.
struct Unit {
    int tile, part;
};

// The units of one warp, first half, then second; all warps of a block have the same of the first.
struct Units {
    Tiles tiles;
    const unsigned char* gate_up;
    const unsigned char* down;
    int warp, num_first, num_all;

    __device__ void count()
    {
        warp = threadIdx.x / WARP;
        num_first = shares_of(tiles.number * SLICES, (int)gridDim.x, (int)blockIdx.x);
        num_all = num_first + shares_of(tiles.number * WIDE_STEPS, (int)gridDim.x * WARPS,
                                        warp * (int)gridDim.x + (int)blockIdx.x);
    }
    __device__ static int shares_of(int units, int sharers, int own)
    {
        return own < units ? (units - own - 1) / sharers + 1 : 0;
    }
    __device__ int first_unit(int i) const { return (int)(blockIdx.x + i * gridDim.x); }
    // Neighbouring blocks take neighbouring columns, so that few units still go to all of them.
    __device__ int second_unit(int i) const
    {
        return (int)(((i - num_first) * WARPS + warp) * gridDim.x + blockIdx.x);
    }
    __device__ int share_begin() const { return warp * SHARE; }
    __device__ int share() const { return max(0, min(SHARE, WIDE_STEPS - share_begin())); }

    __device__ bool is_first(int i) const { return i < num_first; }
    __device__ Unit at(int i) const
    {
        const u32 unit = is_first(i) ? first_unit(i) : second_unit(i);
        const u32 tile = is_first(i) ? unit / SLICES : unit / WIDE_STEPS;
        return {(int)tile, (int)(unit - tile * (is_first(i) ? SLICES : WIDE_STEPS))};
    }
    __device__ int steps(int i) const { return is_first(i) ? share() : INNER_STEPS; }

    // The warp's weights of its unit i.
    __device__ const unsigned char* weights(int i) const
    {
        const Unit unit = at(i);
        const i64 expert = tiles.at(unit.tile).expert;
        if (is_first(i))
            return gate_up +
                   ((expert * SLICES + unit.part) * WIDE_STEPS + share_begin()) * STEP_BYTES;
        return down + (expert * WIDE_STEPS + unit.part) * INNER_STEPS * STEP_BYTES;
    }
};

// All of a warp's weights one after another; the ring runs ahead of what is multiplied.
struct Stream {
    const Units& units;
    Ring ring;
    int unit, left;  // the next unit to bring; steps left of the one before
    const unsigned char* from;

    __device__ void fill()
    {
        while (ring.room > 0) {
            while (left == 0) {
                if (unit == units.num_all) return;
                from = units.weights(unit);
                left = units.steps(unit++);
            }
            const int steps = min(left, SLOT_STEPS);
            ring.bring(from, steps * STEP_BYTES);
            from += SLOT_BYTES;
            left -= steps;
        }
    }
};

// The lane's places in the rows of pairs; a pair's row is pair / per_row. Columns without a pair take
// the first pair's: they cost nothing, and nobody looks at what comes of them.
__device__ __forceinline__ void find_rows(int (&at)[COLUMN_TILES], const Pairs& pairs, int per_row,
                                          int width, int begin)
{
    const int first = pairs.at(0, 0);
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
        const int row = (pairs.of[j] < 0 ? first : pairs.of[j]) / per_row;
        at[j] = row * width + begin * STEP + lane_id() % 4 * 8;
    }
}

__device__ __forceinline__ float silu(float x)
{
    constexpr float LOG2_E = 1.44269504088896341f;
    return divide(x, 1.0f + exp2_fast(-x * LOG2_E));
}

// Adds up the parts of the first half's units, a column tile a round. Of two buffers a round's is the
// one that nobody reads any more.
struct Adder {
    Shared& s;
    u16* inner;
    int* ready;
    u32 round;

    // To be called by the whole block.
    __device__ void add_up(const Pairs& pairs, const Unit& unit, const Sums& sum)
    {
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            const int warp = threadIdx.x / WARP, lane = lane_id();
            float(*const part)[8][WARP] = s.part[round % PARTS];
            if (PARTS == 1) __syncthreads();
#pragma unroll
            for (int i = 0; i < 8; ++i) part[warp][i][lane] = sum[j][i / 4][i % 4];
            __syncthreads();
            // Warps take turns. One adds c[i] of both fragments: a column's gate, and its up.
            const int i = (warp - (int)(round++ * ADDERS % WARPS) + WARPS) % WARPS;
            if (i >= ADDERS) continue;
            float gate = part[0][i][lane], up = part[0][4 + i][lane];
#pragma unroll
            for (int w = 1; w < SHARES; ++w) {
                gate += part[w][i][lane];
                up += part[w][4 + i][lane];
            }
            const int pair = pairs.at(j, lane % 4 * 2 + i % 2);
            if (pair >= 0)
                inner[(i64)pair * INNER + unit.part * SLICE + lane / 4 * 2 + i / 2] =
                    (u16)bf16_pair(silu(gate) * up, 0.0f);
            __syncwarp();
            if (lane == 0) add_acquire_release(&ready[unit.tile], 1);
        }
    }
};

// Rows of fragments are columns 4 g .. 4 g + 3 of a lane: 8 bytes of a row of partial.
__device__ __forceinline__ void store(u16* partial, const Pairs& pairs, int group, const Sums& sum)
{
    const int lane = lane_id();
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int pair = pairs.at(j, lane % 4 * 2 + odd);
            if (pair < 0) continue;
            const uint2 four = {bf16_pair(sum[j][0][odd], sum[j][0][2 + odd]),
                                bf16_pair(sum[j][1][odd], sum[j][1][2 + odd])};
            *(uint2*)(partial + (i64)pair * WIDTH + group * STEP + lane / 4 * 4) = four;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_w4a16(u16* inner, u16* partial, int* ready, const u16* x, const unsigned char* gate_up,
              const unsigned char* down, const i64* expert, const int4* tile, const int* sorted,
              const int* num_tiles, int num_pairs)
{
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& s = *(Shared*)memory;
    const int warp = threadIdx.x / WARP;
    Units units;
    Stream stream{units, {}, 0, 0, nullptr};
    stream.ring.open(&s.ring[warp][0][0], s.landed[warp]);
    start_behind_previous();

    units.tiles = Tiles::of(tile, sorted, num_tiles, expert, num_pairs);
    units.gate_up = gate_up;
    units.down = down;
    units.count();

    // One loop for both halves: instructions come slowly the first time.
    Adder adder{s, inner, ready, 0};
    Product product;
    product.left = 0;
    Pairs pairs;
    for (int i = -1;;) {
        stream.fill();
        if (product.left == 0) {
            if (i >= 0) {
                const Unit unit = units.at(i);
                if (units.is_first(i))
                    adder.add_up(pairs, unit, product.sum);
                else
                    store(partial, pairs, unit.part, product.sum);
            }
            if (++i == units.num_all) break;
            const bool first = units.is_first(i);
            const int number = units.at(i).tile;
            pairs = units.tiles.pairs(units.tiles.at(number));
            int rows[COLUMN_TILES];
            find_rows(rows, pairs, first ? TOP_K : 1, first ? WIDTH : INNER,
                      first ? units.share_begin() : 0);
            if (!first) {
                if (lane_id() == 0) wait_for_blocks(&ready[number], ARRIVALS);
                __syncwarp();
            }
            product.start(first ? x : inner, rows, units.steps(i));
            if (product.left == 0) continue;
        }
        product.go_on(stream.ring.oldest());
        stream.ring.drop_oldest();
    }
}

// Eight bf16, as float.
struct Eight {
    float x[8];
};
__device__ __forceinline__ Eight eight_of(const uint4& v)
{
    return {{bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y), bf16_low(v.z),
             bf16_high(v.z), bf16_low(v.w), bf16_high(v.w)}};
}

extern "C" __global__ void __launch_bounds__(128)
    moe_sum(u16* out, int* ready, const u16* partial, const float* weight, const u16* shared,
            int num_ready)
{
    start_behind_previous();
    const int row = blockIdx.x, column = (int)(blockIdx.y * 128 + threadIdx.x) * 8;
    const int thread = (int)((blockIdx.y * gridDim.x + blockIdx.x) * 128 + threadIdx.x);
    for (int i = thread; i < num_ready; i += (int)(gridDim.x * gridDim.y * 128)) ready[i] = 0;
    if (column >= WIDTH) return;
    uint4 given[TOP_K];
#pragma unroll
    for (int k = 0; k < TOP_K; ++k)
        given[k] = *(const uint4*)(partial + ((i64)row * TOP_K + k) * WIDTH + column);
    Eight sum{};
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
        const Eight term = eight_of(given[k]);
        const float w = weight[row * TOP_K + k];
        if (w == 0.0f) continue;  // of no expert: partial holds anything, even NaN
#pragma unroll
        for (int i = 0; i < 8; ++i) sum.x[i] += w * term.x[i];
    }
    const i64 at = (i64)row * WIDTH + column;
    if (shared != nullptr) {
        const Eight term = eight_of(*(const uint4*)(shared + at));
#pragma unroll
        for (int i = 0; i < 8; ++i) sum.x[i] += term.x[i];
    }
    *(uint4*)(out + at) = {bf16_pair(sum.x[0], sum.x[1]), bf16_pair(sum.x[2], sum.x[3]),
                           bf16_pair(sum.x[4], sum.x[5]), bf16_pair(sum.x[6], sum.x[7])};
}
