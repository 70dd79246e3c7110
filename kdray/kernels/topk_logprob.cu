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
// Grid: blocks of 256 threads. A segment is 8 units, one a warp; a unit is 1024 neighbouring
// logits, 32 a lane, in registers. The segments of all rows are numbered in one list, `pitch` to a
// row; block b takes `run` of them from b * run on, whatever rows they lie in. Its part of a row is
// a piece; the last block of a row to finish merges the pieces (by a ticket in the workspace, which
// resets itself). pitch: the segments of a row, or more, so that every row starts with a block.
//
// Selection. A bound, always a key that K others are known to reach, filters the stream. The first
// comes from the K-th largest of 2K or more disjoint maxima of the first segment. Survivors go to a
// list of their warp. Twice on the way and at the end the block ranks all survivors by counting and
// keeps K. No barrier stands in the stream besides; a warp whose list would overflow (mass ties,
// rising rows) narrows its own unit to at most a list's room, ties by id: nothing is ever dropped
// that could be among the K best, so the result does not depend on timing or pieces.
//
// Log-sum-exp. A unit's sum of 2^(x log2 e - R), R an integer, is float32 in a fixed order; units
// are added as integers (topk_mass.cuh). So a row's result depends neither on other rows nor on
// pieces, nor on shards that start at multiples of 1024. It is within 5e-7 nat of float64; scores
// are rounded from double, within 2 units of 2^-22 of the exact ones. Where a row's maximum exceeds
// 2^28 in magnitude the log-sum-exp is the maximum, as it is in float32.
//
// Limits: k <= K <= 64, V <= 262144, shards * K <= 1024, rows * pitch < 2^31; of a row's pieces, at
// most 32 and pieces * K <= 512.
// Oracle: kernels/reference.py, tokens exactly, scores within 2 of float64 (tests/gpu).

#ifndef K  // at least the k of a launch
#define K 16
#endif
#ifndef INPUT_BF16
#define INPUT_BF16 1
#endif
#ifndef BLOCKS_PER_SM  // resident blocks to fit the registers to
#define BLOCKS_PER_SM (K > 32 ? 3 : INPUT_BF16 ? 5 : 4)
#endif
#ifndef PREFETCH  // 1: load a warp's next unit before it works on the present one
#define PREFETCH 0
#endif
#ifndef AHEAD  // how many segments before its turn a unit is asked for from L2; 0: not
#define AHEAD 0
#endif
#ifndef FIRST_RANKING  // segments of a piece before survivors are ranked: ever fewer pass after it
#define FIRST_RANKING 2
#endif
#ifndef SECOND_RANKING
#define SECOND_RANKING 6
#endif

#include "overlap.cuh"
#include "topk_best.cuh"

// Absent tokens behind the present ones, lowest ids first, where the row has fewer than K present.
__device__ __forceinline__ void add_absent(Shared& s, const Row& row) {
    int size = s.num_best;
    __syncthreads();  // behind the warps that still read the last ranking
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

// Rows of logits and how blocks share them.
struct Batch {
    const void* logits;
    i64 stride;
    int rows, size;
    int pitch, run;  // segments: from row to row in the list of all, and of a block

    __device__ __forceinline__ Row row(int number) const {
        const unsigned char* const data =
            kept((const unsigned char*)logits + number * stride * (16 / VECTOR));
        return {data, size, (u64)data % 16 == 0 ? size : 0};
    }
    __device__ __forceinline__ int units() const { return (size + UNIT - 1) / UNIT; }
    __device__ __forceinline__ int segments() const { return (size + SEGMENT - 1) / SEGMENT; }
    __device__ __forceinline__ Sharers sharers(int number) const {
        const int start = number * pitch, first = start / run;
        return {first, (start + segments() - 1) / run - first + 1};
    }
};

// The K best of a row's segments [begin, end) in s.best, their units' sums in `units`.
__device__ __forceinline__ void stream(Shared& s, const Row& row, UnitSum* units, int begin,
                                       int end) {
    float above = -infinity();  // what a logit must exceed
    int first = begin * SEGMENT + warp_id() * UNIT;
    Slice slice, next;
    if (PREFETCH) next = row.load(first);
#pragma unroll 1
    for (int segment = begin; segment < end; ++segment, first += SEGMENT) {
        slice = PREFETCH ? next : row.load(first);
        if (PREFETCH && segment + 1 < end) next = row.load(first + SEGMENT);
        if (AHEAD && segment + AHEAD < end) row.expect(first + AHEAD * SEGMENT);
        float mine = slice.most();
        u32 largest = warp_max_or_nan(mine);
        if (largest >= ordered(infinity())) {
            slice.clean();
            mine = slice.most();
            largest = warp_max_or_nan(mine);
        }
        const float most = from_ordered(largest);
        if (segment == begin) above = raise_bound(s, first_bound(s, mine), first);
        if (most > above) above = keep_survivors(s, slice, row, most, first, above);
        sum_unit(slice, most, units, first, row.size);
        const int done = segment + 1 - begin;
        if (segment + 1 == end || done == FIRST_RANKING || done == SECOND_RANKING)
            above = raise_bound(s, rank_lists(s), first + SEGMENT);
    }
}

// A block's piece of a row. Where that is all of it, or the row's last to be finished, the row's K
// best are in s.best, absent ones included, and its units' sums in s.units: then true.
__device__ __forceinline__ bool select(Shared& s, const Batch& batch, const Workspace& work,
                                       int number, int begin, int end) {
    const Row row = batch.row(number);
    const int num_units = batch.units();
    const bool whole = begin == 0 && end == batch.segments();
    __syncthreads();  // behind the warps that still read of the block's last row
    if (threadIdx.x < WARPS) s.count[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.num_best = 0;
    UnitSum* const units = kept(whole ? s.units : work.units + (i64)number * num_units);
    stream(s, row, units, begin, end);
    if (units != s.units) {
        const Sharers sharers = batch.sharers(number);
        if (!publish(s, work, number, sharers.count)) return false;
        merge_pieces(s, work, number, sharers, num_units);
    }
    if (s.num_best < K && s.num_best < row.size) add_absent(s, row);
    return true;
}

// All of a block's pieces; write(row) where it has a row's result, by all threads.
template <class Write>
__device__ __forceinline__ void serve(Shared& s, const Batch& batch, const Workspace& work,
                                      const Write& write) {
    const int begin = blockIdx.x * batch.run;
    const int end = min(begin + batch.run, batch.rows * batch.pitch);
#pragma unroll 1
    for (int number = kept(begin / batch.pitch); number * batch.pitch < end;
         number = kept(number + 1)) {
        const int start = number * batch.pitch;
        const int first = max(begin - start, 0), last = min(end - start, batch.segments());
        if (select(s, batch, work, number, first, last)) write(number);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_logprob(
    int* token, int* score, int* ticket, u64* keys, UnitSum* unit_sums, const void* logits,
    i64 stride, int rows, int size, int pitch, int run, int k) {
    __shared__ Shared s;
    wait_for_previous();
    const Batch batch = {logits, stride, rows, size, pitch, run};
    serve(s, batch, {ticket, keys, unit_sums}, [&](int number) {
        if (threadIdx.x >= (K > WARP ? 2 * WARP : WARP)) return;
        const Mass mass = sum_units(s.units, batch.units());
        const int i = threadIdx.x;
        if (i >= k || i >= K) return;
        const u64 key = s.best[i];
        const double normaliser = log_sum_exp(mass, key_value(s.best[0]));
        token[(i64)number * k + i] = key == NO_KEY ? 0 : key_id(key);
        score[(i64)number * k + i] =
            key == NO_KEY ? SCORE_ABSENT : fixed_point(key_value(key), normaliser);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_partial(
    float* value, int* id, i64* mass, int* ticket, u64* keys, UnitSum* unit_sums,
    const void* logits, i64 stride, int rows, int size, int pitch, int run, int k, int first_id) {
    __shared__ Shared s;
    wait_for_previous();
    const Batch batch = {logits, stride, rows, size, pitch, run};
    serve(s, batch, {ticket, keys, unit_sums}, [&](int number) {
        const int i = threadIdx.x;
        if (i < k && i < K) {
            const u64 key = s.best[i];
            value[(i64)number * k + i] = key == NO_KEY ? -infinity() : key_value(key);
            id[(i64)number * k + i] = key == NO_KEY ? NO_ID : first_id + key_id(key);
        }
        if (i >= WARP) return;
        const Mass sum = sum_units(s.units, batch.units());
        if (i == 0) {
            mass[3 * (i64)number] = sum.top;
            mass[3 * (i64)number + 1] = (i64)sum.high;
            mass[3 * (i64)number + 2] = (i64)sum.low;
        }
    });
}

// One block a row: ranks all shards' candidates, adds their masses.
extern "C" __global__ void __launch_bounds__(THREADS) merge_topk(
    int* token, int* score, const float* value, const int* id, const i64* mass, int shards,
    int rows, int k) {
    __shared__ u64 staged[1024];
    __shared__ Shared s;
    wait_for_previous();
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
