// The plain pop loop of one warp, for any budget and any candidates: what the fast designs fall
// back to. About 300 cycles a pop.
//
// Nodes stand in groups of 32. now[i] is the key of node i's best child not yet taken, cursor[i]
// its rank; lane g keeps the greatest key of group g. A pop is a maximum over the groups, then one
// within the winning group; the lowest node number wins a tie, as the contract says.
#pragma once

#include "build_tree_common.cuh"

// Goes on from the `count` nodes that records 1 .. count hold, up to `budget`; returns the nodes
// there are then (root not counted). now and cursor have 32 * GROUPS entries, as many as `budget`
// may be.
template <int GROUPS>
__device__ __forceinline__ int pop_exactly(const Candidates& rows, int count, int budget,
                                           Record* record, int* now, int* cursor)
{
    const int lane = threadIdx.x & 31;
    for (int i = lane; i < 32 * GROUPS; i += 32) {
        now[i] = ABSENT;
        cursor[i] = 0;
    }
    __syncwarp();
    for (int n = 1 + lane; n <= count; n += 32)
        atomicMax(&cursor[record_parent(record[n])], record_rank(record[n]) + 1);
    __syncwarp();
    for (int i = lane; i <= count && i < 32 * GROUPS; i += 32)
        now[i] = child_key(rows, i == 0 ? ROOT_KEY : record[i].y, cursor[i]);
    __syncwarp();

    int group_best = ABSENT;
    for (int g = 0; g < GROUPS; ++g) {
        const int best = warp_max(now[32 * g + lane]);
        if (lane == g) group_best = best;
    }

    while (count < budget) {
        const int best = warp_max(group_best);
        if (best == ABSENT) break;
        const int group = __ffs(warp_ballot(group_best == best)) - 1;
        const int key = now[32 * group + lane];
        const int winner = __ffs(warp_ballot(key == best)) - 1;
        const int parent = 32 * group + winner;
        const int rank = cursor[parent];
        const int parent_key = parent == 0 ? ROOT_KEY : record[parent].y;
        const int sibling = child_key(rows, parent_key, rank + 1);
        const int child = child_key(rows, best, 0);
        const int left = warp_max(lane == winner ? sibling : key);
        ++count;
        __syncwarp();  // all have read what lane 0 now writes
        if (lane == group) group_best = left;
        if (lane == count >> 5) group_best = max(group_best, child);
        if (lane == 0) {
            record[count] = Record{parent << 16 | rank, best};
            now[parent] = sibling;
            cursor[parent] = rank + 1;
            if (count < 32 * GROUPS) now[count] = child;
        }
        __syncwarp();
    }
    return count;
}
