// all_reduce: sums the ranks' vectors in place; every rank reads all of them, in rank order, so all
// ranks get the same bits whatever the size.
//
// data      [V] vectors of 16 bytes of this rank, summed in place
// regions   [N] addresses, in this process, of the ranks' regions (own one included)
// sequence  [BLOCKS] u32, zero before the first launch: launches so far, of each block
// vectors   V, at most `capacity`
//
// A region is memory that all ranks have opened (CUDA IPC): flags [MAX_RANKS, BLOCKS] u32, zero
// before the first launch, written by the other ranks; then two buffers of `capacity` vectors, used
// in turns. A block writes its share of the data to its own region's buffer, tells every rank so,
// waits until every rank has told it the same, and adds their shares up. By the time a buffer comes
// round again every rank has told of the launch between, so it had done with the one before.
//
// Grid BLOCKS blocks of 256 threads, always, and the same launches on every rank in the same order,
// each behind the one before (no early start). Waits without limit for ranks that do not come.
// Precision: sums in float32 from rank 0 on, rounded once. Oracle: torch (tests/gpu/test_all_reduce.py).
// -D BF16=1: vectors of 8 bf16; 0: of 4 float32.

#ifndef BF16
#define BF16 1
#endif

#include "common.cuh"

constexpr int THREADS = 256;
constexpr int BLOCKS = 16;
constexpr int MAX_RANKS = 8;
constexpr int FLAG_VECTORS = MAX_RANKS * BLOCKS * 4 / 16;
constexpr int NUMBERS = BF16 ? 8 : 4;

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

inline void tell(u32* flag, u32 value) { *(volatile u32*)flag = value; }
inline u32 told(const u32* flag) {
    const u32 value = *(const volatile u32*)flag;
    simt::wait_for_other_blocks();
    return value;
}
inline uint4 load_from_rank(const uint4* address) { return *address; }

#endif

__device__ __forceinline__ u32 word(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

__device__ __forceinline__ void add(float (&sum)[NUMBERS], const uint4& x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (BF16) {
            sum[2 * i % NUMBERS] += bf16_low(word(x, i));
            sum[(2 * i + 1) % NUMBERS] += bf16_high(word(x, i));
        } else {
            sum[i] += float_of(word(x, i));
        }
    }
}

// To nearest, halves to even; NaN stays NaN.
__device__ __forceinline__ u32 rounded_to_bf16(float x) {
    const u32 bits = bits_of(x);
    if (is_nan(x)) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

__device__ __forceinline__ u32 packed_word(const float (&sum)[NUMBERS], int i) {
    if (!BF16) return bits_of(sum[i]);
    return rounded_to_bf16(sum[2 * i % NUMBERS]) |
           rounded_to_bf16(sum[(2 * i + 1) % NUMBERS]) << 16;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    all_reduce(uint4* data, const u64* regions, u32* sequence, int rank, int ranks, int vectors,
               int capacity) {
    const u32 launch = sequence[blockIdx.x] + 1;
    const i64 buffer = FLAG_VECTORS + (i64)(launch % 2) * capacity;
    const int first = (int)((i64)vectors * blockIdx.x / gridDim.x);
    const int last = (int)((i64)vectors * (blockIdx.x + 1) / gridDim.x);
    uint4* const own = (uint4*)regions[rank] + buffer;
    for (int i = first + (int)threadIdx.x; i < last; i += THREADS) own[i] = data[i];
    __syncthreads();
    if ((int)threadIdx.x < ranks) {
        const int other = threadIdx.x;
        tell((u32*)regions[other] + rank * BLOCKS + blockIdx.x, launch);
        const u32* const flag = (const u32*)regions[rank] + other * BLOCKS + blockIdx.x;
        while ((int)(told(flag) - launch) < 0) {
        }
    }
    __syncthreads();
    for (int i = first + (int)threadIdx.x; i < last; i += THREADS) {
        uint4 part[MAX_RANKS];
#pragma unroll
        for (int r = 0; r < MAX_RANKS; ++r)
            if (r < ranks) part[r] = load_from_rank((const uint4*)regions[r] + buffer + i);
        float sum[NUMBERS] = {};
#pragma unroll
        for (int r = 0; r < MAX_RANKS; ++r)
            if (r < ranks) add(sum, part[r]);
        data[i] = {packed_word(sum, 0), packed_word(sum, 1), packed_word(sum, 2),
                   packed_word(sum, 3)};
    }
    if (threadIdx.x == 0) sequence[blockIdx.x] = launch;
}
