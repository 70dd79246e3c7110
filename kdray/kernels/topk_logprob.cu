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
// keeps K. No barrier stands in the stream besides, and a warp whose list would overflow (mass ties,
// rising rows) narrows its own unit to at most a list's room, ties by id: nothing is ever dropped
// that could be among the K best, so the result does not depend on timing or splits.
//
// Log-sum-exp. A unit's sum of 2^(x log2 e - R), R an integer, is float32 in a fixed order; units
// are added as integers (class Mass). So a row's result depends neither on other rows nor on
// splits, nor on shards that start at multiples of 1024. It is within 5e-7 nat of float64; scores
// are rounded from double, within 2 units of 2^-22 of the exact ones. Where a row's maximum exceeds
// 2^28 in magnitude the log-sum-exp is the maximum, as it is in float32.
//
// Limits: k <= K <= 64, V <= 262144, splits * K <= 512, splits <= 32, shards * K <= 1024.
// Oracle: kernels/reference.py, tokens exactly, scores within 2 of float64 (tests/gpu).
#include "common.cuh"

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
#ifndef SUM_FIRST  // 1: exponentials before the selection, whose registers the slice then leaves free
#define SUM_FIRST 1
#endif
#ifndef FIRST_RANKING  // segments of a block before survivors are ranked: ever fewer pass after it
#define FIRST_RANKING 3
#endif
#ifndef SECOND_RANKING
#define SECOND_RANKING 10
#endif

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int UNIT = 1024;  // logits of one warp
constexpr int LANE_SIZE = UNIT / WARP;
constexpr int SEGMENT = UNIT * WARPS;
constexpr int MAX_UNITS = 256;
constexpr int VECTOR = INPUT_BF16 ? 8 : 4;  // logits in 16 bytes
constexpr int VECTORS = LANE_SIZE / VECTOR;
constexpr int WORDS = VECTORS * 4;
constexpr int PARTS = 4;  // a lane's maxima are kept by parts of 8 logits
constexpr int PART = LANE_SIZE / PARTS;
constexpr int PART_WORDS = WORDS / PARTS;
constexpr int CAPACITY = 2 * K > 64 ? 2 * K : 64;  // of a warp's list; room for K more after a cut
constexpr int GROUPS = 2 * K > 32 ? (2 * K > 64 ? 128 : 64) : 32;  // of the first bound
constexpr int GROUP = THREADS / GROUPS;
constexpr int MAX_SPLIT_KEYS = 512;
constexpr int STAGED = K + WARPS * CAPACITY;
constexpr int NO_ID = 0x7fffffff;
constexpr float LOG2_E = 1.44269504f;
constexpr float ALMOST_NOTHING = -5.4e8f;  // about -2^29: stands for the maximum of an empty unit
constexpr float HUGE_LOGIT = 2.68435456e8f;  // 2^28
constexpr u64 NO_KEY = 0;

static_assert(K >= 1 && K <= 64, "K must be 1 to 64");
static_assert(GROUPS >= K && STAGED >= MAX_SPLIT_KEYS && WARPS * CAPACITY >= MAX_SPLIT_KEYS, "room");

// A candidate as one integer: larger is better. Value, then the lower id.
__device__ __forceinline__ u64 make_key(float value, int id) {
    value = value == infinity() ? LARGEST_FLOAT : value + 0.0f;  // -0 is 0
    return (u64)ordered(value) << 32 | (u32)~id;
}
__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }
__device__ __forceinline__ float key_value(u64 key) { return from_ordered((u32)(key >> 32)); }
__device__ __forceinline__ int key_id(u64 key) { return (int)~(u32)key; }

// The float just below: x > below(y) is x >= y. Zeros count as one.
__device__ __forceinline__ float below(float y) {
    if (y == -infinity()) return y;
    return from_ordered(ordered(y == 0.0f ? -0.0f : y) - 1);
}

// NaN becomes -inf, +inf the largest float32. In bf16 +inf stays: nothing else is as large.
__device__ __forceinline__ float cleaned(float x) {
    if (is_nan(x)) return -infinity();
    return !INPUT_BF16 && x == infinity() ? LARGEST_FLOAT : x;
}

// The sum of one unit: sum * 2^reference.
struct UnitSum {
    int reference;
    float sum;
};

// Where a lane's logit e stands in its unit: neighbours share 16 bytes, lanes share a cache line.
__device__ __forceinline__ int place(int e) {
    return e / VECTOR * WARP * VECTOR + threadIdx.x % WARP * VECTOR + e % VECTOR;
}

// What a lane holds of a unit, in registers: the stream never looks at memory twice.
struct Slice {
    u32 word[WORDS];

    __device__ __forceinline__ float value(int e) const {
#if INPUT_BF16
        return e % 2 ? bf16_high(word[e / 2]) : bf16_low(word[e / 2]);
#else
        return float_of(word[e]);
#endif
    }
    // The largest logit of a part, or NaN where one is.
    __device__ __forceinline__ float part_max(int part) const {
        u32 most = word[part * PART_WORDS];
#pragma unroll
        for (int w = 1; w < PART_WORDS; ++w) {
            const u32 next = word[part * PART_WORDS + w];
#if INPUT_BF16
            most = bf16_pair_max_or_nan(most, next);
#else
            most = bits_of(max_or_nan(float_of(most), float_of(next)));
#endif
        }
#if INPUT_BF16
        return max_or_nan(bf16_low(most), bf16_high(most));
#else
        return float_of(most);
#endif
    }
    // How many exceed x, a value that the input's type can have.
    __device__ __forceinline__ u32 count_above(float x) const {
#if INPUT_BF16
        const u32 pair = bits_of(x) | bits_of(x) >> 16;
        u32 counts = 0;  // two, as bf16: at most 16 each
#pragma unroll
        for (int w = 0; w < WORDS; ++w)
            counts = bf16_pair_sum(counts, bf16_pair_above(word[w], pair));
        return (u32)(bf16_low(counts) + bf16_high(counts));
#else
        u32 count = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += float_of(word[w]) > x;
        return count;
#endif
    }
    __device__ __forceinline__ void clean() {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
#if INPUT_BF16
            if (is_nan(bf16_low(word[w]))) word[w] = (word[w] & 0xffff0000u) | 0xff80u;
            if (is_nan(bf16_high(word[w]))) word[w] = (word[w] & 0xffffu) | 0xff800000u;
#else
            word[w] = bits_of(cleaned(float_of(word[w])));
#endif
        }
    }
};

// A lane's largest logits: of each part, and of all.
struct Maxima {
    float part[PARTS];
    float most;

    __device__ __forceinline__ void take(const Slice& slice) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) part[i] = slice.part_max(i);
        most = max_or_nan(max_or_nan(part[0], part[1]), max_or_nan(part[2], part[3]));
    }
};

// One row of logits; numbers count from its start.
struct Row {
    const unsigned char* data;
    int size;
    bool aligned;  // its vectors can be read as such

    __device__ __forceinline__ u32 bits(int i) const {
#if INPUT_BF16
        return __ldg((const u16*)data + i);
#else
        return __ldg((const u32*)data + i);
#endif
    }
    __device__ __forceinline__ float raw(int i) const {
#if INPUT_BF16
        return bf16_low(bits(i));
#else
        return float_of(bits(i));
#endif
    }
    // As a cleaned slice has it; beyond the row -inf.
    __device__ __forceinline__ float value(int i) const {
        return i < size ? cleaned(raw(i)) : -infinity();
    }
    // The unit that starts at `first`; what lies beyond the row is -inf.
    __device__ __forceinline__ Slice load(int first) const {
        Slice slice;
        if (aligned && first + UNIT <= size) {
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
                const i64 number = first + place(j * VECTOR);
                const uint4 v = __ldg((const uint4*)(data + number * (16 / VECTOR)));
                slice.word[4 * j] = v.x, slice.word[4 * j + 1] = v.y;
                slice.word[4 * j + 2] = v.z, slice.word[4 * j + 3] = v.w;
            }
            return slice;
        }
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
#if INPUT_BF16
            const int low = first + place(2 * w);
            slice.word[w] = (low < size ? bits(low) : 0xff80u) |
                            (low + 1 < size ? bits(low + 1) : 0xff80u) << 16;
#else
            const int i = first + place(w);
            slice.word[w] = i < size ? bits(i) : 0xff800000u;
#endif
        }
        return slice;
    }
};

struct Shared {
    u64 best[K];                   // the K best so far, in order; NO_KEY where there are fewer
    u64 list[WARPS][CAPACITY];     // survivors since
    u64 staged[STAGED];
    UnitSum units[MAX_UNITS];      // where a row is not split
    float group_max[GROUPS];
    float bound;
    int count[WARPS];
    int num_best;
    int is_last;
};

__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }

// ---------------------------------------------------------------- log-sum-exp

// Sums of units as integers, so that their order cannot show: a unit's 24-bit sum goes, shifted,
// to the 64-bit word of its binary exponent's bin of 32. The top bin and the one below are kept;
// what falls below them is less than 2^-31 of the whole, unit for unit.
struct Mass {
    int top;  // bin number
    u64 high, low;
};

constexpr int NO_BIN = -0x40000000;
constexpr int CHUNK = 22;  // bits summed at once: 32 lanes' sums stay below 2^32

__device__ __forceinline__ u64 warp_sum(u64 x) {
    const u64 mask = (1u << CHUNK) - 1;
    const u64 a = __reduce_add_sync(ALL_LANES, (u32)(x & mask));
    const u64 b = __reduce_add_sync(ALL_LANES, (u32)(x >> CHUNK & mask));
    const u64 c = __reduce_add_sync(ALL_LANES, (u32)(x >> 2 * CHUNK));
    return a + (b << CHUNK) + (c << 2 * CHUNK);
}

__device__ __forceinline__ u64 in_bin(const Mass& part, int bin) {
    return part.top == bin ? part.high : part.top - 1 == bin ? part.low : 0;
}

// The sum of every lane's part: the same in all lanes. All lanes of the warp take part.
__device__ __forceinline__ Mass sum_masses(const Mass& part) {
    Mass total;
    total.top = __reduce_max_sync(ALL_LANES, part.top);
    total.high = warp_sum(in_bin(part, total.top));
    total.low = warp_sum(in_bin(part, total.top - 1));
    return total;
}

__device__ __forceinline__ void add(Mass& mass, int bin, u64 amount) {
    if (bin > mass.top) {
        mass.low = bin == mass.top + 1 ? mass.high : 0;
        mass.high = 0;
        mass.top = bin;
    }
    if (bin == mass.top) mass.high += amount;
    if (bin == mass.top - 1) mass.low += amount;
}

// By one warp.
__device__ __forceinline__ Mass sum_units(const UnitSum* units, int num_units) {
    Mass mine = {NO_BIN, 0, 0};
#pragma unroll 1
    for (int i = lane_id(); i < num_units; i += WARP) {
        const UnitSum unit = units[i];
        const u32 bits = bits_of(unit.sum);
        if (bits == 0) continue;
        const int exponent = unit.reference + (int)(bits >> 23) - 150;  // of the lowest bit
        const u64 mantissa = (bits & 0x7fffffu) | 0x800000u;
        add(mine, exponent >> 5, mantissa << (exponent & 31));
    }
    return sum_masses(mine);
}

// ln of the mass; `largest` is the row's largest logit.
__device__ double log_sum_exp(const Mass& mass, float largest) {
    if (fabsf(largest) >= HUGE_LOGIT) return largest;
    const double sum = (double)mass.high * 4294967296.0 + (double)mass.low;
    const u64 bits = bits_of(sum);
    const int exponent = (int)(bits >> 52) - 1023;
    const float fraction = (float)double_of((bits & 0xfffffffffffffull) | 1023ull << 52);
    const double log2_sum = 32.0 * (mass.top - 1) + exponent + (double)log2f(fraction);
    return log2_sum * (1.0 / (double)LOG2_E);  // the constant that the exponents were scaled by
}

__device__ int fixed_point(float value, double normaliser) {
    if (value == -infinity()) return SCORE_ABSENT;
    const double logprob = fmin(fmax((double)value - normaliser, -31.5), 0.0);
    return round_to_int(logprob * 4194304.0);
}

// The sum of a warp's unit, in a fixed order, to its place; `most` is the lane's largest logit.
__device__ __forceinline__ void sum_unit(const Slice& slice, float most, UnitSum* units, int first,
                                         int size) {
    const u32 best = __reduce_max_sync(ALL_LANES, ordered(most));
    const float reference = rintf(fmaxf(from_ordered(best), ALMOST_NOTHING) * LOG2_E);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < LANE_SIZE; ++e)
        sum[e % 4] += exp2_fast(fmaf(slice.value(e), LOG2_E, -reference));
    float whole = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
    for (int step = 16; step; step /= 2) whole += __shfl_xor_sync(ALL_LANES, whole, step);
    if (lane_id() == 0 && first < size) units[first / UNIT] = {round_to_int(reference), whole};
}

// ---------------------------------------------------------------- survivors
// Survivors are few, so this part reads them again (from L1) in rolled loops, and stays small.

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

// Lists the logits above `above` behind the `size` already listed, unless there is no room for all:
// then false. Each lane looks through those of its parts that have any.
__device__ __forceinline__ bool put_above(Shared& s, const Row& row, const Maxima& maxima,
                                          int first, int size, float above) {
    u32 parts = 0;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) parts |= (maxima.part[i] > above ? 1u : 0u) << i;
    const int room = CAPACITY - size;
    if ((int)__reduce_add_sync(ALL_LANES, (u32)__popc(parts)) > room) return false;
    u32 hits = 0;
    while (parts) {
        const int start = (__ffs(parts) - 1) * PART;
        parts &= parts - 1;
#pragma unroll
        for (int e = 0; e < PART; ++e)
            hits |= (row.value(first + place(start + e)) > above ? 1u : 0u) << (start + e);
    }
    if ((int)__reduce_add_sync(ALL_LANES, (u32)__popc(hits)) > room) return false;
    const u32 lower = (1u << lane_id()) - 1;
    while (const u32 holders = __ballot_sync(ALL_LANES, hits != 0)) {
        if (hits) {
            const int i = first + place(__ffs(hits) - 1);
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

// A cut that keeps at most `room` >= K logits of a unit and at least its K best above `above`.
// Halves the distance between values until one lies right, or until two neighbours leave no choice
// but to take ties by id.
__device__ __forceinline__ Cut find_cut(const Slice& slice, float most, float above, int room) {
    u32 low = step_of(ordered(above)), high = step_of(__reduce_max_sync(ALL_LANES, ordered(most)));
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

// Lists the survivors of a warp's unit; returns the bound, raised where they are many.
__device__ __forceinline__ u64 keep_survivors(Shared& s, const Row& row, const Maxima& maxima,
                                              int first, u64 bound) {
    float above = threshold(bound, first);
    if (!__any_sync(ALL_LANES, maxima.most > above)) return bound;
    int size = s.count[warp_id()];
    __syncwarp();
    if (put_above(s, row, maxima, first, size, above)) return bound;
    // Too many. Make room for K, then choose among the unit's own.
    size = purge_list(s, size, bound);
    if (size > CAPACITY - K) {
        bound = larger(bound, shorten_list(s, size));
        size = K;
        above = threshold(bound, first);
        if (!__any_sync(ALL_LANES, maxima.most > above)) return bound;
    }
    const Cut cut = find_cut(row.load(first), maxima.most, above, CAPACITY - size);
    if (cut.ties == 0) {
        put_above(s, row, maxima, first, size, cut.above);
        // At least K exceed the cut, so what equals it is out, whatever its id.
        return larger(bound, (u64)ordered(cut.above) << 32 | 0xffffffffu);
    }
    const int last = put_ties(s, row, first, size, cut);
    // Short of K only where fewer than K exceeded `above`; then the last tie says nothing.
    return s.count[warp_id()] - size < K ? bound : larger(bound, make_key(cut.tie, last));
}

// ---------------------------------------------------------------- the block's K best

// A bound for the first segment, from the whole block: the K-th largest of GROUPS maxima, reached
// by at least K logits. As a key that equal values pass.
__device__ __forceinline__ u64 first_bound(Shared& s, float most) {
    const int t = threadIdx.x, part = t % GROUP, mine = t / GROUP;
#pragma unroll
    for (int step = 1; step < GROUP; step *= 2)
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
    if (part == 0) s.group_max[mine] = most;
    __syncthreads();
    int rank = 0;
#pragma unroll 4
    for (int i = part; i < GROUPS; i += GROUP) {
        const float other = s.group_max[i];
        rank += other > most || (other == most && i < mine);
    }
#pragma unroll
    for (int step = 1; step < GROUP; step *= 2)
        rank += __shfl_xor_sync(ALL_LANES, rank, step);
    if (part == 0 && rank == K - 1) s.bound = most;
    __syncthreads();
    const float bound = s.bound;
    return bound == -infinity() ? NO_KEY : (u64)ordered(bound + 0.0f) << 32;
}

// The K best of keys[0 .. size) into s.best, in order, by counting: 8 threads a key. Keys are
// distinct. Ends with a barrier.
__device__ __forceinline__ void rank_keys(Shared& s, const u64* keys, int size) {
    constexpr int PER_KEY = 8, AT_ONCE = THREADS / PER_KEY;
    const int part = threadIdx.x % PER_KEY;
#pragma unroll 1
    for (int base = 0; base < size; base += AT_ONCE) {
        const int i = base + threadIdx.x / PER_KEY;
        const u64 mine = i < size ? keys[i] : ~0ull;
        int rank = 0;
#pragma unroll 4
        for (int j = part; j < size; j += PER_KEY) rank += keys[j] > mine;
#pragma unroll
        for (int step = 1; step < PER_KEY; step *= 2)
            rank += __shfl_xor_sync(ALL_LANES, rank, step);
        if (part == 0 && i < size && rank < K) s.best[rank] = mine;
    }
    if (threadIdx.x >= size && threadIdx.x < K) s.best[threadIdx.x] = NO_KEY;
    if (threadIdx.x == 0) s.num_best = size < K ? size : K;
    __syncthreads();
}

// Ranks all that the warps have listed together with the best so far, and empties the lists.
// All threads of the block; returns the new bound.
__device__ __forceinline__ u64 rank_lists(Shared& s, u64 bound) {
    __syncthreads();
    const int warp = warp_id(), num_best = s.num_best;
    int offset = num_best, size = num_best;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const int count = s.count[w];
        size += count;
        if (w < warp) offset += count;
    }
    if (threadIdx.x < num_best) s.staged[threadIdx.x] = s.best[threadIdx.x];
#pragma unroll 1
    for (int i = lane_id(); i < s.count[warp]; i += WARP) s.staged[offset + i] = s.list[warp][i];
    __syncthreads();
    if (lane_id() == 0) s.count[warp] = 0;
    rank_keys(s, s.staged, size);
    return larger(bound, s.best[K - 1]);
}

// ---------------------------------------------------------------- splits

struct Workspace {
    int* ticket;     // [rows], zero between launches
    u64* keys;       // [rows, splits, K]
    UnitSum* units;  // [rows, units]
};

// Hands a split's K best to the last block of the row; true in all threads of that one.
__device__ __forceinline__ bool publish(Shared& s, const Workspace& work, int row, int split,
                                        int splits) {
    if (threadIdx.x < K)
        work.keys[((i64)row * splits + split) * K + threadIdx.x] = s.best[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        // The barrier brought the block's stores here; the release shows them to all.
        s.is_last = add_acquire_release(&work.ticket[row], 1) == splits - 1;
        if (s.is_last) work.ticket[row] = 0;
    }
    __syncthreads();
    return s.is_last;
}

// The K best of all splits into s.best, their units' sums into s.units. The filter: where every
// split shows its q-th best, the m-th largest of those is reached by m * q >= K keys.
__device__ __forceinline__ void merge_splits(Shared& s, const Workspace& work, int row, int splits,
                                             int num_units) {
    const int size = splits * K, lane = lane_id();
    static_assert(MAX_UNITS == THREADS && sizeof(UnitSum) == sizeof(int2), "a unit a thread");
    if (threadIdx.x < num_units) {
        const i64 i = (i64)row * num_units + threadIdx.x;
        const int2 unit = load_shared_by_blocks((const int2*)work.units + i);
        s.units[threadIdx.x] = {unit.x, float_of((u32)unit.y)};
    }
    static_assert(MAX_SPLIT_KEYS == 2 * THREADS, "two keys a thread");
#pragma unroll
    for (int i = threadIdx.x; i < MAX_SPLIT_KEYS; i += THREADS)
        if (i < size) s.staged[i] = load_shared_by_blocks(work.keys + (i64)row * size + i);
    __syncthreads();
    // The least q with q * splits >= K and the least m with m * q >= K, without a division.
    const int q = 1 + __popc(__ballot_sync(ALL_LANES, (lane + 1) * splits < K));
    const int m = __popc(__ballot_sync(ALL_LANES, lane * q < K));
    const u64 shown = lane < splits ? s.staged[lane * K + q - 1] : NO_KEY;
    int rank = lane < splits ? 0 : WARP;
#pragma unroll 4
    for (int i = 0; i < splits; ++i) {
        const u64 other = s.staged[i * K + q - 1];
        rank += other > shown || (other == shown && i < lane);
    }
    const u32 chosen = __ballot_sync(ALL_LANES, rank == m - 1);
    const u64 bound = __shfl_sync(ALL_LANES, shown, __ffs(chosen) - 1);
    u64* kept = s.list[0];  // the lists are empty and lie in a row
#pragma unroll 1
    for (int base = 0; base < size; base += THREADS) {
        const int i = base + threadIdx.x;
        const u64 key = i < size ? s.staged[i] : NO_KEY;
        const bool keep = key != NO_KEY && key >= bound;
        const u32 keepers = __ballot_sync(ALL_LANES, keep);
        int slot = 0;
        if (lane == 0 && keepers) slot = atomicAdd(&s.count[0], __popc(keepers));
        slot = __shfl_sync(ALL_LANES, slot, 0) + __popc(keepers & ((1u << lane) - 1));
        if (keep) kept[slot] = key;
    }
    __syncthreads();
    rank_keys(s, kept, s.count[0]);
}

// ---------------------------------------------------------------- a row

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
