// What rope turns in a layer's attention, and the rows' KV to their cache (Ops.rope_cache).
//
// cache[slot[t]] = [rms_norm(kv[t, :C]) * weight | kv[t, C:] turned]
// rotated[t, h]  = query[t, h] turned, h < H
// C = LATENT_DIM, D = ROPE_DIM. A pair (2i, 2i + 1) is one complex number; turning multiplies it by
// turns[t, i] in float32 and rounds once.
//
// outputs  cache    [S, C + D], cache_row vectors apart; with KV_FP8, which is for bfloat16, rows of
//                   fp8_row_bytes(C, D) bytes as latent_rows.py has them
//          rotated  [T, H, D]          rotated_row, rotated_head vectors apart
// inputs   kv       [T, C + D]         kv_row vectors apart
//          query    [T, H, D]          query_row, query_head vectors apart
//          turns    [T, D / 2] complex64;  slot [T] int64;  weight [C];  eps [] float32
// All but turns, slot and eps are bfloat16 or float32 (INPUT_BF16), in whole vectors of 16 bytes.
// A slot outside 0 .. S - 1 is a row of padding: its KV is written nowhere.
//
// Grid (T, warps of a row / blockDim.y), blocks of 32 by y: warp 0 of a row writes the cache, each
// other turns 32 vectors of queries. No shared memory. A row's bits depend on that row alone.
// Limits: C up to 1024, D up to 128; with KV_FP8 C a multiple of 16.
// The norm is rms_norm.cu's arithmetic; products of a turn are rounded one by one, as torch's are on
// a CPU. Oracle: reference_fused.py, float32 within 2e-6 relatively, bfloat16 within two roundings.

#include "overlap.cuh"
#include "rope_cache_row.cuh"

extern "C" __global__ void __launch_bounds__(256)
rope_cache(uint4* cache, uint4* rotated, const uint4* kv, const uint4* query, const float4* turns,
           const i64* slot, const uint4* weight, const float* eps, int S, int H, int kv_row,
           int query_row, int query_head, int rotated_row, int rotated_head, int cache_row)
{
    start_behind_previous();
    const RowsToPlace rows = {cache,       rotated,    kv,     query, turns,  slot,
                              weight,      eps,        S,      H,     kv_row, query_row,
                              query_head,  rotated_row, rotated_head, cache_row};
    rows.place(blockIdx.x, blockIdx.y * blockDim.y + threadIdx.y);
}
