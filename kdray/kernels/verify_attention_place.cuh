// What a block of verify_attention keeps in shared memory, what it is given, and who does what.
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
// Both groups meet every value; where these are an even number of steps a quarter, each takes the
// extra rows' products in every other step, else the first group takes all.
constexpr bool PAIRED = LATENT_STEPS % 2 == 0;
constexpr int EXTRA_STEPS = PAIRED ? LATENT_STEPS / 2 : LATENT_STEPS;
// Weights may exceed 1 by this many powers of two before they are made relative to a new maximum.
constexpr float SLACK = 8.0f;

// Tiles for it, and what a step costs in each kind: main rows with and without extra ones, and
// extra ones alone.
struct TensorShape {
    static constexpr int TALL_ROWS = TALL, WIDE_ROWS = MAIN_ROWS, SHORT_ROWS = EXTRA_ROWS;
    static constexpr int STEP = ::STEP;
    static constexpr int SETUP_STEPS = SETUP_COST;
    __device__ static int weight(int rows) {
        return rows > WIDE_ROWS ? TALL_COST : rows > SHORT_ROWS ? WIDE_COST : SHORT_COST;
    }
};
static_assert(LATENT % 64 == 0 && ROPE % 16 == 0, "dimensions in steps of 16, in four quarters");

// Barriers of a piece; what completes a phase is a step.
struct Barriers {
    u64 landed[SLOTS];       // by slots: the keys are there
    u64 scored[GROUPS];      // a group's warps have posted their parts of the scores
    u64 weighed[2][GROUPS];  // by turns: a group's warps have posted their rows' weights
    u64 freed[2];            // by turns: all warps have added the values
};

struct alignas(128) Shared {
    unsigned char ring[SLOTS * SLOT_BYTES];
    float4 scores[GROUPS][QUARTERS][QUARTERS - 1][WARP];  // [owner][sender]: C fragments
    uint2 extra_query[QUARTERS][QUERY_STEPS][WARP];       // B fragments, each lane its own
    float4 extra_scores[QUARTERS][WARP];                  // [sender]: C fragments, exchanged
    u16 weights[MAIN_ROWS][STEP];                         // bf16, halves exchanged
    float most[TILE_ROWS];
    float rescale[MAIN_ROWS];
    float extra_rescale[2][EXTRA_ROWS];  // by turns, as one group may be a turn behind
    u32 rescaled[2 * WARPS];  // the last step for which a warp wrote rescale; then extra_rescale
    Barriers barriers;
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

// A thread's place, and where a step of 16 dimensions lies in a key's row. All but the lane is the
// same for a warp. The second group meets latent steps in pairs the other way round.
struct Place {
    u32 kept_lane;
    u32 warp;
    u32 group;
    u32 quarter;

    __device__ explicit Place()
        : kept_lane(threadIdx.x % WARP),
          warp(same_in_warp(threadIdx.x / WARP)),
          group(warp / QUARTERS),
          quarter(warp % QUARTERS) {}
    // The lane and the warp, asked for anew where the compiler would else keep more addresses from
    // turn to turn than there are registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1200
    __device__ u32 lane() const { return kept_lane; }
    __device__ u32 warp_again() const { return warp; }
#else
    __device__ u32 lane() const { return fresh_thread() % WARP; }
    __device__ u32 warp_again() const { return fresh_thread() / WARP; }
#endif
    __device__ u32 latent_step(int visit) const {
        const u32 first = LATENT_STEPS * quarter;
        if (!PAIRED) return first + visit;
        return (visit % 2 == 0 ? first + group : first + 1 - group) + visit / 2 * 2;
    }
    // Where there are fewer steps than quarters the last is met again, by queries of 0.
    __device__ u32 rope_step(int turn) const {
        const u32 step = quarter + QUARTERS * turn;
        return ROPE_STEPS % QUARTERS == 0 ? step : min(step, (u32)ROPE_STEPS - 1);
    }
    __device__ bool has_rope(int turn) const { return quarter + QUARTERS * turn < ROPE_STEPS; }
    // Of a key's row, in steps of 16: what is met as the n-th step of the scores.
    __device__ u32 query_step(int n) const {
        return n < LATENT_STEPS ? latent_step(n) : LATENT / 16 + rope_step(n - LATENT_STEPS);
    }
    __device__ bool has_query(int n) const {
        return n < LATENT_STEPS || has_rope(n - LATENT_STEPS);
    }
    // Whether this warp takes the extra rows' part of the values of a visit.
    __device__ bool takes_extra(int visit) const { return PAIRED ? visit % 2 == 0 : group == 0; }

    // The lane's part, within a slot, of the four matrices of a step of 16 dimensions: keys 0 .. 7
    // and 8 .. 15 of its first half, then of its second. As they are they make an A fragment of
    // keys, transposed two B fragments of values.
    __device__ u32 in_slot() const { return lane() % STEP * STRIDE + lane() / STEP * 16; }
};

// Byte of an extra row's weights of 8 keys, in the slot's room between the rows.
__device__ __forceinline__ u32 extra_weight_place(u32 row, u32 half) {
    return (row + EXTRA_ROWS * half) * STRIDE + ROW_BYTES;
}
// Byte among the weights where 8 of a main row's lie: 8 rows' lie in different banks.
__device__ __forceinline__ u32 weight_place(u32 row, u32 half) {
    return row * 2 * STEP + (half ^ row / 4 % 2) * 16;
}
// Place of a lane's fragment among a sender's extra scores: those that a row's keys come from lie
// in different banks.
__device__ __forceinline__ u32 exchanged(u32 lane) { return lane ^ lane / 8; }
