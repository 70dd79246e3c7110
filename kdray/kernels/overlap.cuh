// Programmatic dependent launch, for kernels launched with overlap (launch.py): a grid may start
// before the one in front of it on the stream has ended.
//
// Every such kernel begins with start_behind_previous(), in every thread and before it touches any
// memory but its parameters. Behind it all that earlier grids wrote is there, and none of them reads
// any more, so a kernel's body need not know. What it saves is the launch itself and the kernel's
// first fetches, about a microsecond each time. Launched without overlap it does nothing.
#pragma once

#ifdef __CUDACC__

__device__ __forceinline__ void start_behind_previous()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // The next grid may come in where there is room; it waits for the end of this one all the same.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#else

__device__ inline void start_behind_previous() {}

#endif
