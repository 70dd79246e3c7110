// verify_attention_invariant: what verify_attention computes, in an order of sums that a row's own path
// alone decides. A token's result has the same bits as a node of any tree, as a row of a prompt and
// as the only row of a step.
//
// A block sums up segments of paths (verify_attention_segment.cuh), and merge_invariant adds a row's
// segments in their order. Neither asks what else is in the step: rows that see the same keys share the
// reading of them alone (plan_paths.cu).
//
// verify_attention_invariant  segments, bf16 on tensor cores (mma.sync), softmax in float32
// merge_invariant             rows of several segments; rows that are padding give 0
//
// info, path, unit   what plan_paths gives
// out         [T, H, C] bf16; query [T, H, C + D] bf16, strides between rows and heads given
// part_value  [items, 64, C / 16, 32] float4, part_norm [items, 64, 8] float2: of a launch's items,
//             which are first_item on, 128 at most
// cache       [S, C + D] bf16; page_table [R, pages] int32
//
// With `planned`, info, path, unit and page table were there before an earlier launch of this kernel
// passed its wait: they are read while the kernel in front still runs.
//
// Grid of verify_attention_invariant: any number of blocks of 256, two to a multiprocessor where
// memory allows; merge_invariant: (items, ceil(C / 128)) blocks of 256.
// Limits: C a multiple of 64, D of 16; rows of query and cache from 16-byte boundaries on.
// Precision: as verify_attention in bf16.
// Oracle: kernels/reference_attention.py and float64 (tests/gpu/test_verify_attention_invariant.py).

#include "verify_attention_segment.cuh"

extern __shared__ __align__(128) unsigned char memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 2) verify_attention_invariant(
    u16* out, float4* part_value, float2* part_norm, const PathInfo* info, const int* path,
    const int* unit, const unsigned char* query, const unsigned char* cache,
    const int* page_table, i64 query_row_stride, i64 query_head_stride, i64 cache_row_stride,
    int first_item, int heads, int pages, int page_shift, int nodes, float scale, int planned) {
    InvariantShared& s = *(InvariantShared*)memory;
    const InvariantAttention in = {out,
                                   part_value,
                                   part_norm,
                                   info,
                                   path,
                                   query,
                                   2 * query_row_stride,
                                   2 * query_head_stride,
                                   cache,
                                   2 * cache_row_stride,
                                   page_table,
                                   first_item,
                                   heads,
                                   pages,
                                   page_shift,
                                   nodes,
                                   scale};
    bool behind = !planned;
    if (behind) start_behind_previous();
    const int* const own = unit + (i64)(first_item / MOST_ITEMS) * (1 + MOST_UNITS);
    const int units = own[0];
#pragma unroll 1
    for (int u = blockIdx.x; u < units; u += gridDim.x) {
        SegmentBlock(s, in, Unit::unpacked(own[1 + u])).run(behind);
        behind = true;
    }
    if (!behind) start_behind_previous();
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_invariant(
    u16* out, const float4* part_value, const float2* part_norm, const PathInfo* info,
    int first_item, int heads) {
    __shared__ float share[EIGHT][SEGMENTS];
    start_behind_previous();
    const int items = (heads + EIGHT - 1) / EIGHT, global = first_item + blockIdx.x;
    const int row = global / items, first = global % items * EIGHT;
    const int segments = load_info(info + row).segments();
    if (segments == 1) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u16* const to = out + ((i64)row * heads + first) * LATENT;
    if (segments > 0) {
        const float2* const norm = part_norm + (i64)blockIdx.x * SEGMENTS * EIGHT + warp;
        const bool has_low = lane < segments, has_high = lane + WARP < segments;
        const float2 low = has_low ? norm[lane * EIGHT] : float2{NO_SCORE, 0};
        const float2 high = has_high ? norm[(lane + WARP) * EIGHT] : float2{NO_SCORE, 0};
        float most = max(low.x, high.x);
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2)
            most = max(most, __shfl_xor_sync(ALL_LANES, most, by));
        const float of_low = exp2_fast(low.x - most), of_high = exp2_fast(high.x - most);
        float sum = plus(multiply(of_low, low.y), multiply(of_high, high.y));
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, by);
        share[warp][lane] = divide(of_low, sum);
        share[warp][lane + WARP] = divide(of_high, sum);
        __syncthreads();
    }
    const int tile = warp + WARPS * blockIdx.y;
    if (tile >= VALUE_STEPS) return;
    const float4* from =
        part_value + ((i64)blockIdx.x * SEGMENTS * VALUE_STEPS + tile) * WARP + lane;
    const float *const a = share[lane % 4 * 2], *const b = share[lane % 4 * 2 + 1];
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int i = 0; i < segments; ++i, from += VALUE_STEPS * WARP) {
        const float4 x = *from;
        sum.x = fmaf(x.x, a[i], sum.x);
        sum.y = fmaf(x.y, b[i], sum.y);
        sum.z = fmaf(x.z, a[i], sum.z);
        sum.w = fmaf(x.w, b[i], sum.w);
    }
    write_fragment<LATENT>(to + 16 * tile, min(EIGHT, heads - first), sum);
}
