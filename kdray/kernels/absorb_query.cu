// A layer's queries as absorbed attention reads them, and the rows' KV to their cache, in one launch
// (Ops.absorb_query): skinny_gemm.cu's product by W_UK, a matrix a head, beside what rope_cache.cu
// does. Neither reads what the other writes. Both explain what is not said here.
//
// absorbed[t, h] = [W_UK[h] query[t, h, :N] | query[t, h, N:] turned];  cache[slot[t]]: rope_cache.cu
//
// outputs absorbed [T, H, C + D] bfloat16, C = LATENT_DIM, D = ROPE_DIM
//         cache    [S, C + D] bfloat16, or rows in fp8 (KV_FP8)
// inputs  query    [T, H, N + D], key_up [H, C, N], kv [T, C + D], weight [C] bfloat16
//         turns    [T, D / 2] complex64;  slot [T] int64;  eps [] float32
// both    work     as skinny_gemm.cu's
// sizes   tokens, N, H, S; then strides in numbers: query a token, query a head, key_up an output,
//         key_up a head, absorbed a token, absorbed a head, kv a row; cache_row in 16 bytes
//
// Grid: skinny_gemm.cu's of H heads, and one more in z, whose warps share the rows' parts. N is a
// multiple of 32, all strides of 8. Bits are those of the two launches. Registers, shared memory,
// limits, precision and oracles are those files' too.

#define INPUT_BF16 1

extern __shared__ __align__(128) unsigned char block_memory[];

#include "skinny_gemm_product.cuh"
#include "rope_cache_row.cuh"

// By the warps of all blocks of the grid's last slice; what takes longest, KV, goes first.
__device__ __forceinline__ void place_rows(const RowsToPlace& rows, int tokens)
{
    const u32 parts = 1 + (rows.H * ROPE_VECTORS + WARP - 1) / WARP;
    const u32 block = blockIdx.y * gridDim.x + blockIdx.x;
    const u32 warps = gridDim.x * gridDim.y * (THREADS / WARP);
#pragma unroll 1
    for (u32 i = block * (THREADS / WARP) + threadIdx.x / WARP; i < tokens * parts; i += warps)
        rows.place(i % tokens, i / tokens);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
absorb_query(u16* absorbed, uint4* cache, const u16* query, const u16* key_up, const u16* kv,
             const uint4* weight, const float4* turns, const i64* slot, const float* eps,
             uint4* work, int tokens, int inputs, int H, int S, int x_token, int x_head, int w_row,
             int w_head, int out_token, int out_head, int kv_row, int cache_row)
{
    __shared__ u64 barriers[BARRIERS];
    let_next_start();
    if (blockIdx.z == H) {
        wait_for_previous();
        const RowsToPlace rows = {cache,
                                  (uint4*)(absorbed + LATENT_DIM),
                                  (const uint4*)kv,
                                  (const uint4*)(query + inputs),
                                  turns,
                                  slot,
                                  weight,
                                  eps,
                                  S,
                                  H,
                                  kv_row / VECTOR,
                                  x_token / VECTOR,
                                  x_head / VECTOR,
                                  out_token / VECTOR,
                                  out_head / VECTOR,
                                  cache_row};
        place_rows(rows, tokens);
        return;
    }
    const Sizes sizes = {tokens, inputs, LATENT_DIM, x_token, x_head,
                         w_row,  w_head, out_token, out_head};
    Sums sum = {};
    multiply_block(sum, query, key_up, false, sizes, Place(tokens, threadIdx.x),
                   shared_address(barriers));
    const Place again(tokens, fresh_thread());
    lay_out((float*)block_memory, sum, again);
    __syncthreads();
    finish<false, false>((float*)block_memory, absorbed, nullptr, work, sizes, again);
}
