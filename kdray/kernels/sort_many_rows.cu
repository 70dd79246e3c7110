// sort_rows for many rows: what sort_rows.cu finds, and each pair's place, for moe_w4a16_many.cu.
// A pair is one row's visit to one expert, number row * TOP_K + choice. sort_rows_count comes first, then
// sort_rows_place.
//
//   tile       [max_tiles] uint32: expert << 22 | pairs in it - 1 << 16 | its first place in `sorted`;
//              by expert, none for experts without pairs
//   sorted     [P] int32: pairs by expert, and by number among those of an expert; behind them nothing
//              that means anything
//   place      [P] int32: where in `sorted` a pair is; of a pair that is left out nothing
//   num_tiles  [1] int32
//   start      [NUM_EXPERTS] int32: an expert's first place;  short_expert [P] uint16: experts, narrow
//   expert     [P] int64, each 0 .. NUM_EXPERTS - 1, or -1: the pair is left out
//
// Grid of sort_rows_count: one block of 1024 threads, which counts every expert's pairs: no order is
// needed for that, so shared atomics do.
// Grid of sort_rows_place: (NUM_EXPERTS), 512 threads. A block looks through all pairs for its expert's,
// 8 a thread at a time, and gives them places in order.
// Limits: NUM_EXPERTS <= 1024; P <= 65,536. max_tiles is at least min(P, NUM_EXPERTS + P / TILE_ROWS);
// short_expert has room for P rounded up to 8, 16-byte aligned.
// Integers; the oracle is reference_moe.sort_rows, exactly. Defines: NUM_EXPERTS, TILE_ROWS.

#include "common.cuh"
#include "overlap.cuh"
#include "running_sum.cuh"

constexpr int COUNTERS = 1024, PLACERS = 512;  // threads
constexpr int EACH = 8;                        // pairs of a thread, a turn
constexpr u16 NONE = 0xffff;
static_assert(NUM_EXPERTS <= COUNTERS, "a thread an expert");
static_assert(TILE_ROWS <= 64, "as packed");

extern "C" __global__ void __launch_bounds__(1024)
    sort_rows_count(u32* tile, int* num_tiles, int* start, u16* short_expert, const i64* expert,
                    int num_pairs)
{
    __shared__ int count[NUM_EXPERTS];
    __shared__ u64 of_warp[COUNTERS / WARP];
    start_behind_previous();
    const int thread = threadIdx.x;
    if (thread < NUM_EXPERTS) count[thread] = 0;
    __syncthreads();
    const int padded = (num_pairs + EACH - 1) / EACH * EACH;
#pragma unroll 8
    for (int p = thread; p < padded; p += COUNTERS) {
        const int own = p < num_pairs ? (int)expert[p] : -1;
        short_expert[p] = own < 0 ? NONE : (u16)own;
        if (own >= 0) atomicAdd(&count[own], 1);
    }
    __syncthreads();

    const int pairs = thread < NUM_EXPERTS ? count[thread] : 0;
    const int tiles = (pairs + TILE_ROWS - 1) / TILE_ROWS;
    const u64 sums = running_sum((u64)pairs << 32 | (u64)tiles, of_warp);
    const int first = (int)(sums >> 32) - pairs, last_tile = (int)(u32)sums;
    if (thread < NUM_EXPERTS) start[thread] = first;
    for (int i = 0; i < tiles; ++i) {
        const int done = i * TILE_ROWS;
        tile[last_tile - tiles + i] = (u32)thread << 22 |
                                      (u32)(min(TILE_ROWS, pairs - done) - 1) << 16 |
                                      (u32)(first + done);
    }
    if (thread == COUNTERS - 1) *num_tiles = last_tile;
}

extern "C" __global__ void __launch_bounds__(512)
    sort_rows_place(int* sorted, int* place, const int* start, const u16* short_expert, int num_pairs)
{
    __shared__ int of_warp[2][PLACERS / WARP];
    start_behind_previous();
    const u32 expert = blockIdx.x;
    int next = start[expert];
    for (int first = 0, turn = 0; first < num_pairs; first += PLACERS * EACH, turn ^= 1) {
        const int pair = first + (int)threadIdx.x * EACH;
        uint4 eight = {ALL_LANES, ALL_LANES, ALL_LANES, ALL_LANES};
        if (pair < num_pairs) eight = *(const uint4*)(short_expert + pair);
        const u32 words[EACH / 2] = {eight.x, eight.y, eight.z, eight.w};
        u32 found = 0;  // bit i: pair + i is the expert's
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            found |= (u32)((words[i / 2] >> i % 2 * 16 & 0xffff) == expert) << i;
        const int count = __popc(found);
        int at = next + running_sum(count, of_warp[turn]) - count;
        for (int i = 0; i < EACH; ++i) {
            if (!(found >> i & 1)) continue;
            sorted[at] = pair + i;
            place[pair + i] = at++;
        }
        for (int w = 0; w < PLACERS / WARP; ++w) next += of_warp[turn][w];
    }
}
