// What the designs of build_tree share: the score contract as 32-bit keys, and the few machine
// operations that plain C++ cannot name (with twins for the CPU shim of the tests, KDRAY_SIMT).
//
// A key orders nodes: score << 4 | 15 - depth, so that a greater key is popped first, equal scores
// go to the shallower node, and a popped key tells its node's depth. The root's key is 15. The best
// child of a node lies at least 1 below it. Scores have 28 bits, so a key fits an int; the least
// int marks what is not there.
#pragma once

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int MAX_DEPTH = 15;
constexpr int MAX_WIDTH = 64;
constexpr int ABSENT = -2147483647 - 1;
constexpr int SCORE_FLOOR = -(1 << 27) + 1;
constexpr int ROOT_KEY = MAX_DEPTH;

// One request's rows.
struct Candidates {
    const int* token;  // [L, K]
    const int* score;  // [L, K], every row descending, ABSENT last
    int L;
    int K;
};

// One request's part of the outputs; null pointers where nobody asked.
struct TreeRow {
    int* token;         // [N]
    int* parent;        // [N]
    int* depth;         // [N]
    int* score;         // [N]
    int* position;      // [N] or null
    unsigned* mask;     // [N, W]
    int* num_nodes;     // [1]
    int* first_child;   // [N] or null
    int* next_sibling;  // [N] or null
    int N;
    int W;
    int root;
    int base;  // absolute position of the root
};

// A node as the designs hand it over: x = parent << 16 | rank in its row, y = key.
using Record = int2;

__device__ __forceinline__ int record_parent(Record r) { return r.x >> 16; }
__device__ __forceinline__ int record_rank(Record r) { return r.x & 0xffff; }
__device__ __forceinline__ int key_depth(int key) { return MAX_DEPTH - (key & 15); }
__device__ __forceinline__ int key_score(int key) { return key >> 4; }

__device__ constexpr int floor_log2(int value)
{
    int log = 0;
    for (; value > 1; value /= 2) ++log;
    return log;
}

__device__ __forceinline__ int warp_max(int value) { return __reduce_max_sync(FULL_WARP, value); }
__device__ __forceinline__ unsigned warp_ballot(bool vote)
{
    return __ballot_sync(FULL_WARP, vote);
}

// Shared memory by 32-bit address, so that loads and stores can be predicated, never branched.
using SharedAddress = unsigned;

#ifndef KDRAY_SIMT

__device__ __forceinline__ SharedAddress shared_address(const void* pointer)
{
    return (SharedAddress)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ int4 load4(SharedAddress address)
{
    int4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

__device__ __forceinline__ int load_if(bool taken, SharedAddress address, int otherwise)
{
    int v = otherwise;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; @p ld.shared.b32 %0, [%2]; }"
                 : "+r"(v)
                 : "r"((int)taken), "r"(address));
    return v;
}

__device__ __forceinline__ int add_if(bool taken, int a, int b)
{
    int v = a;
    asm("{ .reg .pred p; setp.ne.s32 p, %1, 0; @p add.s32 %0, %0, %2; }"
        : "+r"(v)
        : "r"((int)taken), "r"(b));
    return v;
}

__device__ __forceinline__ void store2_if(bool taken, SharedAddress address, int x, int y)
{
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.shared.v2.b32 [%1], {%2, %3}; }"
                 :: "r"((int)taken), "r"(address), "r"(x), "r"(y));
}

__device__ __forceinline__ void store4_if(bool taken, SharedAddress address, int4 v)
{
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; "
                 "@p st.shared.v4.b32 [%1], {%2, %3, %4, %5}; }"
                 :: "r"((int)taken), "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Global to shared without a register or a wait; both 16-byte aligned (or 4, for the small one).
__device__ __forceinline__ void copy_async16_if(bool taken, void* to, const void* from)
{
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; "
                 "@p cp.async.cg.shared.global [%1], [%2], 16; }"
                 :: "r"((int)taken), "r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async4_if(bool taken, void* to, const void* from)
{
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; "
                 "@p cp.async.ca.shared.global [%1], [%2], 4; }"
                 :: "r"((int)taken), "r"(shared_address(to)), "l"(from) : "memory");
}

// A value loaded long before is first looked at here: the compiler may not pull its use, and with
// it the wait, in front of what stands above.
__device__ __forceinline__ int use_from_here(int value)
{
    asm volatile("" : "+r"(value));
    return value;
}

// This thread's copies have arrived; others see them after the next barrier.
__device__ __forceinline__ void copy_async_wait()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

#else

__device__ inline SharedAddress shared_address(const void* pointer)
{
    return simt::shared_address(pointer);
}
__device__ inline int4 load4(SharedAddress address)
{
    return *(const int4*)simt::shared_pointer(address, sizeof(int4));
}
__device__ inline int load_if(bool taken, SharedAddress address, int otherwise)
{
    return taken ? *(const int*)simt::shared_pointer(address, sizeof(int)) : otherwise;
}
__device__ inline int add_if(bool taken, int a, int b)
{
    return taken ? (int)((unsigned)a + (unsigned)b) : a;
}
__device__ inline void store2_if(bool taken, SharedAddress address, int x, int y)
{
    if (taken) *(int2*)simt::shared_pointer(address, sizeof(int2)) = int2{x, y};
}
__device__ inline void store4_if(bool taken, SharedAddress address, int4 v)
{
    if (taken) *(int4*)simt::shared_pointer(address, sizeof(int4)) = v;
}
__device__ inline void copy_async16_if(bool taken, void* to, const void* from)
{
    if (taken) simt::copy_later(to, from, 16);
}
__device__ inline void copy_async4_if(bool taken, void* to, const void* from)
{
    if (taken) simt::copy_later(to, from, 4);
}
__device__ inline int use_from_here(int value) { return value; }
__device__ inline void copy_async_wait() { simt::copy_wait(); }

#endif

// The key of the child with this rank of the node with this key, saturating; ABSENT where the rows
// end. Exact for any candidates.
__device__ __forceinline__ int child_key(const Candidates& rows, int key, int rank)
{
    const int depth = key_depth(key);
    if (depth >= rows.L || rank >= rows.K) return ABSENT;
    const int score = rows.score[depth * rows.K + rank];
    if (score == ABSENT) return ABSENT;
    const int step = max(score, SCORE_FLOOR) * 16;
    const int to_floor = SCORE_FLOOR * 16 + (key & 15) - key;
    return key + max(step, to_floor) - 1;
}

// Sum of `value` over all threads up to this one. Two barriers; every thread must come.
template <class Shape>
__device__ __forceinline__ int running_sum(int value, int* warp_total)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int sum = value;
#pragma unroll
    for (int reach = 1; reach < 32; reach *= 2) {
        const int left = __shfl_up_sync(FULL_WARP, sum, reach);
        if (lane >= reach) sum += left;
    }
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    const int before = lane < warp ? warp_total[lane < Shape::WARPS ? lane : 0] : 0;
    sum += __reduce_add_sync(FULL_WARP, before);
    __syncthreads();  // the totals may be written again
    return sum;
}
