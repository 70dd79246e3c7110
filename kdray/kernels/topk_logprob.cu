// topk_logprob: the K best tokens of each row of logits and the row's log-sum-exp, in one pass.
//
// topk_logprob    token [rows, k] int32, score [rows, k] int32 fixed-point log-probs (core/tree.py)
// topk_partial    the same over a shard of the vocabulary: value [rows, k] float32,
//                 id [rows, k] int32 (global), mass [rows, 3] int64: the sum of exponentials
// merge_topk      value, id [shards, rows, k], mass [shards, rows, 3] -> token, score [rows, k]
// in              logits [rows, V], bf16 or float32 (INPUT_BF16), any row stride and alignment
// order           value descending, then id ascending; NaN and -inf are absent and come last with
//                 their lowest ids, +inf is the largest float32; beyond V: id 0 (partial: NO_ID)
//
// Grid (rows, splits), 256 threads: a split of a row takes `run` of its segments; the last block of
// a row to finish merges the splits (by a ticket in the workspace, which resets itself).
// A segment is 8 units, one a warp; a unit is 1024 neighbouring logits, 32 a lane, in registers.
//
// Selection. A bound, always a key that K others are known to reach, filters the stream. The first
// comes from the K-th largest of 2K or more disjoint maxima of the first segment. Survivors go to a
// list of their warp. Twice on the way and at the end the block ranks all survivors by counting and
// keeps K. No barrier stands in the stream besides; a warp whose list would overflow (mass ties,
// rising rows) narrows its own unit to at most a list's room, ties by id: nothing is ever dropped
// that could be among the K best, so the result does not depend on timing or splits.
//
// Log-sum-exp. A unit's sum of 2^(x log2 e - R), R an integer, is float32 in a fixed order; units
// are added as integers (topk_mass.cuh). So a row's result depends neither on other rows nor on
// splits, nor on shards that start at multiples of 1024. It is within 5e-7 nat of float64; scores
// are rounded from double, within 2 units of 2^-22 of the exact ones. Where a row's maximum exceeds
// 2^28 in magnitude the log-sum-exp is the maximum, as it is in float32.
//
// Limits: k <= K <= 64, V <= 262144, splits * K <= 512, splits <= 32, shards * K <= 1024.
// Oracle: kernels/reference.py, tokens exactly, scores within 2 of float64 (tests/gpu).

#ifndef K  // at least the k of a launch
#define K 16
#endif
#ifndef INPUT_BF16
#define INPUT_BF16 1
#endif
#ifndef BLOCKS_PER_SM  // resident blocks to fit the registers to
#define BLOCKS_PER_SM (INPUT_BF16 ? 4 : 2)
#endif
#ifndef PREFETCH  // 1: load a warp's next unit before it works on the present one
#define PREFETCH 1
#endif
#ifndef SUM_FIRST  // 1: exponentials before the selection, which then has the slice's registers
#define SUM_FIRST 1
#endif
#ifndef FIRST_RANKING  // segments of a block before survivors are ranked: ever fewer pass after it
#define FIRST_RANKING 2
#endif
#ifndef SECOND_RANKING
#define SECOND_RANKING 6
#endif

#include "topk_best.cuh"

// Absent tokens behind the present ones, lowest ids first, where the row has fewer than K present.
__device__ __forceinline__ void add_absent(Shared& s, const Row& row) {
    int size = s.num_best;
    if (warp_id() == 0) {
#pragma unroll 1
        for (int base = 0; base < row.size && size < K; base += WARP) {
            const int i = base + lane_id();
            const float x = i < row.size ? row.value(i) : 0.0f;
            const u32 absent = __ballot_sync(ALL_LANES, is_nan(x) || x == -infinity());
            const int slot = size + __popc(absent & ((1u << lane_id()) - 1));
            if (absent >> lane_id() & 1 && slot < K) s.best[slot] = make_key(-infinity(), i);
            size += __popc(absent);
        }
    }
    __syncthreads();
}

// The K best of this block's row in s.best, absent ones included, and its units' sums in s.units;
// true in the one block of the row that has them.
__device__ __forceinline__ bool select(Shared& s, const Row& row, const Workspace& work,
                                       int run) {
    const int number = blockIdx.x, split = blockIdx.y, splits = gridDim.y;
    const int num_units = (row.size + UNIT - 1) / UNIT;
    const int segments = (num_units + WARPS - 1) / WARPS;
    const int begin = split * run, end = min(begin + run, segments);
    UnitSum* units = splits == 1 ? s.units : work.units + (i64)number * num_units;
    if (threadIdx.x < WARPS) s.count[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.num_best = 0;
    u64 bound = NO_KEY;
    Slice slice, next;
    // With PREFETCH the loop runs one load ahead of its work.
    for (int segment = begin - PREFETCH; segment < end; ++segment) {
        const int first = segment * SEGMENT + warp_id() * UNIT;
        if (segment + PREFETCH < end) next = row.load(first + PREFETCH * SEGMENT);
        if (!PREFETCH) slice = next;
        if (segment >= begin) {
            Maxima maxima;
            maxima.take(slice);
            if (__any_sync(ALL_LANES, !(maxima.most < infinity()))) {
                slice.clean();
                maxima.take(slice);
            }
            if (SUM_FIRST) sum_unit(slice, maxima.most, units, first, row.size);
            if (segment == begin) bound = first_bound(s, maxima.most);
            bound = keep_survivors(s, row, maxima, first, bound);
            if (!SUM_FIRST) sum_unit(slice, maxima.most, units, first, row.size);
            const int done = segment + 1 - begin;
            if (segment + 1 == end || done == FIRST_RANKING || done == SECOND_RANKING)
                bound = rank_lists(s, bound);
        }
        if (PREFETCH) slice = next;
    }
    if (splits > 1) {
        if (!publish(s, work, number, split, splits)) return false;
        merge_splits(s, work, number, splits, num_units);
    }
    if (s.num_best < K && s.num_best < row.size) add_absent(s, row);
    return true;
}

__device__ __forceinline__ Row row_of(const void* logits, i64 stride, int size, int number) {
    const unsigned char* data = (const unsigned char*)logits + number * stride * (16 / VECTOR);
    return {data, size, (u64)data % 16 == 0};
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_logprob(
    int* token, int* score, int* ticket, u64* keys, UnitSum* unit_sums, const void* logits,
    i64 stride, int size, int k, int run) {
    __shared__ Shared s;
    const int number = blockIdx.x;
    const Row row = row_of(logits, stride, size, number);
    if (!select(s, row, {ticket, keys, unit_sums}, run)) return;
    if (threadIdx.x >= (K > WARP ? 2 * WARP : WARP)) return;
    const Mass mass = sum_units(s.units, (size + UNIT - 1) / UNIT);
    const int i = threadIdx.x;
    if (i >= k || i >= K) return;
    const u64 key = s.best[i];
    const double normaliser = log_sum_exp(mass, key_value(s.best[0]));
    token[(i64)number * k + i] = key == NO_KEY ? 0 : key_id(key);
    score[(i64)number * k + i] =
        key == NO_KEY ? SCORE_ABSENT : fixed_point(key_value(key), normaliser);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_partial(
    float* value, int* id, i64* mass, int* ticket, u64* keys, UnitSum* unit_sums,
    const void* logits, i64 stride, int size, int k, int run, int first_id) {
    __shared__ Shared s;
    const int number = blockIdx.x;
    const Row row = row_of(logits, stride, size, number);
    if (!select(s, row, {ticket, keys, unit_sums}, run)) return;
    const int i = threadIdx.x;
    if (i < k && i < K) {
        const u64 key = s.best[i];
        value[(i64)number * k + i] = key == NO_KEY ? -infinity() : key_value(key);
        id[(i64)number * k + i] = key == NO_KEY ? NO_ID : first_id + key_id(key);
    }
    if (i >= WARP) return;
    const Mass sum = sum_units(s.units, (size + UNIT - 1) / UNIT);
    if (i == 0) {
        mass[3 * (i64)number] = sum.top;
        mass[3 * (i64)number + 1] = (i64)sum.high;
        mass[3 * (i64)number + 2] = (i64)sum.low;
    }
}

// One block a row: ranks all shards' candidates, adds their masses.
extern "C" __global__ void __launch_bounds__(THREADS) merge_topk(
    int* token, int* score, const float* value, const int* id, const i64* mass, int shards,
    int rows, int k) {
    __shared__ u64 staged[1024];
    __shared__ Shared s;
    const int row = blockIdx.x, size = shards * k;
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const i64 from = ((i64)(i / k) * rows + row) * k + i % k;
        // Padding differs from shard to shard only by its place, as keys must be distinct.
        staged[i] = id[from] == NO_ID ? (u64)i : make_key(value[from], id[from]);
    }
    __syncthreads();
    rank_keys(s, staged, size);
    if (threadIdx.x >= (K > WARP ? 2 * WARP : WARP)) return;
    Mass mine = {NO_BIN, 0, 0};
    for (int shard = lane_id(); shard < shards; shard += WARP) {
        const i64* part = mass + 3 * ((i64)shard * rows + row);
        add(mine, (int)part[0], (u64)part[1]);
        add(mine, (int)part[0] - 1, (u64)part[2]);
    }
    const Mass total = sum_masses(mine);
    const int i = threadIdx.x;
    if (i >= k || i >= K) return;
    const u64 key = s.best[i];
    const bool padding = key >> 32 == 0;
    const double normaliser = log_sum_exp(total, key_value(s.best[0]));
    token[(i64)row * k + i] = padding ? 0 : key_id(key);
    score[(i64)row * k + i] = padding ? SCORE_ABSENT : fixed_point(key_value(key), normaliser);
}
