"""Seeing into the ranks while they run: traces by rank, begun and ended at the same step.

recorder  one process: NVTX ranges, torch.profiler, memory
session   the driver's side: from which step, for how many
store     where the files of profiles lie, and who may read which
trace     events of a rank's trace, on the clock all ranks share
merge     all ranks' traces and the driver's verbs as one Perfetto file
summary   where a rank's time went, by kernel
check     what Perfetto's importer wants of a file
"""
