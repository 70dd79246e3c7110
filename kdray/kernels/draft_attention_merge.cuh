// What becomes of a piece: of one that is all of a request's keys, the result is written as it is.
// Others leave their parts in the workspace, and the last of the request's blocks to do so merges
// all of them, in their order. So the result does not depend on timing.
#pragma once

#include "draft_attention_deal.cuh"
#include "mma.cuh"

// For `slots` slots of G key heads each. A part is ROWS x HEAD_DIM sums of weighted values, and for
// each row the maximum its weights are relative to and their sum.
struct Workspace {
    float* value;  // [slots, G, ROWS, HEAD_DIM]
    float2* norm;  // [slots, G, ROWS]: (maximum of the scores in powers of two, sum of the weights)
    int* ticket;   // [slots, G], zero between launches
};

// Where a block's rows lie: row p of a key head is query head p % ratio of block slot p / ratio.
struct Heads {
    int group;   // the key head
    int groups;  // G
    int ratio;   // query heads of a key head
    int rows;    // that are no padding

    __device__ int slot_of(int row) const { return min(row, rows - 1) / ratio; }
    // Row `row` of request r in an array [R, slots, H, HEAD_DIM], in numbers.
    __device__ i64 offset(int row, i64 request_stride, i64 slot_stride, int r) const {
        const int head = group * ratio + row % ratio;
        return r * request_stride + row / ratio * slot_stride + (i64)head * HEAD_DIM;
    }
    __device__ i64 out_offset(int row, int r) const {
        const i64 slot_stride = (i64)groups * ratio * HEAD_DIM;
        return offset(row, rows / ratio * slot_stride, slot_stride, r);
    }
};

constexpr float NO_SCORE = -1e30f;  // finite, so that differences of two are no NaN
constexpr int ROW_FOURS = HEAD_DIM / 4;
constexpr int ABREAST_MERGED = 4;  // a thread's loads of a part: what is far takes many on the way

__device__ __forceinline__ void add_scaled(float4& sum, float4 x, float by) {
    sum.x = fmaf(x.x, by, sum.x);
    sum.y = fmaf(x.y, by, sum.y);
    sum.z = fmaf(x.z, by, sum.z);
    sum.w = fmaf(x.w, by, sum.w);
}
__device__ __forceinline__ float4 scaled(float4 x, float by) {
    return {x.x * by, x.y * by, x.z * by, x.w * by};
}
__device__ __forceinline__ void write4(float* out, float4 x) { *(float4*)out = x; }
__device__ __forceinline__ void write4(u16* out, float4 x) {
    *(uint2*)out = {bf16_pair(x.x, x.y), bf16_pair(x.z, x.w)};
}

__device__ __forceinline__ i64 part_row(const Heads& heads, int slot, int row) {
    return ((i64)slot * heads.groups + heads.group) * ROWS + row;
}

// The block's part is in the workspace. True in the last block of the request and head.
__device__ __forceinline__ bool post_part(const Workspace& work, const Piece& piece,
                                          const Heads& heads, int& is_last) {
    int* const ticket = work.ticket + (i64)piece.first_slot * heads.groups + heads.group;
    __syncthreads();
    if (threadIdx.x == 0) {
        // The barrier brought the block's stores here; the release shows them to all.
        is_last = add_acquire_release(ticket, 1) == piece.count - 1;
        if (is_last) *ticket = 0;
    }
    __syncthreads();
    return is_last;
}

// weight[row][part]: what the part's sums of that row count in the result. One warp a row.
__device__ __forceinline__ void weigh_parts(float (*weight)[MAX_PIECES], const Workspace& work,
                                            const Piece& piece, const Heads& heads) {
    for (int row = warp_id(); row < heads.rows; row += WARPS) {
        const int part = lane_id();
        float2 norm = {NO_SCORE, 0.0f};
        if (part < piece.count)
            norm = load_shared_by_blocks(&work.norm[part_row(heads, piece.first_slot + part, row)]);
        float most = norm.x;
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2)
            most = max(most, __shfl_xor_sync(ALL_LANES, most, by));
        const float share = exp2_fast(norm.x - most);
        float sum = share * norm.y;
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, by);
        weight[row][part] = share / sum;
    }
}

// By the last block. weight: shared memory that nobody uses any more.
template <class Number>
__device__ __forceinline__ void merge_parts(Number* out, const Workspace& work, const Piece& piece,
                                            const Heads& heads, float (*weight)[MAX_PIECES]) {
    weigh_parts(weight, work, piece, heads);
    __syncthreads();
    const int elements = heads.rows * ROW_FOURS;
    const i64 from_part_to_part = (i64)heads.groups * ROWS * ROW_FOURS;
    const float4* const first =
        (const float4*)work.value + part_row(heads, piece.first_slot, 0) * ROW_FOURS;
    for (int base = threadIdx.x; base < elements; base += THREADS * ABREAST_MERGED) {
        float4 sum[ABREAST_MERGED] = {};
#pragma unroll 4
        for (int part = 0; part < piece.count; ++part) {
#pragma unroll
            for (int k = 0; k < ABREAST_MERGED; ++k) {
                const int i = min(base + THREADS * k, elements - 1);
                const float4 x = load_shared_by_blocks(first + part * from_part_to_part + i);
                add_scaled(sum[k], x, weight[i / ROW_FOURS][part]);
            }
        }
#pragma unroll
        for (int k = 0; k < ABREAST_MERGED; ++k) {
            const int i = base + THREADS * k;
            if (i >= elements) break;
            const i64 row = heads.out_offset(i / ROW_FOURS, piece.request);
            write4(out + row + i % ROW_FOURS * 4, sum[k]);
        }
    }
}
