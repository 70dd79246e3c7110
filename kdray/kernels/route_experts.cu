// The router's choice of experts for each row (Ops.route_experts).
//
// score = sigmoid(logit); choice = score + bias. Of NUM_GROUPS groups of neighbouring experts the
// TOP_GROUPS with the largest sums of their two best choices are kept (all where there is one
// group); the TOP_K best choices within them win. Equals go to the lower expert, the lower group.
// weight = score (the bias steers, it does not weigh), over the sum of the row's winners where
// `normalize`, times scale.
//
// outputs  expert [T, TOP_K] int64, best first;  weight [T, TOP_K] float32
// inputs   logits [T, NUM_EXPERTS] float32, contiguous;  bias [NUM_EXPERTS] float32
//          slot, num_nodes [T / nodes] int32, or null: row r * nodes + i is padding where
//          i >= num_nodes[r] or slot[r] < 0. It has experts -1 of weight 0, so that it costs nothing.
//
// Grid (nodes, T / nodes), or T where there is no padding; a block a row, thread e holds expert e.
// Each warp ranks its TOP_K best, a reduction each, and leaves them in shared memory in order. For
// each of these candidates it is then counted how many are ahead: at 1 row 0.5 us faster than to take
// the best off the lists one after another, at 2,048 rows 0.9 slower. A choice is an integer key in
// the order of floats, NaN above all as in torch.sort. The code is small because one row runs it
// once, and fetching it is dear.
// Limits: NUM_EXPERTS up to 1024 in NUM_GROUPS up to 32 groups, TOP_K up to 32; T / nodes up to
// 65,535 where there is padding.
// Selection is exact on float32 scores. Oracle: reference_fused.py; experts exactly but where two
// choices lie within the last bits of the exponential (3e-7), weights within 1e-6 relatively.

#ifndef NUM_EXPERTS
#define NUM_EXPERTS 384
#endif
#ifndef TOP_K
#define TOP_K 8
#endif
#ifndef NUM_GROUPS
#define NUM_GROUPS 1
#endif
#ifndef TOP_GROUPS
#define TOP_GROUPS 1
#endif

#include "common.cuh"
#include "overlap.cuh"

constexpr int WARPS = (NUM_EXPERTS + WARP - 1) / WARP;
constexpr int THREADS = WARPS * WARP;
constexpr int GROUP = NUM_EXPERTS / NUM_GROUPS;
constexpr u32 TAKEN = 0, NOBODY = 1;  // below the key of any float
static_assert(NUM_EXPERTS <= 1024, "a thread an expert");
static_assert(NUM_EXPERTS % NUM_GROUPS == 0 && NUM_GROUPS <= WARP, "a lane a group");
static_assert(TOP_K <= WARP && TOP_K <= NUM_EXPERTS, "a lane a winner");

struct Candidate {
    int expert;
    float score;
};

struct Shared {
    alignas(16) u32 best[WARPS * TOP_K];  // keys of the warps' lists, each best first
    Candidate candidate[WARPS * TOP_K];   // whose they are
    Candidate winner[TOP_K];
    u32 key[NUM_EXPERTS];
    alignas(16) u32 group[NUM_GROUPS];
};

__device__ __forceinline__ u32 key_of(float choice)
{
    return ordered(is_nan(choice) ? float_of(0x7fc00000u) : choice);
}
__device__ __forceinline__ u32 lanes_below() { return (1u << lane_id()) - 1; }

// The key of the sum of a warp's two best choices, of which each lane knows two.
__device__ __forceinline__ u32 pair_key(u32 first, u32 second)
{
    const u32 top = __reduce_max_sync(ALL_LANES, first);
    const bool twice = __popc(__ballot_sync(ALL_LANES, first == top)) > 1;
    const u32 next = __reduce_max_sync(ALL_LANES, first == top && !twice ? second : first);
    return key_of(from_ordered(top) + (GROUP > 1 ? from_ordered(next) : 0.0f));
}

// Bit g: group g is among the best. Every warp finds all of it.
__device__ __forceinline__ u32 best_groups(Shared& s, u32 key)
{
    const int lane = lane_id(), warp = threadIdx.x / WARP;
    if (GROUP == WARP) {
        const u32 sum = pair_key(key, TAKEN);
        if (lane == 0) s.group[warp] = sum;
    } else {
        if (threadIdx.x < NUM_EXPERTS) s.key[threadIdx.x] = key;
        __syncthreads();
#pragma unroll 1
        for (int g = warp; g < NUM_GROUPS; g += WARPS) {
            u32 first = TAKEN, second = TAKEN;
            for (int i = lane; i < GROUP; i += WARP) {
                const u32 other = s.key[g * GROUP + i];
                second = max(second, min(first, other));
                first = max(first, other);
            }
            const u32 sum = pair_key(first, second);
            if (lane == 0) s.group[g] = sum;
        }
    }
    __syncthreads();
    const u32 own = lane < NUM_GROUPS ? s.group[lane] : TAKEN;
    int rank = 0;
#pragma unroll
    for (int g = 0; g < NUM_GROUPS; ++g) rank += s.group[g] > own || (s.group[g] == own && g < lane);
    return __ballot_sync(ALL_LANES, lane < NUM_GROUPS && rank < TOP_GROUPS);
}

// Of a lane's key among its warp's, or TOP_K and more where it is not of the best: keys descending,
// lanes ascending among equals.
__device__ __forceinline__ int rank_in_warp(u32 key)
{
    int turn = 0;  // in which it is taken, together with its equals
#pragma unroll 4
    for (int n = 0; n < TOP_K; ++n) {
        const u32 top = __reduce_max_sync(ALL_LANES, key);
        if (key == top) key = TAKEN;
        turn += min(key, 1u);  // unless it is taken
    }
    const int taken = __popc(__ballot_sync(ALL_LANES, turn < TOP_K));
    if (TOP_K < WARP && taken == TOP_K) return turn;  // one each turn
    int rank = WARP;
#pragma unroll 1
    for (int n = 0, before = 0; before < TOP_K; ++n) {
        const u32 equals = __ballot_sync(ALL_LANES, turn == n);
        if (turn == n) rank = before + __popc(equals & lanes_below());
        before += __popc(equals);
    }
    return rank;
}

// Several neighbouring lanes share the work of a candidate, each counting in some of the lists.
__device__ __forceinline__ void merge(Shared& s)
{
    constexpr int PARTS = TOP_K > 16 ? 1 : TOP_K > 8 ? 2 : TOP_K > 4 ? 4 : 8;
    const int part = threadIdx.x % PARTS;
    const int own = min((int)threadIdx.x / PARTS, WARPS * TOP_K - 1), list = own / TOP_K;
    const u32 key = s.best[own];
    const Candidate candidate = s.candidate[own];
    int rank = part == 0 ? own % TOP_K : 0;
#pragma unroll 1
    for (int l = part; l < WARPS; l += PARTS) {
        // Equals of lists in front are ahead as well; the own list has been counted.
        const u32 beaten = l < list ? key - 1 : l == list ? 0xffffffffu : key;
#pragma unroll
        for (int i = 0; i < TOP_K; ++i)  // by the borrow, for which no predicate is waited for
            rank -= (int)(((u64)beaten - s.best[l * TOP_K + i]) >> 32);
    }
#pragma unroll
    for (int by = 1; by < PARTS; by *= 2) rank += __shfl_xor_sync(ALL_LANES, rank, by);
    // Threads without a candidate hold the last one, as its own lanes do.
    if (part == 0 && rank < TOP_K) s.winner[rank] = candidate;
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
route_experts(i64* expert, float* weight, const float* logits, const float* bias, int normalize,
              float scale, const int* slot, const int* num_nodes)
{
    __shared__ Shared s;
    const int node = blockIdx.x, request = blockIdx.y;
    const int row = request * gridDim.x + node;
    const int e = threadIdx.x;
    const bool there = NUM_EXPERTS == THREADS || e < NUM_EXPERTS;
    const float steer = there ? bias[e] : 0.0f;
    start_behind_previous();
    // All loads before the first use, so that their trips to memory overlap.
    const float logit = there ? logits[(i64)row * NUM_EXPERTS + e] : 0.0f;
    int live_nodes = gridDim.x, place = 0;
    if (num_nodes != nullptr) {
        live_nodes = num_nodes[request];
        place = slot[request];
    }
    const float score = divide(1.0f, 1.0f + expf(-logit));
    const i64 out = (i64)row * TOP_K + e;
    if (node >= live_nodes || place < 0) {
        if (e >= TOP_K) return;
        expert[out] = -1;
        weight[out] = 0.0f;
        return;
    }
    u32 key = there ? key_of(plus(score, steer)) : NOBODY;
    if (NUM_GROUPS > 1) {
        const u32 kept = best_groups(s, key);
        // Behind every other, yet never twice: as -inf, not as taken.
        if (there && !(kept >> (e / GROUP) & 1)) key = key_of(-infinity());
    }
    const int rank = rank_in_warp(key);
    if (rank < TOP_K) {
        const int at = e / WARP * TOP_K + rank;
        s.best[at] = key;
        s.candidate[at] = {e, score};
    }
    __syncthreads();
    merge(s);
    if (e >= TOP_K) return;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < TOP_K; ++n) sum = plus(sum, s.winner[n].score);
    const Candidate own = s.winner[e];
    const float share = normalize ? divide(own.score, plus(sum, 1e-20f)) : own.score;
    expert[out] = own.expert;
    weight[out] = multiply(share, scale);
}
