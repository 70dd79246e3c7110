// What plan_attention and verify_attention share: the batch, its pieces, and who sees whom.
//
// A request's rows are packed: packed row p is head p % H of row p / H. They are cut into tiles of
// whole eights of rows; a tile reads keys in steps, from position 0 to the last that its last row
// may see. Some steps of a tile, worked through by one block, are a piece.
#pragma once

#include "mma.cuh"

constexpr int EIGHT = 8;  // packed rows: the n of one product
constexpr float NO_SCORE = -1e30f;  // finite, so that differences of two are no NaN

// The launch's integers. Request r has rows row_start[r] .. row_start[r + 1], of which the first
// num_known[r] + num_nodes[r] - 1 are real; none where num_known[r] is 0.
struct Batch {
    const int* row_start;   // [R + 1]
    const int* num_cached;  // [R]
    const int* num_known;   // [R]
    const int* num_nodes;   // [R]
    int num_requests;
    int heads;
    int pages;       // of a request, in the page table
    int page_shift;  // a page has 1 << page_shift positions
    int nodes;       // of a request, in the mask
};

struct Request {
    int first_row;
    int rows;    // real ones
    int cached;  // positions before them
    int known;
};

__device__ __forceinline__ Request request_of(const Batch& batch, int r) {
    const int first = batch.row_start[r], room = batch.row_start[r + 1] - first;
    const int known = batch.num_known[r], cached = batch.num_cached[r];
    // Whatever the lengths say, nothing beyond the page table and the mask is read.
    const int reachable = min(room, (batch.pages << batch.page_shift) - cached);
    const int nodes = min(batch.num_nodes[r], batch.nodes);
    const int rows = known > 0 ? min(known + nodes - 1, reachable) : 0;
    return {first, max(rows, 0), cached, known};
}

// Steps begin .. end of a tile: number `number` of its `count` pieces, which neighbouring blocks
// from first_block on have. kernels/reference_plan.py: PIECE_FIELDS names these in order.
struct alignas(16) Piece {
    int request;
    int first_row;  // the request's
    int cached;
    int known;
    int first;  // packed row of the request that the tile starts with
    int rows;   // packed rows of the tile
    int keys;   // positions that some row of the tile may see: 0 .. keys - 1
    int begin;
    int end;
    int count;
    int first_block;
    int number;
    int block;
    int unused[3];

    __device__ bool whole() const { return count == 1; }
    __device__ int eights() const { return (rows + EIGHT - 1) / EIGHT; }
    // Where part i of the tile lies in the workspace: a block has at most one part of a tile that
    // it opens and leaves to the next, and one of a tile that it goes on with.
    __device__ int part(int i) const {
        return i == 0 ? 2 * first_block + 1 : 2 * (first_block + i);
    }
};
static_assert(sizeof(Piece) == 64, "four loads of 16 bytes");

__device__ __forceinline__ u32 lowest_bits(int n) {
    return n <= 0 ? 0 : n >= 32 ? 0xffffffffu : (1u << n) - 1;
}

// Whose bit says which draft a row sees: [R, nodes, words].
struct Mask {
    const u32* bits;
    int nodes;
    int words;
};

// Which of positions first .. first + 31 packed row p of the request sees, of the tile's keys:
// those below a limit, and of those from there on, the drafts, the ones whose bit is set.
__device__ __forceinline__ u32 seen_from(const Mask& mask, const Piece& piece, int heads, int p,
                                         int first) {
    const int row = p / heads, node = row - piece.known + 1;
    const int limit = piece.cached + min(row + 1, piece.known);
    u32 seen = lowest_bits(limit - first);
    if (node > 0) {
        const u32* const bits = mask.bits + ((i64)piece.request * mask.nodes + node) * mask.words;
        const int other = first - limit + 1;  // the node at position first; 0 is the root
        const int word = max(other, 0) / 32, shift = other & 31;
        const u32 low = word < mask.words ? bits[word] : 0;
        const u32 high = word + 1 < mask.words ? bits[word + 1] : 0;
        if (other >= 0)
            seen |= shift == 0 ? low : low >> shift | high << (32 - shift);
        else if (other > -32)
            seen |= low << -other;
    }
    return seen & lowest_bits(piece.keys - first);
}
