// Programmatic dependent launch, for kernels launched with overlap (launch.py): a grid may start
// before the one in front of it on the stream has ended.
//
// Every such kernel begins with one of these, in every thread and before it touches any memory but
// its parameters and what nothing near it on the stream writes (weights). Behind it all that
// earlier grids wrote is there, and none of them reads any more, so a kernel's body need not know.
// What it saves is the launch itself and the kernel's first fetches, half a microsecond to one
// each time. Launched without overlap they do nothing.
#pragma once

#ifdef __CUDACC__

__device__ __forceinline__ void wait_for_previous()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next grid may come in where there is room; it waits for the end of this one all the same. Not
// for a grid that nearly fills the device: the next one's blocks would take the places left over,
// and the rest of them would pile up where this one ends first (top-k at 448 rows: 55 us for 49).
__device__ __forceinline__ void let_next_start()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Asks for a line that is read soon.
__device__ __forceinline__ void ask_l2_for(const void* at)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

#else

__device__ inline void wait_for_previous() {}
__device__ inline void let_next_start() {}
__device__ inline void ask_l2_for(const void*) {}

#endif

__device__ __forceinline__ void start_behind_previous()
{
    wait_for_previous();
    let_next_start();
}
