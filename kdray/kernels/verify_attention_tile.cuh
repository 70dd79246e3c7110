// One piece of a tile in bf16 on tensor cores: up to 64 packed rows ("main") and up to 8 more
// ("extra"), which cost their products alone: the fragments of keys and values are those of the main
// rows. A tile has either or both.
//
// Warp (group, quarter): main rows 32 group .. + 31; of the latent dimensions a quarter, as k of
// the scores and as columns of the result; of the rope's, every fourth 16. Queries and results stay
// in registers; extra queries, for which there are none, in shared memory. Of every step, scores
// over a quarter of the dimensions go to the warp that owns the row (8 main rows and 1 extra row a
// warp), which sums them in a fixed order, weighs and posts the weights in bf16 for all.
//
// Scores are keys by rows (M by N), results are rows by dimensions for main rows and dimensions by
// rows for extra ones, so that one matrix load serves both.
//
// A turn multiplies out the scores of step i, then the values of step i - 1, then weighs step i: a
// warp waits for what others post only after work of its own.
#pragma once

#include "verify_attention_weigh.cuh"

template <bool MAIN, bool EXTRA>
struct PieceWork : RowWeights<MAIN, EXTRA> {
    using Rows = RowWeights<MAIN, EXTRA>;
    using Rows::FIRST_EXTRA, Rows::s, Rows::in, Rows::piece, Rows::request;

    float value[2][2 * LATENT_STEPS][4];
    u32 query[4][QUERY_STEPS][2];  // B fragments of 8 rows each
    float extra_value[EXTRA_STEPS][4];

    __device__ PieceWork(Shared& shared, const Attention& attention) : Rows(shared, attention) {
#pragma unroll
        for (int i = 0; i < 2 * LATENT_STEPS * 8; ++i) (&value[0][0][0])[i] = 0;
#pragma unroll
        for (int i = 0; i < EXTRA_STEPS * 4; ++i) (&extra_value[0][0])[i] = 0;
    }

    // ---- queries

    __device__ const unsigned char* query_row(int of_tile) const {
        const int p = piece().tile.first + of_tile, heads = in.batch.heads;
        const i64 row = request().first_row + p / heads;
        return in.query + row * in.query_row_bytes + p % heads * in.query_head_bytes;
    }
    // Dimensions 2t, 2t + 1 of a step of 16, and 8 on.
    __device__ static uint2 query_pair(const Place& place, const unsigned char* row, bool there,
                                       int step) {
        if (!there) return {0, 0};
        const unsigned char* const at = row + step * 32 + place.lane % 4 * 4;
        return {*(const u32*)at, *(const u32*)(at + 16)};
    }

    __device__ void load_query(const Place& place) {
        if (MAIN) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 row = 32 * place.group + 8 * i + place.lane / 4;
                const bool there = row < piece().tile.rows;
                const unsigned char* const at = query_row(there ? row : 0);
#pragma unroll
                for (int v = 0; v < LATENT_STEPS; ++v)
                    keep_query(i, v, query_pair(place, at, there, place.latent_step(v)));
#pragma unroll
                for (int j = 0; j < ROPE_TURNS; ++j) {
                    const bool mine = there && place.has_rope(j);
                    keep_query(i, LATENT_STEPS + j,
                               query_pair(place, at, mine, LATENT / 16 + place.rope_step(j)));
                }
            }
        }
        if (EXTRA) {
            const u32 row = FIRST_EXTRA + place.lane / 4;
            const bool there = row < piece().tile.rows;
            const unsigned char* const at = query_row(there ? row : 0);
#pragma unroll
            for (int v = 0; v < LATENT_STEPS; ++v) {
                if (PAIRED && v % 2 != 0) continue;
                s.extra_query[place.warp][PAIRED ? v / 2 : v][place.lane] =
                    query_pair(place, at, there, place.latent_step(v));
            }
#pragma unroll
            for (int j = 0; j < ROPE_TURNS; ++j) {
                if (!place.takes_extra_rope() || !place.has_rope(j)) continue;
                s.extra_rope_query[place.quarter][j][place.lane] =
                    query_pair(place, at, there, LATENT / 16 + place.rope_step(j));
            }
        }
    }
    __device__ void keep_query(int eighth, int step, uint2 pair) {
        query[eighth][step][0] = pair.x;
        query[eighth][step][1] = pair.y;
    }

    // ---- scores over this warp's dimensions

    __device__ void score_latent(const Place& place, float (&scores)[4][4], float (&extra)[4],
                                 SharedAddress slot) const {
#pragma unroll
        for (int v = 0; v < LATENT_STEPS; ++v) {
            u32 key[4];
            load_matrices(key, place.latent_at(slot, v));
            if (MAIN) score_main(scores, key, v);
            if (EXTRA && place.takes_extra(v)) {
                const uint2 q = s.extra_query[place.warp][PAIRED ? v / 2 : v][place.lane];
                multiply_add(extra, key[0], key[1], key[2], key[3], q.x, q.y);
            }
        }
    }
    __device__ void score_rope(const Place& place, float (&scores)[4][4], float (&extra)[4],
                               SharedAddress slot) const {
#pragma unroll
        for (int j = 0; j < ROPE_TURNS; ++j) {
            if (!place.has_rope(j) || !(MAIN || place.takes_extra_rope())) continue;
            u32 key[4];
            load_matrices(key, place.rope_at(slot, j));
            if (MAIN) score_main(scores, key, LATENT_STEPS + j);
            if (EXTRA && place.takes_extra_rope()) {
                const uint2 q = s.extra_rope_query[place.quarter][j][place.lane];
                multiply_add(extra, key[0], key[1], key[2], key[3], q.x, q.y);
            }
        }
    }
    __device__ void score_main(float (&scores)[4][4], const u32 (&key)[4], int step) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32(&q)[2] = query[i][step];
            multiply_add(scores[i], key[0], key[1], key[2], key[3], q[0], q[1]);
        }
    }

    // Scores to the warps that own the rows; own: those that stay here.
    __device__ void post(const Place& place, float (&own)[4], const float (&scores)[4][4],
                         const float (&extra)[4]) {
        if (MAIN) {
            float4* const to = &s.scores[place.group][0][0][place.lane];
            if (place.quarter < 2)
                place.quarter == 0 ? post_main<0>(to, own, scores) : post_main<1>(to, own, scores);
            else
                place.quarter == 2 ? post_main<2>(to, own, scores) : post_main<3>(to, own, scores);
        }
        if (EXTRA) {
            float4* const to = s.extra_scores[place.warp] + Rows::exchanged(place.lane);
            *to = {extra[0], extra[1], extra[2], extra[3]};
        }
    }
    template <int QUARTER>
    __device__ static void post_main(float4* to, float (&own)[4], const float (&scores)[4][4]) {
#pragma unroll
        for (int owner = 0; owner < QUARTERS; ++owner) {
            const float(&part)[4] = scores[owner];
            const int sender = QUARTER - (QUARTER > owner);
            if (owner != QUARTER)
                to[(owner * (QUARTERS - 1) + sender) * WARP] = {part[0], part[1], part[2], part[3]};
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = scores[QUARTER][i];
    }
    // ---- values

    struct Weights {
        u32 main[2][4];
        u32 extra[2];
    };

    __device__ Weights load_weights(const Place& place, u32 i) const {
        Weights w;
        if (MAIN) {
            const u32 row = 32 * place.group + place.lane % 16;
            const SharedAddress at =
                shared_address(s.ring) + Rows::weight_place(i, row, place.lane / 16);
            load_matrices(w.main[0], at);
            load_matrices(w.main[1], at + 16 / 4 * STRIDE);
        }
        if (EXTRA) {
            const u32* const row = (const u32*)s.extra_weights[i % 2][place.lane / 4];
            w.extra[0] = row[place.lane % 4];
            w.extra[1] = row[4 + place.lane % 4];
        }
        return w;
    }

    // What has been added is made relative to the maxima of step i where that raised any.
    __device__ void rescale(const Place& place, u32 i) {
        if (!__any_sync(ALL_LANES, s.rescaled[place.lane % (2 * WARPS)] == i)) return;
        if (MAIN) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const u32 owner = 4 * place.group + k;
                const float by = s.rescaled[owner] == i ? s.rescale[8 * owner + place.lane / 4] : 1;
#pragma unroll
                for (int n = 0; n < 2 * LATENT_STEPS; ++n) {
                    value[k / 2][n][k % 2 * 2] *= by;
                    value[k / 2][n][k % 2 * 2 + 1] *= by;
                }
            }
        }
        if (EXTRA) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const u32 row = place.lane % 4 * 2 + k;
                const float by = s.rescaled[WARPS + row] == i ? s.rescale[MAIN_ROWS + row] : 1;
#pragma unroll
                for (int u = 0; u < EXTRA_STEPS; ++u) {
                    extra_value[u][k] *= by;
                    extra_value[u][k + 2] *= by;
                }
            }
        }
    }

    __device__ void add_values(const Place& place, const Weights& w, SharedAddress slot) {
#pragma unroll
        for (int v = 0; v < LATENT_STEPS; ++v) {
            if (!MAIN && !place.takes_extra(v)) continue;
            u32 keys[4];
            load_matrices_transposed(keys, place.latent_at(slot, v));
            if (MAIN) {
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const u32(&p)[4] = w.main[m];
                    multiply_add(value[m][2 * v], p[0], p[1], p[2], p[3], keys[0], keys[1]);
                    multiply_add(value[m][2 * v + 1], p[0], p[1], p[2], p[3], keys[2], keys[3]);
                }
            }
            if (EXTRA && place.takes_extra(v))
                multiply_add(extra_value[PAIRED ? v / 2 : v], keys[0], keys[2], keys[1], keys[3],
                             w.extra[0], w.extra[1]);
        }
    }

    // ---- the piece

    __device__ Keys keys() const {
        return {in.cache, (u32)in.cache_row_bytes,
                in.batch.page_table + (i64)request().index * in.batch.pages, in.batch.page_shift,
                piece().tile.keys};
    }

    __device__ int step(u32 i) const { return piece().begin + (int)i; }

    // Turn i multiplies out the scores of the piece's step i and the values of the one before; the
    // first turn has no values, the last no scores. (What is not there is made 0: a register that
    // is set in some turns only would be taken all the time.) Says whether there is another turn.
    __device__ bool turn(u32 i) {
        const Ring ring = {shared_address(s.ring), shared_address(s.barriers)};
        const SharedAddress scored = shared_address(&s.barriers[SLOTS]);
        const SharedAddress weighed = shared_address(&s.barriers[SLOTS + 1]);
        const bool scores_now = step(i) < piece().end, values_now = i > 0;
        float scores[4][4] = {}, extra[4] = {}, own[4] = {};
        if (scores_now) {
            ring.wait(i);
            score_latent(Place(), scores, extra, ring.slot_at(i));
            score_rope(Place(), scores, extra, ring.slot_at(i));
        }
        if (values_now) barrier_wait(weighed, (i - 1) % 2);
        if (scores_now) post(Place(), own, scores, extra);
        if (values_now) rescale(Place(), i - 1);
        if (scores_now) arrive(scored, fresh_thread());
        // All warps have left step i - 2 behind when they weighed step i - 1: its slot is free.
        if (i >= 2 && step(i + 2) < piece().end)
            ring.bring(keys(), fresh_thread(), step(i + 2), i + 2);
        if (values_now) {
            const Weights weights = load_weights(Place(), i - 1);
            add_values(Place(), weights, ring.slot_at(i - 1));
        }
        if (scores_now) {
            barrier_wait(scored, i % 2);
            Rows::weigh(Place(), own, step(i), i);
            arrive(weighed, fresh_thread());
        }
        return __any_sync(ALL_LANES, step(i) < piece().end);
    }

    __device__ void run() {
        const Ring ring = {shared_address(s.ring), shared_address(s.barriers)};
        const int steps = piece().end - piece().begin;
#pragma unroll 1
        for (int i = 0; i < min(SLOTS, steps); ++i)
            ring.bring(keys(), fresh_thread(), piece().begin + i, i);
        load_query(Place());
#pragma unroll 1
        for (u32 i = 0; turn(i); ++i) {}
    }

    __device__ static void arrive(SharedAddress barrier, u32 thread) {
        __syncwarp();
        if (thread % WARP == 0) barrier_arrive(barrier);
    }

    // ---- results

    __device__ void finish() {
        const Place place;
        const float2* const norm = Rows::gather_norms(place);
        if (piece().whole())
            write_result(place, norm);
        else
            post_part(place, norm);
        __syncthreads();  // the next piece's scores come where the norms are
    }
    __device__ void write_result(const Place& place, const float2* norm) const {
        u16* const out = in.out + (i64)piece().packed * LATENT;
        if constexpr (MAIN)
            for_each_pair(place, [&](int row, int dim, float a, float b) {
                const float by = 1.0f / norm[row].y;
                *(u32*)(out + row * LATENT + dim) = bf16_pair(a * by, b * by);
            });
        if constexpr (EXTRA)
            for_each_extra(place, [&](int row, int dim, float a) {
                out[row * LATENT + dim] = (u16)bf16_pair(a * (1.0f / norm[row].y), 0.0f);
            });
    }
    __device__ void post_part(const Place& place, const float2* norm) const {
        const i64 first = (i64)piece().slot_of(piece().number()) * TILE_ROWS;
        float* const out = in.work.value + first * LATENT;
        if constexpr (MAIN)
            for_each_pair(place, [&](int row, int dim, float a, float b) {
                *(float2*)(out + row * LATENT + dim) = {a, b};
            });
        if constexpr (EXTRA)
            for_each_extra(place, [&](int row, int dim, float a) { out[row * LATENT + dim] = a; });
        for (int row = threadIdx.x; row < piece().tile.rows; row += THREADS)
            in.work.norm[first + row] = norm[row];
        announce(in.work, piece());
    }

    template <class Take>
    __device__ void for_each_pair(const Place& place, Take take) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 row = 32 * place.group + 8 * i + place.lane / 4;
            if (row >= piece().tile.rows) continue;
#pragma unroll
            for (int n = 0; n < 2 * LATENT_STEPS; ++n) {
                const u32 dim = 16 * place.latent_step(n / 2) + n % 2 * 8 + place.lane % 4 * 2;
                take(row, dim, value[i / 2][n][i % 2 * 2], value[i / 2][n][i % 2 * 2 + 1]);
            }
        }
    }
    template <class Take>
    __device__ void for_each_extra(const Place& place, Take take) const {
        if (!PAIRED && place.group != 0) return;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const u32 row = FIRST_EXTRA + place.lane % 4 * 2 + c % 2;
            if (row >= piece().tile.rows) continue;
#pragma unroll
            for (int u = 0; u < EXTRA_STEPS; ++u) {
                const u32 step = place.latent_step(PAIRED ? 2 * u : u);
                take(row, 16 * step + place.lane / 4 + c / 2 * 8, extra_value[u][c]);
            }
        }
    }
};

// By one thread, before a barrier: the barriers count from nothing for a new piece.
__device__ __forceinline__ void open_barriers(Shared& s, bool first) {
#pragma unroll
    for (int i = 0; i < SLOTS + 2; ++i) {
        const SharedAddress barrier = shared_address(&s.barriers[i]);
        if (!first) barrier_close(barrier);
        barrier_init(barrier, i < SLOTS ? THREADS : WARPS);
    }
}

template <bool MAIN, bool EXTRA>
__device__ __forceinline__ void attend(Shared& s, const Attention& in) {
    if (LAG > 0 && warp_id() >= WARPS / 2) pause(LAG);
    PieceWork<MAIN, EXTRA> work(s, in);
    work.run();
    work.finish();
}
