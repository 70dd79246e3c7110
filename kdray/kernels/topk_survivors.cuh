// The stream's filter in topk_logprob.cu: which logits of a unit a warp lists, and what it does
// when they are too many. Survivors are few, so this part reads them again (from L1) in rolled
// loops, and stays small.
#pragma once

#include "topk_mass.cuh"

constexpr int CAPACITY = 2 * K > 64 ? 2 * K : 64;  // of a warp's list; room for K more after a cut
constexpr int GROUPS = 2 * K > 32 ? (2 * K > 64 ? 128 : 64) : 32;  // of the first bound
constexpr int GROUP = THREADS / GROUPS;
constexpr int MAX_PIECE_KEYS = 512;
constexpr int STAGED = K + WARPS * CAPACITY;

static_assert(GROUPS >= K, "room");
static_assert(STAGED >= MAX_PIECE_KEYS && WARPS * CAPACITY >= MAX_PIECE_KEYS, "room");

struct Shared {
    u64 best[K];                // the K best so far, in order; NO_KEY where there are fewer
    u64 list[WARPS][CAPACITY];  // survivors since
    u64 staged[STAGED];
    UnitSum units[MAX_UNITS];   // of the whole row, in the block that finishes it
    float group_max[GROUPS];
    float first_bound;
    u64 bound[WARPS];           // a key that K others are known to reach, or NO_KEY
    int count[WARPS];
    int num_best;
    int is_last;
};

// Which logits of a unit go on the list: those above `above`, and of those equal to `tie` the first
// `ties` by id.
struct Cut {
    float above;
    float tie;
    int ties;
};

// What a logit must exceed, given that keys below `bound` are out and the unit's ids start at
// `first`.
__device__ __forceinline__ float threshold(u64 bound, int first) {
    if (bound == NO_KEY) return -infinity();
    const float value = key_value(bound);
    return (u32)first > ~(u32)bound ? value : below(value);  // a first bound has no id: 2^32 - 1
}

// The inputs' values numbered in their order: the largest of them that is at most a float, given as
// ordered(), and back.
__device__ __forceinline__ u32 step_of(u32 key) {
#if INPUT_BF16
    return key >> 31 ? key >> 16 : ((key + 1) >> 16) - 1;  // negative ones end in ones
#else
    return key;
#endif
}
__device__ __forceinline__ float from_step(u32 step) {
#if INPUT_BF16
    return from_ordered(step << 16 | (step >> 15 ? 0 : 0xffffu));
#else
    return from_ordered(step);
#endif
}

// Lists a unit's logits above `above` behind the `size` already listed, unless there is no room for
// all: then false.
__device__ __forceinline__ bool put_above(Shared& s, const Slice& slice, const Row& row, int first,
                                          int size, float above) {
    u32 hits = slice.above(from_step(step_of(ordered(above))));
    if ((int)__reduce_add_sync(ALL_LANES, (u32)__popc(hits)) > CAPACITY - size) return false;
    const u32 lower = (1u << lane_id()) - 1;
    while (const u32 holders = __ballot_sync(ALL_LANES, hits != 0)) {
        if (hits) {
            const int i = first + place(Slice::number_of(__ffs(hits) - 1));
            hits &= hits - 1;
            s.list[warp_id()][size + __popc(holders & lower)] = make_key(row.value(i), i);
        }
        size += __popc(holders);
    }
    if (lane_id() == 0) s.count[warp_id()] = size;
    __syncwarp();
    return true;
}

// Lists what a cut with ties keeps, by id; there is room. By the whole warp, a column of the unit
// at a time. Returns the id of the last tie.
__device__ __forceinline__ int put_ties(Shared& s, const Row& row, int first, int size,
                                        const Cut& cut) {
    const u32 lower = (1u << lane_id()) - 1;
    int ties = 0, last = 0;
#pragma unroll 1
    for (int base = first; base < first + UNIT; base += WARP) {
        const float value = row.value(base + lane_id());
        if (!__any_sync(ALL_LANES, value >= cut.tie)) continue;
        const bool is_tied = value == cut.tie;
        const u32 tied = __ballot_sync(ALL_LANES, is_tied);
        const bool keep =
            is_tied ? ties + __popc(tied & lower) < cut.ties : value > cut.above;
        const u32 kept = __ballot_sync(ALL_LANES, keep);
        if (keep)
            s.list[warp_id()][size + __popc(kept & lower)] = make_key(value, base + lane_id());
        if (kept & tied) last = base + WARP - 1 - __clz(kept & tied);
        ties += __popc(tied);
        size += __popc(kept);
    }
    if (lane_id() == 0) s.count[warp_id()] = size;
    __syncwarp();
    return last;
}

// A cut that keeps at most `room` >= K logits of a unit and at least its K best above `above`.
// Halves the distance between values until one lies right, or until two neighbours leave no choice
// but to take ties by id.
__device__ __forceinline__ Cut find_cut(const Slice& slice, float most, float above, int room) {
    u32 low = step_of(ordered(above)), high = step_of(ordered(most));
    int beyond = 0;  // logits above `high`
#pragma unroll 1
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        const float x = from_step(middle);
        const int count = (int)__reduce_add_sync(ALL_LANES, slice.count_above(x));
        if (count > room) {
            low = middle;
        } else if (count < K) {
            high = middle, beyond = count;
        } else {
            return {x, 0.0f, 0};
        }
    }
    const float tie = from_step(high);
    return {tie, tie, K - beyond};
}

// The list of a warp without what lies below the bound. Returns its size.
__device__ __forceinline__ int purge_list(Shared& s, int size, u64 bound) {
    u64* list = s.list[warp_id()];
    u64 key[CAPACITY / WARP];
    int kept = 0, slot[CAPACITY / WARP];
#pragma unroll
    for (int i = 0; i < CAPACITY / WARP; ++i) {
        const int from = i * WARP + lane_id();
        key[i] = from < size ? list[from] : NO_KEY;
        const bool keep = from < size && key[i] >= bound;
        const u32 keepers = __ballot_sync(ALL_LANES, keep);
        slot[i] = keep ? kept + __popc(keepers & ((1u << lane_id()) - 1)) : -1;
        kept += __popc(keepers);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CAPACITY / WARP; ++i)
        if (slot[i] >= 0) list[slot[i]] = key[i];
    if (lane_id() == 0) s.count[warp_id()] = kept;
    __syncwarp();
    return kept;
}

// The list of a warp cut to its K best; the K-th of them, a bound. By one warp, more than K listed.
__device__ __forceinline__ u64 shorten_list(Shared& s, int size) {
    u64* list = s.list[warp_id()];
    u64 key[CAPACITY / WARP];
    int rank[CAPACITY / WARP];
#pragma unroll
    for (int i = 0; i < CAPACITY / WARP; ++i) {
        const int slot = i * WARP + lane_id();
        key[i] = slot < size ? list[slot] : NO_KEY;
        rank[i] = slot < size ? 0 : K;
    }
#pragma unroll 1
    for (int other = 0; other < size; ++other) {
        const u64 rival = list[other];
#pragma unroll
        for (int i = 0; i < CAPACITY / WARP; ++i) rank[i] += rival > key[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CAPACITY / WARP; ++i)
        if (rank[i] < K) list[rank[i]] = key[i];
    if (lane_id() == 0) s.count[warp_id()] = K;
    __syncwarp();
    return list[K - 1];
}

// By one warp, for itself; returns the threshold of the unit at `first`.
__device__ __forceinline__ float raise_bound(Shared& s, u64 bound, int first) {
    if (lane_id() == 0) s.bound[warp_id()] = bound;
    __syncwarp();
    return threshold(bound, first);
}

// Lists the survivors of a warp's unit: `most`, its largest logit, exceeds `above`, its threshold.
// Returns the next unit's threshold, raised where survivors are many.
__device__ __forceinline__ float keep_survivors(Shared& s, const Slice& slice, const Row& row,
                                                float most, int first, float above) {
    u64 bound = s.bound[warp_id()];
    int size = s.count[warp_id()];
    __syncwarp();
    if (put_above(s, slice, row, first, size, above)) return above;
    // Too many. Make room for K, then choose among the unit's own.
    size = purge_list(s, size, bound);
    if (size > CAPACITY - K) {
        bound = larger(bound, shorten_list(s, size));
        size = K;
        above = threshold(bound, first);
        if (!(most > above)) return raise_bound(s, bound, first + SEGMENT);
    }
    const Cut cut = find_cut(slice, most, above, CAPACITY - size);
    if (cut.ties == 0) {
        put_above(s, slice, row, first, size, cut.above);
        // At least K exceed the cut, so what equals it is out, whatever its id.
        bound = larger(bound, (u64)ordered(cut.above) << 32 | 0xffffffffu);
    } else {
        const int last = put_ties(s, row, first, size, cut);
        // Short of K only where fewer than K exceeded `above`; then the last tie says nothing.
        if (s.count[warp_id()] - size >= K) bound = larger(bound, make_key(cut.tie, last));
    }
    return raise_bound(s, bound, first + SEGMENT);
}
