// The filters of sample_tokens.cu: top-k, top-p, min-p.
//
// Filters keep the first tokens of a row in the order of their places, so a row's filters come down
// to one cut: the first place that is dropped. It is found by halving, each step a pass over the
// row that counts and weighs the tokens before a place, or soon over a short list of them.
#pragma once

#include "sample_row.cuh"

constexpr int LISTED = 2048;  // tokens a row is narrowed to before it is searched

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
