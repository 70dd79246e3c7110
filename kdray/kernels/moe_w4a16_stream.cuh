// A warp's weights on their way through its own ring in shared memory, and their product.
//
// A step is 32 outputs by 32 inputs of one expert, 576 bytes (moe_layout.py); the copy engine brings
// SLOT_STEPS at a time. Lane 4 g + t multiplies them with inputs 8 t .. 8 t + 7 of rows g of each column
// tile, which are 16 bytes in a row of activations: they come straight to registers. So no thread
// waits for another's, and nothing but the ring goes through shared memory.
//
// An H200 reads a step in 34 cycles a multiprocessor, in which its warps issue 136 instructions: what
// is done for every step counts, and every address here is a register and a constant.
#pragma once

#include "common.cuh"
#include "mma.cuh"

constexpr int STEP = 32;
constexpr int STEP_BYTES = 576;
constexpr int SCALES_AT = 512;
constexpr int SLOT_BYTES = SLOT_STEPS * STEP_BYTES;

#ifdef __CUDACC__

// (word & 0x000f000f) | 0x43004300, which takes the compiler two instructions.
__device__ __forceinline__ u32 nibble_pair(u32 word)
{
    u32 pair;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(pair) : "r"(word), "r"(0x000f000f), "r"(0x43004300));
    return pair;
}
__device__ __forceinline__ uint4 load_four(SharedAddress from)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint2 load_two(SharedAddress from)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}

#else

inline u32 nibble_pair(u32 word) { return (word & 0x000f000fu) | 0x43004300u; }
inline uint4 load_four(SharedAddress from) { return *(const uint4*)simt::shared_pointer(from, 16); }
inline uint2 load_two(SharedAddress from) { return *(const uint2*)simt::shared_pointer(from, 8); }

#endif

// Sums of 32 outputs by 8 columns a tile: sum[j][m][i] is fragment m's c[i] (mma.cuh) of tile j.
typedef float Sums[COLUMN_TILES][2][4];

// Eight nibbles n to fragment A of n + 128: 0x4300 | n is that as bf16, exactly.
struct Fragment {
    u32 a[4];
};
__device__ __forceinline__ Fragment unpacked(u32 word)
{
    return {{nibble_pair(word), nibble_pair(word >> 4), nibble_pair(word >> 8),
             nibble_pair(word >> 12)}};
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const Fragment& a, u32 b0, u32 b1)
{
    multiply_add(c, a.a[0], a.a[1], a.a[2], a.a[3], b0, b1);
}

// sum += a step's 32 outputs for the inputs in b. A weight is q = (n + 128) - 136: the products with
// -136, one for all outputs, go first. A group's scale goes on its 32 products' sum.
__device__ __forceinline__ void multiply_step(Sums& sum, SharedAddress words, SharedAddress scales,
                                              const uint4 (&b)[COLUMN_TILES])
{
    const uint4 q = load_four(words);
    const uint2 s = load_two(scales);
    const Fragment zero{{0xc308c308u, 0xc308c308u, 0xc308c308u, 0xc308c308u}};
    const Fragment weights[2][2] = {{unpacked(q.x), unpacked(q.y)}, {unpacked(q.z), unpacked(q.w)}};
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
        float base[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_add(base, zero, b[j].x, b[j].y);
        multiply_add(base, zero, b[j].z, b[j].w);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float c[4] = {base[0], base[1], base[2], base[3]};
            multiply_add(c, weights[m][0], b[j].x, b[j].y);
            multiply_add(c, weights[m][1], b[j].z, b[j].w);
            const u32 scale = m ? s.y : s.x;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sum[j][m][i] += c[i] * (i < 2 ? bf16_low(scale) : bf16_high(scale));
        }
    }
}

// One warp's slots, filled and read in turn.
struct Ring {
    SharedAddress slots, landed;  // landed: a barrier a slot
    int in, out, parity, room;

    // Functions of a whole warp. A barrier completes its phase when a slot's bytes have come.
    __device__ void open(unsigned char* memory, u64* barriers)
    {
        // By way of a shuffle, or the compiler finds the addresses anew each time.
        slots = same_in_warp(shared_address(memory));
        landed = same_in_warp(shared_address(barriers));
        if (lane_id() == 0) {
            for (int i = 0; i < SLOTS; ++i) barrier_init(landed + 8 * i, 1);
            order_before_copies();
        }
        in = out = parity = 0;
        room = SLOTS;
        __syncwarp();
    }
    __device__ void bring(const unsigned char* from, int bytes)
    {
        if (lane_id() == 0) {
            barrier_arrive_expecting(landed + 8 * in, bytes);
            copy_run_async(slots + in * SLOT_BYTES, from, bytes, landed + 8 * in);
        }
        in = in + 1 == SLOTS ? 0 : in + 1;
        --room;
    }
    // The oldest slot brought, when it is there.
    __device__ SharedAddress oldest() const
    {
        barrier_wait(landed + 8 * out, parity);
        return slots + out * SLOT_BYTES;
    }
    __device__ void drop_oldest()
    {
        if (++out == SLOTS) {
            out = 0;
            parity ^= 1;
        }
        ++room;
        __syncwarp();  // all lanes have read it: it may be filled anew
    }
};

// Steps of activations that are on their way; wide tiles have registers for no more than one.
constexpr int AHEAD = COLUMN_TILES > 2 ? 1 : 2;
static_assert(SLOT_STEPS % AHEAD == 0, "a step's registers are the same in every slot");

// A product under way: sums, and the activations of its next steps. The order of additions is that of
// the inputs, whatever else is in the tile.
struct Product {
    Sums sum;
    uint4 b[AHEAD][COLUMN_TILES];
    const u16* rows;
    int next[COLUMN_TILES];  // where in rows they are, AHEAD steps on
    int left;

    // begin[j]: where in rows the lane's eight numbers of column 8 j + g begin.
    __device__ void start(const u16* from, const int (&begin)[COLUMN_TILES], int steps)
    {
        rows = from;
        left = steps;
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[j][i / 4][i % 4] = 0.0f;
            next[j] = begin[j];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                if (i < steps) b[i][j] = at(j, i);
            next[j] += AHEAD * STEP;
        }
    }

    // The next slot's steps.
    __device__ void go_on(SharedAddress slot)
    {
        const SharedAddress words = slot + 16 * lane_id();
        const SharedAddress scales = slot + SCALES_AT + 8 * (lane_id() / 4);
#pragma unroll AHEAD
        for (int i = 0; i < SLOT_STEPS; ++i)
            if (i < left) {
                // The next ones come into the same registers: a copy would wait for them.
                multiply_step(sum, words + i * STEP_BYTES, scales + i * STEP_BYTES, b[i % AHEAD]);
                if (left > i + AHEAD)
#pragma unroll
                    for (int j = 0; j < COLUMN_TILES; ++j) b[i % AHEAD][j] = at(j, i);
            }
        left = max(0, left - SLOT_STEPS);
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) next[j] += SLOT_STEPS * STEP;
    }

private:
    __device__ uint4 at(int j, int step) const
    {
        return load_shared_by_blocks((const uint4*)(rows + next[j] + step * STEP));
    }
};
