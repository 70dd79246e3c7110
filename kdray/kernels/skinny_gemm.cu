// Few rows times a wide matrix: Ops.linear, Ops.gated_linear and Ops.per_head for bf16.
//
// out[t] = W x[t], where W [outputs, inputs] lies as the checkpoint has it, an output's weights
// side by side. Variants: out + add (a residual, or null); GATED, silu(gate) * up of a joined
// matrix of gate rows, then up rows; a batch of matrices, one a head.
//
// output  out     [T, heads, outputs] bfloat16, or float32 (OUT_FP32); GATED: outputs / 2
// inputs  x       [T, heads, inputs] bfloat16
//         weight  [heads, outputs, inputs] bfloat16
//         add     as out, or null
// both    work    workspace of uint4, all bits set between launches; null where SPLIT is 1
// sizes   tokens, inputs, outputs; then strides in numbers: x a token, x a head, weight an output,
//         weight a head, out a token, out a head (add has out's)
//
// A block takes WARPS_M * ROW_TILES tiles of 16 outputs, up to 8 * TOKEN_TILES tokens (of which
// there are GROUPS) and WARPS_K of the SLICES = WARPS_K * SPLIT runs of inputs. Grid (GROUPS *
// tiles of outputs, SPLIT, heads); blocks of 32 * WARPS_M * WARPS_K threads. A warp multiplies one
// run by mma.m16n8k16, outputs on M and tokens on N. Inputs go to the fragments in an order of
// their own, the same for both operands, so that a lane's share of a row is 16 bytes in one piece.
// Weights do not depend on the kernel in front: the rings are filled before it has ended (which it
// must not have written).
//
// Where SPLIT > 1 blocks y < SPLIT - 1 leave their sums in the workspace, and the last takes them
// as they come: a word that is not EMPTY is there. No counter, no fence; the words are emptied
// again. The last block's index is above those it waits for, and blocks start in the order of
// their index.
//
// Order of sums: a run in the order of its inputs, runs as a balanced binary tree. It depends on
// SLICES alone, which hangs on the matrix's shape: a token's bits do not depend on its batch, and
// not on how runs are dealt to warps and blocks.
// Limits: inputs a multiple of 32, outputs of 8 (GATED: 16); strides of x and weight of 8, of out
// 4.
// Dynamic shared memory: gemm_plan.shared_bytes, below 99 KB. Products are exact, sums float32 as
// the tensor cores add (chains of 2 * steps of a run), rounded once. Oracle: reference_gemm.py;
// against float64 within 2^-20 of sum |w x|, and bfloat16's rounding.

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
#ifndef GATED
#define GATED 0
#endif
#ifndef OUT_FP32
#define OUT_FP32 0
#endif

#include "overlap.cuh"
#include "skinny_gemm_stream.cuh"

constexpr int THREADS = WARP * WARPS_M * WARPS_K;
// Registers: 128 a thread, or where many sums are held 168, unless threads are few.
constexpr int RESIDENT = TOKEN_TILES * ROW_TILES >= 16 ? 384 : 512;
constexpr int BLOCKS = RESIDENT > THREADS ? RESIDENT / THREADS : 1;
constexpr int STEP = 32;  // inputs
constexpr int SLICES = WARPS_K * SPLIT;
constexpr int ROWS = 16 * ROW_TILES * WARPS_M;     // of the matrix, a block
constexpr int TOKENS = 8 * TOKEN_TILES;            // a block
constexpr int VECTORS = ROWS / 4;                  // a token
constexpr int PART_STRIDE = ROWS + 4;              // so that a warp's sums go to all banks
constexpr int X_STRIDE = CHUNK * 64;               // bytes; odd in halves of the banks' width
constexpr int TILE_OUTPUTS = GATED ? 8 : 16;       // a tile is 8 gate rows, then their up rows
static_assert(CHUNK % 2 == 1, "rows of x must lie in different halves of the banks");
constexpr bool FEW_SUMS = TOKEN_TILES == 1 && ROW_TILES == 1;
static_assert(SLOTS >= 3, "a step to read and some to come");
static_assert((SLICES & (SLICES - 1)) == 0, "runs merge as a balanced tree");
static_assert(!(GATED && OUT_FP32), "gates are bfloat16");

typedef WeightRing<ROW_TILES, SLOTS> Ring;

extern __shared__ __align__(128) unsigned char block_memory[];

struct Sizes {
    int tokens, inputs, outputs;
    int x_token, x_head, w_row, w_head, out_token, out_head;

    // Of SLICES runs, as even as steps allow.
    __device__ int first_step(u32 slice) const { return slice * (inputs / STEP) / SLICES; }
    __device__ int chunks() const
    {
        const u32 longest = ((u32)inputs / STEP + SLICES - 1) / SLICES;
        return (longest + CHUNK - 1) / CHUNK;
    }
};

// Which part of the product the block makes, and which run of inputs its warp.
struct Place {
    u32 tile;    // of ROWS rows
    int first;   // token
    int tokens;  // of them
    u32 row_warp, run;

    __device__ explicit Place(int all_tokens)
    {
        const u32 warp = threadIdx.x / WARP;
        tile = blockIdx.x / GROUPS;
        first = blockIdx.x % GROUPS * TOKENS;
        tokens = min(all_tokens - first, TOKENS);
        row_warp = warp % WARPS_M;
        run = warp / WARPS_M;
    }
    __device__ u32 slice() const { return blockIdx.y * WARPS_K + run; }
};

// The rows of x for the warp's run: two buffers of CHUNK steps, filled by the copy engine. A
// lane's copies go out one after another, so the warps that share a run take turns at its tokens.
// A barrier a buffer waits for all of the block's runs.
struct Rows {
    const Place& place;
    const u16* x;          // the lane's first row, the run's first step
    int next_row;          // WARP * WARPS_M tokens on, in numbers
    int steps;             // of the run
    SharedAddress landed;  // two barriers
    SharedAddress base;

    // Where one tile of tokens is the rule only those there are take room; else whole tiles do.
    __device__ int rows() const { return TOKEN_TILES == 1 ? place.tokens : TOKENS; }
    __device__ SharedAddress buffer(int chunk) const
    {
        return base + (chunk % 2 * WARPS_K + place.run) * rows() * X_STRIDE;
    }
    // Of the lane.
    __device__ int first_row() const { return lane_id() * WARPS_M + place.row_warp; }
    // All threads. Nobody reads what was in the buffer any more.
    __device__ void bring(u32 chunk) const
    {
        const SharedAddress barrier = landed + chunk % 2 * 8;
        const int bytes = max(0, min(steps - (int)chunk * CHUNK, CHUNK)) * 64;
        if (place.row_warp == 0 && lane_id() == 0)
            barrier_arrive_expecting(barrier, place.tokens * bytes);
        if (bytes == 0) return;
        const SharedAddress to = buffer(chunk) + first_row() * X_STRIDE;
        const u16* const from = x + chunk * CHUNK * STEP;
        constexpr int APART = WARP * WARPS_M;
#pragma unroll
        for (int i = 0; i < (TOKENS + APART - 1) / APART; ++i)
            if (first_row() + i * APART < place.tokens)
                copy_run_async(to + i * APART * X_STRIDE, from + i * next_row, bytes, barrier);
    }
    __device__ void wait(u32 chunk) const { barrier_wait(landed + chunk % 2 * 8, chunk / 2 % 2); }
};

typedef float Sums[ROW_TILES][TOKEN_TILES][4];

// A lane's weights of one step.
struct Weights {
    uint4 part[Ring::PARTS];

    __device__ void load(const Ring& ring, int step)
    {
#pragma unroll
        for (int p = 0; p < Ring::PARTS; ++p) part[p] = ring.part(step, p);
    }
    __device__ void multiply(Sums& sum, int n, const uint4& x) const
    {
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            const uint4 &a = part[2 * m], &b = part[2 * m + 1];
            multiply_add(sum[m][n], a.x, b.x, a.y, b.y, x.x, x.y);
            multiply_add(sum[m][n], a.z, b.z, a.w, b.w, x.z, x.w);
        }
    }
};

// Adds steps step .. end - 1. `rows` is where the lane's share of x lies, of the first.
__device__ __forceinline__ void multiply_steps(Sums& sum, const Ring& ring, int& step, int end,
                                               SharedAddress rows)
{
    Weights now, next;
    if (FEW_SUMS) {
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
            now.multiply(sum, 0, x);
            ring.start(step + SLOTS);
            now = next;
            x = next_x;
        }
    } else {
#pragma unroll 1
        for (; step < end; ++step, rows += 64) {
            ring.wait<SLOTS - 1>();
            now.load(ring, step);
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n)
                now.multiply(sum, n, shared_vector(rows + n * 8 * X_STRIDE));
            ring.start(step + SLOTS);
        }
    }
}

// The warp's sums into part[WARPS_K][tokens][PART_STRIDE], outputs side by side.
__device__ __forceinline__ void lay_out(float* part, const Sums& sum, const Place& place)
{
    const int lane = lane_id(), g = lane / 4, t = lane % 4;
    float* const own = part + place.run * place.tokens * PART_STRIDE +
                       place.row_warp * ROW_TILES * 16 + g;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = 8 * n + 2 * t + i;
            if (token >= place.tokens) continue;
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                own[token * PART_STRIDE + 16 * m] = sum[m][n][i];
                own[token * PART_STRIDE + 16 * m + 8] = sum[m][n][2 + i];
            }
        }
}

__device__ __forceinline__ uint4* published(uint4* work, int split)
{
    const int tile = blockIdx.z * gridDim.x + blockIdx.x;
    return work + ((i64)tile * (SPLIT - 1) + split) * TOKENS * VECTORS;
}

// Vector v of the block's sums, over all runs: the block's own, and what others publish.
__device__ __forceinline__ float4 whole_sum(const float4& own, uint4* work, int v)
{
    if constexpr (SPLIT == 1) {
        return own;
    } else {
        uint4 word[SPLIT];
        bool full;
        do {
            full = true;
#pragma unroll
            for (int s = 0; s < SPLIT - 1; ++s) word[s] = load_relaxed(published(work, s) + v);
#pragma unroll
            for (int s = 0; s < SPLIT - 1; ++s) full = full && is_full(word[s]);
        } while (!full);
        float4 sum[SPLIT];
#pragma unroll
        for (int s = 0; s < SPLIT - 1; ++s) {
            store_relaxed(published(work, s) + v, {EMPTY, EMPTY, EMPTY, EMPTY});
            sum[s] = {float_of(word[s].x), float_of(word[s].y), float_of(word[s].z),
                      float_of(word[s].w)};
        }
        sum[SPLIT - 1] = own;
        return tree_sum<SPLIT>(sum, 1);
    }
}

__device__ __forceinline__ float rounded(float x) { return bf16_low(bf16_pair(x, 0.0f)); }
// As swiglu.cu has it, from the rounded product to the rounded result.
__device__ __forceinline__ float gated(float gate, float up)
{
    const float x = rounded(gate);
    return multiply(rounded(divide(x, 1.0f + expf(-x))), rounded(up));
}

__device__ __forceinline__ void store(void* out, const void* add, i64 at, float4 v)
{
#if OUT_FP32
    if (add) v = v + *(const float4*)((const float*)add + at);
    *(float4*)((float*)out + at) = v;
#else
    if (add) {
        const uint2 more = *(const uint2*)((const u16*)add + at);
        v = v + float4{bf16_low(more.x), bf16_high(more.x), bf16_low(more.y), bf16_high(more.y)};
    }
    *(uint2*)((u16*)out + at) = {bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
#endif
}

// Vector v of the block's sums: on to the last block, or, there, over all runs.
__device__ __forceinline__ float4 merged(const float4& own, uint4* work, int v)
{
    if (blockIdx.y + 1 < SPLIT) {
        publish(published(work, blockIdx.y) + v, own);
        return own;
    }
    return whole_sum(own, work, v);
}

// Sums of the block's warps, and of the other blocks, to where they go.
__device__ __forceinline__ void finish(const float* part, void* out, const void* add, uint4* work,
                                       const Sizes& sizes, const Place& place)
{
    constexpr int UNITS = GATED ? VECTORS / 2 : VECTORS;  // of four outputs, a token
    const int warp_stride = place.tokens * (PART_STRIDE / 4);
#pragma unroll 1
    for (u32 u = threadIdx.x; u < place.tokens * UNITS; u += THREADS) {
        const u32 token = u / UNITS, unit = u % UNITS;
        const u32 vector = GATED ? unit / 2 * 4 + unit % 2 : unit;
        const float4* const own = (const float4*)(part + token * PART_STRIDE) + vector;
        const int v = token * VECTORS + vector;
        float4 sum = merged(tree_sum<WARPS_K>(own, warp_stride), work, v);
#if GATED
        const float4 up = merged(tree_sum<WARPS_K>(own + 2, warp_stride), work, v + 2);
        sum = {gated(sum.x, up.x), gated(sum.y, up.y), gated(sum.z, up.z), gated(sum.w, up.w)};
#endif
        const int feature = place.tile * (UNITS * 4) + unit * 4;
        if (blockIdx.y + 1 < SPLIT || feature >= sizes.outputs / (GATED + 1)) continue;
        const i64 at = (i64)(place.first + token) * sizes.out_token +
                       (i64)blockIdx.z * sizes.out_head + feature;
        store(out, add, at, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
skinny_gemm(void* out, const u16* x, const u16* weight, const void* add, uint4* work, int tokens,
            int inputs, int outputs, int x_token, int x_head, int w_row, int w_head, int out_token,
            int out_head)
{
    __shared__ u64 landed[2];
    let_next_start();
    const Sizes sizes = {tokens, inputs, outputs, x_token, x_head,
                         w_row,  w_head, out_token, out_head};
    const Place place(tokens);
    const int lane = lane_id(), g = lane / 4, t = lane % 4;
    const int first_step = sizes.first_step(place.slice());

    Ring ring;
    ring.steps = sizes.first_step(place.slice() + 1) - first_step;
    ring.base = shared_address(block_memory) + threadIdx.x / WARP * Ring::BYTES + lane * 16;
    const u16* const matrix = weight + (i64)blockIdx.z * w_head + first_step * STEP + 8 * t;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
        // Rows behind the last are computed with it, and written nowhere.
        const int tile = (place.tile * WARPS_M + place.row_warp) * ROW_TILES + m;
        const int row = min(tile * TILE_OUTPUTS + g, outputs / (GATED + 1) - 1);
        const int other = GATED ? row + outputs / 2 : min(tile * TILE_OUTPUTS + g + 8, outputs - 1);
        ring.row[2 * m] = (const unsigned char*)(matrix + (i64)row * w_row);
        ring.row[2 * m + 1] = (const unsigned char*)(matrix + (i64)other * w_row);
    }
    ring.fill();

    const Rows rows = {place,
                       x + (i64)blockIdx.z * x_head + first_step * STEP +
                           (place.first + lane * WARPS_M + place.row_warp) * (i64)x_token,
                       WARP * WARPS_M * x_token,
                       ring.steps,
                       shared_address(landed),
                       shared_address(block_memory) + WARPS_M * WARPS_K * Ring::BYTES};
    if (threadIdx.x == 0) {
        barrier_init(rows.landed, WARPS_K);
        barrier_init(rows.landed + 8, WARPS_K);
        order_before_copies();
    }
    __syncthreads();
    wait_for_previous();

    Sums sum = {};
    const int own_row = TOKEN_TILES == 1 ? min(g, place.tokens - 1) : g;
    const int chunks = sizes.chunks();
    int step = 0;
    // Chunks come in two turns ahead of their use; in the first two turns there is none to use.
#pragma unroll 1
    for (int chunk = -2; chunk < chunks; ++chunk) {
        if (chunk >= 0) {
            rows.wait(chunk);
            const SharedAddress from = rows.buffer(chunk) + own_row * X_STRIDE + t * 16;
            multiply_steps(sum, ring, step, min((chunk + 1) * CHUNK, ring.steps), from);
        }
        if (chunk + 2 >= chunks) continue;
        if (chunk >= 0) __syncthreads();
        rows.bring(chunk + 2);
    }
    __syncthreads();  // rings and rows have been read
    float* const part = (float*)block_memory;
    lay_out(part, sum, place);
    __syncthreads();
    finish(part, out, add, work, sizes, place);
}
