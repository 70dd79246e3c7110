// How attention's kernels write results in bf16: C fragments of 16 dimensions by 8 rows, of which lane
// 4 g + t has dimensions g (x, y) and g + 8 (z, w) of rows 2t and 2t + 1.
#pragma once

#include "mma.cuh"

// 16 dimensions of the first `rows` of eight rows, `WIDTH` numbers apart. Lanes whose dimensions are
// neighbours exchange, so that each writes pairs: one row's the one, the next row's the other.
template <int WIDTH>
__device__ __forceinline__ void write_fragment(u16* out, int rows, float4 x) {
    const u32 lane = fresh_thread() % WARP, odd = lane / 4 % 2;
    const float low = __shfl_xor_sync(ALL_LANES, odd ? x.x : x.y, 4);
    const float high = __shfl_xor_sync(ALL_LANES, odd ? x.z : x.w, 4);
    const int row = lane % 4 * 2 + odd;
    if (row >= rows) return;
    u32* const to = (u32*)(out + row * WIDTH + lane / 4 - odd);
    to[0] = odd ? bf16_pair(low, x.y) : bf16_pair(x.x, low);
    to[4] = odd ? bf16_pair(high, x.w) : bf16_pair(x.z, high);
}
