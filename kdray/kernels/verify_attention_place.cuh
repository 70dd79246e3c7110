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
// Both groups meet every dimension; where these are an even number of steps a quarter, each takes
// the extra rows' products in every other step, else the first group takes all.
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
        : lane(thread % WARP),
          warp(thread / WARP),
          group(warp / QUARTERS),
          quarter(warp % QUARTERS) {}
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
