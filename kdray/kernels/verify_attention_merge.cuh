// Of a tile that several blocks share, each posts its part, waits for the others, and merges its
// share of the tile over all parts in their order: the reading is spread evenly, and the order of
// sums is fixed.
//
// Blocks wait for one another, each only after it has posted everything of its own. So all of the
// grid must come to be resident, which they do where there is a multiprocessor for each: what ran
// in front ends without them, and what comes behind starts when they all have.
#pragma once

#include "verify_attention_batch.cuh"

constexpr int MAX_BLOCKS = 256;

// The block's part is in the workspace; tells the others. Called by all.
__device__ __forceinline__ void announce(int* ticket) {
    __syncthreads();
    // The barrier brought the block's stores here; the release shows them to all.
    if (fresh_thread() == 0) add_acquire_release(ticket, 1);
}

// A block's share of a tile: units first .. last of 32 lanes' fours, each of one eight of rows.
struct MergeShare {
    int first;
    int last;
    int first_row;
    int rows;  // of the eights that it has a part in

    __device__ MergeShare(const Piece& piece, int units_an_eight) {
        const int units = piece.eights() * units_an_eight;
        first = units * piece.number / piece.count;
        last = units * (piece.number + 1) / piece.count;
        first_row = first / units_an_eight * EIGHT;
        rows = last > first ? (last - 1) / units_an_eight * EIGHT + EIGHT - first_row : 0;
    }
};

// norm[row][part] <- (what the part's sums of that row count in the result, ..)
template <int PART_ROWS, int THREADS>
__device__ __forceinline__ void weigh_parts(float2* norm, const float2* parts, const Piece& piece,
                                            const MergeShare& share) {
    const int lane = fresh_thread() % WARP, warp = fresh_thread() / WARP, count = piece.count;
    for (int i = fresh_thread(); i < share.rows * count; i += THREADS) {
        const int row = share.first_row + i / count;
        norm[i] = load_shared_by_blocks(parts + (i64)piece.part(i % count) * PART_ROWS + row);
    }
    __syncthreads();
    for (int row = warp; row < share.rows; row += THREADS / WARP) {
        float2* const of_row = norm + row * count;
        float most = NO_SCORE, sum = 0;
        for (int i = lane; i < count; i += WARP) most = max(most, of_row[i].x);
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2)
            most = max(most, __shfl_xor_sync(ALL_LANES, most, by));
        for (int i = lane; i < count; i += WARP)
            sum = fmaf(exp2_fast(of_row[i].x - most), of_row[i].y, sum);
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, by);
        for (int i = lane; i < count; i += WARP)
            of_row[i].x = exp2_fast(of_row[i].x - most) / sum;
    }
    __syncthreads();
}

// Adds parts first, first + by, .. of units unit, unit + WARPS, .. (AT_ONCE of them) to sums; as
// many loads are under way as registers hold.
template <class Layout, int AT_ONCE>
__device__ __forceinline__ void add_parts(float4 (&sum)[AT_ONCE], const float4* values,
                                          const float2* norm, const Piece& piece,
                                          const MergeShare& share, int unit, int first, int by) {
    constexpr int WARPS = Layout::THREADS / WARP, PARTS = 16 / AT_ONCE;
    constexpr i64 A_PART = Layout::PART_ROWS / EIGHT * Layout::UNITS * WARP;
    const int lane = fresh_thread() % WARP, count = piece.count;
    const float2 *a[AT_ONCE], *b[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
        const int of = min(unit + u * WARPS, share.last - 1);
        const int eight = of / Layout::UNITS * EIGHT - share.first_row;
        a[u] = norm + (eight + Layout::row_of(of, lane, 0)) * count;
        b[u] = norm + (eight + Layout::row_of(of, lane, 1)) * count;
        sum[u] = {0, 0, 0, 0};
    }
#pragma unroll 1
    for (int base = first; base < count; base += PARTS * by) {
        float4 x[PARTS][AT_ONCE];
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int part = min(base + i * by, count - 1);
                const int of = min(unit + u * WARPS, share.last - 1);
                x[i][u] = load_shared_by_blocks(values + piece.part(part) * A_PART + of * WARP +
                                                lane);
            }
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                if (base + i * by >= count) break;
                const float by_a = a[u][base + i * by].x, by_b = b[u][base + i * by].x;
                sum[u].x = fmaf(x[i][u].x, by_a, sum[u].x);
                sum[u].y = fmaf(x[i][u].y, by_b, sum[u].y);
                sum[u].z = fmaf(x[i][u].z, by_a, sum[u].z);
                sum[u].w = fmaf(x[i][u].w, by_b, sum[u].w);
            }
    }
}

// Layout: UNITS an eight, PART_ROWS, THREADS; row_of(unit, lane, k): the row, within its eight, of
// number k of the lane's four; write(out, piece, unit, heads, four).
// scratch: THREADS fours, then (rows of the share) * (parts) pairs: 40 KB at most.
template <class Layout, class Number>
__device__ __forceinline__ void merge_share(Number* out, const float4* values,
                                            const float2* norms, int* ticket, const Piece& piece,
                                            int heads, float4* scratch) {
    constexpr int WARPS = Layout::THREADS / WARP, AT_ONCE = 4;
    const MergeShare share(piece, Layout::UNITS);
    const int lane = fresh_thread() % WARP, warp = fresh_thread() / WARP, count = piece.count;
    float2* const norm = (float2*)(scratch + Layout::THREADS);
    if (fresh_thread() == 0) wait_for_blocks(ticket, count);
    __syncthreads();
    weigh_parts<Layout::PART_ROWS, Layout::THREADS>(norm, norms, piece, share);
    if (2 * (share.last - share.first) > WARPS) {
#pragma unroll 1
        for (int unit = share.first + warp; unit < share.last; unit += AT_ONCE * WARPS) {
            float4 sum[AT_ONCE];
            add_parts<Layout>(sum, values, norm, piece, share, unit, 0, 1);
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u)
                if (unit + u * WARPS < share.last)
                    Layout::write(out, piece, unit + u * WARPS, heads, sum[u]);
        }
    } else if (share.first < share.last) {
        // Several warps share a unit's parts.
        const int sharers = WARPS / (share.last - share.first), sharer = warp % sharers;
        const int unit = share.first + warp / sharers;
        float4 sum[1] = {};
        if (unit < share.last)
            add_parts<Layout>(sum, values, norm, piece, share, unit, sharer, sharers);
        scratch[fresh_thread()] = sum[0];
        __syncthreads();
        if (unit < share.last && sharer == 0) {
            for (int i = 1; i < sharers; ++i) {
                const float4 x = scratch[(warp + i) * WARP + lane];
                sum[0] = {sum[0].x + x.x, sum[0].y + x.y, sum[0].z + x.z, sum[0].w + x.w};
            }
            Layout::write(out, piece, unit, heads, sum[0]);
        }
    }
    __syncthreads();
    // The last to leave makes the ticket ready for the next launch.
    if (fresh_thread() == 0 && add_acquire_release(ticket, 1) == 2 * count - 1) *ticket = 0;
}

// Rows of row_start that belong to no real row give 0.
template <int A_ROW, int THREADS>  // A_ROW: 16-byte chunks of one head's result
__device__ __forceinline__ void clear_padding(void* out, const Batch& batch) {
    for (int r = fresh_block(); r < batch.num_requests; r += gridDim.x) {
        const Request request = request_of(batch, r);
        const i64 first = (i64)(request.first_row + request.rows) * batch.heads * A_ROW;
        const i64 last = (i64)batch.row_start[r + 1] * batch.heads * A_ROW;
        for (i64 i = first + fresh_thread(); i < last; i += THREADS)
            ((float4*)out)[i] = {0, 0, 0, 0};
    }
}
