// How skinny_gemm.cu's sums come together: a block's warps through shared memory, blocks through
// the workspace; and how they are stored. Part of that file, by whose sizes it is compiled.
#pragma once

// The warp's sums into part[WARPS_K][tokens][PART_STRIDE], outputs side by side.
__device__ __forceinline__ void lay_out(float* part, const Sums& sum, const Place& place)
{
    const int lane = lane_id(), g = lane / 4, t = lane % 4;
    float* const own = part + place.run * place.tokens * PART_STRIDE +
                       place.row_warp * ROW_TILES * 16 + g;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = 8 * n + 2 * t + i;
            if (token >= place.tokens) continue;
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                own[token * PART_STRIDE + 16 * m] = sum[m][n][i];
                own[token * PART_STRIDE + 16 * m + 8] = sum[m][n][2 + i];
            }
        }
}

// How many blocks leave their sums for others. Of few tokens' the last keeps its own; of many,
// where each takes a share, all do, so that none needs to know its own from others'.
constexpr int LEFT = MANY && SPLIT > 1 ? SPLIT : SPLIT - 1;

// Where block `split` of a piece leaves them.
__device__ __forceinline__ uint4* published(uint4* work, const Place& place, int split)
{
    const int pieces = MANY ? gridDim.y : gridDim.x;
    const i64 piece = blockIdx.z * pieces + place.piece;
    return work + (piece * LEFT + split) * TOKENS * VECTORS;
}

// Vector v of the piece's sums, over all runs: the block's own, and what others publish.
__device__ __forceinline__ float4 whole_sum(const float4& own, uint4* work, const Place& place,
                                            int v)
{
    if constexpr (SPLIT == 1) {
        return own;
    } else {
        uint4 word[SPLIT];
        bool full;
        do {
            full = true;
#pragma unroll
            for (int s = 0; s < LEFT; ++s) word[s] = look_at(published(work, place, s) + v);
#pragma unroll
            for (int s = 0; s < LEFT; ++s) full = full && is_full(word[s]);
        } while (!full);
        float4 sum[SPLIT];
        sum[SPLIT - 1] = own;
#pragma unroll
        for (int s = 0; s < LEFT; ++s) {
            store_relaxed(published(work, place, s) + v, {EMPTY, EMPTY, EMPTY, EMPTY});
            sum[s] = {float_of(word[s].x), float_of(word[s].y), float_of(word[s].z),
                      float_of(word[s].w)};
        }
        return tree_sum<SPLIT>(sum, 1);
    }
}

__device__ __forceinline__ float rounded(float x) { return bf16_low(bf16_pair(x, 0.0f)); }
// As swiglu.cu has it, from the rounded product to the rounded result.
__device__ __forceinline__ float gated(float gate, float up)
{
    const float x = rounded(gate);
    return multiply(rounded(divide(x, 1.0f + expf(-x))), rounded(up));
}

template <bool FP32>
__device__ __forceinline__ void store(void* out, const void* add, i64 at, float4 v)
{
    if constexpr (FP32) {
        if (add) v = v + *(const float4*)((const float*)add + at);
        *(float4*)((float*)out + at) = v;
    } else {
        if (add) {
            const uint2 more = *(const uint2*)((const u16*)add + at);
            v = v +
                float4{bf16_low(more.x), bf16_high(more.x), bf16_low(more.y), bf16_high(more.y)};
        }
        *(uint2*)((u16*)out + at) = {bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
    }
}

// Units of four outputs, of which a token has UNITS: where the sums of the block's warps lie.
template <bool GATES>
struct Unit {
    static constexpr int UNITS = GATES ? VECTORS / 2 : VECTORS;
    u32 token, unit, vector;

    __device__ explicit Unit(u32 u)
        : token(u / UNITS), unit(u % UNITS), vector(GATES ? unit / 2 * 4 + unit % 2 : unit)
    {
    }
    __device__ int word() const { return token * VECTORS + vector; }
    // Vector `more` further on, over the block's warps.
    __device__ float4 own(const float* part, const Place& place, int more) const
    {
        const float4* const sums = (const float4*)(part + token * PART_STRIDE) + vector + more;
        return tree_sum<WARPS_K>(sums, place.tokens * (PART_STRIDE / 4));
    }
};

// Vector v of the block's sums: left for another block, or, `here`, over all runs.
__device__ __forceinline__ float4 merged(const float4& own, uint4* work, const Place& place, int v,
                                         bool here)
{
    if (SPLIT == 1 || here) return whole_sum(own, work, place, v);
    publish(published(work, place, place.split) + v, own);
    return own;
}

// A unit's sums, left for another block, or, `here`, to where they go.
template <bool GATES, bool FP32>
__device__ __forceinline__ void settle(const float* part, void* out, const void* add, uint4* work,
                                       const Sizes& sizes, const Place& place, u32 u, bool here)
{
    const Unit<GATES> unit(u);
    float4 sum = merged(unit.own(part, place, 0), work, place, unit.word(), here);
    if constexpr (GATES) {
        const float4 up = merged(unit.own(part, place, 2), work, place, unit.word() + 2, here);
        sum = {gated(sum.x, up.x), gated(sum.y, up.y), gated(sum.z, up.z), gated(sum.w, up.w)};
    }
    const int feature = place.tile * (unit.UNITS * 4) + unit.unit * 4;
    if (!here || feature >= sizes.outputs / (GATES + 1)) return;
    const i64 at = (i64)(place.first + unit.token) * sizes.out_token +
                   (i64)blockIdx.z * sizes.out_head + feature;
    store<FP32>(out, add, at, sum);
}

// Sums of the block's warps, and of the other blocks, to where they go.
template <bool GATES, bool FP32>
__device__ __forceinline__ void finish(const float* part, void* out, const void* add, uint4* work,
                                       const Sizes& sizes, const Place& place)
{
    const u32 units = place.tokens * Unit<GATES>::UNITS;
    if constexpr (MANY && SPLIT > 1) {
        constexpr u32 LINE = 8;  // a block's units that lie side by side, to write whole lines
#pragma unroll 1
        for (u32 u = threadIdx.x; u < units; u += THREADS)
            settle<GATES, FP32>(part, out, add, work, sizes, place, u, false);
#pragma unroll 1
        for (u32 i = threadIdx.x;; i += THREADS) {
            const u32 u = (i / LINE * SPLIT + place.split) * LINE + i % LINE;
            if (u >= units) break;
            settle<GATES, FP32>(part, out, add, work, sizes, place, u, true);
        }
    } else {
#pragma unroll 1
        for (u32 u = threadIdx.x; u < units; u += THREADS)
            settle<GATES, FP32>(part, out, add, work, sizes, place, u, place.split == SPLIT - 1);
    }
}
