// moe_w4a16: a layer's routed experts, weights INT4 in groups of 32, for 1 to thousands of rows.
// moe_sum: what each row's experts gave, weighted, and the shared expert's output.
//
//   out      [T, WIDTH] bf16: sum over a row's TOP_K experts, in order, of weight * its output, + shared
//   inner    [P, INNER] bf16: silu(gate) * up of each pair = row * TOP_K + choice (P = T * TOP_K)
//   partial  [P, WIDTH] bf16: a pair's output, unweighted
//   ready    [max_tiles, 32] int32: arrivals at a tile's `inner`, in the first of a line; all 0 before
//            moe_w4a16, and after moe_sum
//   x        [T, WIDTH] bf16
//   gate_up  [X, INNER / 16, WIDTH / 32, 576] bytes, down [X, WIDTH / 32, INNER / 32, 576] bytes:
//            moe_layout.py. w = q * scale, unrounded.
//   expert   [P] int64, -1 with weight 0: none;  weight [P] float32, shared [T, WIDTH] bf16 or null
//   tile, sorted, num_tiles   by sort_rows.cu, with TILE_ROWS = 8 * COLUMN_TILES, and max_tiles the
//            entries of `tile`; or, with COLUMN_TILES 1, null: then P <= 128, max_tiles is P, and
//            each block sorts for itself (P <= 32, T <= 8 where LIST_BYTES < 1,040)
//
// Grid of moe_w4a16: blocks of 16 warps, one to a multiprocessor and all resident at once; they share
// the work evenly, weights streaming on from unit to unit and from the first half to the second. A
// unit's first activations are asked for before the unit in front is done with.
//   first   a unit is a tile's 16 columns of gate and of up: each warp multiplies a 16th of the inputs,
//           then four warps add up the 16 parts in order, while the others go on. Weights are the
//           16-row side of the products, rows of x their 8 columns.
//   second  a unit, of one warp, is a tile's 32 columns of `partial`; it waits for the tile's `inner`.
// Grid of moe_sum: (T, WIDTH / 1024 rounded up), 128 threads of 8 columns.
// Limits: WIDTH and INNER multiples of 32; X <= 1024; P <= 65,536; T * WIDTH and P * INNER < 2^31;
// dynamic shared memory SHARED_BYTES.
// Products exact, sums float32; inner and partial are rounded once. Neither depends on what else is in
// a tile or on COLUMN_TILES, so a row's bits do not depend on its batch.
// Oracle: reference_moe.moe_w4a16; within 1 % (norm of a row's error over the row's norm). One row or
// two are moe_w4a16_few.cu's, and many moe_w4a16_many.cu's, with the same bits.
// Defines: WIDTH, INNER, TOP_K, COLUMN_TILES 1, 2 or 4; cuda_moe.Design: SLOTS of SLOT_STEPS steps a
// warp, PARTS buffers to add up in, LIST_BYTES, BY_LANES, CATCH_UP, and SHARED_BYTES, what these take.

#include "moe_w4a16_product.cuh"
#include "overlap.cuh"

// Rows of fragments are columns 4 g .. 4 g + 3 of a lane: 8 bytes of a row of partial.
struct Stored {
    u16* partial;

    __device__ void operator()(const Pairs& pairs, const Unit& unit, const Sums& sum) const
    {
        const int lane = lane_id();
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int pair = pairs.at(j, lane % 4 * 2 + odd);
                if (pair < 0) continue;
                *(uint2*)(partial + (i64)pair * WIDTH + unit.part * STEP + lane / 4 * 4) =
                    four_of(sum, j, odd);
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_w4a16(u16* inner, u16* partial, int* ready, const u16* x, const unsigned char* gate_up,
              const unsigned char* down, const i64* expert, const int4* tile, const int* sorted,
              const int* num_tiles, int most_tiles, int num_pairs)
{
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& s = *(Shared*)memory;
    const int warp = threadIdx.x / WARP;
    Units units;
    Stream<Units> stream{units, {}, 0, 0, nullptr};
    stream.ring.open(&s.ring[warp][0][0], s.landed[warp]);
    Adder<CountedInner> adder{s.part, 0, {inner, ready}, 0};
    adder.open(s.meeting);
    if (threadIdx.x < 4) s.minus_136[threadIdx.x] = MINUS_136;
    start_behind_previous();

    units.tiles = Tiles::of(s.list, tile, sorted, num_tiles, expert, most_tiles, num_pairs);
    units.gate_up = gate_up;
    units.down = down;
    units.count();
    __syncthreads();
    stream.fill();

    Readiness readiness{ready, inner, 0, 0};
    Activations<Units, Readiness> next{units, readiness, x, 0, 0, x, {}};
    multiply_all(units, stream, next, adder, s.minus_136, Stored{partial});
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
    for (int i = thread; i < num_ready; i += (int)(gridDim.x * gridDim.y * 128)) ready[i * READY_INTS] = 0;
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
