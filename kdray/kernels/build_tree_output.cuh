// Writing trees: what every design does once its records stand in shared memory.
#pragma once

#include "build_tree_common.cuh"

// Token, parent, depth, score and position of all N nodes by THREADS threads. `token` gives the
// token of (depth above the node, rank). Padding nodes are parentless, absent, of token 0.
template <int THREADS, class TokenOf>
__device__ __forceinline__ void write_columns(const TreeRow& out, const Record* record, int count,
                                              TokenOf token_of)
{
    for (int n = threadIdx.x; n < out.N; n += THREADS) {
        int token = 0, parent = -1, depth = 0, score = ABSENT;
        if (n == 0) {
            token = out.root;
            score = 0;
        } else if (n <= count) {
            const Record r = record[n];
            parent = record_parent(r);
            depth = key_depth(r.y);
            score = key_score(r.y);
            token = token_of(depth - 1, record_rank(r));
        }
        out.token[n] = token;
        out.parent[n] = parent;
        out.depth[n] = depth;
        out.score[n] = score;
        if (out.position != nullptr) out.position[n] = out.base + depth;
    }
    if (threadIdx.x == 0) *out.num_nodes = count + 1;
}

// Parts of the same by one warp each, without a branch but the loop; record 0 is the root's.
template <class TokenOf>
__device__ __forceinline__ void write_tokens_of_warp(const TreeRow& out, const Record* record,
                                                     int count, TokenOf token_of)
{
    for (int n = threadIdx.x & 31; n < out.N; n += 32) {
        const bool real = n <= count;
        const Record r = record[real ? n : 0];
        const int depth = key_depth(r.y);
        const int token = token_of(max(depth - 1, 0), record_rank(r));
        out.token[n] = n == 0 ? out.root : real ? token : 0;
        if (out.position != nullptr) out.position[n] = out.base + depth;
    }
}

__device__ __forceinline__ void write_shape_of_warp(const TreeRow& out, const Record* record,
                                                    int count)
{
    const int lane = threadIdx.x & 31;
    for (int n = lane; n < out.N; n += 32) {
        const bool real = n <= count;
        const Record r = record[real ? n : 0];
        out.parent[n] = record_parent(r);  // the root's, where there is no node: -1
        out.depth[n] = key_depth(r.y);
        out.score[n] = real ? key_score(r.y) : ABSENT;
    }
    if (lane == 0) *out.num_nodes = count + 1;
}

// Ancestor rows of at most 33 nodes by one warp: pointers double, so that a node at depth d has its
// row after log2(d + 1) rounds.
__device__ __forceinline__ void write_mask_of_32(const TreeRow& out, const Record* record,
                                                 int count, int L)
{
    const int lane = threadIdx.x & 31;
    // The root leads to itself, which changes nothing, and so does a padding node.
    int ancestor = lane;
    if (lane > 0 && lane <= count) ancestor = record_parent(record[lane]);
    unsigned row = 1u << lane;
#pragma unroll
    for (int reach = 1; reach <= MAX_DEPTH; reach *= 2) {
        if (reach > L) break;
        const unsigned above = __shfl_sync(FULL_WARP, row, ancestor);
        ancestor = __shfl_sync(FULL_WARP, ancestor, ancestor);
        row |= above;
    }
    const int last_parent = count == 32 ? record_parent(record[32]) : 0;
    const unsigned last = __shfl_sync(FULL_WARP, row, last_parent);
    if (lane < out.N) {
        out.mask[lane * out.W] = row;
        if (out.W == 2) out.mask[lane * 2 + 1] = 0;
    }
    if (lane == 0 && out.N == 33) {
        out.mask[64] = count == 32 ? last : 0;
        out.mask[65] = 1;
    }
}

// The same for up to 32 * SLOTS + 1 nodes, through shared memory.
template <int SLOTS>
__device__ __forceinline__ void write_mask_of_slots(const TreeRow& out, const Record* record,
                                                    int count, int L, unsigned (*above)[SLOTS],
                                                    int* ancestors)
{
    const int lane = threadIdx.x & 31;
    unsigned row[SLOTS][SLOTS];
    int ancestor[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const int n = 32 * s + lane;
        ancestor[s] = n;
        if (n > 0 && n <= count) ancestor[s] = record_parent(record[n]);
#pragma unroll
        for (int w = 0; w < SLOTS; ++w) row[s][w] = w == s ? 1u << lane : 0;
    }
    for (int reach = 1;; reach *= 2) {
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            ancestors[32 * s + lane] = ancestor[s];
#pragma unroll
            for (int w = 0; w < SLOTS; ++w) above[32 * s + lane][w] = row[s][w];
        }
        __syncwarp();
        if (reach > L) break;
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const int a = ancestor[s];
            ancestor[s] = ancestors[a];
#pragma unroll
            for (int w = 0; w < SLOTS; ++w) row[s][w] |= above[a][w];
        }
        __syncwarp();
    }
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const int n = 32 * s + lane;
#pragma unroll
        for (int w = 0; w < SLOTS; ++w)
            if (n < out.N && w < out.W) out.mask[n * out.W + w] = row[s][w];
        if (n < out.N && out.W > SLOTS) out.mask[n * out.W + SLOTS] = 0;
    }
    constexpr int LAST = 32 * SLOTS;
    if (out.N > LAST && lane <= SLOTS) {
        const bool real = count == LAST;
        unsigned word = lane == SLOTS ? 1u : 0u;
        if (real && lane < SLOTS) word = above[record_parent(record[LAST])][lane];
        out.mask[LAST * out.W + lane] = word;
    }
}

// First child and next sibling, -1 where there is none, by one warp, which has filled first and next
// with -1 before. `child` is a table of nodes by parent and rank; entries without a node are never
// read.
__device__ __forceinline__ void write_links_of_warp(const TreeRow& out, const Record* record,
                                                    int count, unsigned char* child, int* first,
                                                    int* next)
{
    if (out.first_child == nullptr && out.next_sibling == nullptr) return;
    const int lane = threadIdx.x & 31;
    for (int n = 1 + lane; n <= count; n += 32) {
        const int parent = record_parent(record[n]), rank = record_rank(record[n]);
        child[parent * MAX_WIDTH + rank] = (unsigned char)n;
        if (rank == 0) first[parent] = n;
    }
    __syncwarp();
    for (int n = 1 + lane; n <= count; n += 32) {
        const int parent = record_parent(record[n]), rank = record_rank(record[n]);
        if (rank > 0) next[child[parent * MAX_WIDTH + rank - 1]] = n;
    }
    __syncwarp();
    for (int n = lane; n < out.N; n += 32) {
        const int first_child = first[n], next_sibling = next[n];
        if (out.first_child != nullptr) out.first_child[n] = first_child;
        if (out.next_sibling != nullptr) out.next_sibling[n] = next_sibling;
    }
}

// Zeros in all ancestor rows, by THREADS threads; their stores drain while the tree is built.
template <int THREADS>
__device__ __forceinline__ void clear_mask(const TreeRow& out)
{
    const int words = out.N * out.W;
    const int head = min(words, (int)((16 - (size_t)out.mask % 16) % 16 / 4));
    const int quads = (words - head) / 4;
    int4* middle = (int4*)(out.mask + head);
    for (int i = threadIdx.x; i < quads; i += THREADS) middle[i] = int4{0, 0, 0, 0};
    const int tail = head + 4 * quads;
    if ((int)threadIdx.x < head) out.mask[threadIdx.x] = 0;
    if ((int)threadIdx.x < words - tail) out.mask[tail + threadIdx.x] = 0;
}

// Ancestor bits into cleared rows: a thread walks from its node to the root, node numbers falling,
// and stores each word it has passed. A barrier stands between clear_mask and this.
template <int THREADS>
__device__ __forceinline__ void set_mask(const TreeRow& out, const Record* record, int count)
{
    for (int n = threadIdx.x; n < out.N; n += THREADS) {
        unsigned* row = out.mask + n * out.W;
        int word = n >> 5;
        unsigned bits = 1u << (n & 31);
        int above = n <= count ? n : 0;  // padding nodes see themselves alone
        while (above > 0) {
            above = record_parent(record[above]);
            if (above >> 5 != word) {
                row[word] = bits;
                word = above >> 5;
                bits = 0;
            }
            bits |= 1u << (above & 31);
        }
        row[word] = bits;
    }
}

// First child and next sibling by a block: children are laid out parent by parent, by rank.
// `start` (N + 1 entries) is where each node's children begin, `child` (N) the children.
template <class Shape>
__device__ __forceinline__ void write_links(const TreeRow& out, const Record* record, int count,
                                            int* start, int* child, int* warp_total)
{
    constexpr int THREADS = Shape::THREADS;
    if (out.first_child == nullptr && out.next_sibling == nullptr) return;
    const int me = threadIdx.x;
    for (int n = me; n <= out.N; n += THREADS) start[n] = 0;
    __syncthreads();
    for (int n = 1 + me; n <= count; n += THREADS)
        atomicAdd(&start[record_parent(record[n])], 1);
    __syncthreads();

    const int each = out.N / THREADS + 1;
    const int from = min(me * each, out.N + 1), to = min(from + each, out.N + 1);
    int children = 0;
    for (int n = from; n < to; ++n) children += start[n];
    int before = running_sum<Shape>(children, warp_total) - children;
    for (int n = from; n < to; ++n) {
        const int own = start[n];
        start[n] = before;
        before += own;
    }
    __syncthreads();

    for (int n = 1 + me; n <= count; n += THREADS)
        child[start[record_parent(record[n])] + record_rank(record[n])] = n;
    __syncthreads();
    for (int n = me; n < out.N; n += THREADS) {
        int first = -1, next = -1;
        if (start[n] < start[n + 1]) first = child[start[n]];
        if (n > 0 && n <= count) {
            const int parent = record_parent(record[n]);
            const int behind = start[parent] + record_rank(record[n]) + 1;
            if (behind < start[parent + 1]) next = child[behind];
        }
        if (out.first_child != nullptr) out.first_child[n] = first;
        if (out.next_sibling != nullptr) out.next_sibling[n] = next;
    }
}
