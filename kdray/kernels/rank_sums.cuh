// Ranks that read one another's memory (all_reduce.cu, all_reduce_norm.cu): how they meet, and sums
// in their order. INPUT_BF16 comes from the compiler, as for vectors.cuh.
//
// A region is memory that all ranks have opened (CUDA IPC): flags [MAX_RANKS, BLOCKS] u32, zero
// before the first launch, written by the other ranks; then two buffers of `capacity` vectors, used
// in turns. sequence [BLOCKS] u32, zero before the first launch, is a rank's own: the launches so
// far, the same number for all blocks whenever no launch runs, of whichever kernel they were.
//
// A block writes its share to its own region's buffer, tells the same block of every rank so, waits
// until each has told it, and adds their shares up. Why a buffer may be written without asking: it
// was last read two launches ago. In the launch between, block 0 at least has heard from every rank
// that it had begun that one too, which is behind all of the one it last read in; and nothing of a
// launch touches a region before the one in front on its stream has ended. So it does not matter
// which blocks a launch has, nor which share of the rows was whose.
//
// A rank ends a launch only when every other has begun it, so none is ever more than one ahead: a
// flag that stands for this launch or the next is good, and any other is old, be it of a block that
// many launches did without: up to 2^32 - 2 of them, behind which counts have come round.
#pragma once

#include "vectors.cuh"

constexpr int BLOCKS = 80;  // of a launch at most: all of them run at once
constexpr int MAX_RANKS = 8;
constexpr int FLAG_VECTORS = MAX_RANKS * BLOCKS * 4 / 16;

#ifdef __CUDACC__

// Between GPUs: what this thread (and those it has met at a barrier) wrote before is seen by who
// sees the flag.
__device__ __forceinline__ void tell(u32* flag, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ u32 told(const u32* flag) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
// Past this GPU's L1, which knows nothing of other GPUs' writes.
__device__ __forceinline__ uint4 load_from_rank(const uint4* address) {
    uint4 x;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address)
                 : "memory");
    return x;
}

#else

inline void tell(u32* flag, u32 value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline u32 told(const u32* flag) {
    const u32 value = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    simt::wait_for_other_blocks();
    return value;
}
inline uint4 load_from_rank(const uint4* address) {
    simt::linger();
    return *address;
}

#endif

// Where a launch's buffer begins in every region.
__device__ __forceinline__ i64 buffer_of(u32 launch, int capacity) {
    return FLAG_VECTORS + (i64)(launch % 2) * capacity;
}

// The regions' addresses where they are read fast behind meet_ranks, which empties L1; a thread other
// than its own sees an address there behind a barrier. Once a launch.
__device__ __forceinline__ const u64* at_hand(const u64* regions, int ranks) {
    __shared__ u64 near[MAX_RANKS];
    if ((int)threadIdx.x < ranks) near[threadIdx.x] = regions[threadIdx.x];
    return near;
}

// Behind it the shares that the same block of every rank wrote in front of it are there.
__device__ __forceinline__ void meet_ranks(const u64* regions, int rank, int ranks, u32 launch) {
    __syncthreads();
    if ((int)threadIdx.x < ranks) {
        const int other = threadIdx.x;
        tell((u32*)regions[other] + rank * BLOCKS + blockIdx.x, launch);
        const u32* const flag = (const u32*)regions[rank] + other * BLOCKS + blockIdx.x;
        while (told(flag) - launch > 1) {
        }
    }
    __syncthreads();
}

// Behind meet_ranks: every thread has read the block's count. Block 0 counts for those that this
// launch does without.
__device__ __forceinline__ void count_launch(u32* sequence, u32 launch, int threads) {
    const int thread = threadIdx.x;
    if (thread == 0) sequence[blockIdx.x] = launch;
#pragma unroll
    for (int first = 0; first < BLOCKS; first += threads) {
        const int lacking = first + thread;
        if (blockIdx.x == 0 && lacking >= (int)gridDim.x && lacking < BLOCKS)
            sequence[lacking] = launch;
    }
}

// In float32 from rank 0 on, rounded once: all ranks get the same bits, whatever the size.
__device__ __forceinline__ uint4 sum_in_order(const uint4 (&part)[MAX_RANKS], int ranks) {
    Numbers sum = {};
#pragma unroll
    for (int r = 0; r < MAX_RANKS; ++r)
        if (r < ranks) sum = sum + unpacked(part[r]);
    return packed(sum);
}
