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
// Grid T blocks of one warp, one a row. Lane l holds experts l * SLOTS .. of it, so that the lowest
// lane among equals holds the lowest expert; a choice is an integer key in the order of floats, NaN
// above all as in torch.sort. A winner costs one reduction and a ballot.
// Limits: NUM_EXPERTS up to 1024 in NUM_GROUPS up to 32 groups, TOP_K up to 32.
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

constexpr int SLOTS = (NUM_EXPERTS + WARP - 1) / WARP;
constexpr int GROUP = NUM_EXPERTS / NUM_GROUPS;
constexpr u32 TAKEN = 0;  // below the key of any float
static_assert(NUM_EXPERTS <= 1024, "scores must fit the registers of a warp");
static_assert(NUM_EXPERTS % NUM_GROUPS == 0 && NUM_GROUPS <= WARP, "a lane a group");
static_assert(TOP_K <= WARP && TOP_K <= NUM_EXPERTS, "a lane a winner");

struct Shared {
    float score[NUM_EXPERTS];
    u32 key[NUM_EXPERTS];
    int winner[TOP_K];
};

__device__ __forceinline__ u32 key_of(float choice)
{
    return ordered(is_nan(choice) ? float_of(0x7fc00000u) : choice);
}

// Bit g: group g is among the best. A lane a group.
__device__ __forceinline__ u32 best_groups(const Shared& s)
{
    const int lane = lane_id();
    u32 own = TAKEN;
    if (lane < NUM_GROUPS) {
        u32 first = TAKEN, second = TAKEN;
        for (int i = 0; i < GROUP; ++i) {
            // Lanes start apart, or else they would meet in one bank.
            const u32 key = s.key[lane * GROUP + (i + lane) % GROUP];
            second = max(second, min(first, key));
            first = max(first, key);
        }
        const float sum = from_ordered(first) + (GROUP > 1 ? from_ordered(second) : 0.0f);
        own = key_of(sum);
    }
    int rank = 0;
#pragma unroll
    for (int g = 0; g < NUM_GROUPS; ++g) {
        const u32 other = __shfl_sync(ALL_LANES, own, g);
        rank += other > own || (other == own && g < lane);
    }
    return __ballot_sync(ALL_LANES, lane < NUM_GROUPS && rank < TOP_GROUPS);
}

// The TOP_K largest keys of the warp, one after another, into s.winner.
__device__ __forceinline__ void choose(Shared& s, u32 (&key)[SLOTS])
{
    const int lane = lane_id();
    u32 best = TAKEN;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) best = max(best, key[i]);
#pragma unroll
    for (int n = 0; n < TOP_K; ++n) {
        const u32 top = __reduce_max_sync(ALL_LANES, best);
        const u32 holders = __ballot_sync(ALL_LANES, best == top);
        if (lane != __ffs(holders) - 1) continue;
        bool found = false;
        best = TAKEN;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            if (!found && key[i] == top) {
                found = true;
                key[i] = TAKEN;
                s.winner[n] = lane * SLOTS + i;
            }
            best = max(best, key[i]);
        }
    }
    __syncwarp();
}

__device__ __forceinline__ bool is_padding(int row, const int* slot, const int* num_nodes, int nodes)
{
    if (num_nodes == nullptr) return false;
    const int request = row / nodes;
    return row - request * nodes >= num_nodes[request] || slot[request] < 0;
}

extern "C" __global__ void __launch_bounds__(32)
route_experts(i64* expert, float* weight, const float* logits, const float* bias, int normalize,
              float scale, const int* slot, const int* num_nodes, int nodes)
{
    __shared__ Shared s;
    start_behind_previous();
    const i64 row = blockIdx.x;
    const int lane = lane_id();
    if (is_padding(blockIdx.x, slot, num_nodes, nodes)) {
        if (lane >= TOP_K) return;
        expert[row * TOP_K + lane] = -1;
        weight[row * TOP_K + lane] = 0.0f;
        return;
    }
    float logit[SLOTS], steer[SLOTS];
    u32 key[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const int e = lane * SLOTS + i;
        logit[i] = e < NUM_EXPERTS ? logits[row * NUM_EXPERTS + e] : 0.0f;
        steer[i] = e < NUM_EXPERTS ? bias[e] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const int e = lane * SLOTS + i;
        const float score = divide(1.0f, 1.0f + expf(-logit[i]));
        key[i] = e < NUM_EXPERTS ? key_of(plus(score, steer[i])) : TAKEN;
        if (e < NUM_EXPERTS) {
            s.score[e] = score;
            s.key[e] = key[i];
        }
    }
    __syncwarp();
    if (NUM_GROUPS > 1) {
        const u32 kept = best_groups(s);
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            const int e = lane * SLOTS + i;
            // Behind every other, yet never twice: as -inf, not as taken.
            if (e < NUM_EXPERTS && !(kept >> (e / GROUP) & 1)) key[i] = key_of(-infinity());
        }
    }
    choose(s, key);
    if (lane >= TOP_K) return;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < TOP_K; ++n) sum = plus(sum, s.score[s.winner[n]]);
    const float own = s.score[s.winner[lane]];
    const float share = normalize ? divide(own, plus(sum, 1e-20f)) : own;
    expert[row * TOP_K + lane] = s.winner[lane];
    weight[row * TOP_K + lane] = multiply(share, scale);
}
