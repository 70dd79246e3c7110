// What becomes of a piece: a whole tile's result is written as it is; of a tile that several blocks
// share, each block posts its part, waits for the others, and merges its share of the elements over
// all parts in their order. So the reading is spread evenly, and the order of sums is fixed.
//
// All blocks of the grid must be resident (a cooperative launch): they wait for one another, each
// only after it has posted everything of its own.
#pragma once

#include "mma.cuh"
#include "verify_attention_work.cuh"

// Of a launch, for G blocks; a part is ROWS x LATENT sums of weighted values, and for each row the
// maximum its weights are relative to and their sum.
struct Workspace {
    float* value;  // [2 G, ROWS, LATENT]
    float2* norm;  // [2 G, ROWS]: (maximum of the scores in powers of two, sum of the weights)
    int* ticket;   // [G], zero between launches
};

constexpr int MAX_BLOCKS = 256;
constexpr float NO_SCORE = -1e30f;  // finite, so that differences of two are no NaN

// Sums of four: of a row's neighbouring dimensions.
__device__ __forceinline__ void add_scaled(float4& sum, float4 x, float by) {
    sum.x = fmaf(x.x, by, sum.x);
    sum.y = fmaf(x.y, by, sum.y);
    sum.z = fmaf(x.z, by, sum.z);
    sum.w = fmaf(x.w, by, sum.w);
}

__device__ __forceinline__ void write4(float* out, float4 x) { *(float4*)out = x; }
__device__ __forceinline__ void write4(u16* out, float4 x) {
    *(uint2*)out = {bf16_pair(x.x, x.y), bf16_pair(x.z, x.w)};
}

// The block's part is in the workspace; tells the others.
__device__ __forceinline__ void announce(const Workspace& work, const Piece& piece) {
    __syncthreads();
    // The barrier brought the block's stores here; the release shows them to all.
    if (fresh_thread() == 0) add_acquire_release(&work.ticket[piece.first_block], 1);
}

// weight[row][part]: what the part's sums of that row count in the result. One warp a row, all its
// norms under way at once.
template <int ROWS>
__device__ __forceinline__ void weigh_parts(float* weight, const Workspace& work,
                                            const Piece& piece, int first_row, int last_row) {
    constexpr int A_LANE = MAX_BLOCKS / WARP;
    const int lane = fresh_thread() % WARP, warp = fresh_thread() / WARP;
    for (int row = first_row + warp; row <= last_row; row += WARPS) {
        float* const of_row = weight + (row - first_row) * piece.count;
        float2 norm[A_LANE];
        float most = NO_SCORE, sum = 0;
#pragma unroll
        for (int k = 0; k < A_LANE; ++k) {
            const int part = lane + WARP * k;
            norm[k] = {NO_SCORE, 0};
            if (part < piece.count) {
                const i64 at = (i64)piece.slot_of(part) * ROWS + row;
                norm[k] = load_shared_by_blocks(&work.norm[at]);
            }
        }
#pragma unroll
        for (int k = 0; k < A_LANE; ++k) most = max(most, norm[k].x);
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2)
            most = max(most, __shfl_xor_sync(ALL_LANES, most, by));
#pragma unroll
        for (int k = 0; k < A_LANE; ++k) {
            norm[k].x = exp2_fast(norm[k].x - most);
            sum = fmaf(norm[k].x, norm[k].y, sum);
        }
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, by);
#pragma unroll
        for (int k = 0; k < A_LANE; ++k) {
            const int part = lane + WARP * k;
            if (part < piece.count) of_row[part] = norm[k].x / sum;
        }
    }
}

template <int ROWS, int LATENT_DIM>
__device__ __forceinline__ float4 merged(const float* weight, const Workspace& work,
                                         const Piece& piece, int element, int from, int by) {
    constexpr int A_ROW = LATENT_DIM / 4;
    const float4* const value = (const float4*)work.value + element;
    float4 sum = {0, 0, 0, 0};
#pragma unroll 16
    for (int part = from; part < piece.count; part += by) {
        const i64 at = (i64)piece.slot_of(part) * ROWS * A_ROW;
        add_scaled(sum, load_shared_by_blocks(value + at), weight[part]);
    }
    return sum;
}

// This block's share of the tile: elements of four, counted through rows and dimensions. Where
// these are fewer than the block's threads, several threads share an element's parts.
// scratch: weights, ROWS + 2 * gridDim.x floats; then THREADS sums.
template <int ROWS, int LATENT_DIM, class Number>
__device__ __forceinline__ void merge_share(Number* out, const Workspace& work, const Piece& piece,
                                            float* scratch) {
    constexpr int A_ROW = LATENT_DIM / 4;
    const int elements = piece.tile.rows * A_ROW, number = piece.number();
    const int begin = elements * number / piece.count, end = elements * (number + 1) / piece.count;
    if (fresh_thread() == 0) wait_for_blocks(&work.ticket[piece.first_block], piece.count);
    __syncthreads();
    if (begin < end) {
        const int first_row = begin / A_ROW;
        float4* const sums = (float4*)scratch;
        float* const weight = scratch + 4 * THREADS;
        weigh_parts<ROWS>(weight, work, piece, first_row, (end - 1) / A_ROW);
        __syncthreads();
        int across = THREADS;
        while (across / 2 >= end - begin && across > WARP) across /= 2;
        const int sharers = THREADS / across, sharer = fresh_thread() / across;
        for (int base = begin; base < end; base += across) {
            const int element = base + fresh_thread() % across;
            float4 sum = {0, 0, 0, 0};
            if (element < end) {
                const int row = element / A_ROW;
                sum = merged<ROWS, LATENT_DIM>(weight + (row - first_row) * piece.count, work,
                                               piece, element, sharer, sharers);
            }
            if (sharers > 1) {
                sums[fresh_thread()] = sum;
                __syncthreads();
                for (int i = 1; i < sharers && sharer == 0; ++i)
                    add_scaled(sum, sums[fresh_thread() + i * across], 1.0f);
            }
            if (element < end && sharer == 0)
                write4(out + (i64)piece.packed * LATENT_DIM + 4 * (i64)element, sum);
        }
    }
    __syncthreads();
    // The last to leave makes the ticket ready for the next launch.
    if (fresh_thread() == 0) {
        const int before = add_acquire_release(&work.ticket[piece.first_block], 1);
        if (before == 2 * piece.count - 1) work.ticket[piece.first_block] = 0;
    }
}

// Rows of row_start that belong to no real row give 0.
template <int LATENT_DIM, class Number>
__device__ __forceinline__ void clear_padding(Number* out, const Batch& batch) {
    constexpr int A_ROW = LATENT_DIM / 4;
    for (int r = fresh_block(); r < batch.num_requests; r += gridDim.x) {
        const Request request = request_of(batch, r);
        const i64 first = (i64)(request.first_row + request.rows) * batch.heads * A_ROW;
        const i64 last = (i64)batch.row_start[r + 1] * batch.heads * A_ROW;
        for (i64 i = first + fresh_thread(); i < last; i += THREADS)
            write4(out + 4 * i, {0, 0, 0, 0});
    }
}
