// sample_tokens: the token each row of logits draws, addressed by (seed, position, token).
//
// A draw is argmax(t + noise) over the tokens that top-k, top-p and min-p keep, t being
// (logit - row maximum) / temperature; at temperature 0 it is the argmax of the logits. Of equal
// values the lowest id wins. Noise and filters are those of core/sampling.py. Four launches:
//
// adjust_logits   penalties, bias, held-back tokens: a sparse list applied to float32 logits in place
// row_maxima      the largest logit of each split of a row                        grid (M, splits)
// find_cuts       where top-k, top-p and min-p cut a row                                grid (M)
// draw_tokens     the winner of each split                                        grid (M, splits)
// merge_winners   the best of the splits of a row, or of vocabulary shards       one thread a row
//
// logits [M, V] bf16 or float32 (INPUT_BF16), any row stride and alignment; NaN is -inf, +inf the
// largest float32. Per row: temperature float32 [M] (0: greedy), top_k int32 [M] (0: all), top_p and
// min_p float64 [M], seed uint64 [M], position int32 [M]. 256 threads a block (find_cuts: 512); a
// lane takes 4 neighbouring tokens, which share one Philox block. A shard starts at first_id, a
// multiple of 4, and is given the maximum over all shards; find_cuts needs whole rows. V <= 262144.
//
// Precision. Logits, t and the sum with the noise are float32, each step rounded as NumPy rounds it
// (no fused multiply-add). The noise is float64 rounded to float32, but only for tokens that may
// win: a float32 estimate, wrong by less than NOISE_SLACK over all 2^32 random words, sorts out the
// rest. Top-p sums are float64 in a fixed order. Oracle: core/sampling.py, tokens exactly, but
// where top-p's sum meets its limit within rounding (1e-13) or the last bit of a float64 logarithm
// decides how the noise rounds.
#include "common.cuh"

#ifndef INPUT_BF16
#define INPUT_BF16 0
#endif

constexpr int THREADS = 256, CUT_THREADS = 512;
constexpr int NEIGHBOURS = 4;  // words of a Philox block
constexpr int NO_ID = 0x7fffffff;
constexpr u64 NO_KEY = 0;
constexpr float MOST_NOISE = 22.9f;          // -log(-log(1 - 2^-33)) is 22.874
constexpr float NOISE_SLACK = 0.0009765625f;  // of an estimate of t + noise; seen: a tenth of it
constexpr int LISTED = 2048;                  // tokens a row is narrowed to before it is searched

__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP; }

__device__ __forceinline__ float cleaned(float x) {
    return is_nan(x) ? -infinity() : x == infinity() ? LARGEST_FLOAT : x;
}

__device__ __forceinline__ u64 make_key(float value, int id) {
    return (u64)ordered(value + 0.0f) << 32 | (u32)~id;
}
__device__ __forceinline__ float key_value(u64 key) { return from_ordered((u32)(key >> 32)); }
__device__ __forceinline__ int key_id(u64 key) { return (int)~(u32)key; }

struct Row {
    const unsigned char* data;
    int size;
    bool aligned;  // 4 neighbours can be read at once

    __device__ __forceinline__ float at(int i) const {
#if INPUT_BF16
        return cleaned(bf16_low(__ldg((const u16*)data + i)));
#else
        return cleaned(__ldg((const float*)data + i));
#endif
    }
    // Logits first .. first + 3, cleaned; -inf beyond the row.
    __device__ __forceinline__ void load(int first, float (&x)[NEIGHBOURS]) const {
        if (aligned && first + NEIGHBOURS <= size) {
#if INPUT_BF16
            const uint2 v = __ldg((const uint2*)((const u16*)data + first));
            x[0] = bf16_low(v.x), x[1] = bf16_high(v.x), x[2] = bf16_low(v.y), x[3] = bf16_high(v.y);
#else
            const uint4 v = __ldg((const uint4*)((const float*)data + first));
            x[0] = float_of(v.x), x[1] = float_of(v.y), x[2] = float_of(v.z), x[3] = float_of(v.w);
#endif
#pragma unroll
            for (int i = 0; i < NEIGHBOURS; ++i) x[i] = cleaned(x[i]);
        } else {
#pragma unroll
            for (int i = 0; i < NEIGHBOURS; ++i) x[i] = first + i < size ? at(first + i) : -infinity();
        }
    }
};

__device__ __forceinline__ Row row_of(const void* logits, i64 stride, int size, int number) {
    constexpr int BYTES = INPUT_BF16 ? 2 : 4;
    const unsigned char* data = (const unsigned char*)logits + number * stride * BYTES;
    return {data, size, (u64)data % (BYTES * NEIGHBOURS) == 0};
}

// Tokens of a split: whole groups of neighbours.
struct Span {
    int begin, end;
};
__device__ __forceinline__ Span span_of(int size, int split, int splits) {
    const int groups = (size + NEIGHBOURS - 1) / NEIGHBOURS;
    const int each = (groups + splits - 1) / splits;
    const int begin = min(split * each, groups) * NEIGHBOURS;
    return {begin, min(begin + each * NEIGHBOURS, size)};
}

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// The block's largest key, in thread 0.
__device__ __forceinline__ u64 block_max(u64 key, u64* shared) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        key = larger(key, __shfl_xor_sync(ALL_LANES, key, step));
    if (lane_id() == 0) shared[threadIdx.x / WARP] = key;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < THREADS / WARP; ++w) key = larger(key, shared[w]);
    return key;
}

// ---------------------------------------------------------------- adjustments

// One list entry: on token `token` of row `row`, do `kind` with `value`. Entries of one token stand
// together, in the order in which they apply.
enum { SCALE = 0, ADD = 1, BAN = 2 };

extern "C" __global__ void __launch_bounds__(THREADS) adjust_logits(
    float* logits, const int* row, const int* token, const int* kind, const float* value,
    i64 stride, int rows, int size, int entries, int first_id) {
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= entries) return;
    const int own_row = row[i], own_token = token[i], column = own_token - first_id;
    if (i > 0 && row[i - 1] == own_row && token[i - 1] == own_token) return;  // another's
    if (own_row < 0 || own_row >= rows || column < 0 || column >= size) return;
    float x = cleaned(logits[own_row * stride + column]);
    for (; i < entries && row[i] == own_row && token[i] == own_token; ++i) {
        const float by = value[i];
        if (kind[i] == SCALE) {
            x = x > 0.0f ? divide(x, by) : multiply(x, by);
        } else {
            x = kind[i] == ADD ? plus(x, by) : -infinity();
        }
    }
    logits[own_row * stride + column] = x;
}

// ---------------------------------------------------------------- maxima

// best [M, splits] uint64: the largest logit with its token as a key; NO_KEY where none is finite.
// maximum [M, splits] float32: its value, or -inf.
extern "C" __global__ void __launch_bounds__(THREADS) row_maxima(
    u64* best, float* maximum, const void* logits, i64 stride, int size) {
    __shared__ u64 shared[THREADS / WARP];
    const int number = blockIdx.x, split = blockIdx.y, splits = gridDim.y;
    const Row row = row_of(logits, stride, size, number);
    const Span span = span_of(size, split, splits);
    float most = -infinity();
    int where = 0;
#pragma unroll 2
    for (int i = span.begin + threadIdx.x * NEIGHBOURS; i < span.end; i += THREADS * NEIGHBOURS) {
        float x[NEIGHBOURS];
        row.load(i, x);
#pragma unroll
        for (int j = 0; j < NEIGHBOURS; ++j)
            if (x[j] > most) most = x[j], where = i + j;
    }
    const u64 key = block_max(most == -infinity() ? NO_KEY : make_key(most, where), shared);
    if (threadIdx.x == 0) {
        best[(i64)number * splits + split] = key;
        maximum[(i64)number * splits + split] = key == NO_KEY ? -infinity() : key_value(key);
    }
}

__device__ __forceinline__ float row_maximum(const float* maximum, int number, int parts) {
    float most = -infinity();
    for (int i = 0; i < parts; ++i) most = fmaxf(most, maximum[(i64)number * parts + i]);
    return most;
}

// ---------------------------------------------------------------- filters
// Filters keep the first tokens of a row in the order of their places, so a row's filters come down
// to one cut: the first place that is dropped. It is found by halving, each step a pass over the
// row that counts and weighs the tokens before a place, or soon over a short list of them.

// A token's place in the order of falling t, then rising id: the bits of |t|, which ascend as t
// falls, then the id.
typedef u64 Place;
constexpr int ID_BITS = 18;
constexpr Place END = (Place)0x7f800001u << ID_BITS;  // behind t = -inf
// Weights from here on, a whole vocabulary of them, are lost beside the largest in float64.
constexpr float NO_WEIGHT_FROM = 52.0f;

__device__ __forceinline__ Place place_of(float x, float most, float temperature, int id) {
    const u32 fall = bits_of(divide(minus(x, most), temperature)) & 0x7fffffffu;
    return (Place)fall << ID_BITS | (u32)id;
}
__device__ __forceinline__ float fall_at(Place place) { return float_of((u32)(place >> ID_BITS)); }
__device__ __forceinline__ double weight_of(float fall) { return exp(-(double)fall); }

// The tokens before a place: how many, and their weights' sum.
struct Before {
    int count;
    double mass;
};

struct CutShared {
    Place listed[LISTED];
    Place end;
    double mass[CUT_THREADS / WARP];
    int count[CUT_THREADS / WARP];
};

// The row itself, or once it is narrowed the places listed in shared memory.
struct Tokens {
    Row row;
    float most, temperature;
    int num_listed;  // -1: not narrowed
};

// Calls visit(place) for this thread's tokens, always in the same order.
template <class Visit>
__device__ __forceinline__ void each_token(const Tokens& tokens, const CutShared& s,
                                           const Visit& visit) {
    if (tokens.num_listed >= 0) {
#pragma unroll 1
        for (int i = threadIdx.x; i < tokens.num_listed; i += CUT_THREADS) visit(s.listed[i]);
        return;
    }
#pragma unroll 1
    for (int i = threadIdx.x * NEIGHBOURS; i < tokens.row.size; i += CUT_THREADS * NEIGHBOURS) {
        float x[NEIGHBOURS];
        tokens.row.load(i, x);
#pragma unroll
        for (int j = 0; j < NEIGHBOURS; ++j)
            if (i + j < tokens.row.size)
                visit(place_of(x[j], tokens.most, tokens.temperature, i + j));
    }
}

// The sum over the block, the same in all threads, in a fixed order.
__device__ __forceinline__ Before block_sum(Before own, CutShared& s) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        own.count += __shfl_xor_sync(ALL_LANES, own.count, step);
        own.mass += __shfl_xor_sync(ALL_LANES, own.mass, step);
    }
    if (lane_id() == 0) {
        s.count[threadIdx.x / WARP] = own.count;
        s.mass[threadIdx.x / WARP] = own.mass;
    }
    __syncthreads();
    Before all = {0, 0.0};
#pragma unroll 4
    for (int w = 0; w < CUT_THREADS / WARP; ++w) all.count += s.count[w], all.mass += s.mass[w];
    __syncthreads();
    return all;
}

// Lists the tokens before `end`, of which `own` are this thread's and at most LISTED the block's,
// in an order that the row alone decides.
__device__ __forceinline__ void narrow(Tokens& tokens, CutShared& s, Place end, int own) {
    int through = own;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int from = __shfl_up_sync(ALL_LANES, through, step);
        if (lane_id() >= step) through += from;
    }
    if (lane_id() == WARP - 1) s.count[threadIdx.x / WARP] = through;
    __syncthreads();
    int slot = through - own, size = 0;
#pragma unroll 4
    for (int w = 0; w < CUT_THREADS / WARP; ++w) {
        if (w < (int)threadIdx.x / WARP) slot += s.count[w];
        size += s.count[w];
    }
    each_token(tokens, s, [&](Place place) {
        if (place < end) s.listed[slot++] = place;
    });
    __syncthreads();
    tokens.num_listed = size;
}

// A token is kept where it stands before `end`, fewer than `count` tokens stand before it, and
// those weigh less than `mass`.
struct Limits {
    int count;
    double mass;
    Place end;
};

struct Cut {
    Place place;
    Before before;  // its mass is not counted where place is END and a limit binds
};

// The first place at which nothing is kept any more.
__device__ __forceinline__ Cut find_cut(Tokens& tokens, CutShared& s, const Limits& limits) {
    const int size = tokens.row.size;
    const bool binds = limits.end == END && (limits.count < size || limits.mass < 1e300);
    Place open = 0;
    int open_count = 0;  // tokens before `open`, which keep within the limits
    Cut closed = {limits.end, {size, 0.0}};
    // The end is probed first unless a limit binds before it for sure; then places where a sure
    // model's candidates end: t = -4, -16, ..; then halves.
    const Place first_guess = (Place)bits_of(4.0f) << ID_BITS;
    Place probe = binds ? first_guess : limits.end;
    bool at_end = !binds, guessing = tokens.num_listed < 0;
#pragma unroll 1
    do {
        if (!at_end && (!guessing || probe <= open || probe >= closed.place))
            probe = open + (closed.place - open) / 2;
        Before own = {0, 0.0};
        each_token(tokens, s, [&](Place place) {
            if (place >= probe) return;
            const float fall = fall_at(place);
            ++own.count;
            if (fall < NO_WEIGHT_FROM) own.mass += weight_of(fall);
        });
        const Before before = block_sum(own, s);
        const bool reached = before.count >= limits.count || before.mass >= limits.mass;
        if (reached || at_end) {
            closed = {probe, before};
            if (tokens.num_listed < 0 && before.count <= LISTED)
                narrow(tokens, s, probe, own.count);
        }
        if (at_end && !reached) break;
        if (!reached) open = probe, open_count = before.count;
        if (at_end) {
            probe = first_guess;
            at_end = false;
        } else if (guessing && !reached && probe < (Place)bits_of(512.0f) << ID_BITS) {
            probe += (Place)(2u << 23) << ID_BITS;
        } else {
            guessing = false;
            probe = 0;
        }
        // One token between: it is kept, being the first that is not before `open`.
    } while (closed.place - open > 1 && closed.before.count - open_count > 1);
    return closed;
}

// The least fall whose weight is below min_p, as a place.
__device__ Place end_of_min_p(double min_p) {
    u32 open = 0, closed = (u32)(END >> ID_BITS);
#pragma unroll 1
    while (closed - open > 1) {
        const u32 middle = open + (closed - open) / 2;
        (weight_of(float_of(middle)) < min_p ? closed : open) = middle;
    }
    return (Place)closed << ID_BITS;
}

// cut uint64 [M]: the first place that is dropped; END where all tokens are kept. size <= 262144.
extern "C" __global__ void __launch_bounds__(CUT_THREADS, 2) find_cuts(
    Place* cut, const float* maximum, const void* logits, const float* temperature,
    const int* top_k, const double* top_p, const double* min_p, i64 stride, int size, int parts) {
    __shared__ CutShared s;
    const int number = blockIdx.x, k = top_k[number];
    const float most = row_maximum(maximum, number, parts), heat = temperature[number];
    const double p = top_p[number], least = min_p[number];
    Cut found = {END, {0, 0.0}};
    if (heat > 0.0f && most > -infinity() && (k > 0 || p < 1.0 || least > 0.0)) {
        if (threadIdx.x == 0) s.end = least > 0.0 ? end_of_min_p(least) : END;
        __syncthreads();
        Tokens tokens = {row_of(logits, stride, size, number), most, heat, -1};
        Limits limits = {k > 0 && k < size ? k : NO_ID, 1e300, END};
        // Top-p is a share of what top-k leaves: the first turn finds how much that is.
#pragma unroll 1
        for (int turn = p < 1.0 ? 0 : 1; turn < 2; ++turn) {
            if (turn == 1) {
                if (p < 1.0) limits.mass = p * found.before.mass;
                limits.end = min(s.end, found.place);
            }
            found = find_cut(tokens, s, limits);
        }
    }
    if (threadIdx.x == 0) cut[number] = found.place;
}

// ---------------------------------------------------------------- noise

struct Words {
    u32 word[NEIGHBOURS];
};

// Philox4x32-10 at counter (group, position, 0, 0).
__device__ __forceinline__ Words philox(u32 group, u32 position, u64 seed) {
    u32 c0 = group, c1 = position, c2 = 0, c3 = 0;
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 even = (u64)0xD2511F53u * c0, odd = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(odd >> 32) ^ c1 ^ k0, c2 = (u32)(even >> 32) ^ c3 ^ k1;
        c1 = (u32)odd, c3 = (u32)even;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

__device__ __noinline__ float exact_noise(u32 word) {
    const double uniform = ((double)word + 0.5) * 2.3283064365386963e-10;  // 2^-32
    return (float)-log(-log(uniform));
}

// exact_noise within half of NOISE_SLACK. Near 1 the logarithm is taken of the distance from 1,
// which float32 still knows.
__device__ __forceinline__ float estimated_noise(u32 word) {
    constexpr float LN_2 = 0.693147181f, SCALE = 2.3283064365386963e-10f;
    const float rest = ((float)~word + 0.5f) * SCALE;
    const float near_one = fmaf(0.5f * rest, rest, rest);
    const float wide = -LN_2 * log2_fast(((float)word + 0.5f) * SCALE);
    return -LN_2 * log2_fast(~word < 1u << 24 ? near_one : wide);
}

// exact, estimate float32 [count]: the noise of the random words first .. first + count - 1.
extern "C" __global__ void __launch_bounds__(THREADS) noise_of_words(float* exact, float* estimate,
                                                                     u32 first, int count) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    exact[i] = exact_noise(first + i);
    estimate[i] = estimated_noise(first + i);
}

// ---------------------------------------------------------------- draws

// value float32, id int32 [M, splits]: the winner of each split; -inf and NO_ID where there is none.
// cut may be null: nothing is dropped. `best` and `maximum` are row_maxima's; for a shard, `maximum`
// [M, parts = 1] is that of the whole row.
extern "C" __global__ void __launch_bounds__(THREADS) draw_tokens(
    float* value, int* id, const u64* best, const float* maximum, const Place* cut,
    const void* logits, const float* temperature, const u64* seed, const int* position, i64 stride, int size, int parts, int first_id) {
    __shared__ u64 shared[THREADS / WARP];
    const int number = blockIdx.x, split = blockIdx.y, splits = gridDim.y;
    const i64 out = (i64)number * splits + split;
    const float heat = temperature[number];
    u64 winner = NO_KEY;
    if (heat == 0.0f) {
        winner = best[out];
    } else {
        const Row row = row_of(logits, stride, size, number);
        const Span span = span_of(size, split, splits);
        const float most = row_maximum(maximum, number, parts), inverse = divide(1.0f, heat);
        const Place end = cut == nullptr ? END : cut[number];
        // An estimate of t below this is surely dropped: estimates are off by a few parts in 2^24.
        const float lowest = end >> ID_BITS >= 0x7f800000u ? -LARGEST_FLOAT
                                                           : fall_at(end) * -1.00001f - 1e-30f;
        const u64 own_seed = seed[number];
        const u32 own_position = (u32)position[number];
        float bar = -infinity();  // an estimate below it cannot win
        // All lanes run alike: the last round is padded with -inf.
        for (int base = span.begin; base < span.end; base += THREADS * NEIGHBOURS) {
            const int i = base + threadIdx.x * NEIGHBOURS;
            float x[NEIGHBOURS], estimate[NEIGHBOURS];
            row.load(i < span.end ? i : size, x);
            float top = -infinity();
#pragma unroll
            for (int j = 0; j < NEIGHBOURS; ++j) {
                estimate[j] = (x[j] - most) * inverse;
                if (!(estimate[j] >= lowest)) estimate[j] = -infinity();
                top = fmaxf(top, estimate[j]);
            }
            if (!__any_sync(ALL_LANES, top > -infinity() && top + MOST_NOISE >= bar)) continue;
            const Words words = philox((u32)(first_id + i) / NEIGHBOURS, own_position, own_seed);
            top = -infinity();
#pragma unroll
            for (int j = 0; j < NEIGHBOURS; ++j) {
                estimate[j] += estimated_noise(words.word[j]);
                top = fmaxf(top, estimate[j]);
            }
            if (!__any_sync(ALL_LANES, top > -infinity() && top >= bar)) continue;
#pragma unroll
            for (int j = 0; j < NEIGHBOURS; ++j) {
                if (!(estimate[j] > -infinity() && estimate[j] >= bar)) continue;
                const Place place = place_of(x[j], most, heat, i + j);
                if (place >= end) continue;
                const float sum = plus(-fall_at(place), exact_noise(words.word[j]));
                winner = larger(winner, make_key(sum, first_id + i + j));
            }
            const u32 highest = __reduce_max_sync(ALL_LANES, (u32)(winner >> 32));
            if (highest != 0) bar = from_ordered(highest) - NOISE_SLACK;
        }
    }
    winner = block_max(winner, shared);
    if (threadIdx.x == 0) {
        const bool greedy = heat == 0.0f;
        value[out] = winner == NO_KEY ? -infinity() : key_value(winner);
        id[out] = winner == NO_KEY ? NO_ID : key_id(winner) + (greedy ? first_id : 0);
    }
}

// token [M] int32, 0 where nothing can be drawn, and dead [M] int32: 1 there, else 0. The parts of row m
// stand at m * row_stride + p * part_stride.
extern "C" __global__ void __launch_bounds__(THREADS) merge_winners(
    int* token, int* dead, const float* value, const int* id, int rows, int parts, int row_stride,
    int part_stride) {
    const int number = blockIdx.x * THREADS + threadIdx.x;
    if (number >= rows) return;
    float most = -infinity();
    int winner = NO_ID;
    for (int p = 0; p < parts; ++p) {
        const i64 at = (i64)number * row_stride + (i64)p * part_stride;
        const float x = value[at];
        if (x > most || (x == most && id[at] < winner)) most = x, winner = id[at];
    }
    token[number] = winner == NO_ID ? 0 : winner;
    dead[number] = winner == NO_ID;
}
