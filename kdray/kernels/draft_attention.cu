// draft_attention: a drafter's block of slots over its paged context and over itself (GQA).
//
// out[r, i, h] = sum over the keys that slot i of request r sees of
// softmax(scale * query[r, i, h] . key) * value, key and value being those of head h / (H / G).
// Slot i stands at position end[r] + i; it sees positions before end[r] and the block's own slots,
// none behind its own where `causal`, and only those nearer than `window`.
//
// draft_attention        bf16 on tensor cores (mma.sync), sums and softmax in float32
// draft_attention_fp32   float32 on CUDA cores
//
// out         [R, slots, H, D], as the query is typed
// part_value  [n, G, rows, D] float32, part_norm [n, G, rows, 2] float32, ticket [n, G] int32, zero
//             before the first launch: workspace; n = 2 * pieces, rows = 16 * ROW_TILES
// query       [R, slots, H, D], strides of requests and slots given; own [R, slots, 2, G, D];
//             cache [S, 2, G, D], keys before values; all from 16-byte boundaries on
// end         [R] int32; page_table [R, pages] int32: position p is cache row
//             page_table[r, p >> page_shift] * 2^page_shift + p % 2^page_shift
//
// Grid: blocks of 128 threads (256 with ROW_TILES 8), G for each piece there may be: pieces + R, or
// less where page tables are short, whatever the lengths, which are read on the device. Block b
// takes piece b / G of key head b % G (draft_attention_deal.cuh) and ends at once where there is
// none. A request's last block merges its pieces (draft_attention_merge.cuh). One piece:
// draft_attention_tile.cuh, draft_attention_fp32.cuh.
//
// Limits: D 64 or 128; slots * H / G up to 128; pages of 2^n positions; window up to 2^30. Nothing
// is read of the cache at or beyond end, which may hold NaN. Shared memory within 99 KB a block.
// For a fixed batch and grid the result is fixed to the last bit.
// Precision: bf16 weights are rounded to bf16 before they meet the values, as their sum is; the
// result within 2^-7 of float64 in relative terms (norm of the difference over the norm), float32
// within 2e-5.
// Oracle: kernels/reference_draft.py and float64 (tests/gpu/test_draft_attention.py).

#ifndef HEAD_DIM  // D
#define HEAD_DIM 128
#endif
#ifndef ROW_TILES  // of 16 rows: slots by query heads of a key head; 1, 2, 4 or 8
#define ROW_TILES 2
#endif
#ifndef STAGES  // steps of 64 keys on their way or at work
#define STAGES 2
#endif
#ifndef RESIDENT  // blocks of a multiprocessor to fit the registers to
#define RESIDENT (ROW_TILES > 4 ? 1 : (HEAD_DIM == 64 ? 4 : 3) - (ROW_TILES > 2))
#endif

#include "draft_attention_fp32.cuh"
#include "draft_attention_tile.cuh"
#include "overlap.cuh"

#ifdef SHARED_BYTES  // what a launch gives a block
static_assert(sizeof(Shared) <= SHARED_BYTES && sizeof(PlainShared) <= SHARED_BYTES_FP32, "shared");
#endif

extern __shared__ __align__(128) unsigned char memory[];

template <class Work, class Memory, class Inputs>
__device__ __forceinline__ void attend(const Inputs& in) {
    const Piece piece = deal_piece(in.batch, blockIdx.x / in.heads.groups);
    if (piece.count == 0) return;
    Work work(*(Memory*)memory, in, piece);
    work.run();
    work.finish();
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) draft_attention(
    u16* out, float* part_value, float2* part_norm, int* ticket, const u16* query,
    const unsigned char* own, const unsigned char* cache, const int* end, const int* page_table,
    i64 query_request_stride, i64 query_slot_stride, int num_requests, int slots, int groups,
    int ratio, int pages, int page_shift, int causal, int window, float scale, int pieces,
    int least) {
    wait_for_previous();
    attend<PieceWork, Shared>(Attention{
        out,
        {part_value, part_norm, ticket},
        query,
        query_request_stride,
        query_slot_stride,
        own,
        cache,
        {end, page_table, num_requests, slots, pages, page_shift, causal, window, pieces, least},
        {(int)blockIdx.x % groups, groups, ratio, slots * ratio},
        scale});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) draft_attention_fp32(
    float* out, float* part_value, float2* part_norm, int* ticket, const float* query,
    const float* own, const float* cache, const int* end, const int* page_table,
    i64 query_request_stride, i64 query_slot_stride, int num_requests, int slots, int groups,
    int ratio, int pages, int page_shift, int causal, int window, float scale, int pieces,
    int least) {
    wait_for_previous();
    attend<PlainWork, PlainShared>(PlainAttention{
        out,
        {part_value, part_norm, ticket},
        query,
        query_request_stride,
        query_slot_stride,
        own,
        cache,
        {end, page_table, num_requests, slots, pages, page_shift, causal, window, pieces, least},
        {(int)blockIdx.x % groups, groups, ratio, slots * ratio},
        scale});
}
