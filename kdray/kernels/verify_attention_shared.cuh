// What a block of verify_attention keeps in shared memory, and what a launch is given.
#pragma once

#include "fp8.cuh"
#include "verify_attention_batch.cuh"

#ifndef LATENT  // C
#define LATENT 512
#endif
#ifndef ROPE  // D
#define ROPE 64
#endif

#ifndef KV_FP8  // whether the cache has rows in fp8 (latent_rows.py)
#define KV_FP8 0
#endif

constexpr int SCORE_WARPS = 4;
constexpr int VALUE_WARPS = 8;
constexpr int ALL_WARPS = SCORE_WARPS + VALUE_WARPS;
constexpr int BLOCK = ALL_WARPS * WARP;

#ifndef KEPT_OF_3
#define KEPT_OF_3 (KV_FP8 ? 10 : 12)
#endif
#ifndef KEPT_OF_2
#define KEPT_OF_2 26
#endif

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

// 72 rows take a few registers more than there are on sm_120.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int TILE_EIGHTS = 8;
#else
constexpr int TILE_EIGHTS = 9;
#endif
constexpr int TILE_ROWS = 72;  // of a part in the workspace
constexpr int STEP = 16;                             // keys: the k of a product with values
constexpr int SLOTS = LATENT + ROPE <= 320 ? 6 : KV_FP8 ? 5 : 3;
constexpr int ROW_BYTES = KV_FP8 ? fp8_row_bytes(LATENT, ROPE) : 2 * (LATENT + ROPE);
constexpr int STRIDE = KV_FP8 ? ROW_BYTES : ROW_BYTES + 16;
constexpr int SCALE_PLACE = LATENT + 2 * ROPE;  // byte of a row in fp8 where its scale is
constexpr int SLOT_BYTES = STEP * STRIDE;
constexpr int LATENT_STEPS = LATENT / 16;
constexpr int QUERY_STEPS = LATENT_STEPS + ROPE / 16;  // products that make a score
// A score warp keeps queries in registers as far as there are any, those of the last steps in shared
// memory, two steps to a matrix load. The first warp may have three eights of the nine, the others
// two.
__host__ __device__ constexpr int stored_steps(int eights) {
    return max_of(0, eights == 3 ? QUERY_STEPS - KEPT_OF_3 : eights == 2 ? QUERY_STEPS - KEPT_OF_2 : 0)
               / 2 * 2;
}
// Bytes between two rows: an odd number of 16-byte chunks, for eight rows in different banks.
__host__ __device__ constexpr int stored_stride(int eights) {
    return 32 * stored_steps(eights) + 16;
}
constexpr int STORED_3 = 3 * EIGHT * stored_stride(3);
constexpr int STORED_2 = 2 * EIGHT * stored_stride(2);
constexpr int MERGE_BYTES = 40 * 1024;  // what a merge needs at most, where the ring was
constexpr int VALUE_STEPS = LATENT / 16;
constexpr int TILES_BESIDE = KV_FP8 ? 2 : 1;  // that come from the same bytes
constexpr int VALUE_TILES =  // of 16 dimensions, of a warp
    (VALUE_STEPS / TILES_BESIDE + VALUE_WARPS - 1) / VALUE_WARPS * TILES_BESIDE;
static_assert(LATENT % 64 == 0 && ROPE % 16 == 0, "dimensions in steps of 16");

struct alignas(128) Shared {
    unsigned char ring[max_of(SLOTS * SLOT_BYTES, MERGE_BYTES)];
    unsigned char query[STORED_3 + (SCORE_WARPS - 1) * STORED_2];  // by score warps: their rows
    u16 weights[2][TILE_ROWS + EIGHT][STEP];  // by turns, bf16 or f16, halves exchanged
    float rescale[2][TILE_ROWS];              // by turns
    alignas(16) u32 raised[2][SCORE_WARPS];       // by turns and score warps: the last step that raised a maximum
    float2 norm[TILE_ROWS];  // of a finished piece: the maximum, and the sum of the weights
    // Barriers; a phase is a step of one slot or turn, or (normed) a piece.
    int page[VALUE_WARPS][STEP];  // of the keys that a warp brings next
    u64 landed[SLOTS];  // the keys are there
    u64 freed[SLOTS];   // all value warps have done with them, and with their weights
    u64 weighed[2];     // all score warps have written their weights
    u64 normed;
    Piece piece;
    u32 first_step;  // of the block, the piece's
    u32 end_step;
    int next;     // piece to be taken, and the block's last one
    int last;
    u32 pieces;   // before this one
    Piece waiting[2];
    int num_waiting;
};

struct Workspace {
    float4* value;  // [2 G, 9, VALUE_STEPS, 32]: C fragments, 16 dimensions by 8 rows
    float2* norm;   // [2 G, TILE_ROWS]: (maximum of the scores in powers of two, sum of weights)
    int* ticket;    // [G], zero between launches
};

struct Attention {
    u16* out;  // [T, H, LATENT]
    Workspace work;
    const unsigned char* query;  // [T, H, LATENT + ROPE]
    i64 query_row_bytes;
    i64 query_head_bytes;
    const unsigned char* cache;  // [S, ROW_BYTES]
    i64 cache_row_bytes;
    const int* page_table;  // [R, batch_pages]
    int batch_pages;
    int page_shift;
    Mask mask;
    int heads;
    float scale;  // times log2 e
};

// Where the pieces that a block works through stand: steps are counted on from piece to piece, so a
// step's number tells its slot and the phases of all barriers.
__device__ __forceinline__ u32 slot_of(u32 step) { return step % SLOTS; }
__device__ __forceinline__ int phase_of(u32 step) { return step / SLOTS % 2; }

// Byte among a buffer's weights where a row's of 8 keys lie: 8 rows' lie in different banks.
__device__ __forceinline__ u32 weight_place(u32 row, u32 half) {
    return row * 2 * STEP + (half ^ row / 4 % 2) * 16;
}

__device__ __forceinline__ void arrive(const u64& barrier) {
    __syncwarp();
    if (fresh_thread() % WARP == 0) barrier_arrive(shared_address(&barrier));
}
