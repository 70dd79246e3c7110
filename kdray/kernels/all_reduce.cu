// all_reduce: sums the ranks' vectors in place; every rank reads all of them, in rank order, so all
// ranks get the same bits whatever the size.
//
// data      [V] vectors of 16 bytes of this rank, summed in place
// regions   [N] addresses, in this process, of the ranks' regions (own one included)
// sequence  [BLOCKS] u32, zero before the first launch: launches so far, of each block
// vectors   V, at most `capacity`
//
// How regions are laid out and how ranks meet in them: rank_sums.cuh.
//
// Grid at most BLOCKS blocks of 256 threads, a vector a thread where that is enough; the same launches
// on every rank in the same order, each behind the one before (no early start). Waits without limit
// for ranks that do not come.
// Precision: sums in float32 from rank 0 on, rounded once. Oracle: torch (tests/gpu/test_all_reduce.py).
// -D INPUT_BF16=1: vectors of 8 bf16; 0: of 4 float32.

#ifndef INPUT_BF16
#define INPUT_BF16 1
#endif

#include "rank_sums.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    all_reduce(uint4* data, const u64* regions, u32* sequence, int rank, int ranks, int vectors,
               int capacity) {
    const u32 launch = sequence[blockIdx.x] + 1;
    const i64 buffer = buffer_of(launch, capacity);
    const int first = (int)((i64)vectors * blockIdx.x / gridDim.x);
    const int last = (int)((i64)vectors * (blockIdx.x + 1) / gridDim.x);
    uint4* const own = (uint4*)regions[rank] + buffer;
    for (int i = first + (int)threadIdx.x; i < last; i += THREADS) own[i] = data[i];
    meet_ranks(regions, rank, ranks, launch);
    for (int i = first + (int)threadIdx.x; i < last; i += THREADS) {
        uint4 part[MAX_RANKS];
#pragma unroll
        for (int r = 0; r < MAX_RANKS; ++r)
            if (r < ranks) part[r] = load_from_rank((const uint4*)regions[r] + buffer + i);
        data[i] = sum_in_order(part, ranks);
    }
    count_launch(sequence, launch, THREADS);
}
