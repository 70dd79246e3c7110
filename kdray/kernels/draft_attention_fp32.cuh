// One piece in float32 on CUDA cores: a warp takes PLAIN_ROWS rows. A lane multiplies out one key's
// scores of 32, then weighs 32 keys' values in its own dimensions. For models that are run in
// float32; every sum has a fixed order.
#pragma once

#include "draft_attention_merge.cuh"

constexpr int PLAIN_ROWS = ROWS / WARPS;
constexpr int PLAIN_STRIDE = HEAD_DIM + 4;    // floats; lanes' rows start in different banks
constexpr int PLAIN_DIMS = HEAD_DIM / WARP;   // of the result, a lane: lane_id() + 32 j

struct alignas(16) PlainShared {
    union {
        float query[ROWS][HEAD_DIM];
        float weight[ROWS][MAX_PIECES];  // of a merge, when all steps are done
    };
    float keys[2][WARP][PLAIN_STRIDE];  // keys, and values
    int is_last;
};

struct PlainAttention {
    float* out;  // [R, slots, H, HEAD_DIM]
    Workspace work;
    const float* query;  // [R, slots, H, HEAD_DIM]
    i64 query_request_stride;
    i64 query_slot_stride;
    const float* own;    // [R * slots, 2, G, HEAD_DIM]
    const float* cache;  // [S, 2, G, HEAD_DIM]
    Batch batch;
    Heads heads;
    float scale;  // times log2 e
};

struct PlainWork {
    PlainShared& s;
    const PlainAttention& in;
    const Piece piece;
    const Span span;
    float value[PLAIN_ROWS][PLAIN_DIMS];
    float most[PLAIN_ROWS], sum[PLAIN_ROWS];  // sums of this lane's weights

    __device__ PlainWork(PlainShared& shared, const PlainAttention& attention, const Piece& own)
        : s(shared), in(attention), piece(own), span(span_of(attention.batch, own.request)) {
#pragma unroll
        for (int j = 0; j < PLAIN_ROWS; ++j) {
            most[j] = NO_SCORE;
            sum[j] = 0;
#pragma unroll
            for (int d = 0; d < PLAIN_DIMS; ++d) value[j][d] = 0;
        }
    }

    __device__ static int row(int j) { return PLAIN_ROWS * warp_id() + j; }

    __device__ void load_query() const {
        for (int i = threadIdx.x; i < ROWS * ROW_FOURS; i += THREADS) {
            const int row = i / ROW_FOURS, four = i % ROW_FOURS;
            float4 x = {0, 0, 0, 0};
            if (row < in.heads.rows)
                x = *(const float4*)(in.query + 4 * four +
                                     in.heads.offset(row, in.query_request_stride,
                                                     in.query_slot_stride, piece.request));
            *(float4*)&s.query[row][4 * four] = x;
        }
    }

    // Keys and values of 32 positions from `first` on; zeros behind the last.
    __device__ void load_keys(int first) const {
        const Batch& batch = in.batch;
        const int* const pages = batch.page_table + (i64)piece.request * batch.pages;
        const int shift = batch.page_shift;
        for (int i = threadIdx.x; i < 2 * WARP * ROW_FOURS; i += THREADS) {
            const int four = i % ROW_FOURS, kind = i / ROW_FOURS % 2, key = i / ROW_FOURS / 2;
            const int p = first + key;
            float4 x = {0, 0, 0, 0};
            if (p < span.last) {
                const bool cached = p < span.end;
                const i64 at = cached ? ((i64)pages[p >> shift] << shift) + (p & ((1 << shift) - 1))
                                      : (i64)piece.request * batch.slots + p - span.end;
                const i64 of_kind = (2 * at + kind) * in.heads.groups + in.heads.group;
                x = *(const float4*)((cached ? in.cache : in.own) + of_kind * HEAD_DIM + 4 * four);
            }
            *(float4*)&s.keys[kind][key][4 * four] = x;
        }
    }

    __device__ void score(float (&scores)[PLAIN_ROWS]) const {
#pragma unroll 2
        for (int i = 0; i < HEAD_DIM; i += 4) {
            const float4 k = *(const float4*)&s.keys[0][lane_id()][i];
#pragma unroll
            for (int j = 0; j < PLAIN_ROWS; ++j) {
                const float4 q = *(const float4*)&s.query[row(j)][i];
                const float last = fmaf(q.z, k.z, fmaf(q.w, k.w, scores[j]));
                scores[j] = fmaf(q.x, k.x, fmaf(q.y, k.y, last));
            }
        }
    }

    // Scores to weights; what has been summed up is made relative to the new maxima.
    __device__ void weigh(float (&scores)[PLAIN_ROWS], int position) {
        const bool some_hidden = hides(in.batch, span, position - lane_id(), WARP);
#pragma unroll
        for (int j = 0; j < PLAIN_ROWS; ++j) {
            float x = scores[j] * in.scale;
            if (some_hidden && !sees(in.batch, span, in.heads.slot_of(row(j)), position))
                x = -infinity();
            const float best = max(most[j], from_ordered(__reduce_max_sync(ALL_LANES, ordered(x))));
            const float factor = exp2_fast(most[j] - best);
            most[j] = best;
            scores[j] = exp2_fast(x - best);
            sum[j] = fmaf(sum[j], factor, scores[j]);
#pragma unroll
            for (int d = 0; d < PLAIN_DIMS; ++d) value[j][d] *= factor;
        }
    }

    __device__ void add_values(const float (&weights)[PLAIN_ROWS]) {
#pragma unroll 2
        for (int key = 0; key < WARP; ++key) {
            float v[PLAIN_DIMS];
#pragma unroll
            for (int d = 0; d < PLAIN_DIMS; ++d) v[d] = s.keys[1][key][lane_id() + WARP * d];
#pragma unroll
            for (int j = 0; j < PLAIN_ROWS; ++j) {
                const float w = __shfl_sync(ALL_LANES, weights[j], key);
#pragma unroll
                for (int d = 0; d < PLAIN_DIMS; ++d) value[j][d] = fmaf(w, v[d], value[j][d]);
            }
        }
    }

    __device__ void run() {
        load_query();
        const int last = min(span.first + piece.end * STEP, span.last);
#pragma unroll 1
        for (int first = span.first + piece.begin * STEP; first < last; first += WARP) {
            load_keys(first);
            __syncthreads();
            float weights[PLAIN_ROWS] = {};
            score(weights);
            weigh(weights, first + lane_id());
            add_values(weights);
            __syncthreads();
        }
    }

    __device__ void finish() {
#pragma unroll
        for (int j = 0; j < PLAIN_ROWS; ++j) {
#pragma unroll
            for (int by = WARP / 2; by > 0; by /= 2)
                sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], by);
            if (row(j) >= in.heads.rows) continue;
            const i64 part = part_row(in.heads, piece.slot(), row(j));
            float* const to = piece.whole() ? in.out + in.heads.out_offset(row(j), piece.request)
                                            : in.work.value + part * HEAD_DIM;
            const float by = piece.whole() ? 1.0f / sum[j] : 1.0f;
#pragma unroll
            for (int d = 0; d < PLAIN_DIMS; ++d) to[lane_id() + WARP * d] = value[j][d] * by;
            if (!piece.whole() && lane_id() == 0) in.work.norm[part] = {most[j], sum[j]};
        }
        if (piece.whole() || !post_part(in.work, piece, in.heads, s.is_last)) return;
        merge_parts(in.out, in.work, piece, in.heads, s.weight);
    }
};
