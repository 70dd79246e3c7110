"""How ranks start under Nsight Systems: Ray's runtime environment for `nsys profile`.

Nothing is recorded until a profile with CUDA_PROFILER begins (cudaProfilerStart in every rank at
the same step), and each one gives a report of its own, so no report waits for a process to end.
"""

from __future__ import annotations

NSIGHT_OPTIONS = {
    "t": "cuda,cublas,nvtx",
    # Kernels inside CUDA graphs one by one; nsys's default shows a whole graph as one bar. Costs
    # some microseconds a node while recording.
    "cuda-graph-trace": "node",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "repeat",
    "sample": "none",
    "cpuctxsw": "none",
    "o": "'kdray_%p'",
}
