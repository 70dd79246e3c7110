// verify_attention: absorbed MLA over the paged latent cache, a draft tree behind the prefix.
//
// out[t, h] = sum over the keys that row t sees of softmax(scale * query[t, h] . key) * key[:C]:
// values are the first C numbers of a key (kernels/ops.py: AttentionBatch says who sees whom).
//
// verify_attention        bf16 on tensor cores (mma.sync), sums and softmax in float32
// verify_attention_fp32   float32 on CUDA cores
//
// out         [T, H, C], as the query is typed; every row of row_start is written, 0 for padding
// part_value  [2 G, rows, C] float32, part_norm [2 G, rows, 2] float32, ticket [G] int32, zero
//             before the first launch: workspace for G blocks; rows is 72, or 8 in float32
// query       [T, H, C + D], strides between rows and heads given; cache [S, C + D], rows from
//             16-byte boundaries on
// row_start   [R + 1] int32, num_cached, num_known, num_nodes [R] int32: request r has rows
//             row_start[r] .., num_known[r] + num_nodes[r] - 1 of them real, none with num_known 0
// page_table  [R, pages] int32; mask [R, nodes, words] int32
//
// Grid G blocks of 256 threads, all resident at once (cooperative), whatever the lengths: these are
// read on the device, and all blocks get equal shares of the work (verify_attention_work.cuh).
// A block works through its pieces; parts of tiles that several blocks share are merged at the end,
// by all of them (verify_attention_merge.cuh). One tile: verify_attention_tile.cuh, or _fp32.cuh.
//
// Limits: C a multiple of 64, D of 16; pages of 2^n positions; any H and R; G <= 256. Shared memory
// within 99 KB a block; bf16 takes all registers, one block a multiprocessor. For a fixed batch and
// grid the result is fixed to the last bit.
// Precision: bf16 weights are rounded to bf16 before they meet the values, as their sum is; the
// result within 2^-7 of float64 in relative terms (norm of the difference over the norm), float32
// within 1e-5.
// Oracle: kernels/reference_attention.py and float64 (tests/gpu/test_verify_attention.py).

#ifndef LATENT  // C
#define LATENT 512
#endif
#ifndef ROPE  // D
#define ROPE 64
#endif
#ifndef TALL_COST  // what a step costs with 65 to 72 rows, with 9 to 64, and with up to 8
#define TALL_COST 11
#endif
#ifndef WIDE_COST
#define WIDE_COST 10
#endif
#ifndef SHORT_COST
#define SHORT_COST 4
#endif
#ifndef SETUP_COST  // of a tile, in steps
#define SETUP_COST 3
#endif
#ifndef TALL  // rows of a tile at most: 72, or 64 to leave rows beyond to tiles of their own
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define TALL 64  // 72 take a few registers more than there are
#else
#define TALL 72
#endif
#endif
#ifndef LAG  // nanoseconds by which half the warps start a piece later
#define LAG 0
#endif

#include "verify_attention_fp32.cuh"
#include "verify_attention_tile.cuh"

#ifdef SHARED_BYTES  // what a launch gives a block
static_assert(sizeof(Shared) <= SHARED_BYTES && sizeof(PlainShared) <= SHARED_BYTES_FP32, "shared");
#endif

extern __shared__ __align__(128) unsigned char memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) verify_attention(
    u16* out, float* part_value, float2* part_norm, int* ticket, const unsigned char* query,
    const unsigned char* cache, const int* row_start, const int* num_cached, const int* num_known,
    const int* num_nodes, const int* page_table, const u32* mask, i64 query_row_stride,
    i64 query_head_stride, i64 cache_row_stride, int num_requests, int heads, int pages,
    int page_shift, int nodes, int words, float scale, int least) {
    Shared& s = *(Shared*)memory;
    const Attention in = {out,
                          {part_value, part_norm, ticket},
                          query,
                          2 * query_row_stride,
                          2 * query_head_stride,
                          cache,
                          2 * cache_row_stride,
                          {row_start, num_cached, num_known, num_nodes, page_table, mask,
                           num_requests, heads, pages, page_shift, nodes, words},
                          scale};
    if (threadIdx.x == 0) {
        s.num_waiting = 0;
        open_barriers(s.barriers, true);
    }
    open_deal<TensorShape>(s.deal, in.batch, least);
    __syncthreads();
#pragma unroll 1
    for (;;) {
        if (threadIdx.x == 0) deal_piece<TensorShape>(s.deal, in.batch);
        __syncthreads();
        if (!s.deal.dealt) break;
        if (TALL > MAIN_ROWS && s.deal.piece.tile.rows > MAIN_ROWS)
            attend<true, (TALL > MAIN_ROWS)>(s, in);
        else if (s.deal.piece.tile.rows > EXTRA_ROWS)
            attend<true, false>(s, in);
        else
            attend<false, true>(s, in);
        if (threadIdx.x == 0) {
            if (!s.deal.piece.whole()) s.waiting[s.num_waiting++] = s.deal.piece;
            open_barriers(s.barriers, false);
        }
    }
    clear_padding<LATENT>(out, in.batch);
    for (int i = 0; i < s.num_waiting; ++i)
        merge_share<TILE_ROWS, LATENT>(out, in.work, s.waiting[i], (float*)s.ring);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) verify_attention_fp32(
    float* out, float* part_value, float2* part_norm, int* ticket, const float* query,
    const float* cache, const int* row_start, const int* num_cached, const int* num_known,
    const int* num_nodes, const int* page_table, const u32* mask, i64 query_row_stride,
    i64 query_head_stride, i64 cache_row_stride, int num_requests, int heads, int pages,
    int page_shift, int nodes, int words, float scale, int least) {
    PlainShared& s = *(PlainShared*)memory;
    const PlainAttention in = {out,
                               {part_value, part_norm, ticket},
                               query,
                               query_row_stride,
                               query_head_stride,
                               cache,
                               cache_row_stride,
                               {row_start, num_cached, num_known, num_nodes, page_table, mask,
                                num_requests, heads, pages, page_shift, nodes, words},
                               scale};
    if (threadIdx.x == 0) s.num_waiting = 0;
    open_deal<PlainShape>(s.deal, in.batch, least);
    __syncthreads();
    for (;;) {
        if (threadIdx.x == 0) deal_piece<PlainShape>(s.deal, in.batch);
        __syncthreads();
        if (!s.deal.dealt) break;
        attend_plain(s, in);
        if (threadIdx.x == 0 && !s.deal.piece.whole()) s.waiting[s.num_waiting++] = s.deal.piece;
        __syncthreads();
    }
    clear_padding<LATENT>(out, in.batch);
    for (int i = 0; i < s.num_waiting; ++i)
        merge_share<PLAIN_ROWS, LATENT>(out, in.work, s.waiting[i], s.scratch);
}
