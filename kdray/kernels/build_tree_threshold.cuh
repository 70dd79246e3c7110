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

#include "build_tree_bound.cuh"
#include "build_tree_common.cuh"
#include "build_tree_exact.cuh"
#include "build_tree_output.cuh"

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

constexpr unsigned short NOWHERE = 0xffff;  // the rank of a node that is not among the best

// Sorts the nodes 1 .. end - 1 by bin into s.sorted and s.node; s.bin becomes each bin's start.
template <class Shape>
__device__ __forceinline__ void sort_into_bins(int end, int shift, ThresholdShared<Shape>& s)
{
    constexpr int EACH = Shape::BINS / Shape::THREADS;
    const int me = threadIdx.x;
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
}

// Equals at the same depth stand by their parents' ranks, then by their own in the row. Level by
// level from the root, so that the parents' ranks are final.
template <class Shape>
__device__ __forceinline__ void settle_ties(int nodes, int shift, ThresholdShared<Shape>& s)
{
    const int me = threadIdx.x;
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
            const unsigned own = s.order[i];
            int before = 0;
#pragma unroll 4
            for (int k = from; k < to; ++k)
                before += (s.sorted[k] == order) & (s.order[k] < own);
            s.rank[n] += (unsigned short)before;
        }
        __syncthreads();
    }
}

// Ranks the nodes 1 .. end - 1: s.rank[node] counts those before it, at least `budget` (or NOWHERE)
// for nodes that are not among the best.
template <class Shape>
__device__ __forceinline__ void rank_nodes(int end, int budget, int bound,
                                           ThresholdShared<Shape>& s)
{
    const int me = threadIdx.x;
    const unsigned greatest = (unsigned)bound << 4 | MAX_DEPTH;
    const int shift = max(0, 32 - __clz(greatest) - floor_log2(Shape::BINS));
    sort_into_bins(end, shift, s);

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
    settle_ties(nodes, shift, s);
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
