// What skinny_gemm's kernels share: a block's part of a product, from the weights' first fetch to its
// warps' sums. Part of those files, by whose sizes it is compiled; skinny_gemm.cu explains it.
#pragma once

#ifndef TOKEN_TILES
#define TOKEN_TILES 1
#endif
#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef WARPS_M
#define WARPS_M 1
#endif
#ifndef WARPS_K
#define WARPS_K 8
#endif
#ifndef SPLIT
#define SPLIT 1
#endif
#ifndef SLOTS
#define SLOTS 8
#endif
#ifndef GROUPS
#define GROUPS 1
#endif
#ifndef CHUNK
#define CHUNK 7
#endif
#include "overlap.cuh"
#include "skinny_gemm_rows.cuh"

constexpr int THREADS = WARP * WARPS_M * WARPS_K;
// Registers: 128 a thread, or 168 where many sums are held and shared memory lets no more threads in
// than these: by blocks of few warps, or 100 KB a multiprocessor.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool CROWDED = false;
#else
constexpr bool CROWDED = THREADS >= 256;
#endif
constexpr int RESIDENT = TOKEN_TILES * ROW_TILES >= 16 && !CROWDED ? 384 : 512;
constexpr int BLOCKS = RESIDENT > THREADS ? RESIDENT / THREADS : 1;
constexpr int STEP = 32;  // inputs
constexpr int SLICES = WARPS_K * SPLIT;
constexpr int ROWS = 16 * ROW_TILES * WARPS_M;  // of the matrix, a block
constexpr int TOKENS = 8 * TOKEN_TILES;         // a block
constexpr int VECTORS = ROWS / 4;               // a token
constexpr int PART_STRIDE = ROWS + 4;           // so that a warp's sums go to all banks
constexpr bool MANY = TOKEN_TILES > 1;
static_assert(SLOTS >= 3, "a step to read and some to come");
static_assert((SLICES & (SLICES - 1)) == 0, "runs merge as a balanced tree");

typedef WeightRing<ROW_TILES, SLOTS> Ring;
constexpr int RING_BYTES = WARPS_M * WARPS_K * Ring::BYTES;
#if TOKEN_TILES == 1
typedef RowBuffers<TOKENS, WARPS_M, WARPS_K, CHUNK> Rows;
constexpr int BARRIERS = 2;
#else
typedef RowRing<TOKENS, WARPS_M, CHUNK> Rows;
constexpr int BARRIERS = Rows::BARRIERS * WARPS_K;
#endif

struct Sizes {
    int tokens, inputs, outputs;
    int x_token, x_head, w_row, w_head, out_token, out_head;

    // Of SLICES runs, as even as steps allow.
    __device__ int first_step(u32 slice) const { return slice * (inputs / STEP) / SLICES; }
    __device__ int longest_run() const { return ((u32)inputs / STEP + SLICES - 1) / SLICES; }
};

// Which part of the product the block makes, and which run of inputs its warp.
struct Place {
    u32 piece, split;  // of the grid
    u32 tile;          // of ROWS rows
    int first;         // token
    int tokens;        // of them
    u32 row_warp, run;

    // `before`: pieces of other matrices in front of this one's.
    __device__ Place(int all_tokens, u32 thread, u32 before = 0)
    {
        const u32 warp = thread / WARP;
        piece = piece_of_grid();
        split = MANY ? blockIdx.x : blockIdx.y;
        tile = (piece - before) / GROUPS;
        first = piece % GROUPS * TOKENS;
        tokens = min(all_tokens - first, TOKENS);
        row_warp = warp % WARPS_M;
        run = warp / WARPS_M;
    }
    __device__ static u32 piece_of_grid() { return MANY ? blockIdx.y : blockIdx.x; }
    __device__ u32 slice() const { return split * WARPS_K + run; }
};

typedef float Sums[ROW_TILES][TOKEN_TILES][4];

#include "skinny_gemm_weights.cuh"

// A step's weights as the tensor cores take them.
struct Operands {
    u32 a[ROW_TILES][2][4];

    // `zero` is 0, which the assembler cannot know: it would move words anew for every product.
    __device__ Operands(const Weights& weights, u32 zero)
    {
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            const uint4 &g = weights.part[2 * m], &h = weights.part[2 * m + 1];
            const u32 words[2][4] = {{g.x, h.x, g.y, h.y}, {g.z, h.z, g.w, h.w}};
#pragma unroll
            for (int i = 0; i < 8; ++i) a[m][i / 4][i % 4] = words[i / 4][i % 4] ^ zero;
        }
    }
    // Tiles n and on of tokens, whose shares of x are given. A sum's two products wait for each
    // other, so all first ones go ahead.
    template <int COUNT>
    __device__ void multiply(Sums& sum, int n, const uint4 (&x)[COUNT]) const
    {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) {
                    const u32(&w)[4] = a[m][half];
                    const u32 low = half ? x[i].z : x[i].x, high = half ? x[i].w : x[i].y;
                    multiply_add(sum[m][n + i], w[0], w[1], w[2], w[3], low, high);
                }
    }
};

#if TOKEN_TILES == 1

// Adds steps step .. end - 1. `rows` is where the lane's share of x lies, of the first.
__device__ __forceinline__ void multiply_steps(Sums& sum, const Ring& ring, int& step, int end,
                                               SharedAddress rows)
{
    Weights now, next;
    if (ROW_TILES == 1) {
        // Products wait for one another, so the next step's operands come meanwhile.
        uint4 x, next_x;
        if (step >= end) return;
        ring.wait<SLOTS - 1>();
        now.load(ring, step);
        x = shared_vector(rows);
#pragma unroll 1
        for (; step < end; ++step) {
            rows += 64;
            if (step + 1 < end) {
                ring.wait<SLOTS - 2>();
                next.load(ring, step + 1);
                next_x = shared_vector(rows);
            }
            Operands(now, 0).multiply<1>(sum, 0, {x});
            ring.start(step + SLOTS);
            now = next;
            x = next_x;
        }
    } else {
#pragma unroll 1
        for (; step < end; ++step, rows += 64) {
            ring.wait<SLOTS - 1>();
            now.load(ring, step);
            Operands(now, 0).multiply<1>(sum, 0, {shared_vector(rows)});
            ring.start(step + SLOTS);
        }
    }
}

// The warp's run; all threads of the block. `longest`: steps of the block's longest run.
__device__ __forceinline__ void multiply_run(Sums& sum, const Ring& ring, const Rows& rows,
                                             int longest)
{
    const int lane = lane_id(), own_row = min(lane / 4, rows.tokens - 1);
    const int chunks = (longest + CHUNK - 1) / CHUNK;
    int step = 0;
    // Chunks come in two turns ahead of their use; in the first two turns there is none to use.
#pragma unroll 1
    for (int chunk = -2; chunk < chunks; ++chunk) {
        if (chunk >= 0) {
            rows.wait(chunk);
            const SharedAddress from =
                rows.buffer(chunk) + own_row * Rows::ROW_BYTES + lane % 4 * 16;
            multiply_steps(sum, ring, step, min((chunk + 1) * CHUNK, ring.steps), from);
        }
        if (chunk + 2 >= chunks) continue;
        if (chunk >= 0) __syncthreads();
        rows.bring(chunk + 2);
    }
}

#else

// The warp's run.
__device__ __forceinline__ void multiply_run(Sums& sum, const Ring& ring, const Rows& rows,
                                             u32 zero)
{
    // Where registers allow it the next step's weights come ahead of the products.
    constexpr bool AHEAD = TOKEN_TILES * ROW_TILES <= 8;
    // Tiles of tokens whose products fill the tensor cores' latency.
    constexpr int TOGETHER = TOKEN_TILES == 2 ? 2 : 4 / ROW_TILES;
    const int lane = lane_id(), own = lane * 16;  // row lane / 4, part lane % 4
    Weights now, next;
    if (AHEAD && ring.steps > 0) {
        ring.wait<SLOTS - 1>();
        next.load(ring, 0);
    }
#pragma unroll 1
    for (int step = 0; step < ring.steps; ++step) {
        if (step % CHUNK == 0) rows.wait(step / CHUNK);
        const SharedAddress from = rows.at(step) + own;
        if (AHEAD) {
            now = next;
            ring.wait<SLOTS - 2>();
            if (step + 1 < ring.steps) next.load(ring, step + 1);
        } else {
            ring.wait<SLOTS - 1>();
            now.load(ring, step);
        }
        const Operands weights(now, zero);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n += TOGETHER) {
            uint4 x[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) x[i] = shared_vector(from + (n + i) * 512);
            weights.multiply(sum, n, x);
        }
        if (step % CHUNK == CHUNK - 1) rows.pass(step / CHUNK);
        ring.start(step + SLOTS);
    }
}

#endif

// The warps' sums. `barriers`: BARRIERS of them.
__device__ __forceinline__ void multiply_block(Sums& sum, const u16* x, const u16* weight,
                                               bool gated, const Sizes& sizes, const Place& place,
                                               SharedAddress barriers)
{
    const int lane = lane_id();
    const Ring ring = weights_of(weight, gated, sizes, place);
    const u16* const first_x = x + (i64)blockIdx.z * sizes.x_head +
                               sizes.first_step(place.slice()) * STEP;
    const SharedAddress behind_rings = shared_address(block_memory) + RING_BYTES;
#if TOKEN_TILES == 1
    const int own_row = place.first + lane * WARPS_M + place.row_warp;
    const Rows rows = {first_x + own_row * (i64)sizes.x_token, WARP * WARPS_M * sizes.x_token,
                       place.tokens, ring.steps, place.row_warp, place.run,
                       barriers, behind_rings};
    if (threadIdx.x == 0) {
        barrier_init(rows.landed, WARPS_K);
        barrier_init(rows.landed + 8, WARPS_K);
        order_before_copies();
    }
    __syncthreads();
    wait_for_previous();
    multiply_run(sum, ring, rows, sizes.longest_run());
#else
    const u32 run = same_in_warp(place.run);
    const Rows rows = {first_x + place.first * (i64)sizes.x_token, sizes.x_token,
                       place.tokens, ring.steps, behind_rings + run * Rows::BYTES,
                       barriers + run * Rows::BARRIERS * 8};
    if (place.row_warp == 0 && lane == 0) rows.open();
    __syncthreads();
    wait_for_previous();
    rows.fill();
    multiply_run(sum, ring, rows, (u32)sizes.inputs >> 31);
#endif
    __syncthreads();  // rings and rows have been read
}

#include "skinny_gemm_sums.cuh"
