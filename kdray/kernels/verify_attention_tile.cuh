// One piece of a tile in bf16 on tensor cores: up to 64 packed rows ("main") and up to 8 more
// ("extra"), which cost their products alone: the fragments of keys and values are those of the
// main rows. A tile has either or both.
//
// Warp (group, quarter): main rows 32 group .. + 31; of the latent dimensions a quarter, as k of
// the scores and as columns of the result; of the rope's, every fourth 16. Queries and results stay
// in registers; extra queries, for which there are none, in shared memory. Of every step, scores
// over a quarter of the dimensions go to the warp that owns the row, which sums them in a fixed
// order, weighs and posts the weights in bf16 for its group.
//
// A turn multiplies out the scores of step i, then the values of step i - 1, then weighs step i: a
// warp waits for what others post only after work of its own. The groups wait for each other only
// for keys, and the second for the extra rows' weights, so that one of them may weigh while the
// other multiplies.
#pragma once

#include "verify_attention_products.cuh"

template <bool MAIN, bool EXTRA>
struct PieceWork : Products<MAIN, EXTRA> {
    using Base = Products<MAIN, EXTRA>;
    using Base::FIRST_EXTRA, Base::s, Base::in, Base::at, Base::piece, Base::request,
        Base::value, Base::extra_value;
    using Base::Base;

    __device__ Ring ring() const {
        return {shared_address(s.ring),
                shared_address(s.barriers.landed),
                in.cache,
                same_in_warp((u32)in.cache_row_bytes),
                (const int*)same_in_warp((u64)(in.batch.page_table +
                                               (i64)request().index * in.batch.pages)),
                in.batch.page_shift,
                same_in_warp((1u << in.batch.page_shift) - 1),
                same_in_warp(piece().tile.keys),
                same_in_warp(piece().begin)};
    }

    __device__ void run() {
        const Ring keys = ring();
        const u32 steps = same_in_warp(piece().end) - keys.begin;
        // From here on not all of a step's positions are seen by all.
        const int masked = same_in_warp(request().cached) / STEP - keys.begin;
        int page = keys.page_of(at.warp, at.lane(), 0);
        if (steps >= SLOTS)
            keys.template bring<SLOTS>(at.warp, at.lane(), 0, page);
        else
            bring_few(keys, steps);
        page = keys.page_of(at.warp, at.lane(), SLOTS);
        Base::load_query();
#pragma unroll 1
        for (u32 i = 0; i <= steps; ++i) turn(keys, i, steps, (int)i >= masked, page);
    }
    __device__ void bring_few(const Ring& keys, u32 steps) const {
#pragma unroll 1
        for (u32 i = 0; i < steps; ++i)
            keys.template bring<1>(at.warp, at.lane(), i, keys.page_of(at.warp, at.lane(), i));
    }

    // Turn i multiplies out the scores of the piece's step i and the values of the one before; the
    // first turn has no values, the last no scores. page: of the key that is brought next.
    __device__ void turn(const Ring& keys, u32 i, u32 steps, bool masked, int& page) {
        const SharedAddress scored = shared_address(s.barriers.scored) + 8 * at.group;
        const bool scores_now = i < steps, values_now = i > 0;
        float scores[QUARTERS][4] = {}, extra[4] = {};
        if (scores_now) {
            keys.wait(i);
            Base::add_scores(scores, extra, keys.slot_at(i));
        }
        if (values_now) {
            barrier_wait(weighed(i - 1, at.group), (i - 1) / 2 % 2);
            if (EXTRA && at.group != 0) barrier_wait(weighed(i - 1, 0), (i - 1) / 2 % 2);
        }
        if (scores_now) Base::post(scores, extra);
        if (values_now) {
            if (i >= 2) bring_next(keys, i, steps, page);
            Base::rescale(i - 1);
            const typename Base::Weights weights = Base::load_weights(i - 1);
            // What the group has posted for step i - 1 has been read: it may post for step i.
            if (scores_now) arrive(scored);
            Base::add_values(weights, keys.slot_at(i - 1));
            arrive(freed(i - 1));
        } else {
            arrive(scored);
        }
        if (scores_now) {
            barrier_wait(scored, i % 2);
            Base::weigh(scores[0], i, masked);
            arrive(weighed(i, at.group));
        }
    }
    // Step i + 2, where step i - 2 was. (All warps have its keys behind them, and its weights.)
    __device__ void bring_next(const Ring& keys, u32 i, u32 steps, int& page) const {
        barrier_wait(freed(i - 2), i / 2 % 2 ^ 1);
        if (i + 2 >= steps) return;
        keys.template bring<1>(at.warp, at.lane(), i + 2, page);
        page = keys.page_of(at.warp, at.lane(), i + 3);
    }
    __device__ SharedAddress weighed(u32 i, u32 group) const {
        return shared_address(s.barriers.weighed) + 8 * (i % 2 * GROUPS + group);
    }
    __device__ SharedAddress freed(u32 i) const {
        return shared_address(s.barriers.freed) + 8 * (i % 2);
    }
    __device__ void arrive(SharedAddress barrier) const {
        __syncwarp();
        if (at.lane() == 0) barrier_arrive(barrier);
    }

    // ---- results

    __device__ void finish() {
        const float2* const norm = Base::gather_norms();
        if (piece().whole())
            write_result(norm);
        else
            post_part(norm);
        __syncthreads();  // the next piece's scores come where the norms are
    }
    __device__ void write_result(const float2* norm) const {
        u16* const out = in.out + (i64)piece().packed * LATENT;
        if constexpr (MAIN)
            for_each_pair([&](int row, int dim, float a, float b) {
                const float by = 1.0f / norm[row].y;
                *(u32*)(out + row * LATENT + dim) = bf16_pair(a * by, b * by);
            });
        if constexpr (EXTRA)
            for_each_extra([&](int row, int dim, float a) {
                out[row * LATENT + dim] = (u16)bf16_pair(a * (1.0f / norm[row].y), 0.0f);
            });
    }
    __device__ void post_part(const float2* norm) const {
        const i64 first = (i64)piece().slot_of(piece().number()) * TILE_ROWS;
        float* const out = in.work.value + first * LATENT;
        if constexpr (MAIN)
            for_each_pair([&](int row, int dim, float a, float b) {
                *(float2*)(out + row * LATENT + dim) = {a, b};
            });
        if constexpr (EXTRA)
            for_each_extra([&](int row, int dim, float a) { out[row * LATENT + dim] = a; });
        for (int row = threadIdx.x; row < piece().tile.rows; row += THREADS)
            in.work.norm[first + row] = norm[row];
        announce(in.work, piece());
    }

    template <class Take>
    __device__ void for_each_pair(Take take) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 row = 32 * (at.warp_again() / QUARTERS) + 8 * i + at.lane() / 4;
            if (row >= piece().tile.rows) continue;
#pragma unroll
            for (int n = 0; n < 2 * LATENT_STEPS; ++n) {
                const u32 dim = 16 * at.latent_step(n / 2) + n % 2 * 8 + at.lane() % 4 * 2;
                take(row, dim, value[i / 2][n][i % 2 * 2], value[i / 2][n][i % 2 * 2 + 1]);
            }
        }
    }
    template <class Take>
    __device__ void for_each_extra(Take take) const {
        if (!PAIRED && at.group != 0) return;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const u32 row = FIRST_EXTRA + at.lane() % 4 * 2 + c % 2;
            if (row >= piece().tile.rows) continue;
#pragma unroll
            for (int u = 0; u < EXTRA_STEPS; ++u) {
                const u32 step = at.latent_step(PAIRED ? 2 * u : u);
                take(row, 16 * step + at.lane() / 4 + c / 2 * 8, extra_value[u][c]);
            }
        }
    }
};

// By one thread, before a barrier: the barriers count from nothing for a new piece.
__device__ __forceinline__ void open_barriers(Barriers& barriers, bool first) {
    constexpr int ALL = sizeof(Barriers) / 8, FREED = ALL - 2;
#pragma unroll
    for (int i = 0; i < ALL; ++i) {
        const SharedAddress barrier = shared_address((u64*)&barriers + i);
        if (!first) barrier_close(barrier);
        barrier_init(barrier, i < SLOTS || i >= FREED ? WARPS : WARPS / GROUPS);
    }
    order_before_copies();
}

template <bool MAIN, bool EXTRA>
__device__ __forceinline__ void attend(Shared& s, const Attention& in) {
    if (LAG > 0 && warp_id() >= WARPS / 2) pause(LAG);
    PieceWork<MAIN, EXTRA> work(s, in);
    work.run();
    work.finish();
}
