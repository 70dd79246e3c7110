// What rope_cache.cu and absorb_query.cu do with a row: its KV to the cache, its queries turned. Part
// of those files, by whose sizes it is compiled; rope_cache.cu explains it.
#pragma once

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

// Part `part` of a row, by one warp: 0 is its KV, which goes to the cache; each other one turns 32
// vectors of its queries, of which there are H heads.
struct RowsToPlace {
    uint4* cache;
    uint4* rotated;
    const uint4 *kv, *query;
    const float4* turns;
    const i64* slot;
    const uint4* weight;
    const float* eps;
    int S, H, kv_row, query_row, query_head, rotated_row, rotated_head, cache_row;

    __device__ void place(i64 row, int part) const
    {
        if (part == 0) {
            write_cache_row(cache, kv + row * kv_row, turns, slot, weight, eps, row, S, cache_row);
            return;
        }
        const int vector = (part - 1) * WARP + lane_id();
        const int head = vector / ROPE_VECTORS, at = vector % ROPE_VECTORS;
        if (head >= H) return;
        const uint4 pairs = query[row * query_row + (i64)head * query_head + at];
        rotated[row * rotated_row + (i64)head * rotated_head + at] =
            turned(pairs, load_turns(turns, row, at));
    }
};
