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
    float4 extra_scores[WARPS][WARP];                 // [sender]: C fragments, exchanged
    uint2 extra_rope_query[QUARTERS][ROPE_TURNS][WARP];
    u16 extra_weights[2][EXTRA_ROWS][STEP];  // bf16, by turns; those of main rows lie in the ring
    float extra_sum[WARPS][STEP];
    float most[TILE_ROWS];
    float rescale[TILE_ROWS];
    u32 rescaled[2 * WARPS];  // the last step in which a warp wrote rescale: main rows, extra rows
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
    float sum;  // of weights of main row 2t or 2t + 1 of the warp's eight, for an even or odd g

    __device__ PieceWork(Shared& shared, const Attention& attention)
        : s(shared), in(attention), sum(0) {
        // Read by the warps that own the rows, after a barrier.
        if (threadIdx.x < TILE_ROWS) s.most[threadIdx.x] = NO_SCORE;
        if (threadIdx.x < WARPS * STEP) (&s.extra_sum[0][0])[threadIdx.x] = 0;
        if (threadIdx.x < 2 * WARPS) s.rescaled[threadIdx.x] = ~0u;
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
            float4* const to = s.extra_scores[place.warp] + exchanged(place.lane);
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
    // Place of a lane's fragment: those that a row's keys come from lie in different banks.
    __device__ static u32 exchanged(u32 lane) { return lane ^ lane / 8; }

    // ---- weights of the rows this warp owns

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
            float best = max(seen_score(score[k], above[k]), seen_score(score[k + 2], above[k + 2]));
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

    // ---- values

    struct Weights {
        u32 main[2][4];
        u32 extra[2];
    };

    __device__ Weights load_weights(const Place& place, u32 i) const {
        Weights w;
        if (MAIN) {
            const u32 row = 32 * place.group + place.lane % 16;
            const SharedAddress at = shared_address(s.ring) + weight_place(i, row, place.lane / 16);
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

    __device__ bool is_masked(int step) const { return (step + 1) * STEP > request().cached; }

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
            weigh(Place(), own, step(i), i);
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
