// A block of verify_attention_invariant and one segment of keys: scores, weights and weighted values of
// up to four items, chunk by chunk.
//
// A chunk is 32 keys. Its scores are one order of products, its weights are relative to the greatest
// score so far of the segment, and its weighted values are added behind those of the chunks before.
#pragma once

#include "attention_fragment.cuh"
#include "overlap.cuh"
#include "verify_attention_paths.cuh"

#ifndef LATENT  // C
#define LATENT 512
#endif
#ifndef ROPE  // D
#define ROPE 64
#endif

constexpr int CHUNK = 32;  // keys
constexpr int STEP = 16;   // keys of a product
constexpr int ROWS = GROUP * EIGHT;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int ROWS_A_WARP = ROWS / WARPS;
constexpr int ROW_BYTES = 2 * (LATENT + ROPE);
constexpr int STRIDE = ROW_BYTES + 16;  // an odd number of 16-byte pieces: rows in different banks
constexpr int PIECES = ROW_BYTES / 16;
constexpr int QUERY_STEPS = (LATENT + ROPE) / 16;
constexpr int VALUE_STEPS = LATENT / 16;
constexpr int VALUE_TILES = (VALUE_STEPS + WARPS - 1) / WARPS;  // of 16 dimensions, of a warp
constexpr int SCORE_STRIDE = CHUNK + 4;
constexpr int WEIGHT_STRIDE = 2 * CHUNK + 16;
static_assert(LATENT % 64 == 0 && ROPE % 16 == 0, "dimensions in steps of 16");
static_assert(CHUNK == WARP && CHUNK / STEP * GROUP == WARPS, "a lane a key, a warp a product");
static_assert(THREADS >= FIRST_SEGMENT, "a thread a key");

struct InvariantShared {
    unsigned char key[CHUNK * STRIDE];
    unsigned char query[ROWS * STRIDE];
    float score[ROWS][SCORE_STRIDE];
    alignas(16) unsigned char weight[ROWS * WEIGHT_STRIDE];
    float factor[ROWS];
    float2 norm[ROWS];
    int slot[FIRST_SEGMENT];
};
#ifdef SHARED_BYTES  // what a launch gives a block
static_assert(sizeof(InvariantShared) <= SHARED_BYTES, "shared");
#endif

struct InvariantAttention {
    u16* out;
    float4* part_value;
    float2* part_norm;
    const PathInfo* info;
    const int* path;
    const unsigned char* query;
    i64 query_row_bytes;
    i64 query_head_bytes;
    const unsigned char* cache;
    i64 cache_row_bytes;
    const int* page_table;
    int first_item;
    int heads;
    int pages;
    int page_shift;
    int nodes;
    float scale;  // times log2 e

    __device__ int items_a_row() const { return (heads + EIGHT - 1) / EIGHT; }
    __device__ int row_of(int item) const { return (first_item + item) / items_a_row(); }
    __device__ int first_head_of(int item) const {
        return (first_item + item) % items_a_row() * EIGHT;
    }
    __device__ int heads_of(int item) const { return min(EIGHT, heads - first_head_of(item)); }
};

struct SegmentBlock {
    InvariantShared& s;
    const InvariantAttention& in;
    const Unit unit;
    const PathInfo info;  // the first item's
    const int begin, end;  // keys
    const int warp, lane;
    float value[VALUE_TILES][GROUP][4];
    float most[ROWS_A_WARP];  // of the warp's rows
    float sum[ROWS_A_WARP];

    __device__ SegmentBlock(InvariantShared& shared, const InvariantAttention& attention, Unit of)
        : s(shared),
          in(attention),
          unit(of),
          info(load_info(attention.info + attention.row_of(of.item))),
          begin(of.segment * info.segment()),
          end(min(begin + info.segment(), info.keys)),
          warp(same_in_warp((int)threadIdx.x / WARP)),
          lane(threadIdx.x % WARP) {
#pragma unroll
        for (int i = 0; i < ROWS_A_WARP; ++i) {
            most[i] = NO_SCORE;
            sum[i] = 0;
        }
#pragma unroll
        for (int m = 0; m < VALUE_TILES; ++m)
#pragma unroll
            for (int n = 0; n < GROUP; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) value[m][n][k] = 0;
    }

    __device__ bool has(int m) const { return tile(m) < VALUE_STEPS; }
    __device__ int tile(int m) const { return warp + WARPS * m; }

    // behind: whether the kernel in front has ended.
    __device__ void run(bool behind) {
        find_slots(begin);
        if (!behind) start_behind_previous();
        ask_for_query();
#pragma unroll 1
        for (int first = begin; first < end; first += CHUNK) {
            const int keys = min(CHUNK, end - first);
            const int at = (first - begin) % FIRST_SEGMENT;
            if (at == 0 && first > begin) find_slots(first);
            ask_for_keys(at, keys);
            wait_for_copies();
            __syncthreads();
            score_keys(keys);
            __syncthreads();
            weigh(keys);
            __syncthreads();
            add_values(keys);
            __syncthreads();
        }
        finish();
    }

    // Heads beyond the item's are its last again.
    __device__ void ask_for_query() const {
        const SharedAddress to = shared_address(s.query);
        for (int i = threadIdx.x; i < unit.count * EIGHT * PIECES; i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES, n = row / EIGHT;
            const int item = unit.item + n;
            const int head = in.first_head_of(item) + min(row % EIGHT, in.heads_of(item) - 1);
            copy_async(to + row * STRIDE + 16 * piece,
                       in.query + in.row_of(item) * in.query_row_bytes +
                           head * in.query_head_bytes + 16 * piece,
                       true);
        }
    }

    // Cache rows of the next keys, a thread a key; behind the last key that one again.
    __device__ void find_slots(int first) const {
        if (threadIdx.x < FIRST_SEGMENT) {
            const int key = min(first + (int)threadIdx.x, end - 1), beyond = key - info.limit;
            const int at =
                beyond < 0 ? key : in.path[(i64)in.row_of(unit.item) * in.nodes + beyond];
            const int page = in.page_table[(i64)info.request * in.pages + (at >> in.page_shift)];
            s.slot[threadIdx.x] = (page << in.page_shift) + (at & ((1 << in.page_shift) - 1));
        }
        __syncthreads();
    }

    __device__ void ask_for_keys(int first, int keys) const {
        const SharedAddress to = shared_address(s.key);
        const int whole = (keys + STEP - 1) / STEP * STEP;
        for (int i = threadIdx.x; i < whole * PIECES; i += THREADS) {
            const int key = i / PIECES, piece = i % PIECES;
            copy_async(to + key * STRIDE + 16 * piece,
                       in.cache + s.slot[first + key] * in.cache_row_bytes + 16 * piece, true);
        }
    }

    // A warp has 16 keys by eight rows: keys are A, queries B, two sums in turn.
    __device__ void score_keys(int keys) const {
        const int m = warp % (CHUNK / STEP), n = warp / (CHUNK / STEP);
        if (n >= unit.count || m * STEP >= keys) return;
        const SharedAddress from =
            shared_address(s.key) + (m * STEP + lane % STEP) * STRIDE + lane / STEP * 16;
        const SharedAddress query_from =
            shared_address(s.query) + (n * EIGHT + lane % EIGHT) * STRIDE + lane / EIGHT * 16;
        float sums[2][4] = {};
#pragma unroll 4
        for (int i = 0; i < QUERY_STEPS / 2; ++i) {
            u32 q[4], a[4], b[4];
            load_matrices(q, query_from + 64 * i);
            load_matrices(a, from + 64 * i);
            load_matrices(b, from + 64 * i + 32);
            multiply_add(sums[0], a[0], a[1], a[2], a[3], q[0], q[1]);
            multiply_add(sums[1], b[0], b[1], b[2], b[3], q[2], q[3]);
        }
        if (QUERY_STEPS % 2) {
            u32 q[4], a[4];
            load_matrices(q, shared_address(s.query) + (n * EIGHT + lane % EIGHT) * STRIDE +
                                 32 * (QUERY_STEPS - 1) + lane / EIGHT % 2 * 16);
            load_matrices(a, from + 32 * (QUERY_STEPS - 1));
            multiply_add(sums[0], a[0], a[1], a[2], a[3], q[0], q[1]);
        }
        const int key = m * STEP + lane / 4, row = n * EIGHT + lane % 4 * 2;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            s.score[row + k % 2][key + k / 2 * EIGHT] = (sums[0][k] + sums[1][k]) * in.scale;
    }

    // A warp has four rows, a lane a key of each.
    __device__ void weigh(int keys) {
#pragma unroll
        for (int i = 0; i < ROWS_A_WARP; ++i) {
            const int row = ROWS_A_WARP * warp + i;
            if (row >= unit.count * EIGHT) break;
            const float x = lane < keys ? s.score[row][lane] : NO_SCORE;
            float now = max(most[i], x);
#pragma unroll
            for (int by = WARP / 2; by > 0; by /= 2)
                now = max(now, __shfl_xor_sync(ALL_LANES, now, by));
            const u32 weight = bf16_pair(exp2_fast(x - now), 0);
            float added = bf16_low(weight);
#pragma unroll
            for (int by = WARP / 2; by > 0; by /= 2)
                added += __shfl_xor_sync(ALL_LANES, added, by);
            const float factor = exp2_fast(most[i] - now);
            sum[i] = plus(multiply(sum[i], factor), added);
            most[i] = now;
            *(u16*)(s.weight + row * WEIGHT_STRIDE + 2 * lane) = (u16)weight;
            if (lane == 0) s.factor[row] = factor;
        }
    }

    // A warp has every eighth 16 dimensions: values, turned, are A, weights B.
    __device__ void add_values(int keys) {
#pragma unroll
        for (int n = 0; n < GROUP; ++n) {
            if (n >= unit.count) break;
            const float2 by = *(const float2*)&s.factor[n * EIGHT + lane % 4 * 2];
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    value[m][n][k] = multiply(value[m][n][k], k % 2 ? by.y : by.x);
        }
        const int row = lane / 16 * EIGHT + lane % EIGHT, piece = lane / EIGHT % 2 * 16;
        const SharedAddress weights = shared_address(s.weight) + row * WEIGHT_STRIDE + piece;
        const SharedAddress values = shared_address(s.key) + row * STRIDE + piece + 32 * warp;
#pragma unroll
        for (int step = 0; step < CHUNK / STEP; ++step) {
            if (step * STEP >= keys) break;
            u32 w[GROUP / 2][4];
#pragma unroll
            for (int n = 0; n < GROUP; n += 2)
                if (n < unit.count)
                    load_matrices(w[n / 2], weights + n * EIGHT * WEIGHT_STRIDE + 32 * step);
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m) {
                if (!has(m)) continue;
                u32 v[4];
                load_matrices_transposed(v, values + step * STEP * STRIDE + 32 * WARPS * m);
#pragma unroll
                for (int n = 0; n < GROUP; ++n)
                    if (n < unit.count)
                        multiply_add(value[m][n], v[0], v[1], v[2], v[3], w[n / 2][n % 2 * 2],
                                     w[n / 2][n % 2 * 2 + 1]);
            }
        }
    }

    // The result where the segment is all that a row sees, else its part of it.
    __device__ void finish() const {
#pragma unroll
        for (int i = 0; i < ROWS_A_WARP; ++i)
            if (lane == 0) s.norm[ROWS_A_WARP * warp + i] = {most[i], sum[i]};
        __syncthreads();
#pragma unroll
        for (int n = 0; n < GROUP; ++n)
            if (n < unit.count) finish_item(n);
        __syncthreads();  // before the next unit's norms
    }

    __device__ void finish_item(int n) const {
        const int item = unit.item + n, row = in.row_of(item);
        const bool only = load_info(in.info + row).segments() == 1;
        const i64 part = (i64)item * SEGMENTS + unit.segment;
        if (!only && threadIdx.x < EIGHT)
            in.part_norm[part * EIGHT + threadIdx.x] = s.norm[n * EIGHT + threadIdx.x];
        u16* const out = in.out + ((i64)row * in.heads + in.first_head_of(item)) * LATENT;
        const float2* const norm = s.norm + n * EIGHT + lane % 4 * 2;
        const float by[2] = {divide(1.0f, norm[0].y), divide(1.0f, norm[1].y)};
#pragma unroll
        for (int m = 0; m < VALUE_TILES; ++m) {
            if (!has(m)) continue;
            const float(&x)[4] = value[m][n];
            if (only)
                write_fragment<LATENT>(out + 16 * tile(m), in.heads_of(item),
                                       {multiply(x[0], by[0]), multiply(x[1], by[1]),
                                        multiply(x[2], by[0]), multiply(x[3], by[1])});
            else
                in.part_value[(part * VALUE_STEPS + tile(m)) * WARP + lane] = {x[0], x[1], x[2],
                                                                              x[3]};
        }
    }
};
