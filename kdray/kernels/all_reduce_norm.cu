// all_reduce_norm: sums the ranks' rows, adds them to the residual stream and takes the norm, in one
// launch: of a row all_reduce.cu, then rms_norm.cu, to the bit.
//
// outputs  out    [T, WIDTH]          total [T, WIDTH] (may be x itself)
// inputs   x      [T, WIDTH], the same on all ranks;  part [T, WIDTH] of this rank
//          weight [WIDTH];  eps [] float32
//          regions, sequence, rank, capacity: as in all_reduce.cu, and the same ones
// Rows are bfloat16 or float32 (INPUT_BF16), in whole vectors of 16 bytes. -D RANKS: how many ranks.
//
// Grid T blocks, one a row, at most BLOCKS; thread t holds vectors t, t + THREADS, .. of it. Static
// shared memory 64 bytes and 4 a warp. Launches of it and of all_reduce may follow one another in any order,
// the same on every rank (rank_sums.cuh). May start early: it waits for all in front before it
// touches a region or its count. Waits without limit for ranks that do not come.
// Limits: at most 4 vectors a thread.
// Precision and oracle: those of the two kernels, whose bits it has (tests/gpu/test_all_reduce_norm.py).

#ifndef INPUT_BF16
#define INPUT_BF16 1
#endif
#ifndef RANKS
#define RANKS 8
#endif

#include "overlap.cuh"
#include "rank_sums.cuh"
#include "row_norm.cuh"

constexpr int AT_ONCE = ITEMS <= 2 ? ITEMS : 1;  // a thread's vectors that travel together
static_assert(ITEMS <= 4, "a row must fit the registers");
static_assert(RANKS <= MAX_RANKS, "flags for more ranks");
static_assert(MAX_RANKS <= THREADS, "a thread a rank");

extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce_norm(uint4* out, uint4* total, const uint4* x, const uint4* part, const uint4* weight,
                const float* eps, const u64* regions, u32* sequence, int rank, int capacity)
{
    const i64 row = (i64)blockIdx.x * VECTORS;
    uint4 mine[ITEMS], held[ITEMS], factor[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (has(i)) factor[i] = weight[place(i)];
    const float epsilon = *eps;
    uint4* const own = (uint4*)regions[rank];
    const u64* const near = at_hand(regions, RANKS);
    start_behind_previous();
    const u32 launch = sequence[blockIdx.x] + 1;
    const i64 buffer = buffer_of(launch, capacity) + row;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (has(i)) mine[i] = part[row + place(i)];
    // Needed only behind the ranks' meeting, which takes longer than this trip to memory.
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (has(i)) held[i] = x[row + place(i)];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (has(i)) own[buffer + place(i)] = mine[i];
    meet_ranks(near, rank, RANKS, launch);

    float squares = 0.0f;
#pragma unroll
    for (int first = 0; first < ITEMS; first += AT_ONCE) {
        uint4 parts[AT_ONCE][MAX_RANKS];
#pragma unroll
        for (int i = first; i < first + AT_ONCE; ++i)
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                if (!has(i)) continue;
                const uint4* const theirs = (const uint4*)near[r] + buffer + place(i);
                parts[i - first][r] = r == rank ? mine[i] : load_from_rank(theirs);
            }
#pragma unroll
        for (int i = first; i < first + AT_ONCE; ++i) {
            if (!has(i)) continue;
            const uint4 sum = sum_in_order(parts[i - first], RANKS);
            held[i] = packed(unpacked(held[i]) + unpacked(sum));
            total[row + place(i)] = held[i];
            squares += sum_of_squares(unpacked(held[i]));
        }
    }
    count_launch(sequence, launch, THREADS);
    const float scale = row_scale(squares, epsilon);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (has(i)) out[row + place(i)] = normalised(held[i], scale, factor[i]);
}
