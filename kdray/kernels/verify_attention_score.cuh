// A score warp: scores and weights of up to three eights of rows, eight `warp`, `warp` + 4, .. of
// the tile. Scores are keys by rows (M by N): A fragments are keys, B fragments queries, and lane
// 4 g + t gets keys g and g + 8 of rows 2t and 2t + 1. No other warp has a part in a row's weights.
//
// Of keys in fp8 a matrix load brings the lane latents 4t .. 4t + 3 of 16: two pairs, which a product
// has at columns 2t and 2t + 8. So products take latents in this order, and queries too.
#pragma once

#include "overlap.cuh"
#include "verify_attention_shared.cuh"

// Weights may exceed 1 by this many powers of two before they are made relative to a new maximum.
constexpr float SLACK = 8.0f;

// What weights are multiplied by beside their key's scale, some 2^-7, so that float16 holds them.
constexpr float WEIGHT_UNIT = KV_FP8 ? 256.0f : 1.0f;

// Until the weights of two steps before are done with.
__device__ __forceinline__ void wait_for_room(Shared& s, u32 step) {
    if (step >= 2) barrier_wait(shared_address(&s.freed[slot_of(step - 2)]), phase_of(step - 2));
}

template <int MINE>  // eights
struct ScoreWarp {
    static constexpr int STORED = stored_steps(MINE), KEPT = QUERY_STEPS - STORED;
    Shared& s;
    const Attention& in;
    u32 warp;
    u32 lane;
    u32 query[KEPT][MINE][2];
    float most[MINE][2];  // of rows 2t and 2t + 1: what weights are relative to
    float sum[MINE][2];   // of the lane's keys' weights
    float key_scale[2];   // of the step's keys g and g + 8, in fp8

    __device__ ScoreWarp(Shared& shared, const Attention& attention)
        : s(shared),
          in(attention),
          warp(same_in_warp(fresh_thread() / WARP)),
          lane(fresh_thread() % WARP) {
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            most[j][0] = most[j][1] = NO_SCORE;
            sum[j][0] = sum[j][1] = 0;
        }
    }

    __device__ u32 eight(int j) const { return warp + SCORE_WARPS * j; }

    __device__ void run() {
        u32 step = s.first_step;
        ask_for_mask();
        start_behind_previous();
        load_query();
        const int steps = s.piece.end - s.piece.begin;
        // From here on not all of a step's positions are seen by all.
        const int limit =
            s.piece.cached + min(s.piece.first / in.heads + 1, s.piece.known);
        const int masked = limit / STEP - s.piece.begin;
#pragma unroll 1
        for (int i = 0; i < steps; ++i, ++step) {
            float score[MINE][4];
            barrier_wait(shared_address(&s.landed[slot_of(step)]), phase_of(step));
            multiply(score, shared_address(s.ring) + slot_of(step) * SLOT_BYTES);
            weigh(score, step, s.piece.begin + i, i >= masked);
        }
        post_norms();
    }

    // Else it would be waited for when the scores are there.
    __device__ void ask_for_mask() const {
        const int words = in.mask.nodes * in.mask.words, line = lane * WARP;
        if (warp == 0 && line < words) ask_l2_for(in.mask.bits + (i64)s.piece.request * words + line);
    }

    // Rows beyond the tile's are its last again: nobody asks for them.
    __device__ void load_query() {
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const u32 g = lane / 4, t = lane % 4;
            const int p = s.piece.first + min((int)(EIGHT * eight(j) + g), s.piece.rows - 1);
            const unsigned char* const row =
                in.query + (s.piece.first_row + p / in.heads) * in.query_row_bytes +
                p % in.heads * in.query_head_bytes;
            const SharedAddress to = stored() + (EIGHT * j + g) * stored_stride(MINE) + 16 * t;
#pragma unroll
            for (int chunk = 0; chunk < 2 * STORED; chunk += 4)
                copy_async(to + 16 * chunk, row + 32 * KEPT + 16 * (chunk + t), true);
#pragma unroll
            for (int n = 0; n < KEPT; ++n) {
                const bool halves = KV_FP8 && n < LATENT_STEPS;  // 4t .. 4t + 3 of the step
                query[n][j][0] = *(const u32*)(row + 32 * n + (halves ? 8 : 4) * t);
                query[n][j][1] = *(const u32*)(row + 32 * n + (halves ? 4 + 8 * t : 16 + 4 * t));
            }
        }
        wait_for_copies();
        __syncwarp();
#if KV_FP8
        make_halves();
#endif
    }
#if KV_FP8
    // Queries of latents in float16 and, where they are stored, in the order of their products.
    __device__ void make_halves() {
        constexpr int TURNED = max_of(0, LATENT_STEPS - KEPT);
#pragma unroll
        for (int n = 0; n < KEPT && n < LATENT_STEPS; ++n)
#pragma unroll
            for (int j = 0; j < MINE; ++j)
#pragma unroll
                for (int k = 0; k < 2; ++k) query[n][j][k] = half_query(query[n][j][k]);
        unsigned char* row = s.query + (warp == 0 ? 0 : STORED_3 + (warp - 1) * STORED_2) +
                             lane / 4 * stored_stride(MINE);
#pragma unroll 2
        for (int n = 0; n < TURNED; ++n, row += 32) {
            uint2 four[MINE];
#pragma unroll
            for (int j = 0; j < MINE; ++j)
                four[j] = ((const uint2*)(row + j * EIGHT * stored_stride(MINE)))[lane % 4];
            __syncwarp();
#pragma unroll
            for (int j = 0; j < MINE; ++j) {
                u32* const to = (u32*)(row + j * EIGHT * stored_stride(MINE)) + lane % 4;
                to[0] = half_query(four[j].x);
                to[4] = half_query(four[j].y);
            }
        }
        __syncwarp();
    }
    __device__ static u32 half_query(u32 pair) {
        return half_pair(bf16_low(pair), bf16_high(pair));
    }
#endif
    __device__ SharedAddress stored() const {
        return shared_address(s.query) + (warp == 0 ? 0 : STORED_3 + (warp - 1) * STORED_2);
    }

    // Where the lane's row of a matrix load begins.
    __device__ SharedAddress stored_of_lane() const {
        return stored() + lane % EIGHT * stored_stride(MINE) + lane / EIGHT * 16;
    }

    // What the next step needs is asked for before the products of the present one. Steps have
    // CHAINS sums in turn, so that as many products of an eight are under way.
    __device__ void multiply(float (&score)[MINE][4], SharedAddress slot) {
        constexpr int CHAINS = MINE == 1 ? 4 : 2, OF_TWO = KV_FP8 ? LATENT_STEPS / 2 : 0;
        constexpr int LOADS = QUERY_STEPS - OF_TWO;  // the first OF_TWO bring keys for two steps
        const SharedAddress from = slot + lane % STEP * STRIDE + lane / STEP * 16;
        const SharedAddress query_from = stored_of_lane();
        float sums[CHAINS][MINE][4] = {};
        u32 key[2][4], q[MINE][4];
        load_matrices(key[0], from);
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            if (n + 1 < LOADS) load_matrices(key[(n + 1) % 2], from + 32 * (n + 1));
            const u32(&k)[4] = key[n % 2];
            if (n < OF_TWO) {
                const u32 low[4] = {half_pair_of_e4m3(k[0]), half_pair_of_e4m3(k[1]),
                                    half_pair_of_e4m3_high(k[0]), half_pair_of_e4m3_high(k[1])};
                add_products<CHAINS, true>(sums, low, q, query_from, 2 * n);
                const u32 high[4] = {half_pair_of_e4m3(k[2]), half_pair_of_e4m3(k[3]),
                                     half_pair_of_e4m3_high(k[2]), half_pair_of_e4m3_high(k[3])};
                add_products<CHAINS, true>(sums, high, q, query_from, 2 * n + 1);
            } else {
                if (KV_FP8 && n == OF_TWO) scale_latents<CHAINS>(sums, slot);
                add_products<CHAINS, false>(sums, k, q, query_from, n + OF_TWO);
            }
        }
        add_up<CHAINS>(score, sums);
    }
    // Of one step. Queries that are not kept come for two steps at a time, to q.
    template <int CHAINS, bool HALVES>
    __device__ void add_products(float (&sums)[CHAINS][MINE][4], const u32 (&k)[4],
                                 u32 (&q)[MINE][4], SharedAddress query_from, int step) const {
        // In fp8 worked out anew: held, it costs registers that the compiler does not find.
        if (KV_FP8) query_from = stored_of_lane();
        const int at = step - KEPT;  // among the stored
        if (at >= 0 && at % 2 == 0)
#pragma unroll
            for (int j = 0; j < MINE; ++j)
                load_matrices(q[j], query_from + j * EIGHT * stored_stride(MINE) + 32 * at);
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const u32 low = at < 0 ? query[step][j][0] : q[j][at % 2 * 2];
            const u32 high = at < 0 ? query[step][j][1] : q[j][at % 2 * 2 + 1];
            if (HALVES)
                multiply_add_half(sums[step % CHAINS][j], k[0], k[1], k[2], k[3], low, high);
            else
                multiply_add(sums[step % CHAINS][j], k[0], k[1], k[2], k[3], low, high);
        }
    }
    // The sums so far are of latents in units of their keys' scales.
    template <int CHAINS>
    __device__ void scale_latents(float (&sums)[CHAINS][MINE][4], SharedAddress slot) {
        const unsigned char* const first =
            s.ring + (slot - shared_address(s.ring)) + lane / 4 * STRIDE + SCALE_PLACE;
        key_scale[0] = *(const float*)first;
        key_scale[1] = *(const float*)(first + EIGHT * STRIDE);
        float sum[MINE][4];
        add_up<CHAINS>(sum, sums);
#pragma unroll
        for (int j = 0; j < MINE; ++j)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                sums[0][j][k] = sum[j][k] * key_scale[k / 2];
#pragma unroll
                for (int chain = 1; chain < CHAINS; ++chain) sums[chain][j][k] = 0;
            }
    }
    template <int CHAINS>
    __device__ static void add_up(float (&score)[MINE][4], const float (&sums)[CHAINS][MINE][4]) {
#pragma unroll
        for (int j = 0; j < MINE; ++j)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                score[j][k] = sums[0][j][k] + sums[1][j][k];
                if (CHAINS == 4) score[j][k] += sums[2 % CHAINS][j][k] + sums[3 % CHAINS][j][k];
            }
    }

    __device__ void weigh(const float (&score)[MINE][4], u32 step, int tile_step, bool masked) {
        float above[MINE][4];  // relative to most
        bool grows = false;
#pragma unroll
        for (int j = 0; j < MINE; ++j)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                above[j][k] = fmaf(score[j][k], in.scale, -most[j][k % 2]);
                grows = grows || above[j][k] > SLACK;
            }
        const u32 turn = step % 2;
        const bool settles = __any_sync(ALL_LANES, grows || masked);
        wait_for_room(s, step);
        if (settles) settle(score, above, step, tile_step, masked);
#pragma unroll
        for (int j = 0; j < MINE; ++j) keep_weights(above[j], j, turn);
        arrive(s.weighed[turn]);
    }

    // What is seldom called for: hides what a row does not see, and takes new maxima for rows whose
    // scores have grown far above the old ones; what has been summed up counts the less.
    __device__ void settle(const float (&score)[MINE][4], float (&above)[MINE][4], u32 step,
                           int tile_step, bool masked) {
        // Lane i's word: what row i % 8 of eight i / 8 sees.
        u32 sees = ~0u;
        if (masked) {
            const int of_tile = min((int)(EIGHT * eight(lane / EIGHT) + lane % EIGHT),
                                    s.piece.rows - 1);
            sees = seen_from(in.mask, s.piece, in.heads, s.piece.first + of_tile,
                             tile_step * STEP);
        }
        bool raised = false;
#pragma unroll
        for (int j = 0; j < MINE; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const u32 seen =
                    __shfl_sync(ALL_LANES, sees, EIGHT * j + lane % 4 * 2 + e) >> lane / 4;
                const float low = seen & 1 ? score[j][e] * in.scale : NO_SCORE;
                const float high = seen >> 8 & 1 ? score[j][e + 2] * in.scale : NO_SCORE;
                float best = max(low, high);
#pragma unroll
                for (int by = 4; by < WARP; by *= 2)
                    best = max(best, __shfl_xor_sync(ALL_LANES, best, by));
                const float now = best > most[j][e] + SLACK ? best : most[j][e];
                const float factor = exp2_fast(most[j][e] - now);
                raised = raised || now > most[j][e];
                most[j][e] = now;
                sum[j][e] *= factor;
                above[j][e] = low - now;
                above[j][e + 2] = high - now;
                if (lane < 4) s.rescale[step % 2][EIGHT * eight(j) + 2 * lane + e] = factor;
            }
        if (__any_sync(ALL_LANES, raised) && lane == 0) s.raised[step % 2][warp] = step;
    }

    __device__ void keep_weights(const float (&above)[4], int j, u32 turn) {
#if KV_FP8
        const float weight[4] = {exp2_fast(above[0]), exp2_fast(above[1]), exp2_fast(above[2]),
                                 exp2_fast(above[3])};
        const float unit[2] = {WEIGHT_UNIT * key_scale[0], WEIGHT_UNIT * key_scale[1]};
        u32 pair[2];
#pragma unroll
        for (int k = 0; k < 2; ++k)
            pair[k] = half_pair(weight[2 * k] * unit[k], weight[2 * k + 1] * unit[k]);
#else
        const u32 pair[2] = {bf16_pair(exp2_fast(above[0]), exp2_fast(above[1])),
                             bf16_pair(exp2_fast(above[2]), exp2_fast(above[3]))};
#endif
        store_matrices_transposed(shared_address(s.weights[turn][EIGHT * eight(j)]) +
                                      weight_place(lane % 8, lane / 8 % 2),
                                  pair[0], pair[1]);
#if KV_FP8
        sum[j][0] += weight[0] + weight[2];
        sum[j][1] += weight[1] + weight[3];
#else
        sum[j][0] += bf16_low(pair[0]) + bf16_low(pair[1]);
        sum[j][1] += bf16_high(pair[0]) + bf16_high(pair[1]);
#endif
    }

    __device__ void post_norms() {
        float2* const part = in.work.norm + (i64)s.piece.part(s.piece.number) * TILE_ROWS;
#pragma unroll
        for (int j = 0; j < MINE; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float all = sum[j][e];
#pragma unroll
                for (int by = 4; by < WARP; by *= 2)
                    all += __shfl_xor_sync(ALL_LANES, all, by);
                const u32 row = EIGHT * eight(j) + lane % 4 * 2 + e;
                all *= WEIGHT_UNIT;
                if (lane >= 4) continue;
                s.norm[row] = {most[j][e], all};
                if (!s.piece.whole()) part[row] = {most[j][e], all};
            }
        arrive(s.normed);
    }
};

// Without an eight of the tile's rows a warp's arrivals are still counted on.
__device__ __forceinline__ void score_nothing(Shared& s) {
    u32 step = s.first_step;
    const int steps = s.piece.end - s.piece.begin;
#pragma unroll 1
    for (int i = 0; i < steps; ++i, ++step) {
        wait_for_room(s, step);
        arrive(s.weighed[step % 2]);
    }
    arrive(s.normed);
}

__device__ __forceinline__ void score_piece(Shared& s, const Attention& in) {
    const int warp = same_in_warp(threadIdx.x / WARP);
    const int mine = (s.piece.eights() - warp + SCORE_WARPS - 1) / SCORE_WARPS;
    if (TILE_EIGHTS > 8 && mine == 3)
        ScoreWarp<3>(s, in).run();
    else if (mine == 2)
        ScoreWarp<2>(s, in).run();
    else if (mine == 1)
        ScoreWarp<1>(s, in).run();
    else
        score_nothing(s);
}
