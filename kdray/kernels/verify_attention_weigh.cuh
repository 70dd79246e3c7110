// The weights of a step's keys, by the warps that own the rows: 8 main rows a warp, and 2 extra
// rows a warp of the first group. Scores come in parts from the group's warps, that multiplied them
// out; weights go to all in bf16.
#pragma once

#include "verify_attention_place.cuh"

template <bool MAIN, bool EXTRA>
struct RowWeights {
    static constexpr int FIRST_EXTRA = MAIN ? MAIN_ROWS : 0;
    Shared& s;
    const Attention& in;
    const Place at;
    float sum;        // of main row 2t's weights or (for an odd g) 2t + 1's, of the warp's eight
    float extra_sum;  // of the lane's extra row's, for its key of the steps

    __device__ RowWeights(Shared& shared, const Attention& attention)
        : s(shared), in(attention), sum(0), extra_sum(0) {
        // Read by the warps that own the rows, after a barrier.
        if (threadIdx.x < TILE_ROWS) s.most[threadIdx.x] = NO_SCORE;
        if (threadIdx.x < 2 * WARPS) s.rescaled[threadIdx.x] = ~0u;
    }

    __device__ const Request& request() const { return s.deal.request; }
    __device__ const Piece& piece() const { return s.deal.piece; }
    __device__ bool owns_extra() const { return EXTRA && at.group == 0; }

    // Lane 4 g + t has keys g and g + 8 of main rows 2t and 2t + 1 of the warp's eight. (Asked for
    // anew, as a register that keeps it from turn to turn would be one too many.)
    __device__ u32 main_row() const { return 8 * at.warp + fresh_thread() % 4 * 2; }
    // And key lane % 16 of one of the warp's two extra rows.
    __device__ u32 extra_row() const { return 2 * at.quarter + at.lane() / STEP; }

    // Which of a step's positions a row of the tile sees; for one behind its last, that one.
    __device__ u32 seen_by(int row, int step) const {
        const int p = piece().tile.first + min(row, piece().tile.rows - 1);
        return seen_from(in.batch, request(), p, piece().tile.keys, step * STEP);
    }

    // own: this warp's part of its own rows' scores of the piece's step i; masked: not all of the
    // step's positions are seen by all.
    __device__ void weigh(const float (&own)[4], u32 i, bool masked) {
        if (MAIN) weigh_main(own, i, masked);
        if (owns_extra()) weigh_extra(i, masked);
    }

    __device__ void weigh_main(const float (&own)[4], u32 i, bool masked) {
        float score[4] = {own[0], own[1], own[2], own[3]}, above[4];  // above: relative to most
        collect(score);
        const float2 most = *(const float2*)&s.most[main_row()];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            above[k] = fmaf(score[k], in.scale, k % 2 == 0 ? -most.x : -most.y);
        const bool grows = max(max(above[0], above[1]), max(above[2], above[3])) > SLACK;
        if (__any_sync(ALL_LANES, grows || masked)) settle(i, masked, score, above);
        keep_weights(above);
    }
    __device__ void weigh_extra(u32 i, bool masked) {
        const float score = collect_extra();
        float above = fmaf(score, in.scale, -s.most[MAIN_ROWS + extra_row()]);
        if (__any_sync(ALL_LANES, above > SLACK || masked)) settle_extra(i, masked, score, above);
        const u32 pair = bf16_pair(exp2_fast(above), 0.0f), key = at.lane() % STEP;
        const u32 place = Ring::slot(i) * SLOT_BYTES + extra_weight_place(extra_row(), key / 8);
        *(u16*)(s.ring + place + key % 8 * 2) = (u16)pair;
        extra_sum += bf16_low(pair);
    }

    // Adds what the other quarters found.
    __device__ void collect(float (&score)[4]) const {
        const float4* const from = &s.scores[0][0][0][at.lane()] + at.warp * (QUARTERS - 1) * WARP;
#pragma unroll
        for (int sender = 0; sender < QUARTERS - 1; ++sender) {
            const float4 part = from[sender * WARP];
            score[0] += part.x;
            score[1] += part.y;
            score[2] += part.z;
            score[3] += part.w;
        }
    }
    __device__ float collect_extra() const {
        const u32 key = at.lane() % STEP, fragment = exchanged(key % 8 * 4 + at.quarter);
        const u32 number = at.lane() / STEP + key / 8 * 2;
        const float* const first = (const float*)&s.extra_scores[0][fragment] + number;
        float sum_of_parts = 0;
#pragma unroll
        for (int sender = 0; sender < QUARTERS; ++sender)
            sum_of_parts += first[sender * 4 * WARP];
        return sum_of_parts;
    }

    // What is seldom called for: hides what a row does not see, and takes new maxima for rows whose
    // scores have grown far above the old ones; what has been summed up counts the less.
    __device__ void settle(u32 i, bool masked, const float (&score)[4], float (&above)[4]) {
        const u32 row = main_row(), g = at.lane() / 4;
        bool hidden[4] = {}, raised = false;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if (masked) {
                const u32 seen = seen_by(row + k, piece().begin + i) >> g;
                hidden[k] = !(seen & 1);
                hidden[k + 2] = !(seen >> 8 & 1);
            }
            const float most = s.most[row + k];
            float best = max(hidden[k] ? NO_SCORE : score[k] * in.scale,
                             hidden[k + 2] ? NO_SCORE : score[k + 2] * in.scale);
#pragma unroll
            for (int by = 4; by < WARP; by *= 2)
                best = max(best, __shfl_xor_sync(ALL_LANES, best, by));
            const float now = best > most + SLACK ? best : most, factor = exp2_fast(most - now);
            if (at.lane() / 4 % 2 == k) sum *= factor;
            raised = raised || now > most;
#pragma unroll
            for (int half = 0; half < 4; half += 2)
                above[k + half] =
                    hidden[k + half] ? NO_SCORE : fmaf(score[k + half], in.scale, -now);
            __syncwarp();  // all lanes have read the maximum
            if (at.lane() < 4) {
                s.most[row + k] = now;
                s.rescale[row + k] = factor;
            }
        }
        if (__any_sync(ALL_LANES, raised) && at.lane() == 0) s.rescaled[at.warp] = i;
    }
    __device__ void settle_extra(u32 i, bool masked, float score, float& above) {
        const u32 row = extra_row();
        const bool hidden = masked && !(seen_by(FIRST_EXTRA + row, piece().begin + i) >>
                                            at.lane() % STEP & 1);
        const float most = s.most[MAIN_ROWS + row];
        float best = hidden ? NO_SCORE : score * in.scale;
#pragma unroll
        for (int by = STEP / 2; by > 0; by /= 2)
            best = max(best, __shfl_xor_sync(ALL_LANES, best, by));
        const float now = best > most + SLACK ? best : most, factor = exp2_fast(most - now);
        extra_sum *= factor;
        above = hidden ? NO_SCORE : fmaf(score, in.scale, -now);
        __syncwarp();
        if (at.lane() % STEP == 0) {
            s.most[MAIN_ROWS + row] = now;
            s.extra_rescale[i % 2][row] = factor;
        }
        if (__any_sync(ALL_LANES, now > most) && at.lane() == 0) s.rescaled[rescaled_extra(i)] = i;
    }
    // Which of s.rescaled tells of the warp's extra rows of step i.
    __device__ u32 rescaled_extra(u32 i) const { return WARPS + i % 2 * QUARTERS + at.quarter; }

    __device__ void keep_weights(const float (&above)[4]) {
        const u32 pair[2] = {bf16_pair(exp2_fast(above[0]), exp2_fast(above[1])),
                             bf16_pair(exp2_fast(above[2]), exp2_fast(above[3]))};
        const u32 lane = fresh_thread();
        const u32 place = weight_place(lane % 8, lane / 8 % 2);
        store_matrices_transposed(
            shared_address(s.weights) + 8 * at.warp * 2 * STEP + place, pair[0], pair[1]);
        // Lanes with an even g keep the sum of row 2t, the others that of row 2t + 1: neighbours
        // exchange what they do not keep.
        const float low = bf16_low(pair[0]) + bf16_low(pair[1]);
        const float high = bf16_high(pair[0]) + bf16_high(pair[1]);
        const bool odd = at.lane() / 4 % 2;
        sum += (odd ? high : low) + __shfl_xor_sync(ALL_LANES, odd ? low : high, 4);
    }

    // The sums over all lanes of a row: [TILE_ROWS] in shared memory, which the scores have left.
    __device__ float2* gather_norms() {
        __syncthreads();
        float2* const norm = (float2*)s.scores;
        if (MAIN) {
            sum += __shfl_xor_sync(ALL_LANES, sum, 8);
            sum += __shfl_xor_sync(ALL_LANES, sum, 16);
            const u32 row = main_row() + at.lane() / 4 % 2;
            if (at.lane() < 8) norm[row] = {s.most[row], sum};
        }
        if (owns_extra()) {
            const u32 row = 2 * (fresh_thread() / WARP) + at.lane() / STEP;
#pragma unroll
            for (int by = 1; by < STEP; by *= 2)
                extra_sum += __shfl_xor_sync(ALL_LANES, extra_sum, by);
            if (at.lane() % STEP == 0)
                norm[FIRST_EXTRA + row] = {s.most[MAIN_ROWS + row], extra_sum};
        }
        __syncthreads();
        return norm;
    }
};
