// sample_tokens: the token each row of logits draws, addressed by (seed, position, token).
//
// A draw is argmax(t + noise) over the tokens that top-k, top-p and min-p keep, t being
// (logit - row maximum) / temperature; at temperature 0 it is the argmax of the logits. Of equal
// values the lowest id wins. Noise and filters are those of core/sampling.py. Launches:
//
// adjust_logits   penalties, bias and bans: a sparse list, applied to float32 logits in place
// row_maxima      the largest logit of each split of a row                        grid (M, splits)
// find_cuts       where top-k, top-p and min-p cut a row                                grid (M)
// draw_tokens     the winner of each split                                        grid (M, splits)
// merge_winners   the best of the splits of a row, or of vocabulary shards       one thread a row
//
// logits [M, V] bf16 or float32 (INPUT_BF16), any row stride and alignment; NaN is -inf, +inf the
// largest float32. Per row [M]: temperature float32 (0: greedy), top_k int32 (0: all), top_p and
// min_p float64, seed uint64, position int32. 256 threads a block (find_cuts: 512); a
// lane takes 4 neighbouring tokens, which share one Philox block. A shard starts at first_id, a
// multiple of 4, and is given the maxima of all shards; find_cuts needs whole rows. V <= 262144.
//
// Precision. Logits, t and the sum with the noise are float32, each step rounded as NumPy rounds it
// (no fused multiply-add). The noise is float64 rounded to float32, but only for tokens that may
// win: a float32 estimate, wrong by less than NOISE_SLACK over all 2^32 random words, sorts out the
// rest. Top-p sums are float64 in a fixed order. Oracle: core/sampling.py, tokens exactly, but
// where top-p's sum meets its limit within rounding (1e-13) or the last bit of a float64 logarithm
// decides how the noise rounds.

#ifndef INPUT_BF16
#define INPUT_BF16 0
#endif

#include "overlap.cuh"
#include "sample_cuts.cuh"
#include "sample_noise.cuh"

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

__device__ __forceinline__ float row_maximum(const float* maximum, int number, int parts) {
    float most = -infinity();
    for (int i = 0; i < parts; ++i) most = fmaxf(most, maximum[(i64)number * parts + i]);
    return most;
}

// One list entry: on token `token` of row `row`, do `kind` with `value`. Entries of one token stand
// together, in the order in which they apply.
enum { SCALE = 0, ADD = 1, BAN = 2 };

extern "C" __global__ void __launch_bounds__(THREADS) adjust_logits(
    float* logits, const int* row, const int* token, const int* kind, const float* value,
    i64 stride, int rows, int size, int entries, int first_id) {
    start_behind_previous();
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

// best [M, splits] uint64: the largest logit with its token as a key; NO_KEY where none is finite.
// maximum [M, splits] float32: its value, or -inf.
extern "C" __global__ void __launch_bounds__(THREADS) row_maxima(
    u64* best, float* maximum, const void* logits, i64 stride, int size) {
    __shared__ u64 shared[THREADS / WARP];
    wait_for_previous();
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

// cut uint64 [M]: the first place that is dropped; END where all tokens are kept. size <= 262144.
extern "C" __global__ void __launch_bounds__(CUT_THREADS, 2) find_cuts(
    Place* cut, const float* maximum, const void* logits, const float* temperature,
    const int* top_k, const double* top_p, const double* min_p, i64 stride, int size, int parts) {
    __shared__ CutShared s;
    wait_for_previous();
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

// exact, estimate float32 [count]: the noise of the random words first .. first + count - 1.
extern "C" __global__ void __launch_bounds__(THREADS) noise_of_words(float* exact, float* estimate,
                                                                     u32 first, int count) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    exact[i] = exact_noise(first + i);
    estimate[i] = estimated_noise(first + i);
}

// value float32, id int32 [M, splits]: the winner of each split; -inf and NO_ID where there is
// none. cut may be null: nothing is dropped. `best` and `maximum` are row_maxima's; for a shard,
// `maximum` [M, parts] holds the largest logits of parts of the whole row.
extern "C" __global__ void __launch_bounds__(THREADS) draw_tokens(
    float* value, int* id, const u64* best, const float* maximum, const Place* cut,
    const void* logits, const float* temperature, const u64* seed, const int* position, i64 stride,
    int size, int parts, int first_id) {
    __shared__ u64 shared[THREADS / WARP];
    wait_for_previous();
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

// token [M] int32, 0 where nothing can be drawn; dead [M] int32: 1 there, else 0. The parts of row
// m stand at m * row_stride + p * part_stride.
extern "C" __global__ void __launch_bounds__(THREADS) merge_winners(
    int* token, int* dead, const float* value, const int* id, int rows, int parts, int row_stride,
    int part_stride) {
    start_behind_previous();
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
