// The weights of a step's keys, by the warps that own the rows: 8 main rows and 1 extra row each.
// Scores come in parts from the warps that multiplied them out; weights go to all in bf16.
#pragma once

#include "verify_attention_place.cuh"

template <bool MAIN, bool EXTRA>
struct RowWeights {
    static constexpr int FIRST_EXTRA = MAIN ? MAIN_ROWS : 0;
    Shared& s;
    const Attention& in;
    float sum;  // of weights of main row 2t or 2t + 1 of the warp's eight, for an even or odd g

    __device__ RowWeights(Shared& shared, const Attention& attention)
        : s(shared), in(attention), sum(0) {
        // Read by the warps that own the rows, after a barrier.
        if (threadIdx.x < TILE_ROWS) s.most[threadIdx.x] = NO_SCORE;
        if (threadIdx.x < WARPS * STEP) (&s.extra_sum[0][0])[threadIdx.x] = 0;
        if (threadIdx.x < 2 * WARPS) s.rescaled[threadIdx.x] = ~0u;
    }

    __device__ const Request& request() const { return s.deal.request; }
    __device__ const Piece& piece() const { return s.deal.piece; }

    // Place of a lane's fragment: those that a row's keys come from lie in different banks.
    __device__ static u32 exchanged(u32 lane) { return lane ^ lane / 8; }

    __device__ bool is_masked(int step) const { return (step + 1) * STEP > request().cached; }

    // Which of a step's positions a row of the tile sees; for one behind its last, that one.
    __device__ u32 seen_by(int row, int step) const {
        const int p = piece().tile.first + min(row, piece().tile.rows - 1);
        return seen_from(in.batch, request(), p, piece().tile.keys, step * STEP);
    }

    // Main rows: lane 4 g + t has keys g and g + 8 of rows 2t and 2t + 1 of the warp's eight. The
    // extra row: key lane % 16, in both halves of the warp.
    __device__ void weigh(const Place& place, const float (&own)[4], int step, u32 i) {
        const u32 row = 8 * place.warp + place.lane % 4 * 2, extra_row = MAIN_ROWS + place.warp;
        float score[4] = {own[0], own[1], own[2], own[3]}, extra_score = 0;
        float most[2], extra_most, above[4], extra_above;  // above: scaled, relative to most
        bool grows = false;
        if (MAIN) {
            collect(place, score);
            most[0] = s.most[row];
            most[1] = s.most[row + 1];
#pragma unroll
            for (int k = 0; k < 4; ++k) above[k] = fmaf(score[k], in.scale, -most[k % 2]);
            if (is_masked(step)) hide(place, step, above);
            grows = max(max(above[0], above[1]), max(above[2], above[3])) > SLACK;
        }
        if (EXTRA) {
            extra_score = collect_extra(place);
            extra_most = s.most[extra_row];
            extra_above = fmaf(extra_score, in.scale, -extra_most);
            if (is_masked(step)) hide_extra(place, step, extra_above);
            grows = grows || extra_above > SLACK;
        }
        if (__any_sync(ALL_LANES, grows)) {
            if (MAIN) raise(place, i, score, most, above);
            if (EXTRA) raise_extra(place, i, extra_score, extra_most, extra_above);
        }
        if (MAIN) keep_weights(place, i, above);
        if (EXTRA) keep_extra_weights(place, i, extra_above);
    }

    // Adds what the other quarters found.
    __device__ void collect(const Place& place, float (&score)[4]) const {
#pragma unroll
        for (int sender = 0; sender < QUARTERS - 1; ++sender) {
            const float4 part = s.scores[place.group][place.quarter][sender][place.lane];
            score[0] += part.x;
            score[1] += part.y;
            score[2] += part.z;
            score[3] += part.w;
        }
    }
    __device__ float collect_extra(const Place& place) const {
        const u32 key = place.lane % STEP, half = place.lane / STEP, row = place.warp;
        const u32 fragment = exchanged(key % 8 * 4 + row / 2), number = row % 2 + key / 8 * 2;
        const float* const first = (const float*)&s.extra_scores[half][fragment] + number;
        float sum = 0;
#pragma unroll
        for (int sender = 0; sender < WARPS; sender += 2) sum += first[sender * 4 * WARP];
        return sum + __shfl_xor_sync(ALL_LANES, sum, STEP);
    }

    __device__ void hide(const Place& place, int step, float (&above)[4]) const {
        const u32 row = 8 * place.warp + place.lane % 4 * 2, g = place.lane / 4;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const u32 seen = seen_by(row + k, step) >> g;
            if (!(seen & 1)) above[k] = NO_SCORE;
            if (!(seen >> 8 & 1)) above[k + 2] = NO_SCORE;
        }
    }
    __device__ void hide_extra(const Place& place, int step, float& above) const {
        const u32 seen = seen_by(FIRST_EXTRA + place.warp, step);
        if (!(seen >> place.lane % STEP & 1)) above = NO_SCORE;
    }

    // New maxima for rows whose scores have grown far above the old ones; what has been summed up
    // counts the less.
    __device__ void raise(const Place& place, u32 i, const float (&score)[4], float (&most)[2],
                          float (&above)[4]) {
        const u32 row = 8 * place.warp + place.lane % 4 * 2;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float best =
                max(seen_score(score[k], above[k]), seen_score(score[k + 2], above[k + 2]));
#pragma unroll
            for (int by = 4; by < WARP; by *= 2)
                best = max(best, __shfl_xor_sync(ALL_LANES, best, by));
            const float factor = factor_for(most[k], best);
            if (place.lane / 4 % 2 == k) sum *= factor;
            above[k] = above_of(score[k], above[k], most[k]);
            above[k + 2] = above_of(score[k + 2], above[k + 2], most[k]);
            if (place.lane < 4) {
                s.most[row + k] = most[k];
                s.rescale[row + k] = factor;
            }
        }
        if (place.lane == 0) s.rescaled[place.warp] = i;
    }
    __device__ void raise_extra(const Place& place, u32 i, float score, float most, float& above) {
        const u32 row = MAIN_ROWS + place.warp;
        float best = seen_score(score, above);
#pragma unroll
        for (int by = STEP / 2; by > 0; by /= 2)
            best = max(best, __shfl_xor_sync(ALL_LANES, best, by));
        const float factor = factor_for(most, best);
        above = above_of(score, above, most);
        if (place.lane < STEP) s.extra_sum[place.warp][place.lane] *= factor;
        if (place.lane == 0) {
            s.most[row] = most;
            s.rescale[row] = factor;
            s.rescaled[WARPS + place.warp] = i;
        }
    }
    __device__ float seen_score(float score, float above) const {
        return above == NO_SCORE ? NO_SCORE : score * in.scale;
    }
    __device__ float above_of(float score, float above, float most) const {
        return above == NO_SCORE ? NO_SCORE : fmaf(score, in.scale, -most);
    }
    __device__ static float factor_for(float& most, float best) {
        if (!(best > most + SLACK)) return 1.0f;
        const float factor = exp2_fast(most - best);
        most = best;
        return factor;
    }

    __device__ void keep_weights(const Place& place, u32 i, const float (&above)[4]) {
        const u32 pair[2] = {bf16_pair(exp2_fast(above[0]), exp2_fast(above[1])),
                             bf16_pair(exp2_fast(above[2]), exp2_fast(above[3]))};
        const u32 at = weight_place(i, 8 * place.warp + place.lane % 8, place.lane / 8 % 2);
        store_matrices_transposed(shared_address(s.ring + at), pair[0], pair[1]);
        // Lanes with an even g keep the sum of row 2t, the others that of row 2t + 1: neighbours
        // exchange what they do not keep.
        const float low = bf16_low(pair[0]) + bf16_low(pair[1]);
        const float high = bf16_high(pair[0]) + bf16_high(pair[1]);
        const bool odd = place.lane / 4 % 2;
        sum += (odd ? high : low) + __shfl_xor_sync(ALL_LANES, odd ? low : high, 4);
    }
    __device__ void keep_extra_weights(const Place& place, u32 i, float above) {
        if (place.lane >= STEP) return;
        const u32 pair = bf16_pair(exp2_fast(above), 0.0f);
        s.extra_weights[i % 2][place.warp][place.lane] = (u16)pair;
        s.extra_sum[place.warp][place.lane] += bf16_low(pair);
    }
    // Byte of the ring where 8 of a main row's weights lie: of the step's own slot what the rope's
    // dimensions (or padding) have been; halves exchanged so that 8 rows lie in different banks.
    __device__ static u32 weight_place(u32 i, u32 row, u32 half) {
        const u32 chunk = row % 4 * 2 + (half ^ row / 4 % 2);  // as 16 rows on, 4 slot rows on
        return Ring::slot(i) * SLOT_BYTES + row / 4 * STRIDE + 2 * LATENT + 16 * chunk;
    }

    // The sums over all lanes of a row: [TILE_ROWS] in shared memory, which the scores have left.
    __device__ float2* gather_norms(const Place& place) {
        __syncthreads();
        float2* const norm = (float2*)s.scores;
        if (MAIN) {
            sum += __shfl_xor_sync(ALL_LANES, sum, 8);
            sum += __shfl_xor_sync(ALL_LANES, sum, 16);
            const u32 row = 8 * place.warp + place.lane % 4 * 2 + place.lane / 4 % 2;
            if (place.lane < 8) norm[row] = {s.most[row], sum};
        }
        if (EXTRA) {
            const u32 row = place.warp;
            float sum_of_row = s.extra_sum[row][place.lane % STEP];
#pragma unroll
            for (int by = 1; by < STEP; by *= 2)
                sum_of_row += __shfl_xor_sync(ALL_LANES, sum_of_row, by);
            if (place.lane == 0) norm[FIRST_EXTRA + row] = {s.most[MAIN_ROWS + row], sum_of_row};
        }
        __syncthreads();
        return norm;
    }
};
