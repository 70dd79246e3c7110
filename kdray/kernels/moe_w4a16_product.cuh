// A warp's work from unit to unit: products of one after another, as weights come.
#pragma once

#include "moe_w4a16_parts.cuh"

// What a block keeps.
struct Shared {
    unsigned char ring[WARPS][SLOTS][SLOT_BYTES];
    float part[PARTS][WARPS][8][WARP];
    unsigned char list[LIST_BYTES];
    u32 minus_136[4];
    u64 landed[WARPS][SLOTS];
    Meeting meeting;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as launched");

// A product under way: sums, and the activations of its next steps. The order of additions is that of
// the inputs, whatever else is in the tile.
struct Product {
    Sums sum;
    uint4 b[AHEAD][COLUMN_TILES];
    Fragment zero;  // MINUS_136

    __device__ void clear()
    {
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[j][i / 4][i % 4] = 0.0f;
    }
    // Activations of a slot's step. They come to where an earlier step's were: a copy would wait.
    template <class Activations>
    __device__ void load(const Activations& next, int step)
    {
        if (step >= next.left) return;
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j)
            b[step % AHEAD][j] = *(const uint4*)(next.rows + next.at[j] + step * STEP);
    }
    template <class Activations>
    __device__ void load_first(const Activations& next)
    {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) load(next, i);
    }

    // The oldest slot: `left` steps, at most SLOT_STEPS. It is filled anew at once, where registers
    // take all that it holds.
    template <class Stream, class Activations>
    __device__ void go_on(Stream& stream, Activations& next, int left)
    {
        constexpr bool EARLY = COLUMN_TILES * SLOT_STEPS <= 4;
        const int slot = stream.ring.oldest;
        stream.ring.wait();
        Weights w[SLOT_STEPS];
        if (EARLY) {
#pragma unroll
            for (int i = 0; i < SLOT_STEPS; ++i) w[i] = stream.ring.step(slot, i);
            __syncwarp();
            stream.bring_next();
        }
#pragma unroll
        for (int i = 0; i < SLOT_STEPS; ++i) {
            if (i == SLOT_STEPS - AHEAD) next.turn();
            if (WHOLE_SLOTS || i < left) {
                if (!EARLY) w[i] = stream.ring.step(slot, i);
                multiply_step(sum, zero, w[i], b[i % AHEAD]);
            }
            load(next, (i + AHEAD) % SLOT_STEPS);
        }
        if (!EARLY) {
            __syncwarp();
            stream.bring_next();
        }
    }
};

// A lane's four outputs of column 2 t + odd of a tile, as they are kept.
__device__ __forceinline__ uint2 four_of(const Sums& sum, int j, int odd)
{
    return {bf16_pair(sum[j][0][odd], sum[j][0][2 + odd]),
            bf16_pair(sum[j][1][odd], sum[j][1][2 + odd])};
}

// All units of a warp. `finish` takes the sums of one of the second half.
template <class Units, class Stream, class Activations, class Adder, class Finish>
__device__ __forceinline__ void multiply_all(const Units& units, Stream& stream, Activations& next,
                                             Adder& adder, const u32* minus_136,
                                             const Finish& finish)
{
    next.prepare(0);
    Product product;
    product.zero = {{MINUS_136, MINUS_136, MINUS_136, MINUS_136}};
    if (COLUMN_TILES == 1) {  // there are registers for it: the compiler would make it each time
        const uint4 kept = shared_vector(shared_address(minus_136));
        product.zero = {{kept.x, kept.y, kept.z, kept.w}};
    }
    // One loop for both halves: instructions come slowly the first time.
    for (int i = -1, left = 0;;) {
        if (left == 0) {
            if (i >= 0) {
                const Unit unit = units.at(i);
                if (units.is_first(i))
                    adder.add_up(units, unit, product.sum);
                else
                    finish(units.pairs(unit), unit, product.sum);
            }
            if (++i == units.num_all) break;
            left = units.steps(i);
            product.clear();
            if (left == 0) {  // a warp without a share
                next.prepare(i + 1);
                continue;
            }
            if (next.left == 0) {
                next.admit();
                product.load_first(next);
            }
        }
        product.go_on(stream, next, left);
        left = max(0, left - SLOT_STEPS);
    }
}
