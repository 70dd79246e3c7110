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

#ifndef INPUT_BF16
#define INPUT_BF16 1
#endif
#ifndef LATENT_DIM
#define LATENT_DIM 512
#endif
#ifndef ROPE_DIM
#define ROPE_DIM 64
#endif

#ifndef KV_FP8
#define KV_FP8 0
#endif

#include "fp8.cuh"
#include "overlap.cuh"
#include "vectors.cuh"

constexpr int LATENT_VECTORS = LATENT_DIM / VECTOR;
constexpr int ROPE_VECTORS = ROPE_DIM / VECTOR;
constexpr int ITEMS = (LATENT_VECTORS + WARP - 1) / WARP;
static_assert(LATENT_DIM % VECTOR == 0 && ROPE_DIM % VECTOR == 0, "parts are whole vectors");
static_assert(!KV_FP8 || (INPUT_BF16 && LATENT_DIM % 16 == 0), "chunks are latents or keys");
static_assert(ITEMS <= 8 && ROPE_VECTORS <= WARP, "a row must fit the registers of a warp");

// The rotations of one vector's pairs: two pairs in 16 bytes.
struct Turns {
    float4 two[VECTOR / 4];
};

__device__ __forceinline__ Turns load_turns(const float4* turns, i64 row, int vector)
{
    Turns out;
#pragma unroll
    for (int i = 0; i < VECTOR / 4; ++i)
        out.two[i] = turns[row * (ROPE_DIM / 4) + vector * (VECTOR / 4) + i];
    return out;
}

__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin)
{
    const float real = minus(multiply(a, cos), multiply(b, sin));
    b = plus(multiply(a, sin), multiply(b, cos));
    a = real;
}

__device__ __forceinline__ uint4 turned(const uint4& pairs, const Turns& turns)
{
    Numbers n = unpacked(pairs);
#pragma unroll
    for (int i = 0; i < VECTOR / 4; ++i) {
        turn(n.x[4 * i], n.x[4 * i + 1], turns.two[i].x, turns.two[i].y);
        turn(n.x[4 * i + 2], n.x[4 * i + 3], turns.two[i].z, turns.two[i].w);
    }
    return packed(n);
}

#if KV_FP8
constexpr float LEAST_LARGEST = 7.888609052e-31f;  // 2^-100: below it, a row of zeros
constexpr int LATENT_CHUNKS = LATENT_DIM / 16;
constexpr int SCALE_CHUNK = LATENT_CHUNKS + ROPE_VECTORS;
constexpr int CHUNKS = fp8_row_bytes(LATENT_DIM, ROPE_DIM) / 16;

// The largest magnitude of the warp's latents; no number where one of them is none.
__device__ __forceinline__ float largest_of(const uint4 (&latent)[ITEMS])
{
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i * WARP + lane_id() >= LATENT_VECTORS) continue;
        const Numbers n = unpacked(latent[i]);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) most = max(most, bits_of(n.x[e]) & 0x7fffffffu);
    }
    return float_of(__reduce_max_sync(ALL_LANES, most));
}

// Latents in e4m3 and their scale; the key stays to be written behind them.
__device__ __forceinline__ void write_latent(uint4* out, const uint4 (&latent)[ITEMS])
{
    const int lane = lane_id();
    float largest = largest_of(latent), factor = 0.0f;
    if (largest < LEAST_LARGEST)
        largest = 0.0f;
    else
        factor = divide(LARGEST_E4M3, largest);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i * WARP + lane >= LATENT_VECTORS) continue;
        const Numbers n = unpacked(latent[i]);
        u32 pair[VECTOR / 2];
#pragma unroll
        for (int e = 0; e < VECTOR / 2; ++e)
            pair[e] = e4m3_pair(multiply(n.x[2 * e], factor), multiply(n.x[2 * e + 1], factor));
        ((uint2*)out)[i * WARP + lane] = {pair[0] | pair[1] << 16, pair[2] | pair[3] << 16};
    }
    if (lane < CHUNKS - SCALE_CHUNK)
        out[SCALE_CHUNK + lane] = {lane == 0 ? bits_of(divide(largest, LARGEST_E4M3)) : 0, 0, 0, 0};
}
#else
constexpr int LATENT_CHUNKS = LATENT_VECTORS;

__device__ __forceinline__ void write_latent(uint4* out, const uint4 (&latent)[ITEMS])
{
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (i * WARP + lane_id() < LATENT_VECTORS) out[i * WARP + lane_id()] = latent[i];
}
#endif

__device__ __forceinline__ void write_cache_row(uint4* cache, const uint4* kv, const float4* turns,
                                                const i64* slot, const uint4* weight,
                                                const float* eps, i64 row, int S, int cache_row)
{
    const int lane = lane_id();
    const i64 place = slot[row];
    uint4 held[ITEMS], factor[ITEMS], key;
    Turns own;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (i * WARP + lane < LATENT_VECTORS) held[i] = kv[i * WARP + lane];
    if (lane < ROPE_VECTORS) {
        key = kv[LATENT_VECTORS + lane];
        own = load_turns(turns, row, lane);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (i * WARP + lane < LATENT_VECTORS) factor[i] = weight[i * WARP + lane];

    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (i * WARP + lane < LATENT_VECTORS) squares += sum_of_squares(unpacked(held[i]));
    const float scale = rms_scale(warp_sum(squares), LATENT_DIM, *eps);
    if (place < 0 || place >= S) return;
    uint4* out = cache + place * cache_row;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (i * WARP + lane < LATENT_VECTORS) held[i] = normalised(held[i], scale, factor[i]);
    write_latent(out, held);
    if (lane < ROPE_VECTORS) out[LATENT_CHUNKS + lane] = turned(key, own);
}

extern "C" __global__ void __launch_bounds__(256)
rope_cache(uint4* cache, uint4* rotated, const uint4* kv, const uint4* query, const float4* turns,
           const i64* slot, const uint4* weight, const float* eps, int S, int H, int kv_row,
           int query_row, int query_head, int rotated_row, int rotated_head, int cache_row)
{
    start_behind_previous();
    const i64 row = blockIdx.x;
    const int warp = blockIdx.y * blockDim.y + threadIdx.y;
    if (warp == 0) {
        write_cache_row(cache, kv + row * kv_row, turns, slot, weight, eps, row, S,
                        cache_row);
        return;
    }
    const int vector = (warp - 1) * WARP + lane_id();
    const int head = vector / ROPE_VECTORS, at = vector % ROPE_VECTORS;
    if (head >= H) return;
    const uint4 pairs = query[row * query_row + (i64)head * query_head + at];
    rotated[row * rotated_row + (i64)head * rotated_head + at] =
        turned(pairs, load_turns(turns, row, at));
}
