// The products of one piece, and the registers they live in: scores of a step's keys over a warp's
// dimensions, and values by weights. Scores are keys by rows (M by N), results are rows by
// dimensions for main rows and dimensions by rows for extra ones, so that one matrix load serves
// both.
#pragma once

#include "verify_attention_weigh.cuh"

template <bool MAIN, bool EXTRA>
struct Products : RowWeights<MAIN, EXTRA> {
    using Rows = RowWeights<MAIN, EXTRA>;
    using Rows::FIRST_EXTRA, Rows::s, Rows::in, Rows::at, Rows::piece, Rows::request,
        Rows::owns_extra;

    float value[2][2 * LATENT_STEPS][4];
    // B fragments of 8 rows each, of the group's eight (quarter + j) % 4: the warp's own are first.
    u32 query[QUARTERS][QUERY_STEPS][2];
    float extra_value[EXTRA_STEPS][4];

    __device__ Products(Shared& shared, const Attention& attention) : Rows(shared, attention) {
#pragma unroll
        for (int i = 0; i < 2 * LATENT_STEPS * 8; ++i) (&value[0][0][0])[i] = 0;
#pragma unroll
        for (int i = 0; i < EXTRA_STEPS * 4; ++i) (&extra_value[0][0])[i] = 0;
    }

    // ---- queries

    __device__ u32 eighth(int j) const { return (at.quarter + j) % QUARTERS; }

    __device__ const unsigned char* query_row(int of_tile) const {
        const int p = piece().tile.first + of_tile, heads = in.batch.heads;
        const i64 row = request().first_row + p / heads;
        return in.query + row * in.query_row_bytes + p % heads * in.query_head_bytes;
    }
    // Dimensions 2t, 2t + 1 of what is met as the n-th step, and 8 on; 0 for a row that is not
    // there.
    __device__ uint2 query_pair(const unsigned char* row, bool there, int n) const {
        if (!there || !at.has_query(n)) return {0, 0};
        const unsigned char* const from = row + at.query_step(n) * 32 + at.lane() % 4 * 4;
        return {*(const u32*)from, *(const u32*)(from + 16)};
    }

    __device__ void load_query() {
        if (MAIN) {
#pragma unroll
            for (int j = 0; j < QUARTERS; ++j) {
                const u32 row = 32 * at.group + 8 * eighth(j) + at.lane() / 4;
                const bool there = row < piece().tile.rows;
                const unsigned char* const from = query_row(there ? row : 0);
#pragma unroll
                for (int n = 0; n < QUERY_STEPS; ++n) {
                    const uint2 pair = query_pair(from, there, n);
                    query[j][n][0] = pair.x;
                    query[j][n][1] = pair.y;
                }
            }
        }
        if (owns_extra()) {
            const u32 row = FIRST_EXTRA + at.lane() / 4;
            const bool there = row < piece().tile.rows;
            const unsigned char* const from = query_row(there ? row : 0);
#pragma unroll
            for (int n = 0; n < QUERY_STEPS; ++n)  // read by this lane alone
                s.extra_query[at.quarter][n][at.lane()] = query_pair(from, there, n);
        }
    }

    // ---- scores over this warp's dimensions; extra rows' by the first group

    __device__ void load_keys(u32 (&key)[4], SharedAddress slot, int n) const {
        load_matrices(key, at.in_slot() + (slot + 32 * at.query_step(n)));
    }
    // The next step's keys are asked for before the products of the present one.
    __device__ void add_scores(float (&scores)[QUARTERS][4], float (&extra)[4],
                               SharedAddress slot) const {
        if (!MAIN && !owns_extra()) return;
        u32 key[2][4];
        load_keys(key[0], slot, 0);
#pragma unroll
        for (int n = 0; n < QUERY_STEPS; ++n) {
            if (n + 1 < QUERY_STEPS) load_keys(key[(n + 1) % 2], slot, n + 1);
            const u32(&k)[4] = key[n % 2];
            if (MAIN) {
#pragma unroll
                for (int j = 0; j < QUARTERS; ++j)
                    multiply_add(scores[j], k[0], k[1], k[2], k[3], query[j][n][0],
                                 query[j][n][1]);
            }
            if (owns_extra()) {
                const uint2 q = s.extra_query[at.quarter][n][at.lane()];
                multiply_add(extra, k[0], k[1], k[2], k[3], q.x, q.y);
            }
        }
    }

    // To the warps that own the rows; what stays here is scores[0].
    __device__ void post(const float (&scores)[QUARTERS][4], const float (&extra)[4]) {
        const u32 lane = at.lane(), warp = at.warp_again();
        if (MAIN) {
#pragma unroll
            for (int j = 1; j < QUARTERS; ++j) {
                const float(&x)[4] = scores[j];
                s.scores[warp / QUARTERS][(warp + j) % QUARTERS][j - 1][lane] = {x[0], x[1], x[2],
                                                                                 x[3]};
            }
        }
        if (owns_extra())
            s.extra_scores[at.quarter][exchanged(lane)] = {extra[0], extra[1], extra[2], extra[3]};
    }

    // ---- values

    struct Weights {
        u32 main[2][4];
        u32 extra[2];
    };

    __device__ Weights load_weights(u32 i) const {
        Weights w;
        if (MAIN) {
            const SharedAddress from = shared_address(s.weights) + 32 * at.group * 2 * STEP +
                                       weight_place(at.lane() % 16, at.lane() / 16);
            load_matrices(w.main[0], from);
            load_matrices(w.main[1], from + 16 * 2 * STEP);
        }
        if (EXTRA) {
            const u32 row = at.lane() / 4;
            const unsigned char* const keys =
                s.ring + Ring::slot(i) * SLOT_BYTES + at.lane() % 4 * 4;
            w.extra[0] = *(const u32*)(keys + extra_weight_place(row, 0));
            w.extra[1] = *(const u32*)(keys + extra_weight_place(row, 1));
        }
        return w;
    }

    // What has been added is made relative to the maxima of step i where that raised any.
    __device__ void rescale(u32 i) {
        const u32 main = QUARTERS * at.group, extra = WARPS + i % 2 * QUARTERS;
        const u32 first = !EXTRA || (MAIN && at.lane() / QUARTERS % 2 == 0) ? main : extra;
        if (!__any_sync(ALL_LANES, s.rescaled[first + at.lane() % QUARTERS] == i)) return;
        const u32 lane = fresh_thread() % WARP;  // no register is kept for this
        if (MAIN) {
#pragma unroll
            for (int k = 0; k < QUARTERS; ++k) {
                const float by =
                    s.rescaled[main + k] == i ? s.rescale[8 * (main + k) + lane / 4] : 1;
#pragma unroll
                for (int n = 0; n < 2 * LATENT_STEPS; ++n) {
                    value[k / 2][n][k % 2 * 2] *= by;
                    value[k / 2][n][k % 2 * 2 + 1] *= by;
                }
            }
        }
        if (EXTRA) {
            const bool raised = s.rescaled[extra + lane % 4] == i;  // rows 2t and 2t + 1
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float by = raised ? s.extra_rescale[i % 2][lane % 4 * 2 + k] : 1;
#pragma unroll
                for (int u = 0; u < EXTRA_STEPS; ++u) {
                    extra_value[u][k] *= by;
                    extra_value[u][k + 2] *= by;
                }
            }
        }
    }

    __device__ void load_values(u32 (&keys)[4], SharedAddress slot, int v) const {
        load_matrices_transposed(keys, at.in_slot() + (slot + 32 * at.latent_step(v)));
    }
    __device__ void add_values(const Weights& w, SharedAddress slot) {
        u32 keys[2][4];
        constexpr int BY = !MAIN && PAIRED ? 2 : 1;  // extra rows alone: every other step's
        load_values(keys[0], slot, 0);
#pragma unroll
        for (int v = 0; v < LATENT_STEPS; v += BY) {
            if (v + BY < LATENT_STEPS) load_values(keys[(v / BY + 1) % 2], slot, v + BY);
            const u32(&k)[4] = keys[v / BY % 2];
            if (MAIN) {
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const u32(&p)[4] = w.main[m];
                    multiply_add(value[m][2 * v], p[0], p[1], p[2], p[3], k[0], k[1]);
                    multiply_add(value[m][2 * v + 1], p[0], p[1], p[2], p[3], k[2], k[3]);
                }
            }
            if (EXTRA && at.takes_extra(v))
                multiply_add(extra_value[PAIRED ? v / 2 : v], k[0], k[2], k[1], k[3], w.extra[0],
                             w.extra[1]);
        }
    }
};
