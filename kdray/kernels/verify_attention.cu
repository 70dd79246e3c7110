// verify_attention: absorbed MLA over the paged latent cache, a draft tree behind the prefix.
//
// out[t, h] = sum over the keys that row t sees of softmax(scale * query[t, h] . key) * key[:C]:
// values are the first C numbers of a key (kernels/attention_batch.py says who sees whom).
//
// verify_attention        bf16 on tensor cores (mma.sync), sums and softmax in float32
// verify_attention_fp32   float32 on CUDA cores
//
// out         [T, H, C], as the query is typed; every row of row_start is written, 0 for padding
// part_value  [2 G, rows, C] float32, part_norm [2 G, rows, 2] float32, ticket [G] int32, zero
//             before the first launch: workspace for G blocks; rows is 72, or 8 in float32
// piece, start  what plan_attention gives for G blocks
// query       [T, H, C + D], strides between rows and heads given; cache [S, C + D], or with KV_FP8
//             rows in fp8 (latent_rows.py) as uint8 [S, bytes]; rows from 16-byte boundaries on
// row_start   [R + 1] int32, num_cached, num_known, num_nodes [R] int32: request r has rows
//             row_start[r] .., num_known[r] + num_nodes[r] - 1 of them real, none with num_known 0
// page_table  [R, pages] int32; mask [R, nodes, words] int32
//
// Grid G blocks, at most one a multiprocessor, of 384 threads, 256 in float32. A block works
// through the pieces of work that plan_attention dealt to it; parts of tiles that several blocks
// share are merged at the end, by all of them (verify_attention_merge.cuh).
//
// With `planned`, piece and start were there before an earlier launch of this kernel passed its wait,
// and so were lengths, page table, and the cache of all positions before a request's rows: a block
// reads them while the kernel in front still runs. (All but the first layer's launches of a step.)
//
// In bf16 a block has four warps that multiply scores and weigh (verify_attention_score.cuh) and
// eight that sum weighted values (verify_attention_value.cuh), each a step or two behind the other:
// they meet at barriers in shared memory and nowhere else, so that scores of one step, weights of
// the one before and values of the one before that are under way at once.
//
// Limits: C a multiple of 64, D of 16; pages of 2^n positions; any H and R; G <= 256. Shared memory
// within 99 KB a block. For a fixed batch and grid the result is fixed to the last bit.
// Precision: bf16 weights are rounded to bf16 before they meet the values, as their sum is; the
// result within 2^-7 of float64 in relative terms (norm of the difference over the norm), float32
// within 1e-5.
// With KV_FP8 latents meet queries and weights in float16. Latents are exact in it, and so are queries
// from 2^-14 to 65504; smaller ones are within 2^-25, larger ones count as 65504. A weight, at most
// 256, is multiplied by its key's scale and by 256 first, and what is above 65504 counts as that: only
// where a row's largest latent is above 448. Sums of weights are of float32 ones. The result is within
// 2^-7 of float64 over what the rows stand for.
// Oracle: kernels/reference_attention.py and float64 (tests/gpu/test_verify_attention.py).

#include "overlap.cuh"
#include "verify_attention_fp32.cuh"
#include "verify_attention_merge.cuh"
#include "verify_attention_score.cuh"
#include "verify_attention_value.cuh"

#ifdef SHARED_BYTES  // what a launch gives a block
static_assert(sizeof(Shared) <= SHARED_BYTES && sizeof(PlainShared) <= SHARED_BYTES_FP32, "shared");
#endif

extern __shared__ __align__(128) unsigned char memory[];

struct TensorLayout {
    static constexpr int UNITS = VALUE_STEPS, PART_ROWS = TILE_ROWS, THREADS = BLOCK;
    __device__ static int row_of(int, int lane, int k) { return lane % 4 * 2 + k % 2; }
    __device__ static void write(u16* out, const Piece& piece, int unit, int heads, float4 x) {
        const int eight = unit / UNITS * EIGHT;
        const i64 packed = (i64)piece.first_row * heads + piece.first + eight;
        write_fragment(out + packed * LATENT + 16 * (unit % UNITS), piece.rows - eight, x);
    }
};

__device__ __forceinline__ void open_barriers(Shared& s) {
    for (int i = 0; i < SLOTS; ++i) {
        barrier_init(shared_address(&s.landed[i]), 1);
        barrier_init(shared_address(&s.freed[i]), VALUE_WARPS);
    }
    for (int i = 0; i < 2; ++i) {
        barrier_init(shared_address(&s.weighed[i]), SCORE_WARPS);
        for (int warp = 0; warp < SCORE_WARPS; ++warp) s.raised[i][warp] = ~0u;
    }
    barrier_init(shared_address(&s.normed), SCORE_WARPS);
    order_before_copies();
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1) verify_attention(
    u16* out, float4* part_value, float2* part_norm, int* ticket, const Piece* piece,
    const int* start, const unsigned char* query, const unsigned char* cache,
    const int* row_start, const int* num_cached, const int* num_known, const int* num_nodes,
    const int* page_table, const u32* mask, i64 query_row_stride, i64 query_head_stride,
    i64 cache_row_stride, int num_requests, int heads, int pages, int page_shift, int nodes,
    int words, float scale, int planned) {
    Shared& s = *(Shared*)memory;
    const Attention in = {out,
                          {part_value, part_norm, ticket},
                          query,
                          2 * query_row_stride,
                          2 * query_head_stride,
                          cache,
                          (KV_FP8 ? 1 : 2) * cache_row_stride,
                          page_table,
                          pages,
                          page_shift,
                          {mask, nodes, words},
                          heads,
                          scale};
    if (threadIdx.x == 0) {
        s.num_waiting = 0;
        s.end_step = 0;
        s.pieces = ~0u;
        open_barriers(s);
    }
    if (!planned) wait_for_previous();
    if (threadIdx.x == 0) {
        s.next = start[blockIdx.x];
        s.last = start[blockIdx.x + 1];
    }
    __syncthreads();
#pragma unroll 1
    while (s.next < s.last) {
        if (fresh_thread() < sizeof(Piece) / sizeof(int4))
            ((int4*)&s.piece)[fresh_thread()] = ((const int4*)(piece + s.next))[fresh_thread()];
        __syncthreads();
        if (fresh_thread() == 0) {
            s.first_step = s.end_step;
            s.end_step += s.piece.end - s.piece.begin;
            ++s.next;
            ++s.pieces;
        }
        __syncthreads();
        if (fresh_thread() < SCORE_WARPS * WARP)
            score_piece(s, in);
        else
            sum_values(s, in);
        if (!s.piece.whole()) announce(&ticket[s.piece.first_block]);
        if (fresh_thread() == 0 && !s.piece.whole()) s.waiting[s.num_waiting++] = s.piece;
        __syncthreads();
    }
    start_behind_previous();
    const Batch batch = {row_start, num_cached, num_known, num_nodes, num_requests,
                         heads,     pages,      page_shift, nodes};
    clear_padding<LATENT / 8, BLOCK>(out, batch);
    for (int i = 0; i < s.num_waiting; ++i)
        merge_share<TensorLayout>(out, part_value, part_norm, &ticket[s.waiting[i].first_block],
                                  s.waiting[i], heads, (float4*)s.ring);
}

extern "C" __global__ void __launch_bounds__(PLAIN_THREADS, 1) verify_attention_fp32(
    float* out, float4* part_value, float2* part_norm, int* ticket, const Piece* piece,
    const int* start, const float* query, const float* cache, const int* row_start,
    const int* num_cached, const int* num_known, const int* num_nodes, const int* page_table,
    const u32* mask, i64 query_row_stride, i64 query_head_stride, i64 cache_row_stride,
    int num_requests, int heads, int pages, int page_shift, int nodes, int words, float scale,
    int) {
    PlainShared& s = *(PlainShared*)memory;
    const PlainAttention in = {out,
                               (float*)part_value,
                               part_norm,
                               query,
                               query_row_stride,
                               query_head_stride,
                               cache,
                               cache_row_stride,
                               page_table,
                               pages,
                               page_shift,
                               {mask, nodes, words},
                               heads,
                               scale};
    start_behind_previous();
    const int first = start[blockIdx.x], last = start[blockIdx.x + 1];
    if (threadIdx.x == 0) s.num_waiting = 0;
    for (int i = first; i < last; ++i) {
        __syncthreads();
        if (threadIdx.x < sizeof(Piece) / sizeof(int4))
            ((int4*)&s.piece)[threadIdx.x] = ((const int4*)(piece + i))[threadIdx.x];
        __syncthreads();
        attend_plain(s, in);
        if (s.piece.whole()) continue;
        announce(&ticket[s.piece.first_block]);
        if (threadIdx.x == 0) s.waiting[s.num_waiting++] = s.piece;
    }
    __syncthreads();
    const Batch batch = {row_start, num_cached, num_known, num_nodes, num_requests,
                         heads,     pages,      page_shift, nodes};
    clear_padding<LATENT / 4, PLAIN_THREADS>(out, batch);
    for (int i = 0; i < s.num_waiting; ++i)
        merge_share<PlainLayout>(out, part_value, part_norm, &ticket[s.waiting[i].first_block],
                                 s.waiting[i], heads, s.scratch);
}
