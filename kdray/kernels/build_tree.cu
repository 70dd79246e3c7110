// Best-first draft trees (DDTree) for a batch of requests: Ops.build_trees, core.tree.build_tree.
//
// Of all prefixes of the candidates' rows the `budget` best, as a tree: by score (sum of the rows'
// fixed-point log-probs, saturating) descending, depth ascending, parent's node number ascending.
// Node 0 is the root; nodes stand in that order, so a parent stands before its children.
//
// outputs  token, parent, depth, score  [R, N] int32   root: its token, -1, 0, 0; padding nodes:
//                                                      0, -1, 0, ABSENT
//          position      [R, N] int32 or null          base + depth
//          mask          [R, N, W] int32 words         bit j of row i: node j is i or above it;
//                                                      padding nodes see themselves alone
//          num_nodes     [R] int32                     root counted
//          first_child, next_sibling  [R, N] int32 or null   -1 where there is none; siblings stand
//                                                      in ascending node number
// inputs   token, score  [R, L, K] int32   rows by score descending, ABSENT (least int) last
//          roots         [R] int32
//          base          [R] int32 or null   the root's absolute position; null: 0
//          budgets       [R] int32           draft nodes wanted, cut to 0 .. N - 1
// sizes    L, K, N
//
// Grid R blocks, one a request; nothing is shared between requests. Entries, by the greatest N:
//   build_tree_pop_{32,64,128}   128 threads, N <= 1 + that: branch-free pops (build_tree_pop.cuh);
//                                static shared memory 10 to 24 KB
//   build_tree_threshold_{256,1024}  512 threads (other powers of two by -D), N <= 1 + that:
//                                count, expand, rank (build_tree_threshold.cuh); dynamic shared
//                                memory 82 and 98 KB
// Limits: 0 <= L <= 15, 0 <= K <= 64, 1 <= N <= 1025; any score <= 0.
// Integers only: equal to core.tree.build_tree bit for bit, whatever the ties. No atomic's order
// shows in the result.

#include "build_tree_common.cuh"
#include "build_tree_exact.cuh"
#include "build_tree_output.cuh"
#include "build_tree_pop.cuh"
#include "build_tree_threshold.cuh"
#include "overlap.cuh"

#ifndef KDRAY_THRESHOLD_THREADS_256
#define KDRAY_THRESHOLD_THREADS_256 512
#endif
#ifndef KDRAY_THRESHOLD_THREADS_1024
#define KDRAY_THRESHOLD_THREADS_1024 512
#endif

struct Outputs {
    int *token, *parent, *depth, *score, *position, *mask, *num_nodes, *first_child, *next_sibling;
};

struct Inputs {
    const int *token, *score, *roots, *base, *budgets;
    int L, K, N;
};

// What is read of a request besides its rows; on its way while other work goes on.
struct Request {
    int root;
    int base;
    int asked;  // draft nodes
};

__device__ __forceinline__ Request read_request(const Inputs& in)
{
    const unsigned r = blockIdx.x;
    return Request{in.roots[r], in.base == nullptr ? 0 : in.base[r], in.budgets[r]};
}

// Without candidates there are no rows.
__device__ __forceinline__ Candidates candidates(const Inputs& in)
{
    const size_t start = (size_t)blockIdx.x * (unsigned)(in.L * in.K);
    const bool any = in.K > 0 && in.N > 1;
    return Candidates{in.token + start, in.score + start, any ? in.L : 0, in.K};
}

__device__ __forceinline__ TreeRow tree_row(const Outputs& out, const Inputs& in,
                                            const Request& request)
{
    const unsigned r = blockIdx.x;
    const unsigned N = in.N, W = (N + 31) / 32;
    const size_t row = (size_t)r * N;
    TreeRow tree;
    tree.token = out.token + row;
    tree.parent = out.parent + row;
    tree.depth = out.depth + row;
    tree.score = out.score + row;
    tree.position = out.position == nullptr ? nullptr : out.position + row;
    tree.mask = (unsigned*)out.mask + (size_t)r * (N * W);
    tree.num_nodes = out.num_nodes + r;
    tree.first_child = out.first_child == nullptr ? nullptr : out.first_child + row;
    tree.next_sibling = out.next_sibling == nullptr ? nullptr : out.next_sibling + row;
    tree.N = in.N;
    tree.W = (int)W;
    tree.root = request.root;
    tree.base = request.base;
    return tree;
}

template <int SLOTS>
__device__ __forceinline__ void build_tree_pop(const Outputs& out, const Inputs& in,
                                               PopShared<SLOTS>& s)
{
    const Candidates rows = candidates(in);
    const Request request = read_request(in);
    const int fours = max(1, (int)((unsigned)(min(in.K, in.N - 1) + 3) / 4));
    const int warp = threadIdx.x >> 5;
    read_rows(rows, fours, s);
    copy_async_wait();
    __syncthreads();

    if (warp == 0) {
        const int count = build_by_popping(rows, request.asked, in.N - 1, fours, s);
        if (threadIdx.x == 0) s.count = count;
    }
    if (warp == 2)
        for (int n = threadIdx.x & 31; n <= 32 * SLOTS; n += 32)
            s.first_child[n] = s.next_sibling[n] = -1;
    const TreeRow tree = tree_row(out, in, request);
    __syncthreads();

    const int count = s.count;
    if (warp == 0)
        write_tokens_of_warp(tree, s.record, count, [&](int depth, int rank) {
            return s.token[4 * fours * depth + rank];
        });
    else if (warp == 1 && SLOTS == 1)
        write_mask_of_32(tree, s.record, count, rows.L);
    else if (warp == 1)
        write_mask_of_slots<SLOTS>(tree, s.record, count, rows.L, s.above, s.ancestor);
    else if (warp == 2)
        write_links_of_warp(tree, s.record, count, s.child, s.first_child, s.next_sibling);
    else
        write_shape_of_warp(tree, s.record, count);
}

template <class Shape>
__device__ __forceinline__ void build_tree_threshold(const Outputs& out, const Inputs& in,
                                                     void* shared)
{
    auto& s = *(ThresholdShared<Shape>*)shared;
    const Candidates rows = candidates(in);
    const Request request = read_request(in);
    const TreeRow tree = tree_row(out, in, request);
    const int count = build_by_threshold(rows, request.asked, in.N - 1, tree, s);
    __syncthreads();
    write_columns<Shape::THREADS>(
        tree, s.record, count,
        [&](int depth, int rank) { return rows.token[depth * rows.K + rank]; });
    set_mask<Shape::THREADS>(tree, s.record, count);
    write_links<Shape>(tree, s.record, count, (int*)s.order, (int*)s.origin, s.warp_total);
}

#define KDRAY_BUILD_TREE_ARGUMENTS                                                             \
    int *token, int *parent, int *depth, int *score, int *position, int *mask, int *num_nodes, \
        int *first_child, int *next_sibling, const int *candidate_token,                       \
        const int *candidate_score, const int *roots, const int *base, const int *budgets,     \
        int L, int K, int N

#define KDRAY_OUTPUTS \
    Outputs{token, parent, depth, score, position, mask, num_nodes, first_child, next_sibling}
#define KDRAY_INPUTS Inputs{candidate_token, candidate_score, roots, base, budgets, L, K, N}

extern "C" __global__ void __launch_bounds__(POP_THREADS, 1)
build_tree_pop_32(KDRAY_BUILD_TREE_ARGUMENTS)
{
    __shared__ PopShared<1> shared;
    start_behind_previous();
    build_tree_pop<1>(KDRAY_OUTPUTS, KDRAY_INPUTS, shared);
}

extern "C" __global__ void __launch_bounds__(POP_THREADS, 1)
build_tree_pop_64(KDRAY_BUILD_TREE_ARGUMENTS)
{
    __shared__ PopShared<2> shared;
    start_behind_previous();
    build_tree_pop<2>(KDRAY_OUTPUTS, KDRAY_INPUTS, shared);
}

extern "C" __global__ void __launch_bounds__(POP_THREADS, 1)
build_tree_pop_128(KDRAY_BUILD_TREE_ARGUMENTS)
{
    __shared__ PopShared<4> shared;
    start_behind_previous();
    build_tree_pop<4>(KDRAY_OUTPUTS, KDRAY_INPUTS, shared);
}

// So many nodes: all prefixes of two depths of 64 candidates, or three of 16, should they be equal.
using Threshold256 = ThresholdShape<KDRAY_THRESHOLD_THREADS_256, 4480, 1024, 256>;
using Threshold1024 = ThresholdShape<KDRAY_THRESHOLD_THREADS_1024, 4864, 2048, 1024>;
static_assert(sizeof(ThresholdShared<Threshold256>) <= 82 * 1024, "as the launcher asks");
static_assert(sizeof(ThresholdShared<Threshold1024>) <= 98 * 1024, "as the launcher asks");

extern __shared__ int4 threshold_shared[];

extern "C" __global__ void __launch_bounds__(KDRAY_THRESHOLD_THREADS_256)
build_tree_threshold_256(KDRAY_BUILD_TREE_ARGUMENTS)
{
    start_behind_previous();
    build_tree_threshold<Threshold256>(KDRAY_OUTPUTS, KDRAY_INPUTS, threshold_shared);
}

extern "C" __global__ void __launch_bounds__(KDRAY_THRESHOLD_THREADS_1024)
build_tree_threshold_1024(KDRAY_BUILD_TREE_ARGUMENTS)
{
    start_behind_previous();
    build_tree_threshold<Threshold1024>(KDRAY_OUTPUTS, KDRAY_INPUTS, threshold_shared);
}
