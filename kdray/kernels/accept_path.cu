// The target's way through a batch of draft trees (Ops.accept_paths, core.tree.follow).
//
// From the root on, step to the lowest-numbered child that bears the token the target drew at the
// node before; stop where there is none or the path holds 1 + depth nodes.
//
// outputs  path      [R, 1 + depth] int32   node numbers from the root on, 0 behind the last
//          length    [R] int32              nodes on the path, root counted
//          bonus     [R] int32              the token drawn after the last of them
//          malformed [R] int32              1 where the tree is none (below), else 0
// inputs   token, parent, target  [R, N] int32;  num_nodes [R] int32
//
// A tree is malformed where its count is outside 1 .. N, its root has a parent, or a node within
// the count has a parent that does not stand before it. Its path is the root alone. No walk can
// cycle or leave the arrays: parents are checked before one is followed, steps go to higher node
// numbers only, and there are at most `depth` of them.
//
// Grid R blocks, one a request; a thread a draft node, so ceil((N - 1) / 32) warps and at least
// one. Limits: 1 <= N <= 1025, depth >= 0. Static shared memory 8.2 KB.
// Integers only: equal to ReferenceOps.accept_paths exactly.

#include "overlap.cuh"

constexpr int MAX_NODES = 1025;
constexpr int NONE = 0x7fffffff;

extern "C" __global__ void __launch_bounds__(1024)
accept_path(int* path, int* length, int* bonus, int* malformed,
            const int* token, const int* parent, const int* target, const int* num_nodes,
            int N, int depth)
{
    __shared__ int drawn[MAX_NODES];
    __shared__ int next[MAX_NODES];  // where the path goes on from a node

    start_behind_previous();
    const int request = blockIdx.x;
    const size_t row = (size_t)request * N;
    const int node = threadIdx.x + 1;
    const bool inside = node < N;

    // All of the request's words at once: one trip to memory, not three in a row.
    const int count = num_nodes[request];
    const int own_token = inside ? token[row + node] : 0;
    const int own_parent = inside ? parent[row + node] : 0;
    bool bad = count < 1 || count > N;
    if (inside) {
        drawn[node] = target[row + node];
        next[node] = NONE;
    }
    if (threadIdx.x == 0) {
        drawn[0] = target[row];
        next[0] = NONE;
        bad |= parent[row] != -1;
    }
    const bool real = inside && node < count;
    bad |= real && (own_parent < 0 || own_parent >= node);

    const bool broken = __syncthreads_or(bad);
    // Of children with the same token the lowest number wins, in whatever order they arrive.
    if (!broken && real && own_token == drawn[own_parent]) atomicMin(&next[own_parent], node);
    __syncthreads();
    if (threadIdx.x >= 32) return;

    // The lanes of one warp walk in step, reading the same words; the first of them writes.
    int* out = path + (size_t)request * (depth + 1);
    const bool writes = threadIdx.x == 0;
    int here = 0;
    int nodes = 1;
    if (writes) out[0] = 0;
    for (int step = next[0]; nodes <= depth && step != NONE; step = next[here]) {
        here = step;
        if (writes) out[nodes] = here;
        ++nodes;
    }
#pragma unroll 1
    for (int k = nodes + threadIdx.x; k <= depth; k += 32) out[k] = 0;
    if (writes) {
        length[request] = nodes;
        bonus[request] = drawn[here];
        malformed[request] = broken;
    }
}
