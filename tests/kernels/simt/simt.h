// CUDA on one CPU core, for tests: a kernel's own source, compiled by g++ with this file in front
// and linked to the machine it runs on (simt.cpp), which is compiled once for all of them.
//
// Every thread of a block is a fiber; blocks run one after another, save that a block which waits for
// others (as those of a cooperative launch may) is set aside for them. Warp collectives are rendezvous:
// all lanes named in the mask must meet at the same operation, or the program stops with a message.
// __syncthreads is a rendezvous of all threads that have not returned. Between two such points the
// fibers run in an order drawn from a seed, and a fiber may be set aside at any shared-memory
// helper, so that a missing barrier shows as a wrong result. Shared memory is poisoned before each
// block. What this cannot show: races within one instruction stream of hardware, memory-model
// faults, time.
//
// Matrix products are emulated from the documented fragments; their sums' order is this file's own.
//
// Not covered, as no kernel here needs it: partial masks, cooperative groups, textures, streams.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define KDRAY_SIMT 1
#define __device__
#define __host__
#define __global__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// Static shared memory: a section of its own, so that it can be found and poisoned.
#define __shared__ static __attribute__((section("simt_shared")))

struct uint3_ {
    unsigned x = 0, y = 0, z = 0;
};
using dim3 = uint3_;
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

extern "C" char __start_simt_shared[] __attribute__((weak));
extern "C" char __stop_simt_shared[] __attribute__((weak));

#pragma GCC visibility push(hidden)

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace simt {

constexpr size_t SHARED_LIMIT = 99 * 1024;
alignas(128) extern unsigned char dynamic_shared[SHARED_LIMIT + 64];

struct PairA {
    uint32_t v[4];
};
struct PairB {
    uint32_t v[2];
};

uint64_t rendezvous(const char* operation, unsigned mask, uint64_t value, int aux = 0);
uint64_t block_rendezvous(const char* operation, uint64_t value);
void wait_for_other_blocks();
// Where a launch reads what those of other ranks may write, each in its own copy of the library and on
// its own thread: now and then long enough for them to get as far ahead as they can.
void linger();

unsigned round_to_half(float value);
unsigned round_to_e4m3(float value);
float from_e4m3(unsigned bits);

unsigned shared_address(const void* pointer);
void* shared_pointer(unsigned address, size_t bytes);
void copy_later(void* to, const void* from, size_t bytes);
void copy_wait();
void copy_commit();
void copy_wait_groups(size_t youngest);
void copy_run(unsigned to, const void* from, size_t bytes, unsigned barrier);

void barrier_init(unsigned address, int count);
void barrier_arrive(unsigned address);
void barrier_expect(unsigned address, size_t bytes);
void barrier_arrive_after_copies(unsigned address);
void barrier_wait(unsigned address, int parity);

void load_matrices(uint32_t (&m)[4], unsigned row, bool transposed);
void store_matrices_transposed(unsigned row, uint32_t m0, uint32_t m1);
void multiply_add_bf16(float (&c)[4], PairA a, PairB b);
void multiply_add_half(float (&c)[4], PairA a, PairB b);

void launch(void (*run)(void*), void* closure, const unsigned* grid, const unsigned* block,
            unsigned seed);

#pragma GCC visibility pop

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>)
{
    kernel(*(std::remove_cv_t<A>*)arguments[I]...);
}

template <class... A>
void launch(void (*kernel)(A...), void** arguments, const unsigned* grid, const unsigned* block,
            unsigned seed)
{
    struct Closure {
        void (*kernel)(A...);
        void** arguments;
    } closure{kernel, arguments};
    const auto run = [](void* c) {
        auto& own = *(Closure*)c;
        call(own.kernel, own.arguments, std::index_sequence_for<A...>{});
    };
    launch(run, &closure, grid, block, seed);
}

template <class T>
uint64_t bits(T value)
{
    uint64_t raw = 0;
    std::memcpy(&raw, &value, sizeof value);
    return raw;
}

template <class T>
T value_of(uint64_t raw)
{
    T value;
    std::memcpy(&value, &raw, sizeof value);
    return value;
}

}  // namespace simt

template <class T>
T max(T a, T b)
{
    return a < b ? b : a;
}
template <class T>
T min(T a, T b)
{
    return b < a ? b : a;
}

inline void __syncwarp(unsigned mask = 0xffffffffu) { simt::rendezvous("syncwarp", mask, 0); }
inline void __syncthreads() { simt::block_rendezvous("syncthreads", 0); }
inline int __syncthreads_or(int p) { return (int)simt::block_rendezvous("syncthreads_or", p != 0); }
inline int __syncthreads_and(int p)
{
    return (int)simt::block_rendezvous("syncthreads_and", p != 0);
}
inline int __syncthreads_count(int p)
{
    return (int)simt::block_rendezvous("syncthreads_count", p != 0);
}
inline unsigned __ballot_sync(unsigned m, int p)
{
    return (unsigned)simt::rendezvous("ballot", m, p != 0);
}
inline int __any_sync(unsigned m, int p) { return (int)simt::rendezvous("any", m, p != 0); }
inline int __all_sync(unsigned m, int p) { return (int)simt::rendezvous("all", m, p != 0); }
template <class T>
T __shfl_sync(unsigned m, T v, int lane)
{
    return simt::value_of<T>(simt::rendezvous("shfl", m, simt::bits(v), lane));
}
template <class T>
T __shfl_up_sync(unsigned m, T v, int by)
{
    return simt::value_of<T>(simt::rendezvous("shfl_up", m, simt::bits(v), by));
}
template <class T>
T __shfl_down_sync(unsigned m, T v, int by)
{
    return simt::value_of<T>(simt::rendezvous("shfl_down", m, simt::bits(v), by));
}
template <class T>
T __shfl_xor_sync(unsigned m, T v, int by)
{
    return simt::value_of<T>(simt::rendezvous("shfl_xor", m, simt::bits(v), by));
}
template <class T>
unsigned __match_any_sync(unsigned m, T v)
{
    return (unsigned)simt::rendezvous("match_any", m, simt::bits(v));
}
inline int __reduce_max_sync(unsigned m, int v)
{
    return (int)simt::rendezvous("smax", m, (uint32_t)v);
}
inline int __reduce_min_sync(unsigned m, int v)
{
    return (int)simt::rendezvous("smin", m, (uint32_t)v);
}
inline unsigned __reduce_max_sync(unsigned m, unsigned v)
{
    return (unsigned)simt::rendezvous("umax", m, v);
}
inline unsigned __reduce_min_sync(unsigned m, unsigned v)
{
    return (unsigned)simt::rendezvous("umin", m, v);
}
template <class T>
T __reduce_add_sync(unsigned m, T v)
{
    return (T)simt::rendezvous("add", m, (uint32_t)v);
}
inline unsigned __reduce_or_sync(unsigned m, unsigned v)
{
    return (unsigned)simt::rendezvous("or", m, v);
}
inline unsigned __reduce_and_sync(unsigned m, unsigned v)
{
    return (unsigned)simt::rendezvous("and", m, v);
}

template <class T>
T atomicAdd(T* at, T v)
{
    const T old = *at;
    *at = old + v;
    return old;
}
template <class T>
T atomicMax(T* at, T v)
{
    const T old = *at;
    *at = max(old, v);
    return old;
}
template <class T>
T atomicMin(T* at, T v)
{
    const T old = *at;
    *at = min(old, v);
    return old;
}
template <class T>
T atomicOr(T* at, T v)
{
    const T old = *at;
    *at = old | v;
    return old;
}
template <class T>
T atomicExch(T* at, T v)
{
    const T old = *at;
    *at = v;
    return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
inline int __clz(unsigned v) { return v == 0 ? 32 : __builtin_clz(v); }
inline unsigned __brev(unsigned v)
{
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (v >> i & 1) << (31 - i);
    return r;
}
inline int __float_as_int(float v) { return simt::value_of<int>(simt::bits(v)); }
inline float __int_as_float(int v) { return simt::value_of<float>(simt::bits(v)); }
inline int __float2int_rn(float v) { return (int)std::nearbyint(v); }
template <class T>
T __ldg(const T* at)
{
    return *at;
}
