// Design T's first part: a cost within which the budget's prefixes lie, found without making one.
// What the design keeps in shared memory stands here too. See build_tree_threshold.cuh.
#pragma once

#include "build_tree_common.cuh"

constexpr int COST_LIMIT = -SCORE_FLOOR;  // sums saturate here
constexpr int NO_COST = 1 << 30;          // of an absent candidate
constexpr int MANY = 65535;               // counts saturate here, far above any budget
constexpr int MAX_BUDGET = 1024;

// THREADS   also the bins of the count
// CAPACITY  nodes stored, the root among them
// BINS      of the ranking, a multiple of THREADS
// BUDGET    32 * GROUPS of the fallback
template <int THREADS_, int CAPACITY_, int BINS_, int BUDGET_>
struct ThresholdShape {
    static constexpr int THREADS = THREADS_;
    static constexpr int WARPS = THREADS_ / 32;
    static constexpr int CAPACITY = CAPACITY_;
    static constexpr int BINS = BINS_;
    static constexpr int BUDGET = BUDGET_;
};

template <class Shape>
struct ThresholdShared {
    int cost[MAX_DEPTH][MAX_WIDTH];
    int spine[MAX_DEPTH + 1];                        // cost of the best prefix of each depth
    int ranks[MAX_DEPTH];                            // of a row that can matter
    int level_size[MAX_DEPTH + 1];
    int warp_total[Shape::WARPS];
    int bound_bin;
    unsigned tied_levels;
    int count;
    // By node, in order of arrival; node 0 is the root.
    // cost << 4 | depth. Before: the rows of the count. Later, by place: order among equals.
    alignas(16) unsigned order[Shape::CAPACITY];
    unsigned origin[Shape::CAPACITY];  // parent << 8 | rank
    unsigned short rank[Shape::CAPACITY];  // arrival in its bin, then place in the tree - 1
    // By place, that is sorted by bin.
    unsigned short node[Shape::CAPACITY];
    unsigned sorted[Shape::CAPACITY];  // the order again. Before: the histograms of the count
    int bin[Shape::BINS + 1];
    Record record[Shape::BUDGET + 1];
};

__device__ __forceinline__ bool within(int parent_cost, int cost, int bound)
{
    return cost < NO_COST && min(parent_cost + cost, COST_LIMIT) <= bound;
}

template <class Shape>
__device__ __forceinline__ void read_costs(const Candidates& rows, int width,
                                           ThresholdShared<Shape>& s)
{
    for (int i = threadIdx.x; i < rows.L * MAX_WIDTH; i += Shape::THREADS) {
        const int depth = i / MAX_WIDTH, rank = i % MAX_WIDTH;
        if (rank >= width) continue;
        const int score = rows.score[depth * rows.K + rank];
        s.cost[depth][rank] = score == ABSENT ? NO_COST : -max(score, SCORE_FLOOR);
    }
    for (int i = threadIdx.x; i <= Shape::BINS; i += Shape::THREADS) s.bin[i] = 0;
    if (threadIdx.x <= MAX_DEPTH) s.level_size[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.tied_levels = 0;
    __syncthreads();
    if (threadIdx.x <= rows.L) {
        int sum = 0;
#pragma unroll
        for (int d = 0; d < MAX_DEPTH; ++d)
            if (d < (int)threadIdx.x) sum = min(sum + s.cost[d][0], NO_COST);
        s.spine[threadIdx.x] = sum;
    }
    __syncthreads();
}

// One count with bins of 2^shift: the first bin in which the prefixes reach the budget, or THREADS.
template <class Shape>
__device__ __forceinline__ int count_prefixes(int L, int width, int budget, int shift,
                                              ThresholdShared<Shape>& s)
{
    constexpr int BINS = Shape::THREADS;
    const int me = threadIdx.x;
    const int round_up = (1 << shift) - 1;
    // Two histograms, each with BINS zeros in front for what lies below the first bin.
    int* histogram = (int*)s.sorted + BINS;
    // By row, how many bins each candidate lies behind the best; BINS, that is in the zeros, for
    // those that fill the row up to a multiple of AT_ONCE.
    constexpr int AT_ONCE = 8;
    auto deviation = (int (*)[MAX_WIDTH])s.order;

    for (int i = me; i < L * MAX_WIDTH; i += Shape::THREADS) {
        const int depth = i / MAX_WIDTH, rank = i % MAX_WIDTH;
        const int best = s.cost[depth][0];
        // What lies further behind is beyond the last bin with every prefix in front of it.
        const int end = max(1, BINS - ((s.spine[depth + 1] + round_up) >> shift));
        int here = BINS, behind = BINS;
        if (rank < width) here = min((s.cost[depth][rank] - best + round_up) >> shift, BINS);
        if (rank + 1 < width) behind = (s.cost[depth][rank + 1] - best + round_up) >> shift;
        deviation[depth][rank] = here;
        if (here < end && behind >= end) s.ranks[depth] = rank + 1;
    }
    histogram[me - BINS] = histogram[me + BINS] = 0;
    histogram[me] = me == 0;
    if (me == 0) s.bound_bin = BINS;
    __syncthreads();

    int total = 0;
    int now = 0;
    for (int d = 0; d < L; ++d) {
        const int start = (s.spine[d + 1] + round_up) >> shift;
        if (start >= BINS) break;
        int sum = 0;
        if (me < BINS - start) {
            const int ranks = s.ranks[d];
            const int* own = histogram + now + me;
            for (int k = 0; k < ranks; k += AT_ONCE) {
                const int4 near = *(const int4*)&deviation[d][k];
                const int4 far = *(const int4*)&deviation[d][k + 4];
                sum += own[-near.x] + own[-near.y] + own[-near.z] + own[-near.w];
                sum += own[-far.x] + own[-far.y] + own[-far.z] + own[-far.w];
            }
        }
        now = 2 * BINS - now;
        histogram[now + me] = min(sum, MANY);
        __syncthreads();
        total += histogram[now + me - start];
    }
    const int sum = running_sum<Shape>(total, s.warp_total);
    if (sum >= budget && sum - total < budget) s.bound_bin = me;
    __syncthreads();
    return s.bound_bin;
}

// A cost within which at least `budget` prefixes lie, where there are so many.
template <class Shape>
__device__ __forceinline__ int find_bound(int L, int width, int budget, ThresholdShared<Shape>& s)
{
    constexpr int BINS = Shape::THREADS;
    constexpr int FINE_ENOUGH = 3 * BINS / 16;
    constexpr int LOG_BINS = floor_log2(BINS);
    static_assert(BINS == 1 << LOG_BINS, "bins are a power of two");
    static_assert(4 * BINS <= Shape::CAPACITY, "two histograms and their zeros fit s.sorted");
    static_assert(MAX_DEPTH * MAX_WIDTH <= Shape::CAPACITY, "the count's rows fit s.order");
    int shift = 26 - LOG_BINS;  // 16 nat: fits nearly every tree
    for (;;) {
        const int bin = count_prefixes(L, width, budget, shift, s);
        __syncthreads();  // all have read it
        if (bin == BINS) {
            if (BINS << shift > COST_LIMIT) return COST_LIMIT;
            ++shift;
            continue;
        }
        if (bin >= FINE_ENOUGH || bin == 0 || shift == 0) return min(bin << shift, COST_LIMIT);
        // The bins were too coarse: spread what is within the bound over all of them.
        const int bound = bin << shift;
        while (shift > 0 && bound >> (shift - 1) < BINS - 2 * MAX_DEPTH) --shift;
    }
}
