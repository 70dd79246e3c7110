// One piece of a tile in bf16 on tensor cores: up to 64 packed rows as the M of its products
// ("main"), and up to 8 more as an N ("extra"), which costs their products alone: the fragments of
// keys and values are those of the main rows. A tile has either or both.
//
// Warp (group, quarter): main rows 32 group .. + 31; of the latent dimensions a quarter, as k of
// the scores and as columns of the result; of the rope's, every fourth 16. Queries and results stay
// in registers. Of every step, scores over a quarter of the dimensions go to the warp that owns the
// row (8 main rows and 1 extra row a warp), which sums them in a fixed order, weighs and posts the
// weights in bf16 for all.
//
// The scores of step i + 1 are multiplied out before the values of step i, and weighed in the
// middle of these, so that a warp waits for another's part only after half a step's own work.
#pragma once

#include "verify_attention_merge.cuh"
#include "verify_attention_ring.cuh"

constexpr int MAIN_ROWS = 64;
constexpr int EXTRA_ROWS = 8;
constexpr int TILE_ROWS = MAIN_ROWS + EXTRA_ROWS;
constexpr int GROUPS = 2;
constexpr int QUARTERS = 4;
constexpr int LATENT_STEPS = LATENT / 16 / QUARTERS;  // of 16 dimensions, a warp
constexpr int ROPE_STEPS = ROPE / 16;                 // all warps
constexpr int ROPE_TURNS = (ROPE_STEPS + QUARTERS - 1) / QUARTERS;
constexpr int QUERY_STEPS = LATENT_STEPS + ROPE_TURNS;
// Both groups meet every dimension; where these are an even number of steps a quarter, each takes
// the extra rows' products in every other step, else the first group takes all.
constexpr bool PAIRED = LATENT_STEPS % 2 == 0;
constexpr int EXTRA_STEPS = PAIRED ? LATENT_STEPS / 2 : LATENT_STEPS;
// Weights may exceed 1 by this many powers of two before they are made relative to a new maximum.
constexpr float SLACK = 8.0f;

// Tiles for it, and what a step costs in each kind: main rows with and without extra ones, and extra
// ones alone.
struct TensorShape {
    static constexpr int TALL_ROWS = TALL, WIDE_ROWS = MAIN_ROWS, SHORT_ROWS = EXTRA_ROWS;
    static constexpr int STEP = ::STEP;
    static constexpr int SETUP_STEPS = SETUP_COST;
    __device__ static int weight(int rows) {
        return rows > WIDE_ROWS ? TALL_COST : rows > SHORT_ROWS ? WIDE_COST : SHORT_COST;
    }
};
static_assert(LATENT % 64 == 0 && ROPE % 16 == 0, "dimensions in steps of 16, in four quarters");

struct alignas(128) Shared {
    unsigned char ring[SLOTS * SLOT_BYTES];
    uint2 extra_query[WARPS][EXTRA_STEPS][WARP];      // B fragments, each lane its own
    float4 scores[GROUPS][QUARTERS][QUARTERS - 1][WARP];  // [owner][sender]: C fragments
    float extra_scores[WARPS][STEP * EXTRA_ROWS];     // [sender]
    uint2 extra_rope_query[QUARTERS][ROPE_TURNS][WARP];
    u16 extra_weights[2][EXTRA_ROWS][STEP];  // bf16, by turns; those of main rows lie in the ring
    float extra_sum[WARPS][STEP];
    float most[TILE_ROWS];
    float rescale[TILE_ROWS];
    int rescaled[2][WARPS];  // main, extra: the last step in which the warp wrote rescale
    u64 barriers[SLOTS + 2];  // a step's keys have landed; its scores are posted; its weights are
    Deal deal;
    Piece waiting[2];
    int num_waiting;
};

// What it takes to attend.
struct Attention {
    u16* out;                    // [T, H, LATENT]
    Workspace work;
    const unsigned char* query;  // [T, H, LATENT + ROPE]
    i64 query_row_bytes;
    i64 query_head_bytes;
    const unsigned char* cache;  // [S, LATENT + ROPE]
    i64 cache_row_bytes;
    Batch batch;
    float scale;  // times log2 e
};

// A thread's place, and where a step of 16 dimensions lies among a row's chunks. The second group
// meets steps in pairs the other way round.
struct Place {
    u32 lane;
    u32 warp;
    u32 group;
    u32 quarter;

    __device__ explicit Place(u32 thread = fresh_thread())
        : lane(thread % WARP), warp(thread / WARP), group(warp / QUARTERS), quarter(warp % QUARTERS) {}
    __device__ u32 latent_step(int visit) const {
        return LATENT_STEPS * quarter + (PAIRED ? visit ^ group : visit);
    }
    __device__ u32 rope_step(int turn) const { return quarter + QUARTERS * turn; }
    __device__ bool has_rope(int turn) const {
        return ROPE_STEPS % QUARTERS == 0 || rope_step(turn) < ROPE_STEPS;
    }
    // Whether this warp takes the extra rows' part of what it meets in a visit or turn.
    __device__ bool takes_extra(int visit) const { return PAIRED ? visit % 2 == 0 : group == 0; }
    __device__ bool takes_extra_rope() const { return group == 0; }

    // Address of the lane's part of the four matrices of a step of 16 dimensions: keys 0 .. 7 and
    // 8 .. 15 of its first half, then of its second. As they are they make an A fragment of keys,
    // transposed two B fragments of values.
    __device__ SharedAddress matrices_at(SharedAddress slot, u32 chunk) const {
        const u32 key = lane % STEP;
        return slot + key * STRIDE + ((chunk + lane / STEP) ^ key % 8) * 16;
    }
    // From the first visit's chunk to another's. Where a quarter starts at a multiple of 128 bytes
    // only three bits of the place change within 128.
    static constexpr bool SIMPLE = LATENT_STEPS % 4 == 0;
    __device__ static SharedAddress moved(SharedAddress first, int visit) {
        return (first ^ visit % 4 * 32) + visit / 4 * 128;
    }
    __device__ SharedAddress latent_at(SharedAddress slot, int visit) const {
        if (SIMPLE) return moved(matrices_at(slot, 2 * latent_step(0)), visit);
        return matrices_at(slot, 2 * latent_step(visit));
    }
    __device__ SharedAddress rope_at(SharedAddress slot, int turn) const {
        return matrices_at(slot, LATENT / 8 + 2 * rope_step(turn));
    }
};

template <bool MAIN, bool EXTRA>
struct PieceWork {
    static constexpr int FIRST_EXTRA = MAIN ? MAIN_ROWS : 0;
    Shared& s;
    const Attention& in;
    float value[2][2 * LATENT_STEPS][4];
    u32 query[4][QUERY_STEPS][2];  // B fragments of 8 rows each
    float extra_value[EXTRA_STEPS][4];
    float sum[2];  // of the lane's weights of its two main rows

    __device__ PieceWork(Shared& shared, const Attention& attention)
        : s(shared), in(attention), sum{0, 0} {
        // Read by the warps that own the rows, after a barrier.
        if (threadIdx.x < TILE_ROWS) s.most[threadIdx.x] = NO_SCORE;
        if (threadIdx.x < WARPS * STEP) (&s.extra_sum[0][0])[threadIdx.x] = 0;
        if (threadIdx.x < 2 * WARPS) (&s.rescaled[0][0])[threadIdx.x] = -1;
#pragma unroll
        for (int i = 0; i < 2 * LATENT_STEPS * 8; ++i) (&value[0][0][0])[i] = 0;
#pragma unroll
        for (int i = 0; i < EXTRA_STEPS * 4; ++i) (&extra_value[0][0])[i] = 0;
    }

    __device__ const Request& request() const { return s.deal.request; }
    __device__ const Piece& piece() const { return s.deal.piece; }

    // ---- queries

    __device__ const unsigned char* query_row(int of_tile) const {
        const int p = piece().tile.first + of_tile, heads = in.batch.heads;
        const i64 row = request().first_row + p / heads;
        return in.query + row * in.query_row_bytes + p % heads * in.query_head_bytes;
    }
    // Dimensions 2t, 2t + 1 of a step of 16, and 8 on.
    __device__ static uint2 query_pair(const Place& place, const unsigned char* row, bool there, int step) {
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

    __device__ void score_latent(const Place& place, float (&scores)[4][4], float (&extra)[4], SharedAddress slot) const {
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

    // Word of extra_scores of an extra row's score: what lanes write at once, and what they read at
    // once, lies in different banks.
    __device__ static u32 extra_word(u32 sender, u32 row, u32 key) {
        const u32 in_pair = 16 * ((row ^ sender) & 1) + key + 8 * (row / 2);
        return row / 2 * 32 + in_pair % 32;
    }

    // Scores to the warps that own the rows; own: those that stay here.
    __device__ void post(const Place& place, float (&own)[4], const float (&scores)[4][4], const float (&extra)[4]) {
        if (MAIN) {
#pragma unroll
            for (int owner = 0; owner < QUARTERS; ++owner) {
                const float(&part)[4] = scores[owner];
                if (owner == 0 || owner == place.quarter) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) own[i] = part[i];
                }
                const u32 sender = place.quarter - (place.quarter > owner);
                if (owner != place.quarter)
                    s.scores[place.group][owner][sender][place.lane] = {part[0], part[1], part[2],
                                                                        part[3]};
            }
        }
        if (EXTRA) {
            const u32 w = place.warp, g = place.lane / 4, row = place.lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                s.extra_scores[w][extra_word(w, row + i % 2, g + i / 2 * 8)] = extra[i];
        }
    }

    // ---- weights of the rows this warp owns

    // Byte of the ring where 8 of a main row's weights lie: of the step's own slot what the rope's
    // dimensions (or padding) have been; halves exchanged so that 8 rows lie in different banks.
    __device__ static u32 weight_place(int count, u32 row, u32 half) {
        const u32 chunk = row % 4 * 2 + (half ^ row / 4 % 2);
        return Ring::slot(count) * SLOT_BYTES + row / 4 * STRIDE + 2 * LATENT + 16 * chunk;
    }

    // masked: some of the step's positions are not seen by all rows.
    __device__ void weigh(const Place& place, const float (&own)[4], int step, int count, bool masked) {
        if (MAIN) weigh_main(place, own, step, count, masked);
        if (EXTRA) weigh_extra(place, step, count, masked);
    }

    // Which of a step's positions a row of the tile sees; for one behind its last, that one.
    __device__ u32 seen_by(int row, int step) const {
        const int p = piece().tile.first + min(row, piece().tile.rows - 1);
        return seen_from(in.batch, request(), p, piece().tile.keys, step * STEP);
    }

    __device__ void weigh_main(const Place& place, const float (&own)[4], int step, int count, bool masked) {
        // Keys g and g + 8 of rows 2t and 2t + 1 of the warp's eight.
        float x[4] = {own[0], own[1], own[2], own[3]};
#pragma unroll
        for (int sender = 0; sender < QUARTERS - 1; ++sender) {
            const float4 part = s.scores[place.group][place.quarter][sender][place.lane];
            x[0] += part.x;
            x[1] += part.y;
            x[2] += part.z;
            x[3] += part.w;
        }
        const u32 g = place.lane / 4, rows = 8 * place.warp, row = rows + place.lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= in.scale;
        if (masked) {
            const u32 seen[2] = {seen_by(row, step) >> g, seen_by(row + 1, step) >> g};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(seen[i % 2] >> i / 2 * 8 & 1)) x[i] = NO_SCORE;
        }
        float most[2] = {s.most[row], s.most[row + 1]};
        float best[2] = {max(x[0], x[2]), max(x[1], x[3])};
        if (__any_sync(ALL_LANES, best[0] > most[0] + SLACK || best[1] > most[1] + SLACK)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int by = 4; by < WARP; by *= 2)
                    best[i] = max(best[i], __shfl_xor_sync(ALL_LANES, best[i], by));
                const float factor = raise(most[i], best[i]);
                sum[i] *= factor;
                if (g == 0) {
                    s.most[row + i] = most[i];
                    s.rescale[row + i] = factor;
                }
            }
            if (place.lane == 0) s.rescaled[0][place.warp] = count;
        }
        u32 pair[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            pair[half] = bf16_pair(weight_of(x[2 * half], most[0]),
                                   weight_of(x[2 * half + 1], most[1]));
            sum[0] += bf16_low(pair[half]);
            sum[1] += bf16_high(pair[half]);
        }
        const u32 at = weight_place(count, rows + place.lane % 8, place.lane / 8 % 2);
        store_matrices_transposed(shared_address(s.ring + at), pair[0], pair[1]);
    }

    __device__ void weigh_extra(const Place& place, int step, int count, bool masked) {
        const u32 row = place.warp, key = place.lane % 16, half = place.lane / 16;
        float x = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i += 2) {
            const int sender = i + half;
            x += s.extra_scores[sender][extra_word(sender, row, key)];
        }
        x += __shfl_xor_sync(ALL_LANES, x, 16);
        x *= in.scale;
        if (masked && !(seen_by(FIRST_EXTRA + row, step) >> key & 1)) x = NO_SCORE;
        float most = s.most[MAIN_ROWS + row], sum_before = s.extra_sum[row][key];
        if (__any_sync(ALL_LANES, x > most + SLACK)) {
            float best = x;
#pragma unroll
            for (int by = 8; by > 0; by /= 2)
                best = max(best, __shfl_xor_sync(ALL_LANES, best, by));
            const float factor = raise(most, best);
            sum_before *= factor;
            if (place.lane == 0) {
                s.most[MAIN_ROWS + row] = most;
                s.rescale[MAIN_ROWS + row] = factor;
                s.rescaled[1][place.warp] = count;
            }
        }
        const u32 pair = bf16_pair(weight_of(x, most), 0.0f);
        if (half == 0) {
            s.extra_weights[count % 2][row][key] = (u16)pair;
            s.extra_sum[row][key] = sum_before + bf16_low(pair);
        }
    }

    // A new maximum where scores have grown far above the old one; what old weights count by it.
    __device__ static float raise(float& most, float best) {
        if (!(best > most + SLACK)) return 1.0f;
        const float factor = exp2_fast(most - best);
        most = best;
        return factor;
    }
    __device__ static float weight_of(float x, float most) {
        return x == NO_SCORE ? 0.0f : exp2_fast(x - most);
    }

    // ---- values

    struct Weights {
        u32 main[2][4];
        u32 extra[2];
    };

    __device__ Weights load_weights(const Place& place, int i) const {
        Weights w;
        if (MAIN) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const u32 row = 32 * place.group + 16 * m + place.lane % 16;
                const u32 at = weight_place(i, row, place.lane / 16);
                load_matrices(w.main[m], shared_address(s.ring + at));
            }
        }
        if (EXTRA) {
            const u32* const row = (const u32*)s.extra_weights[i % 2][place.lane / 4];
            w.extra[0] = row[place.lane % 4];
            w.extra[1] = row[4 + place.lane % 4];
        }
        return w;
    }

    // What has been added is made relative to the maxima of step i where that raised one.
    __device__ void rescale(const Place& place, int i) {
        if (MAIN && __any_sync(ALL_LANES, s.rescaled[0][4 * place.group + place.lane % 4] == i)) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const u32 owner = 4 * place.group + k;
                const float by =
                    s.rescaled[0][owner] == i ? s.rescale[8 * owner + place.lane / 4] : 1.0f;
#pragma unroll
                for (int n = 0; n < 2 * LATENT_STEPS; ++n) {
                    value[k / 2][n][k % 2 * 2] *= by;
                    value[k / 2][n][k % 2 * 2 + 1] *= by;
                }
            }
        }
        if (EXTRA && __any_sync(ALL_LANES, s.rescaled[1][place.lane % 8] == i)) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const u32 row = place.lane % 4 * 2 + k;
                const float by = s.rescaled[1][row] == i ? s.rescale[MAIN_ROWS + row] : 1.0f;
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

    __device__ bool is_masked(int step) const { return (step + 1) * STEP > request().cached; }

    __device__ Keys keys() const {
        return {in.cache, in.cache_row_bytes,
                in.batch.page_table + (i64)request().index * in.batch.pages, in.batch.page_shift,
                piece().tile.keys};
    }

    __device__ int step(int i) const { return piece().begin + i; }

    // Turn i multiplies out the scores of the piece's step i and the values of the one before; the
    // first turn has no values, the last no scores. (What is not there is made 0: a register that
    // is set in some turns only would be taken all the time.) Says whether there is another turn.
    __device__ bool turn(int i) {
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
            weigh(Place(), own, step(i), i, is_masked(step(i)));
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
        for (int i = 0; turn(i); ++i) {}
    }

    __device__ static void arrive(SharedAddress barrier, u32 thread) {
        __syncwarp();
        if (thread % WARP == 0) barrier_arrive(barrier);
    }

    // ---- results

    // The sums over all lanes of a row: [TILE_ROWS] in shared memory, which the scores have left.
    __device__ float2* gather_norms(const Place& place) {
        __syncthreads();
        float2* const norm = (float2*)s.scores;
        if (MAIN) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int by = 4; by < WARP; by *= 2)
                    sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], by);
                const u32 row = 8 * place.warp + place.lane % 4 * 2 + i;
                if (place.lane < 4) norm[row] = {s.most[row], sum[i]};
            }
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

    __device__ void finish() {
        const Place place;
        const float2* const norm = gather_norms(place);
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
