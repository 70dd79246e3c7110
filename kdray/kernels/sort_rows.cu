// sort_rows: rows of a step, each routed to TOP_K experts, laid side by side by expert and cut into
// tiles, for moe_w4a16.cu. A pair is one row's visit to one expert, number row * TOP_K + choice.
//
//   tile       [max_tiles] int4: expert, pairs in it (1 .. TILE_ROWS), its first place in `sorted`, 0;
//              by expert, none for experts without pairs
//   sorted     [P] int32: pairs by expert, and by number among those of an expert; behind them nothing
//              that means anything
//   num_tiles  [1] int32
//   expert     [P] int64, each 0 .. NUM_EXPERTS - 1, or -1: the pair is left out
//
// Grid: one block of 1024 threads, whose warps take equal runs of pairs: count, add up, place. Nothing
// depends on the order in which they do. Dynamic shared memory: 64 * NUM_EXPERTS bytes.
// Limits: NUM_EXPERTS <= 1024; an expert has at most 65,535 pairs. max_tiles is at least
// min(P, NUM_EXPERTS + P / TILE_ROWS).
// Integers; the oracle is reference_moe.sort_rows, exactly. Defines: NUM_EXPERTS, TILE_ROWS.

#include "common.cuh"
#include "overlap.cuh"
#include "running_sum.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;
static_assert(NUM_EXPERTS <= THREADS, "a thread an expert");

// The pairs of one warp, 32 at a time. Lanes of the same expert are `same`; the lowest leads them.
struct Visit {
    int pair, expert;
    u32 same;

    __device__ static Visit at(const i64* expert, int pair, int end)
    {
        Visit v;
        v.pair = pair;
        v.expert = pair < end ? (int)expert[pair] : -1;
        v.same = __match_any_sync(ALL_LANES, v.expert);
        return v;
    }
    __device__ int before() const { return __popc(same & ((1u << lane_id()) - 1)); }
    __device__ bool there() const { return expert >= 0; }
    __device__ bool leads() const { return there() && before() == 0; }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    sort_rows(int4* tile, int* sorted, int* num_tiles, const i64* expert, int num_pairs)
{
    extern __shared__ u16 counts[];
    __shared__ int start[NUM_EXPERTS];
    __shared__ u64 of_warp[WARPS];
    start_behind_previous();

    const int thread = threadIdx.x, warp = thread / WARP, lane = lane_id();
    for (int i = thread; i < WARPS * NUM_EXPERTS; i += THREADS) counts[i] = 0;
    const int run = (num_pairs + THREADS - 1) / THREADS * WARP;
    const int begin = warp * run, end = min(begin + run, num_pairs);
    u16* const own = counts + warp * NUM_EXPERTS;
    __syncthreads();

    for (int p = begin; p < end; p += WARP) {
        const Visit v = Visit::at(expert, p + lane, end);
        if (v.leads()) own[v.expert] += (u16)__popc(v.same);
        __syncwarp();
    }
    __syncthreads();

    int pairs = 0;
    if (thread < NUM_EXPERTS)
        for (int w = 0; w < WARPS; ++w) {
            const int count = counts[w * NUM_EXPERTS + thread];
            counts[w * NUM_EXPERTS + thread] = (u16)pairs;
            pairs += count;
        }
    const int tiles = (pairs + TILE_ROWS - 1) / TILE_ROWS;
    const u64 sums = running_sum((u64)pairs << 32 | (u64)tiles, of_warp);
    const int first = (int)(sums >> 32) - pairs, last_tile = (int)(u32)sums;
    if (thread < NUM_EXPERTS) start[thread] = first;
    for (int i = 0; i < tiles; ++i) {
        const int done = i * TILE_ROWS;
        tile[last_tile - tiles + i] = {thread, min(TILE_ROWS, pairs - done), first + done, 0};
    }
    if (thread == THREADS - 1) *num_tiles = last_tile;
    __syncthreads();

    for (int p = begin; p < end; p += WARP) {
        const Visit v = Visit::at(expert, p + lane, end);
        if (v.there()) sorted[start[v.expert] + own[v.expert] + v.before()] = v.pair;
        __syncwarp();
        if (v.leads()) own[v.expert] += (u16)__popc(v.same);
        __syncwarp();
    }
}
