// One piece in bf16 on tensor cores.
//
// Warp (tile, part): rows 16 tile .. + 15 and of every step KEYS keys; queries, sums and the row's
// maximum stay in its registers. The parts of a tile are merged through shared memory at the end,
// in their order. Keys and values come through a ring of STAGES steps, by asynchronous copies; a
// key's row lies in shared memory with its 16-byte chunks exchanged by the low bits of the key's
// number, so that eight keys' chunks of one place lie in different banks.
#pragma once

#include "draft_attention_merge.cuh"

constexpr int KEY_PARTS = WARPS / ROW_TILES;
constexpr int KEYS = STEP / KEY_PARTS;
constexpr int CHUNK = KEYS < 32 ? KEYS : 32;  // keys that are weighed at once
constexpr int ROW_BYTES = 2 * HEAD_DIM;
constexpr int ROW_CHUNKS = ROW_BYTES / 16;
constexpr int TILE_BYTES = STEP * ROW_BYTES;     // keys of a step; as many of values behind them
constexpr int KEYS_A_WARP = STEP / WARPS;        // that it brings
constexpr int ABREAST = WARP / ROW_CHUNKS;       // keys it brings at once
constexpr int DIM_STEPS = HEAD_DIM / 16;
constexpr int SUMS_STRIDE = HEAD_DIM + 8;        // floats; a warp's rows start in different banks
// Weights may exceed 1 by this many powers of two before they are made relative to a new maximum.
constexpr float SLACK = 8.0f;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "rows of 8 or 16 chunks");
static_assert(ROW_TILES == 1 || ROW_TILES == 2 || ROW_TILES == 4 || ROW_TILES == 8, "even shares");

struct Sums {
    float value[WARPS][16][SUMS_STRIDE];
    float2 norm[WARPS][16];
};

struct alignas(128) Shared {
    union {
        unsigned char ring[STAGES][2 * TILE_BYTES];
        Sums sums;                        // when all steps are done
        float weight[ROWS][MAX_PIECES];  // of a merge, when those are posted
    };
    u64 landed[STAGES];  // barriers: a step's keys and values are there
    int is_last;
};

struct Attention {
    u16* out;  // [R, slots, H, HEAD_DIM]
    Workspace work;
    const u16* query;  // [R, slots, H, HEAD_DIM]
    i64 query_request_stride;
    i64 query_slot_stride;
    const unsigned char* own;    // [R * slots, 2, G, HEAD_DIM]
    const unsigned char* cache;  // [S, 2, G, HEAD_DIM]
    Batch batch;
    Heads heads;
    float scale;  // times log2 e
};

struct PieceWork {
    Shared& s;
    const Attention& in;
    const Piece piece;
    const Span span;
    u32 query[DIM_STEPS][4];         // A fragments
    float value[2 * DIM_STEPS][4];   // C fragments of 8 dimensions each
    float most[2], sum[2];           // of rows lane / 4 and + 8; sums of this lane's weights

    __device__ PieceWork(Shared& shared, const Attention& attention, const Piece& own)
        : s(shared), in(attention), piece(own), span(span_of(attention.batch, own.request)) {
#pragma unroll
        for (int i = 0; i < 8 * DIM_STEPS; ++i) (&value[0][0])[i] = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            most[half] = NO_SCORE;
            sum[half] = 0;
        }
    }

    __device__ static int tile() { return warp_id() % ROW_TILES; }
    __device__ static int key_part() { return warp_id() / ROW_TILES; }
    __device__ static int row(int half) { return 16 * tile() + lane_id() / 4 + 8 * half; }
    __device__ int position(int i) const { return span.first + (piece.begin + i) * STEP; }

    // ---- keys and values

    // The row of the cache, or ~ the row of `own`, of the key that this lane knows for its warp in
    // the piece's step i. Behind the last key comes the last again, which nobody sees.
    __device__ int locate(int i) const {
        const Batch& batch = in.batch;
        const int p = position(i) + KEYS_A_WARP * warp_id() + lane_id() % KEYS_A_WARP;
        if (p >= span.end)
            return ~(piece.request * batch.slots + min(p - span.end, batch.slots - 1));
        const int* const pages = batch.page_table + (i64)piece.request * batch.pages;
        const int shift = batch.page_shift;
        return (pages[p >> shift] << shift) + (p & ((1 << shift) - 1));
    }

    // Starts the copies of step i, whose keys lie where locate said.
    __device__ void bring(int i, int where) const {
        const int chunk = lane_id() % ROW_CHUNKS;
        const u32 kind_bytes = in.heads.groups * ROW_BYTES;  // from a key to its value
        const u32 within = in.heads.group * ROW_BYTES + 16 * chunk;
        const SharedAddress ring = shared_address(s.ring[i % STAGES]);
#pragma unroll 2
        for (int k = 0; k < KEYS_A_WARP; k += ABREAST) {
            const int from_lane = k + lane_id() / ROW_CHUNKS;
            const int key = KEYS_A_WARP * warp_id() + from_lane;
            const int at = __shfl_sync(ALL_LANES, where, from_lane);
            const u64 row = (u32)(at < 0 ? ~at : at);
            const unsigned char* const from =
                (at < 0 ? in.own : in.cache) + row * (2 * kind_bytes) + within;
            const SharedAddress to = ring + key * ROW_BYTES + (chunk ^ key % 8) * 16;
            copy_async(to, from, true);
            copy_async(to + TILE_BYTES, from + kind_bytes, true);
        }
        barrier_arrive_after_copies(shared_address(&s.landed[i % STAGES]));
    }

    // ---- scores

    __device__ void load_query() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool there = row(half) < in.heads.rows;
            const u16* const from =
                in.query + 2 * (lane_id() % 4) +
                in.heads.offset(there ? row(half) : 0, in.query_request_stride,
                                in.query_slot_stride, piece.request);
#pragma unroll
            for (int d = 0; d < DIM_STEPS; ++d) {
                query[d][half] = there ? *(const u32*)(from + 16 * d) : 0;
                query[d][2 + half] = there ? *(const u32*)(from + 16 * d + 8) : 0;
            }
        }
    }

    // Of CHUNK keys from `key` of the step on, scaled.
    __device__ void score(float (&scores)[CHUNK / 8][4], SharedAddress keys, int key) const {
        const int lane = lane_id();
        const SharedAddress rows = keys + (key + lane / 16 * 8 + lane % 8) * ROW_BYTES;
#pragma unroll
        for (int d = 0; d < DIM_STEPS; ++d) {
            const SharedAddress chunk = rows + ((2 * d + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
            for (int n = 0; n < CHUNK / 16; ++n) {
                u32 k[4];
                load_matrices(k, chunk + 16 * n * ROW_BYTES);
                const u32(&q)[4] = query[d];
                multiply_add(scores[2 * n], q[0], q[1], q[2], q[3], k[0], k[1]);
                multiply_add(scores[2 * n + 1], q[0], q[1], q[2], q[3], k[2], k[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) (&scores[0][0])[i] *= in.scale;
    }

    __device__ void hide(float (&scores)[CHUNK / 8][4], int first) const {
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) {
            const int p = first + i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
            const int slot = in.heads.slot_of(row(i / 2 % 2));
            if (!sees(in.batch, span, slot, p)) scores[i / 4][i % 4] = -infinity();
        }
    }

    // ---- weights

    // New maxima for rows whose scores have grown far above the old ones; what has been summed up
    // counts the less.
    __device__ void raise(const float (&best_of_lane)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float best = best_of_lane[half];
            best = max(best, __shfl_xor_sync(ALL_LANES, best, 1));
            best = max(best, __shfl_xor_sync(ALL_LANES, best, 2));
            if (!(best > most[half] + SLACK)) continue;
            const float factor = exp2_fast(most[half] - best);
            most[half] = best;
            sum[half] *= factor;
#pragma unroll
            for (int n = 0; n < 2 * DIM_STEPS; ++n) {
                value[n][2 * half] *= factor;
                value[n][2 * half + 1] *= factor;
            }
        }
    }

    // Scores to weights in bf16, as A fragments of 16 keys each.
    __device__ void weigh(u32 (&weights)[CHUNK / 16][4], const float (&scores)[CHUNK / 8][4]) {
        float best[2] = {-infinity(), -infinity()};
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i)
            best[i / 2 % 2] = max(best[i / 2 % 2], scores[i / 4][i % 4]);
        const bool grows = best[0] > most[0] + SLACK || best[1] > most[1] + SLACK;
        if (__any_sync(ALL_LANES, grows)) raise(best);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float low = exp2_fast(scores[n][2 * half] - most[half]);
                const float high = exp2_fast(scores[n][2 * half + 1] - most[half]);
                const u32 pair = bf16_pair(low, high);
                sum[half] += bf16_low(pair) + bf16_high(pair);
                weights[n / 2][n % 2 * 2 + half] = pair;
            }
        }
    }

    __device__ void add_values(const u32 (&weights)[CHUNK / 16][4], SharedAddress values, int key) {
        const int lane = lane_id();
        const SharedAddress rows = values + (key + lane % 16) * ROW_BYTES;
#pragma unroll
        for (int n = 0; n < CHUNK / 16; ++n) {
            const u32(&w)[4] = weights[n];
#pragma unroll
            for (int d = 0; d < DIM_STEPS; ++d) {
                u32 v[4];
                const SharedAddress chunk = rows + ((2 * d + lane / 16) ^ lane % 8) * 16;
                load_matrices_transposed(v, chunk + 16 * n * ROW_BYTES);
                multiply_add(value[2 * d], w[0], w[1], w[2], w[3], v[0], v[1]);
                multiply_add(value[2 * d + 1], w[0], w[1], w[2], w[3], v[2], v[3]);
            }
        }
    }

    // ---- the piece

    __device__ void take(int i) {
        const SharedAddress keys = shared_address(s.ring[i % STAGES]);
#pragma unroll 1
        for (int c = 0; c < KEYS; c += CHUNK) {
            const int key = key_part() * KEYS + c, first = position(i) + key;
            if (first >= span.last) break;
            float scores[CHUNK / 8][4] = {};
            score(scores, keys, key);
            if (hides(in.batch, span, first, CHUNK)) hide(scores, first);
            u32 weights[CHUNK / 16][4];
            weigh(weights, scores);
            add_values(weights, keys + TILE_BYTES, key);
        }
    }

    __device__ void run() {
        const int steps = piece.end - piece.begin;
        if (threadIdx.x < STAGES) barrier_init(shared_address(&s.landed[threadIdx.x]), THREADS);
        int where[STAGES + 1];
#pragma unroll
        for (int i = 0; i <= STAGES; ++i) where[i] = i < steps ? locate(i) : 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < STAGES; ++i)
            if (i < steps) bring(i, where[i]);
        load_query();
        int next = where[STAGES];
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            barrier_wait(shared_address(&s.landed[i % STAGES]), i / STAGES % 2);
            take(i);
            __syncthreads();  // all warps have left the step's stage
            if (i + STAGES >= steps) continue;
            bring(i + STAGES, next);
            if (i + STAGES + 1 < steps) next = locate(i + STAGES + 1);
        }
    }

    // ---- results

    __device__ void gather_sums() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 1);
            sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 2);
            const int r = lane_id() / 4 + 8 * half;
            if (lane_id() % 4 == 0) s.sums.norm[warp_id()][r] = {most[half], sum[half]};
            float* const to = &s.sums.value[warp_id()][r][lane_id() % 4 * 2];
#pragma unroll
            for (int n = 0; n < 2 * DIM_STEPS; ++n)
                *(float2*)(to + 8 * n) = {value[n][2 * half], value[n][2 * half + 1]};
        }
        __syncthreads();
    }

    // Four dimensions of a row over all parts of its tile, and the row's norm.
    __device__ float4 merged(int row, int four, float2& norm) const {
        float best = NO_SCORE;
#pragma unroll
        for (int part = 0; part < KEY_PARTS; ++part)
            best = max(best, s.sums.norm[row / 16 + part * ROW_TILES][row % 16].x);
        float4 total = {0, 0, 0, 0};
        norm = {best, 0.0f};
#pragma unroll
        for (int part = 0; part < KEY_PARTS; ++part) {
            const int warp = row / 16 + part * ROW_TILES;
            const float2 of_part = s.sums.norm[warp][row % 16];
            const float by = exp2_fast(of_part.x - best);
            norm.y = fmaf(of_part.y, by, norm.y);
            add_scaled(total, *(const float4*)&s.sums.value[warp][row % 16][4 * four], by);
        }
        return total;
    }

    __device__ void finish() {
        gather_sums();
        for (int i = threadIdx.x; i < in.heads.rows * ROW_FOURS; i += THREADS) {
            const int row = i / ROW_FOURS, four = i % ROW_FOURS;
            float2 norm;
            const float4 total = merged(row, four, norm);
            if (piece.whole()) {
                u16* const out = in.out + in.heads.out_offset(row, piece.request) + 4 * four;
                write4(out, scaled(total, 1.0f / norm.y));
            } else {
                const i64 to = part_row(in.heads, piece.slot(), row);
                write4(in.work.value + to * HEAD_DIM + 4 * four, total);
                if (four == 0) in.work.norm[to] = norm;
            }
        }
        if (piece.whole() || !post_part(in.work, piece, in.heads, s.is_last)) return;
        merge_parts(in.out, in.work, piece, in.heads, s.weight);
    }
};
