// The log-sum-exp of topk_logprob.cu: units summed in float32 in a fixed order, then added as
// integers, in any order, to a log-prob in fixed point.
#pragma once

#include "topk_row.cuh"

constexpr float LOG2_E = 1.44269504f;
constexpr float ALMOST_NOTHING = -5.4e8f;  // about -2^29: stands for the maximum of an empty unit
constexpr float HUGE_LOGIT = 2.68435456e8f;  // 2^28

// The sum of one unit: sum * 2^reference, which is an integer.
struct alignas(8) UnitSum {
    float reference;
    float sum;
};

// Sums of units as integers, so that their order cannot show: a unit's 24-bit sum goes, shifted,
// to the 64-bit word of its binary exponent's bin of 32. The top bin and the one below are kept;
// what falls below them is less than 2^-31 of the whole, unit for unit.
struct Mass {
    int top;  // bin number
    u64 high, low;
};

constexpr int NO_BIN = -0x40000000;
constexpr int CHUNK = 22;  // bits summed at once: 32 lanes' sums stay below 2^32

__device__ __forceinline__ u64 warp_sum(u64 x) {
    const u64 mask = (1u << CHUNK) - 1;
    const u64 a = __reduce_add_sync(ALL_LANES, (u32)(x & mask));
    const u64 b = __reduce_add_sync(ALL_LANES, (u32)(x >> CHUNK & mask));
    const u64 c = __reduce_add_sync(ALL_LANES, (u32)(x >> 2 * CHUNK));
    return a + (b << CHUNK) + (c << 2 * CHUNK);
}

__device__ __forceinline__ u64 in_bin(const Mass& part, int bin) {
    return part.top == bin ? part.high : part.top - 1 == bin ? part.low : 0;
}

// The sum of every lane's part: the same in all lanes. All lanes of the warp take part.
__device__ __forceinline__ Mass sum_masses(const Mass& part) {
    Mass total;
    total.top = __reduce_max_sync(ALL_LANES, part.top);
    total.high = warp_sum(in_bin(part, total.top));
    total.low = warp_sum(in_bin(part, total.top - 1));
    return total;
}

__device__ __forceinline__ void add(Mass& mass, int bin, u64 amount) {
    if (bin > mass.top) {
        mass.low = bin == mass.top + 1 ? mass.high : 0;
        mass.high = 0;
        mass.top = bin;
    }
    if (bin == mass.top) mass.high += amount;
    if (bin == mass.top - 1) mass.low += amount;
}

// By one warp.
__device__ __forceinline__ Mass sum_units(const UnitSum* units, int num_units) {
    Mass mine = {NO_BIN, 0, 0};
#pragma unroll 1
    for (int i = lane_id(); i < num_units; i += WARP) {
        const UnitSum unit = units[i];
        const u32 bits = bits_of(unit.sum);
        if (bits == 0) continue;
        // Of the lowest bit.
        const int exponent = round_to_int(unit.reference) + (int)(bits >> 23) - 150;
        const u64 mantissa = (bits & 0x7fffffu) | 0x800000u;
        add(mine, exponent >> 5, mantissa << (exponent & 31));
    }
    return sum_masses(mine);
}

// ln of the mass; `largest` is the row's largest logit.
__device__ double log_sum_exp(const Mass& mass, float largest) {
    if (fabsf(largest) >= HUGE_LOGIT) return largest;
    const double sum = (double)mass.high * 4294967296.0 + (double)mass.low;
    const u64 bits = bits_of(sum);
    const int exponent = (int)(bits >> 52) - 1023;
    const float fraction = (float)double_of((bits & 0xfffffffffffffull) | 1023ull << 52);
    const double log2_sum = 32.0 * (mass.top - 1) + exponent + (double)log2f(fraction);
    return log2_sum * (1.0 / (double)LOG2_E);  // the constant that the exponents were scaled by
}

__device__ int fixed_point(float value, double normaliser) {
    if (value == -infinity()) return SCORE_ABSENT;
    const double logprob = fmin(fmax((double)value - normaliser, -31.5), 0.0);
    return round_to_int(logprob * 4194304.0);
}

// The sum of a warp's unit, in a fixed order, to its place; `most` is its largest logit.
__device__ __forceinline__ void sum_unit(const Slice& slice, float most, UnitSum* units, int first,
                                         int size) {
    const float reference = rintf(fmaxf(most, ALMOST_NOTHING) * LOG2_E);
    float sum[4];
#pragma unroll
    for (int e = 0; e < LANE_SIZE; ++e) {
        const float term = exp2_fast(fmaf(slice.value(e), LOG2_E, -reference));
        sum[e % 4] = e < 4 ? term : sum[e % 4] + term;
    }
    float whole = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
    for (int step = 16; step; step /= 2) whole += __shfl_xor_sync(ALL_LANES, whole, step);
    if (lane_id() == 0 && first < size) units[(u32)first / UNIT] = {reference, whole};
}
