// Design T: one block a request counts, expands, ranks. No step waits for the one node before it.
//
// 1. Count. A histogram over cost (= -score) says how many prefixes are as cheap as that: level by
//    level it is convolved with the row's deviations from its best candidate, so that only
//    deviations are rounded, and up. The first bin where the sum over all levels reaches the budget
//    bounds the cost of the last node kept: at least `budget` prefixes are within it, measured
//    about 5 % more. No candidate is generated for it, and no data makes it slow.
// 2. Expand. Level by level, lanes take parents and warps take ranks; children within the bound are
//    appended in any order.
// 3. Rank. Nodes are counted into linear bins of their order (cost, then depth) and placed by bin;
//    a node's rank is its bin's start and the smaller ones inside. Equal orders (equal score and
//    depth) are settled level by level from the root: the parents' places are final by then.
//
// Nodes that do not fit the store, which takes thousands of equal scores, leave the tree to
// pop_exactly: never wrong, never beyond the arrays.
#pragma once

#include "build_tree_common.cuh"
#include "build_tree_exact.cuh"
#include "build_tree_output.cuh"

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

// All prefixes within the bound, as nodes 1 .. in s.order and s.origin. Returns how many there are,
// the root counted, or more than CAPACITY where they do not fit.
template <class Shape>
__device__ __forceinline__ int expand(int L, int width, int bound, ThresholdShared<Shape>& s)
{
    constexpr int AT_ONCE = 4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const unsigned below = (1u << lane) - 1;

    // A rank matters where even the cheapest parent may take it.
    if (threadIdx.x < L) s.ranks[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < L * MAX_WIDTH; i += Shape::THREADS) {
        const int depth = i / MAX_WIDTH, rank = i % MAX_WIDTH;
        if (rank >= width || !within(s.spine[depth], s.cost[depth][rank], bound)) continue;
        if (rank + 1 == width || !within(s.spine[depth], s.cost[depth][rank + 1], bound))
            s.ranks[depth] = rank + 1;
    }
    if (threadIdx.x == 0) s.order[0] = s.origin[0] = 0;
    __syncthreads();

    int first = 0, end = 1;  // the level's parents
    for (int d = 0; d < L; ++d) {
        const int ranks = s.ranks[d];
        if (ranks == 0) break;
        const int log_ranks = 32 - __clz(ranks - 1);
        const int items = (end - first + 31) / 32 << log_ranks;  // of 32 parents and one rank
        for (int start = warp; start < items; start += Shape::WARPS * AT_ONCE) {
            unsigned takes[AT_ONCE];
            unsigned order[AT_ONCE];
            unsigned origin[AT_ONCE];
            int found = 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int item = start + i * Shape::WARPS;
                const int rank = item & ((1 << log_ranks) - 1);
                const int parent = first + 32 * (item >> log_ranks) + lane;
                order[i] = origin[i] = 0;
                bool fits = item < items && rank < ranks && parent < end;
                if (fits) {
                    const int cost = s.cost[d][rank];
                    const int parent_cost = (int)(s.order[parent] >> 4);
                    fits = within(parent_cost, cost, bound);
                    order[i] = (unsigned)min(parent_cost + cost, COST_LIMIT) << 4 | (d + 1);
                    origin[i] = (unsigned)(parent << 8 | rank);
                }
                takes[i] = warp_ballot(fits);
                found += __popc(takes[i]);
            }
            if (found == 0) continue;
            int at = 0;
            if (lane == 0) at = atomicAdd(&s.level_size[d + 1], found);
            at = end + __shfl_sync(FULL_WARP, at, 0);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int node = at + __popc(takes[i] & below);
                if ((takes[i] >> lane & 1) && node < Shape::CAPACITY) {
                    s.order[node] = order[i];
                    s.origin[node] = origin[i];
                }
                at += __popc(takes[i]);
            }
        }
        __syncthreads();
        first = end;
        end += s.level_size[d + 1];  // each level has a counter of its own: no one resets it
        if (end > Shape::CAPACITY) break;
    }
    return end;
}

// Places the nodes 1 .. end - 1: s.rank[node] is the place from 0 on, at least `budget` for nodes
// that are not among the best.
template <class Shape>
__device__ __forceinline__ void rank_nodes(int end, int budget, int bound,
                                           ThresholdShared<Shape>& s)
{
    constexpr unsigned short NOWHERE = 0xffff;
    constexpr int EACH = Shape::BINS / Shape::THREADS;
    constexpr int LOG_BINS = floor_log2(Shape::BINS);
    const int me = threadIdx.x;
    const unsigned greatest = (unsigned)bound << 4 | MAX_DEPTH;
    const int shift = max(0, 32 - __clz(greatest) - LOG_BINS);

    for (int n = 1 + me; n < end; n += Shape::THREADS)
        s.rank[n] = (unsigned short)atomicAdd(&s.bin[s.order[n] >> shift], 1);
    __syncthreads();

    int own[EACH];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += own[i] = s.bin[me * EACH + i];
    int start = running_sum<Shape>(sum, s.warp_total) - sum;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        s.bin[me * EACH + i] = start;
        start += own[i];
    }
    if (me == Shape::THREADS - 1) s.bin[Shape::BINS] = start;
    __syncthreads();

    for (int n = 1 + me; n < end; n += Shape::THREADS) {
        const int place = s.bin[s.order[n] >> shift] + s.rank[n];
        s.sorted[place] = s.order[n];
        s.node[place] = (unsigned short)n;
    }
    __syncthreads();

    const int nodes = end - 1;
    unsigned tied = 0;  // depths at which equals met, as bits
    for (int i = me; i < nodes; i += Shape::THREADS) {
        const unsigned order = s.sorted[i];
        const int from = s.bin[order >> shift], to = s.bin[(order >> shift) + 1];
        int rank = from;
        int equals = 0;
        if (from < budget) {
#pragma unroll 4
            for (int k = from; k < to; ++k) {
                rank += s.sorted[k] < order;
                equals += s.sorted[k] == order;
            }
        }
        if (equals > 1 && rank < budget) tied |= 1u << (order & 15);
        // A tied node waits for its level; so far its rank is that of the first of its equals.
        s.rank[s.node[i]] = rank < budget ? (unsigned short)rank : NOWHERE;
    }
    tied = __reduce_or_sync(FULL_WARP, tied);
    if (tied != 0 && (me & 31) == 0) atomicOr(&s.tied_levels, tied);
    __syncthreads();

    for (unsigned left = s.tied_levels; left != 0; left &= left - 1) {
        const unsigned depth = __ffs(left) - 1;
        for (int i = me; i < nodes; i += Shape::THREADS) {
            const int n = s.node[i];
            if ((s.sorted[i] & 15) != depth || s.rank[n] == NOWHERE) continue;
            const unsigned origin = s.origin[n];
            const unsigned parent = origin >> 8;
            const unsigned parent_rank = parent == 0 ? 0 : s.rank[parent] + 1;
            s.order[i] = parent_rank << 8 | (origin & 0xff);
        }
        __syncthreads();
        for (int i = me; i < nodes; i += Shape::THREADS) {
            const unsigned order = s.sorted[i];
            const int n = s.node[i];
            if ((order & 15) != depth || s.rank[n] == NOWHERE) continue;
            const int from = s.bin[order >> shift], to = s.bin[(order >> shift) + 1];
            int before = 0;
#pragma unroll 4
            for (int k = from; k < to; ++k)
                before += s.sorted[k] == order && s.order[k] < s.order[i];
            s.rank[n] += (unsigned short)before;
        }
        __syncthreads();
    }
}

// Builds one request's tree into s.record, its mask cleared meanwhile; returns its number of draft
// nodes, which are at most `asked` and `limit`.
template <class Shape>
__device__ __forceinline__ int build_by_threshold(const Candidates& rows, int asked, int limit,
                                                  const TreeRow& tree, ThresholdShared<Shape>& s)
{
    const int me = threadIdx.x;
    read_costs(rows, min(rows.K, limit), s);
    clear_mask<Shape::THREADS>(tree);
    const int budget = max(0, min(use_from_here(asked), limit));
    const int width = min(rows.K, budget);  // no node of the tree has a higher rank
    if (width == 0 || rows.L == 0) return 0;
    const int bound = find_bound(rows.L, width, budget, s);
    const int end = expand(rows.L, width, bound, s);
    if (end > Shape::CAPACITY) {
        __syncthreads();
        if (me < 32) {
            const int count = pop_exactly<Shape::BUDGET / 32>(rows, 0, budget, s.record,
                                                              (int*)s.order, (int*)s.origin);
            if (me == 0) s.count = count;
        }
        __syncthreads();
        return s.count;
    }
    rank_nodes(end, budget, bound, s);
    for (int i = me; i < end - 1; i += Shape::THREADS) {
        const unsigned order = s.sorted[i];
        const int rank = s.rank[s.node[i]];
        if (rank >= budget) continue;
        const unsigned origin = s.origin[s.node[i]];
        const int parent = (int)(origin >> 8);
        const int number = parent == 0 ? 0 : s.rank[parent] + 1;
        const int key = MAX_DEPTH - (int)(order & 15) - (int)(order >> 4) * 16;
        s.record[rank + 1] = Record{number << 16 | (int)(origin & 0xff), key};
    }
    __syncthreads();
    return min(budget, end - 1);
}
