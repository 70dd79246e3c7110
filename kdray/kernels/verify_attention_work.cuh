// How verify_attention's work is cut and dealt out, on the device, from the lengths of this step.
//
// A request's rows are packed: packed row p is head p % H of row p / H. They are cut into tiles of
// rows; a tile reads keys in steps, from position 0 to the last its last row may see. All steps of
// all tiles of all requests stand in one list, weighted by what they cost; every block takes an
// equal stretch of it. A block's part of one tile is a piece.
#pragma once

#include "mma.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }

// The launch's integers. Request r has rows row_start[r] .. row_start[r + 1], of which the first
// num_known[r] + num_nodes[r] - 1 are real; none where num_known[r] is 0.
struct Batch {
    const int* row_start;   // [R + 1]
    const int* num_cached;  // [R]
    const int* num_known;   // [R]
    const int* num_nodes;   // [R]
    const int* page_table;  // [R, pages]
    const u32* mask;        // [R, nodes, words]
    int num_requests;
    int heads;
    int pages;
    int page_shift;
    int nodes;
    int words;
};

struct Request {
    int index;
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
    return {r, first, max(rows, 0), cached, known};
}

// Tiles of a request's n packed rows: `tall` of TALL_ROWS, then some of WIDE_ROWS, the last with
// what is left. At most SHORT_ROWS over a multiple of TALL_ROWS are a tile of their own.
template <class Shape>
struct Tiling {
    int size;
    int count;
    int tall;

    __device__ explicit Tiling(int n)
        : size(n), count((n + Shape::TALL_ROWS - 1) / Shape::TALL_ROWS) {
        constexpr int MORE = Shape::TALL_ROWS - Shape::WIDE_ROWS;
        const int left = n % Shape::TALL_ROWS, beyond = n - Shape::WIDE_ROWS * count;
        tall = left > 0 && left <= Shape::SHORT_ROWS ? count - 1 : 0;
        if (MORE > 0 && tall == 0 && beyond > 0) tall = (beyond + MORE - 1) / max(MORE, 1);
    }
    __device__ int first(int tile) const {
        return Shape::WIDE_ROWS * tile + (Shape::TALL_ROWS - Shape::WIDE_ROWS) * min(tile, tall);
    }
    __device__ int rows(int tile) const {
        return min(tile < tall ? Shape::TALL_ROWS : Shape::WIDE_ROWS, size - first(tile));
    }
};

struct Tile {
    int first;  // packed rows of its request
    int rows;
    int keys;  // positions that some row of it may see: 0 .. keys - 1
    int steps;
    int weight;  // what a step costs
};

template <class Shape>
__device__ __forceinline__ Tile tile_of(const Batch& batch, const Request& request,
                                        const Tiling<Shape>& tiling, int number) {
    Tile tile;
    tile.first = tiling.first(number);
    tile.rows = tiling.rows(number);
    tile.keys = request.cached + (tile.first + tile.rows - 1) / batch.heads + 1;
    tile.steps = (tile.keys + Shape::STEP - 1) / Shape::STEP;
    tile.weight = Shape::weight(tile.rows);
    return tile;
}

template <class Shape>
__device__ __forceinline__ u32 cost_of(const Tile& tile) {
    return (u32)(tile.steps + Shape::SETUP_STEPS) * tile.weight;
}

template <class Shape>
__device__ __forceinline__ u32 cost_of(const Batch& batch, const Request& request) {
    const Tiling<Shape> tiling(request.rows * batch.heads);
    u32 cost = 0;
    for (int t = 0; t < tiling.count; ++t)
        cost += cost_of<Shape>(tile_of<Shape>(batch, request, tiling, t));
    return cost;
}

// Steps begin .. end of a tile, one of `count` pieces that neighbouring blocks from first_block on
// have of it.
struct Piece {
    Tile tile;
    int begin;
    int end;
    int count;
    int first_block;
    int packed;  // packed row of the whole batch that the tile starts with

    __device__ bool whole() const { return count == 1; }
    __device__ int number() const { return (int)fresh_block() - first_block; }
    // Where a piece lies in the workspace: a block has at most one that opens a tile it does not
    // finish (its last) and one that goes on with a tile (its first).
    __device__ int slot_of(int number) const {
        return number == 0 ? 2 * first_block + 1 : 2 * (first_block + number);
    }
};

// What is dealt to one block: costs begin .. end of the list, and how far that has been dealt. In
// shared memory, as the registers have other work.
struct Deal {
    u32 warp_cost[WARPS];
    u32 each;  // cost a block
    u32 begin;
    u32 end;
    u32 base;  // where the costs of tile `tile` of `request` start
    int tile;
    Request request;
    Piece piece;
    bool dealt;  // whether there was another piece

    __device__ int block_at(u32 cost) const { return cost / each; }
};

__device__ __forceinline__ u32 sum_up_to_lane(u32 x) {
    const int lane = fresh_thread() % WARP;
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
        const u32 lower = __shfl_up_sync(ALL_LANES, x, by);
        if (lane >= by) x += lower;
    }
    return x;
}

// least: cost below which another block is not worth its overhead; at least any step's weight, so
// that no block between the first and the last of a tile is without a step of it.
template <class Shape>
__device__ __forceinline__ void open_deal(Deal& deal, const Batch& batch, int least) {
    const int requests = (batch.num_requests + THREADS - 1) / THREADS;
    const int first = threadIdx.x * requests, last = min(first + requests, batch.num_requests);
    u32 own = 0;
    for (int r = first; r < last; ++r) own += cost_of<Shape>(batch, request_of(batch, r));
    const u32 up_to_lane = sum_up_to_lane(own);
    const int warp = fresh_thread() / WARP;
    if (fresh_thread() % WARP == WARP - 1) deal.warp_cost[warp] = up_to_lane;
    __syncthreads();
    u32 before = up_to_lane - own, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += deal.warp_cost[w];
        total += deal.warp_cost[w];
    }
    const u32 each = max((total + gridDim.x - 1) / gridDim.x, (u32)least);
    const u32 begin = min(blockIdx.x * each, total), end = min(begin + each, total);
    if (threadIdx.x == 0) {
        deal.each = each;
        deal.begin = begin;
        deal.end = end;
        deal.base = end;
    }
    __syncthreads();
    if (begin == end || begin < before || begin >= before + own) return;
    for (int r = first; r < last; ++r) {
        const Request request = request_of(batch, r);
        const u32 cost = cost_of<Shape>(batch, request);
        if (begin < before + cost) {
            deal.base = before;
            deal.tile = 0;
            deal.request = request;
            return;
        }
        before += cost;
    }
}

__device__ __forceinline__ int steps_before(u32 cost, u32 base, int weight, int steps) {
    return cost <= base ? 0 : (int)min((cost - base + weight - 1) / weight, (u32)steps);
}

// This block's piece of a tile whose costs start at deal.base; begin == end where it has none.
template <class Shape>
__device__ __forceinline__ Piece piece_of(const Deal& deal, const Tile& tile, int heads) {
    const u32 first_step = deal.base + Shape::SETUP_STEPS * tile.weight;
    Piece piece;
    piece.tile = tile;
    piece.begin = steps_before(deal.begin, first_step, tile.weight, tile.steps);
    piece.end = steps_before(deal.end, first_step, tile.weight, tile.steps);
    piece.first_block = deal.block_at(first_step);
    const int last_block = deal.block_at(first_step + (u32)(tile.steps - 1) * tile.weight);
    piece.count = last_block - piece.first_block + 1;
    piece.packed = deal.request.first_row * heads + tile.first;
    return piece;
}

// The next piece into deal.piece. By one thread; the others meet it at a barrier afterwards.
template <class Shape>
__device__ __forceinline__ void deal_piece(Deal& deal, const Batch& batch) {
    deal.dealt = false;
    while (deal.base < deal.end && !deal.dealt) {
        const Tiling<Shape> tiling(deal.request.rows * batch.heads);
        if (deal.tile == tiling.count) {
            deal.request = request_of(batch, deal.request.index + 1);
            deal.tile = 0;
            continue;
        }
        const Tile tile = tile_of<Shape>(batch, deal.request, tiling, deal.tile++);
        deal.piece = piece_of<Shape>(deal, tile, batch.heads);
        deal.dealt = deal.piece.begin < deal.piece.end;
        deal.base += cost_of<Shape>(tile);
    }
}

__device__ __forceinline__ u32 lowest_bits(int n) {
    return n <= 0 ? 0 : n >= 32 ? 0xffffffffu : (1u << n) - 1;
}

// Which of positions first .. first + 31 packed row p of a request sees, of the tile's `keys`:
// those below a limit, and of those from there on, the drafts, the ones whose bit in the mask is set.
__device__ __forceinline__ u32 seen_from(const Batch& batch, const Request& request, int p,
                                         int keys, int first) {
    const int row = p / batch.heads, node = row - request.known + 1;
    const int limit = request.cached + min(row + 1, request.known);
    u32 seen = lowest_bits(limit - first);
    if (node > 0) {
        const u32* const bits =
            batch.mask + ((i64)request.index * batch.nodes + node) * batch.words;
        const int other = first - limit + 1;  // the node at position first; 0 is the root
        const int word = max(other, 0) / 32, shift = other & 31;
        const u32 low = word < batch.words ? bits[word] : 0;
        const u32 high = word + 1 < batch.words ? bits[word + 1] : 0;
        if (other >= 0)
            seen |= shift == 0 ? low : low >> shift | high << (32 - shift);
        else if (other > -32)
            seen |= low << -other;
    }
    return seen & lowest_bits(keys - first);
}
