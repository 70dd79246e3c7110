// plan_attention: cuts verify_attention's work into pieces and deals them out, once for all layers.
//
// piece    [P] of 16 int32 (verify_attention_batch.cuh: Piece), in the order of their blocks
// start    [G + 1] int32: block b has pieces start[b] .. start[b + 1] - 1
// cost     [R * tiles] u32: workspace
// row_start [R + 1], num_cached, num_known, num_nodes [R] int32: as verify_attention has them
//
// A tile has up to tile_rows packed rows, in eights dealt out evenly. Where all work comes to less
// than small_cost for each block it has up to small_rows: a part of a tile costs its rows to merge.
// Little work is cut finer still: a block's way through a tile is what takes the time, and keys may
// well be read more often. It has tiles of few_rows where they come to less than few_cost for each
// block, else of twice as many where those come to less than twice_cost, and there is a block for
// each tile. A step (`step` keys) costs step_cost + eight_cost * eights, a piece setup_cost beside
// its steps.
// `share` is what a block does: of candidates the least that G blocks hold, with
//   large   a tile that costs more than a share: equal pieces, a block for each
//   middle  one of more than 7/8 of it: a block
//   small   all others: a block each where there are as many; else laid end to end and cut at every
//           share, but not where that would leave less of a tile than a piece costs by itself
// Large and middle tiles have the first blocks, so none of their cuts is off by a small one's.
// least: cost below which another block is not worth its overhead; at least 2 setups and 2 steps.
//
// tiles: of a request, at most, however it is cut.
//
// Grid 1 block of 256 threads. R and tiles any; G <= 256; P = R * tiles + G.
// Oracle: kernels/reference_plan.py: plan_attention (tests: equal).

#include "overlap.cuh"
#include "verify_attention_batch.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int EACH_WARP = 4;                     // candidates that a warp tries
constexpr int CANDIDATES = EACH_WARP * WARPS;    // 1, 1 1/16, .. 2, 2 1/8, .. times the mean
static_assert(CANDIDATES == 32, "two lists of 16");

struct Costs {
    int tile_rows;
    int step;
    int step_cost;
    int eight_cost;
    int setup_cost;
    int tiles;  // of a request, at most
};

struct Tile {
    int request;
    int first;
    int rows;
    int keys;
    int steps;
    u32 step_cost;
};

// Tile `number` of a request; 0 rows where it has no such tile.
__device__ __forceinline__ Tile tile_at(const Batch& batch, const Costs& costs, int slot) {
    const int r = slot / costs.tiles, number = slot % costs.tiles;
    const Request request = request_of(batch, r);
    const int packed = request.rows * batch.heads, eights = (packed + EIGHT - 1) / EIGHT;
    const int most = costs.tile_rows / EIGHT, count = (eights + most - 1) / most;
    if (number >= count) return {r, 0, 0, 0, 0, 0};
    const int first = EIGHT * (eights * number / count);
    const int last = min(EIGHT * (eights * (number + 1) / count), packed);
    const int keys = request.cached + (last - 1) / batch.heads + 1;
    const u32 step_cost =
        costs.step_cost + costs.eight_cost * ((last - first + EIGHT - 1) / EIGHT);
    return {r, first, last - first, keys, (keys + costs.step - 1) / costs.step, step_cost};
}

// Of tiles first .. last - 1; (their sum, how many there are).
__device__ __forceinline__ uint2 write_costs(u32* cost, const Batch& batch, const Costs& costs,
                                             int first, int last) {
    uint2 sum = {0, 0};
    for (int slot = first; slot < last; ++slot) {
        const Tile tile = tile_at(batch, costs, slot);
        const u32 c = tile.rows > 0 ? costs.setup_cost + tile.step_cost * tile.steps : 0;
        cost[slot] = c;
        sum.x += c;
        sum.y += c > 0;
    }
    return sum;
}

// Pieces of a tile that costs more than a share.
__device__ __forceinline__ int pieces_of(u32 steps_cost, u32 setup, u32 share) {
    return (int)((steps_cost + share - setup - 1) / (share - setup));
}
__device__ __forceinline__ bool fills_a_block(u32 cost, u32 share) {
    return (u64)8 * cost > (u64)7 * share;
}
// Blocks for a tile of that cost, 0 for a small one.
__device__ __forceinline__ int blocks_for(u32 cost, u32 setup, u32 share) {
    if (cost > share) return pieces_of(cost - setup, setup, share);
    return fills_a_block(cost, share) ? 1 : 0;
}

template <class Number>
__device__ __forceinline__ Number sum_of_warp(Number x) {
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) x += __shfl_xor_sync(ALL_LANES, x, by);
    return x;
}

struct Shared {
    u32 warp_sum[2][WARPS];
    u32 total;
    u32 needed[CANDIDATES];
    u32 share;
};

// Sums of (a, b) over the threads before this one; all of them in total.
__device__ __forceinline__ uint2 sums_before(Shared& s, u32 a, u32 b, uint2& total) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 up_to_a = a, up_to_b = b;
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
        const u32 lower_a = __shfl_up_sync(ALL_LANES, up_to_a, by);
        const u32 lower_b = __shfl_up_sync(ALL_LANES, up_to_b, by);
        if (lane >= by) {
            up_to_a += lower_a;
            up_to_b += lower_b;
        }
    }
    __syncthreads();
    if (lane == WARP - 1) {
        s.warp_sum[0][warp] = up_to_a;
        s.warp_sum[1][warp] = up_to_b;
    }
    __syncthreads();
    uint2 before = {up_to_a - a, up_to_b - b};
    total = {0, 0};
    for (int w = 0; w < WARPS; ++w) {
        const u32 of_a = s.warp_sum[0][w], of_b = s.warp_sum[1][w];
        if (w < warp) before = {before.x + of_a, before.y + of_b};
        total = {total.x + of_a, total.y + of_b};
    }
    return before;
}

__device__ __forceinline__ u32 candidate(u32 lowest, int i) {
    const u64 share = ((u64)lowest * (16 + i % 16) + 15) / 16 << i / 16;
    return (u32)min(share, (u64)0x7fffffff);
}

// The least share that fits; all the cost where none of the candidates does.
__device__ __forceinline__ u32 choose_share(Shared& s, const u32* cost, int slots, u32 setup,
                                            u32 total, u32 least, u32 blocks) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 lowest = max((total + blocks - 1) / blocks, least);
    u32 whole[EACH_WARP] = {}, small[EACH_WARP] = {};
    for (int slot = lane; slot < slots; slot += WARP) {
        const u32 c = cost[slot];
#pragma unroll
        for (int i = 0; i < EACH_WARP; ++i) {
            const u32 share = candidate(lowest, EACH_WARP * warp + i);
            const u32 n = c > 0 ? blocks_for(c, setup, share) : 0;
            whole[i] += n;
            small[i] += n == 0 ? c : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < EACH_WARP; ++i) {
        const u32 share = candidate(lowest, EACH_WARP * warp + i);
        const u32 sum = sum_of_warp(small[i]), needed = sum_of_warp(whole[i]);
        if (lane == 0) s.needed[EACH_WARP * warp + i] = needed + (sum + share - 1) / share;
    }
    __syncthreads();
    if (warp == 0) {
        const u32 fits = __ballot_sync(ALL_LANES, s.needed[lane] <= blocks);
        if (lane == 0) s.share = fits ? candidate(lowest, __ffs(fits) - 1) : max(total, least);
    }
    __syncthreads();
    return s.share;
}

// A small tile from `begin` on in the list of all small ones: the block of its head, and the steps
// that stay there; the rest, if any, go to the next block.
struct Cut {
    int block;
    int head_steps;
};
__device__ __forceinline__ Cut cut_of(const Tile& tile, u32 begin, u32 setup, u32 share) {
    const u32 block = begin / share, cut = (block + 1) * share;
    const u32 cost = setup + tile.step_cost * tile.steps, end = begin + cost;
    const u32 little = setup + tile.step_cost;
    if (end < cut + little) return {(int)block, tile.steps};
    if (cut < begin + little) return {(int)block + 1, tile.steps};
    return {(int)block, (int)((cut - begin - setup) / tile.step_cost)};
}

__device__ __forceinline__ Piece piece_of(const Batch& batch, const Tile& tile) {
    const Request request = request_of(batch, tile.request);
    Piece piece = {};
    piece.request = tile.request;
    piece.first_row = request.first_row;
    piece.cached = request.cached;
    piece.known = request.known;
    piece.first = tile.first;
    piece.rows = tile.rows;
    piece.keys = tile.keys;
    return piece;
}

// Steps begin .. end as number `number` of count pieces from block first_block on.
__device__ __forceinline__ void write_piece(Piece* to, Piece piece, int begin, int end, int count,
                                            int first_block, int number) {
    piece.begin = begin;
    piece.end = end;
    piece.count = count;
    piece.first_block = first_block;
    piece.number = number;
    piece.block = first_block + number;
    *to = piece;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    plan_attention(Piece* piece, int* start, u32* cost, const int* row_start,
                   const int* num_cached, const int* num_known, const int* num_nodes,
                   int num_requests, int heads, int pages, int page_shift, int nodes, int tiles,
                   int tile_rows, int small_rows, int small_cost, int few_rows, int few_cost,
                   int twice_cost, int step, int step_cost, int eight_cost, int setup_cost,
                   int least, int blocks) {
    __shared__ Shared s;
    start_behind_previous();
    const Batch batch = {row_start, num_cached, num_known, num_nodes, num_requests,
                         heads,     pages,      page_shift, nodes};
    Costs costs = {tile_rows, step, step_cost, eight_cost, setup_cost, tiles};
    const int slots = num_requests * tiles, each = (slots + THREADS - 1) / THREADS;
    const int first = min((int)threadIdx.x * each, slots), last = min(first + each, slots);

    uint2 total;
    const auto cut_into = [&](int rows) {
        costs.tile_rows = rows;
        const uint2 own = write_costs(cost, batch, costs, first, last);
        sums_before(s, own.x, own.y, total);
    };
    // Whether little work, cut into tiles of some rows, is as little as that.
    const auto comes_to_less = [&](int rows, int most) {
        if (rows >= small_rows) return false;
        cut_into(rows);
        return total.x < (u32)(most * blocks) && total.y <= (u32)blocks;
    };
    if (!comes_to_less(few_rows, few_cost) && !comes_to_less(2 * few_rows, twice_cost)) {
        cut_into(tile_rows);
        if (small_rows < tile_rows && total.x < (u32)(small_cost * blocks)) cut_into(small_rows);
    }
    const u32 share =
        choose_share(s, cost, slots, setup_cost, total.x, (u32)least, (u32)blocks);

    u32 whole = 0, small = 0, num_small = 0;
    for (int slot = first; slot < last; ++slot) {
        const u32 c = cost[slot];
        const int n = c > 0 ? blocks_for(c, setup_cost, share) : 0;
        whole += n;
        small += n == 0 ? c : 0;
        num_small += c > 0 && n == 0;
    }
    uint2 taken, left;
    uint2 before = sums_before(s, whole, small, taken);
    const u32 small_before = sums_before(s, num_small, 0, left).x;
    const bool a_block_each = taken.x + left.x <= (u32)blocks;
    if (a_block_each) {
        before.x += small_before;
        taken.x += left.x;
    }
    const auto blocks_of = [&](u32 c) {
        return max(blocks_for(c, setup_cost, share), a_block_each ? 1 : 0);
    };
    int block = before.x;
    u32 begin = before.y, cut_here = 0;
    for (int slot = first; slot < last; ++slot) {
        const u32 c = cost[slot];
        if (c == 0 || blocks_of(c) > 0) continue;
        const Tile tile = tile_at(batch, costs, slot);
        cut_here += cut_of(tile, begin, setup_cost, share).head_steps < tile.steps ? 2 : 1;
        begin += c;
    }
    uint2 all;
    int next = taken.x + sums_before(s, cut_here, 0, all).x;
    const int count = taken.x + all.x;

    begin = before.y;
    for (int slot = first; slot < last; ++slot) {
        const u32 c = cost[slot];
        if (c == 0) continue;
        const Tile tile = tile_at(batch, costs, slot);
        const Piece made = piece_of(batch, tile);
        const int n = blocks_of(c);
        for (int i = 0; i < n; ++i)
            write_piece(piece + block + i, made, tile.steps * i / n, tile.steps * (i + 1) / n, n,
                        block, i);
        block += n;
        if (n > 0) continue;
        const Cut cut = cut_of(tile, begin, setup_cost, share);
        const int pieces = cut.head_steps < tile.steps ? 2 : 1, at = taken.x + cut.block;
        write_piece(piece + next++, made, 0, cut.head_steps, pieces, at, 0);
        if (pieces == 2)
            write_piece(piece + next++, made, cut.head_steps, tile.steps, 2, at, 1);
        begin += c;
    }
    __syncthreads();
    for (int i = threadIdx.x; i <= count; i += THREADS) {
        const int from = i == 0 ? 0 : piece[i - 1].block + 1;
        const int to = i == count ? blocks : piece[i].block;
        for (int b = from; b <= to; ++b) start[b] = i;
    }
}
