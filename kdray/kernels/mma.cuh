// Tensor-core products, matrix loads and stores, asynchronous copies and shared-memory barriers by
// name, each with a twin that runs in the tests' CPU shim. All of them are there from sm_90 on.
//
// Fragments of mma.m16n8k16, for lane = 4 g + t:
//   A [16, 16]   a[0]: row g, columns 2t and 2t + 1; a[1]: row g + 8; a[2], a[3]: columns + 8
//   B [16, 8]    b0: rows 2t and 2t + 1 of column g; b1: rows + 8
//   C [16, 8]    c[0], c[1]: row g, columns 2t and 2t + 1; c[2], c[3]: row g + 8
#pragma once

#include "common.cuh"

typedef u32 SharedAddress;

#ifdef __CUDACC__

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
    return (SharedAddress)__cvta_generic_to_shared(pointer);
}

// Four 8 x 8 matrices of 16-bit numbers; lane 8 i + j gives the address of row j of matrix i, and
// receives in m[i] the numbers 2t, 2t + 1 of row g (transposed: of column g).
__device__ __forceinline__ void load_matrices(u32 (&m)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}

// Two of them back into shared memory, transposed: lane 8 i + j gives the address of row j of what
// is stored of matrix i, which is column j of the fragments.
__device__ __forceinline__ void store_matrices_transposed(SharedAddress row, u32 m0, u32 m1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row),
                 "r"(m0), "r"(m1)
                 : "memory");
}

// c += a b, products exact, sums in float32.
__device__ __forceinline__ void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                             u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of float16.
__device__ __forceinline__ void multiply_add_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                                  u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory, zeros where `there` is false (nothing is read then).
__device__ __forceinline__ void copy_async(SharedAddress to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

// 4 bytes, and until all that this thread has started so is there.
__device__ __forceinline__ void copy_word_async(SharedAddress to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// 16 bytes to shared memory; L2 asks memory for the whole line of 128.
__device__ __forceinline__ void copy_line_async(SharedAddress to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}
// What this thread has started since its last group becomes a group.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all of this thread's groups but the last few have landed.
template <int LAST>
__device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LAST) : "memory");
}
__device__ __forceinline__ uint4 shared_vector(SharedAddress from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

// A run of bytes (a multiple of 16, from and to 16-byte boundaries) on its way from global to
// shared memory by the copy engine; the barrier counts what has landed. Called by several lanes,
// each starts a copy of its own.
__device__ __forceinline__ void copy_run_async(SharedAddress to, const void* from, u32 bytes,
                                               SharedAddress barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
// Between this thread's own writes to shared memory (a barrier's opening among them) and the copy
// engine's that follow.
__device__ __forceinline__ void order_before_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// threadIdx.x and blockIdx.x, asked for anew: neither they nor what follows from them keeps a
// register from where it was used before.
__device__ __forceinline__ u32 fresh_thread() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
__device__ __forceinline__ u32 fresh_block() {
    u32 block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

// A barrier is 8 bytes of shared memory; it completes a phase when `count` threads have arrived.
__device__ __forceinline__ void barrier_init(SharedAddress barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// What this thread (and those it has met) wrote before is seen by who waits for the phase.
__device__ __forceinline__ void barrier_arrive(SharedAddress barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier)
                 : "memory");
}
// Arrives, and lets the phase wait for so many more bytes of copies.
__device__ __forceinline__ void barrier_arrive_expecting(SharedAddress barrier, u32 bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(
                     barrier),
                 "r"(bytes)
                 : "memory");
}
// This thread arrives when all its copies so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(SharedAddress barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// Until the phase of that parity (the first is 0) is complete.
__device__ __forceinline__ void barrier_wait(SharedAddress barrier, int parity) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

// Until another block of this launch, resident beside this one, has raised the counter so far.
__device__ __forceinline__ void wait_for_blocks(const int* counter, int least) {
    int seen;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < least);
}

#else

inline SharedAddress shared_address(const void* pointer) { return simt::shared_address(pointer); }
inline void load_matrices(u32 (&m)[4], SharedAddress row) { simt::load_matrices(m, row, false); }
inline void load_matrices_transposed(u32 (&m)[4], SharedAddress row) {
    simt::load_matrices(m, row, true);
}
inline void store_matrices_transposed(SharedAddress row, u32 m0, u32 m1) {
    simt::store_matrices_transposed(row, m0, m1);
}
inline void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    simt::multiply_add_bf16(c, {a0, a1, a2, a3}, {b0, b1});
}
inline void multiply_add_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    simt::multiply_add_half(c, {a0, a1, a2, a3}, {b0, b1});
}
inline void copy_async(SharedAddress to, const void* from, bool there) {
    simt::copy_later(simt::shared_pointer(to, 16), there ? from : nullptr, 16);
}
inline void copy_word_async(SharedAddress to, const void* from) {
    simt::copy_later(simt::shared_pointer(to, 4), from, 4);
}
inline void wait_for_copies() { simt::copy_wait(); }
inline void copy_line_async(SharedAddress to, const void* from) {
    simt::copy_later(simt::shared_pointer(to, 16), from, 16);
}
inline void end_group() { simt::copy_commit(); }
template <int LAST>
inline void wait_for_groups() {
    simt::copy_wait_groups(LAST);
}
inline uint4 shared_vector(SharedAddress from) {
    return *(const uint4*)simt::shared_pointer(from, 16);
}
inline u32 fresh_thread() { return threadIdx.x; }
inline u32 fresh_block() { return blockIdx.x; }
inline void barrier_init(SharedAddress barrier, int count) { simt::barrier_init(barrier, count); }
inline void barrier_arrive(SharedAddress barrier) { simt::barrier_arrive(barrier); }
inline void barrier_arrive_after_copies(SharedAddress barrier) {
    simt::barrier_arrive_after_copies(barrier);
}
inline void copy_run_async(SharedAddress to, const void* from, u32 bytes, SharedAddress barrier) {
    simt::copy_run(to, from, bytes, barrier);
}
inline void order_before_copies() {}
inline void barrier_arrive_expecting(SharedAddress barrier, u32 bytes) {
    simt::barrier_expect(barrier, bytes);
    simt::barrier_arrive(barrier);
}
inline void barrier_wait(SharedAddress barrier, int parity) { simt::barrier_wait(barrier, parity); }
inline void wait_for_blocks(const int* counter, int least) {
    while (*(const volatile int*)counter < least) simt::wait_for_other_blocks();
}

#endif

// A number that all lanes of a warp have, and that the compiler then knows to be one for them all.
template <class T>
__device__ __forceinline__ T same_in_warp(T x) {
    return __shfl_sync(ALL_LANES, x, 0);
}
