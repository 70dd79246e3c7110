// A warp's weights on their way through its own ring in shared memory, and their product.
//
// A step is 32 outputs by 32 inputs of one expert, 576 bytes (moe_layout.py); the copy engine brings
// two at a time. Lane 4 g + t multiplies them with inputs 8 t .. 8 t + 7 of rows g of each column
// tile, which are 16 bytes in a row of activations: they come straight to registers. So no thread
// waits for another's, and nothing but the ring goes through shared memory.
#pragma once

#include "common.cuh"
#include "mma.cuh"

constexpr int STEP = 32;
constexpr int STEP_BYTES = 576;
constexpr int SCALES_AT = 512;
constexpr int SLOT_STEPS = 2;
constexpr int SLOT_BYTES = SLOT_STEPS * STEP_BYTES;
constexpr int SLOTS = 3;

// Sums of 32 outputs by 8 columns a tile: sum[j][m][i] is fragment m's c[i] (mma.cuh) of tile j.
typedef float Sums[COLUMN_TILES][2][4];

__device__ __forceinline__ void clear(Sums& sum)
{
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[j][m][i] = 0.0f;
}

// Eight nibbles n to fragment A of n - 8: 0x4300 | n is 128 + n as bf16, exactly.
struct Fragment {
    u32 a[4];
};
__device__ __forceinline__ Fragment unpacked(u32 word)
{
    Fragment f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        f.a[i] = bf16_pair_sum((word >> 4 * i & 0x000f000fu) | 0x43004300u, 0xc308c308u);
    return f;
}

// sum += a step's 32 outputs for the inputs in b. A group's scale goes on its 32 products' sum.
__device__ __forceinline__ void multiply_step(Sums& sum, const unsigned char* step,
                                              const uint4 (&b)[COLUMN_TILES])
{
    const int lane = lane_id();
    const uint4 q = *(const uint4*)(step + 16 * lane);
    const uint2 s = *(const uint2*)(step + SCALES_AT + 8 * (lane / 4));
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const Fragment first = unpacked(m ? q.z : q.x), second = unpacked(m ? q.w : q.y);
        const u32 scales = m ? s.y : s.x;
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            multiply_add(c, first.a[0], first.a[1], first.a[2], first.a[3], b[j].x, b[j].y);
            multiply_add(c, second.a[0], second.a[1], second.a[2], second.a[3], b[j].z, b[j].w);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sum[j][m][i] += c[i] * (i < 2 ? bf16_low(scales) : bf16_high(scales));
        }
    }
}

// One warp's slots.
struct Ring {
    unsigned char* slots;
    u64* landed;  // a barrier a slot
    u32 brought, taken;

    // To be called by a whole warp; a barrier completes its phase when a slot's bytes have come.
    __device__ void open()
    {
        if (lane_id() == 0) {
            for (int i = 0; i < SLOTS; ++i) barrier_init(shared_address(&landed[i]), 1);
            order_before_copies();
        }
        brought = taken = 0;
        __syncwarp();
    }
    __device__ bool has_room() const { return brought - taken < SLOTS; }

    __device__ void bring(const unsigned char* from, int steps)
    {
        const u32 slot = brought++ % SLOTS;
        if (lane_id() == 0) {
            const SharedAddress barrier = shared_address(&landed[slot]);
            barrier_arrive_expecting(barrier, steps * STEP_BYTES);
            copy_run_async(shared_address(slots + slot * SLOT_BYTES), from, steps * STEP_BYTES,
                           barrier);
        }
    }
    // The oldest slot brought, when it is there.
    __device__ const unsigned char* oldest() const
    {
        const u32 slot = taken % SLOTS;
        barrier_wait(shared_address(&landed[slot]), (int)(taken / SLOTS & 1));
        return slots + slot * SLOT_BYTES;
    }
    __device__ void drop_oldest()
    {
        ++taken;
        __syncwarp();  // all lanes have read it: it may be filled anew
    }
};

// The activations of a tile's columns, from some input on: at[j] is where the lane's eight numbers of
// column 8 j + g begin, -1 where there is no such column.
struct Inputs {
    const u16* rows;
    int at[COLUMN_TILES];

    __device__ void load(uint4 (&b)[COLUMN_TILES], int step) const
    {
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            b[j] = {0, 0, 0, 0};
            if (at[j] >= 0) b[j] = load_shared_by_blocks((const uint4*)(rows + at[j] + step * STEP));
        }
    }
};

// Steps of activations that are on their way; wide tiles have registers for no more than one.
constexpr int AHEAD = COLUMN_TILES > 2 ? 1 : SLOT_STEPS;

// A product under way: sums, and the activations of its next steps. The order of additions is that of
// the inputs, whatever else is in the tile.
struct Product {
    Sums sum;
    Inputs inputs;
    uint4 b[AHEAD][COLUMN_TILES];
    int done, steps;

    __device__ void begin(const Inputs& given, int count)
    {
        clear(sum);
        inputs = given;
        done = 0;
        steps = count;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (i < steps) inputs.load(b[i], i);
    }
    __device__ bool is_done() const { return done == steps; }

    // The next slot's steps.
    __device__ void go_on(const unsigned char* slot)
    {
#pragma unroll AHEAD
        for (int i = 0; i < SLOT_STEPS; ++i) {
            if (is_done()) break;
            const int later = done + AHEAD;
            const unsigned char* const step = slot + i * STEP_BYTES;
            if constexpr (AHEAD == 1) {
                multiply_step(sum, step, b[0]);
                if (later < steps) inputs.load(b[0], later);
            } else {
                uint4 now[COLUMN_TILES];
#pragma unroll
                for (int j = 0; j < COLUMN_TILES; ++j) now[j] = b[i][j];
                if (later < steps) inputs.load(b[i], later);
                multiply_step(sum, step, now);
            }
            ++done;
        }
    }
};
