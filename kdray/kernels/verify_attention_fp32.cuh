// One piece in float32 on CUDA cores: 8 packed rows, one a warp. A lane multiplies out
// one key's score of a step of 32, then weighs 32 keys' values in its own dimensions. For the small
// dimensions of models that are run in float32; every sum has a fixed order.
#pragma once

#include "verify_attention_merge.cuh"
#include "verify_attention_shared.cuh"

constexpr int PLAIN_THREADS = 256;
constexpr int PLAIN_STEP = WARP;
constexpr int PLAIN_WIDTH = LATENT + ROPE;
constexpr int PLAIN_STRIDE = PLAIN_WIDTH + 4;  // floats; lanes' rows start in different banks
constexpr int PLAIN_DIMS = LATENT / WARP;      // of the result, a lane: lane_id() + 32 j
static_assert(PLAIN_THREADS / WARP == EIGHT, "a row a warp");
static_assert(LATENT % WARP == 0 && ROPE % 4 == 0, "dimensions in fours, and the latent by lanes");

struct PlainShared {
    alignas(16) float query[EIGHT][PLAIN_WIDTH];
    union {
        alignas(16) float key[PLAIN_STEP][PLAIN_STRIDE];
        // Of a merge: a four a thread, and a pair for each row and each of MAX_BLOCKS parts.
        float4 scratch[PLAIN_THREADS + EIGHT * MAX_BLOCKS / 2];
    };
    Piece piece;
    Piece waiting[2];
    int num_waiting;
};

struct PlainAttention {
    float* out;      // [T, H, LATENT]
    float* value;    // [2 G, EIGHT, LATENT]
    float2* norm;    // [2 G, EIGHT]
    const float* query;
    i64 query_row_stride;
    i64 query_head_stride;
    const float* cache;
    i64 cache_row_stride;
    const int* page_table;
    int pages;
    int page_shift;
    Mask mask;
    int heads;
    float scale;  // times log2 e
};

struct PlainLayout {
    static constexpr int A_ROW = LATENT / 4;
    static constexpr int UNITS = EIGHT * A_ROW / WARP, PART_ROWS = EIGHT, THREADS = PLAIN_THREADS;
    __device__ static int row_of(int unit, int lane, int) {
        return (unit % UNITS * WARP + lane) / A_ROW;
    }
    __device__ static void write(float* out, const Piece& piece, int unit, int heads, float4 x) {
        const int row = row_of(unit, lane_id(), 0);
        const i64 packed = (i64)piece.first_row * heads + piece.first + row;
        if (row < piece.rows)
            ((float4*)out)[packed * A_ROW + (unit * WARP + lane_id()) % A_ROW] = x;
    }
};

__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }

__device__ __forceinline__ void load_plain_query(PlainShared& s, const PlainAttention& in) {
    const int p = s.piece.first + min(warp_id(), s.piece.rows - 1);
    const float* const row = in.query +
                             (s.piece.first_row + p / in.heads) * in.query_row_stride +
                             p % in.heads * in.query_head_stride;
    for (int i = lane_id(); i < PLAIN_WIDTH; i += WARP) s.query[warp_id()][i] = row[i];
}

// Rows of keys from step * PLAIN_STEP on; zeros behind the tile's last.
__device__ __forceinline__ void load_plain_keys(PlainShared& s, const PlainAttention& in,
                                                int step) {
    constexpr int A_ROW = PLAIN_WIDTH / 4;
    const int* const pages = in.page_table + (i64)s.piece.request * in.pages;
    const int shift = in.page_shift;
    for (int i = threadIdx.x; i < PLAIN_STEP * A_ROW; i += PLAIN_THREADS) {
        const int key = i / A_ROW, four = i % A_ROW, position = step * PLAIN_STEP + key;
        float4 x = {0, 0, 0, 0};
        if (position < s.piece.keys) {
            const i64 row = ((i64)pages[position >> shift] << shift) +
                            (position & ((1 << shift) - 1));
            x = *(const float4*)(in.cache + row * in.cache_row_stride + 4 * four);
        }
        *(float4*)&s.key[key][4 * four] = x;
    }
}

__device__ __forceinline__ float plain_score(const PlainShared& s) {
    float4 sum = {0, 0, 0, 0};
#pragma unroll 4
    for (int i = 0; i < PLAIN_WIDTH; i += 4) {
        const float4 q = *(const float4*)&s.query[warp_id()][i];
        const float4 k = *(const float4*)&s.key[lane_id()][i];
        sum.x = fmaf(q.x, k.x, sum.x);
        sum.y = fmaf(q.y, k.y, sum.y);
        sum.z = fmaf(q.z, k.z, sum.z);
        sum.w = fmaf(q.w, k.w, sum.w);
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

__device__ __forceinline__ void attend_plain(PlainShared& s, const PlainAttention& in) {
    const Piece& piece = s.piece;
    const int p = piece.first + min(warp_id(), piece.rows - 1);
    float value[PLAIN_DIMS] = {}, most = NO_SCORE, sum = 0;
    load_plain_query(s, in);
    for (int step = piece.begin; step < piece.end; ++step) {
        load_plain_keys(s, in, step);
        __syncthreads();
        const u32 seen = seen_from(in.mask, piece, in.heads, p, step * PLAIN_STEP);
        const bool mine = seen >> lane_id() & 1;
        const float x = mine ? plain_score(s) * in.scale : NO_SCORE;
        float best = max(most, x);
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2)
            best = max(best, __shfl_xor_sync(ALL_LANES, best, by));
        const float factor = exp2_fast(most - best), weight = mine ? exp2_fast(x - best) : 0.0f;
        most = best;
        sum = fmaf(sum, factor, weight);
#pragma unroll
        for (int j = 0; j < PLAIN_DIMS; ++j) value[j] *= factor;
#pragma unroll 4
        for (int key = 0; key < PLAIN_STEP; ++key) {
            const float w = __shfl_sync(ALL_LANES, weight, key);
#pragma unroll
            for (int j = 0; j < PLAIN_DIMS; ++j)
                value[j] = fmaf(w, s.key[key][lane_id() + WARP * j], value[j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, by);
    const bool whole = piece.whole(), there = warp_id() < piece.rows;
    const i64 part_row = (i64)piece.part(piece.number) * EIGHT + warp_id();
    const i64 packed = (i64)piece.first_row * in.heads + piece.first + warp_id();
    float* const out = whole ? in.out + packed * LATENT : in.value + part_row * LATENT;
    const float by = whole ? 1.0f / sum : 1.0f;
#pragma unroll
    for (int j = 0; j < PLAIN_DIMS; ++j)
        if (there) out[lane_id() + WARP * j] = value[j] * by;
    if (!whole && lane_id() == 0) in.norm[part_row] = {most, sum};
}
