#!/usr/bin/env python3
"""How fast a rank loads its part of a checkpoint, beside a plain read of the same files.

    python jobs/bench_load.py --model PATH --tp 8 --out benchmarks/results
    python jobs/bench_load.py --make num_hidden_layers=3,n_routed_experts=96 --tp 8 --tp 1

--make writes a checkpoint of Kimi K2.6's layout with these fields changed into --scratch, where it
stays for the next run. Each measurement starts with the files out of the page cache, as far as the
system does as it is told. gbps counts bytes of the files; peak_host_gb is the process's own memory
at most, without the page cache.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from make_checkpoint import main as make_checkpoint
from record import Record

from kdray.arguments import HelpFormatter
from kdray.kernels.ops import load_ops
from kdray.model.checkpoint import Checkpoint
from kdray.model.manifest import bytes_to_read
from kdray.model.parallel import Shard
from kdray.model.target import TargetModel
from kdray.model.weights import load_threads

READ_BYTES = 16 << 20


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    folder = options.model or made(options.make, options.scratch)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)  # a GPU's context is made once, by whatever comes first
    threads = options.threads or load_threads(device)
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    config = {"files": len(files), "gb": size / 1e9, "threads": threads, "device": device.type}
    record = Record("load", config, options.out)
    for ranks in options.tp or [1]:
        for _ in range(options.repeats):
            plain_s = plain_read(files, threads)
            loaded_s, num_bytes = load(folder, Shard(ranks - 1, ranks), device, threads)
            plain, loaded = size / plain_s / 1e9, num_bytes / loaded_s / 1e9
            record.add(
                {"tp": ranks, "threads": threads},
                {"gbps": [loaded], "plain_gbps": [plain], "s": [loaded_s]},
                {
                    "plain_fraction": loaded / plain,
                    "read_gb": num_bytes / 1e9,
                    "peak_host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
                },
            )
    record.finish()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="a checkpoint that is there")
    add("--make", default="num_hidden_layers=3", metavar="NAME=VALUE,..", help="or one to be made")
    add("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where it is made")
    add(
        "--tp", type=int, action="append", metavar="N", help="ranks; the last one loads. Repeatable"
    )
    add("--threads", type=int, help="that read (default: as an engine does)")
    add("--repeats", type=int, default=2, help="of each measurement")
    add("--out", type=Path, metavar="FOLDER", help="for the record")
    return parser.parse_args(argv)


def made(fields: str, scratch: Path) -> Path:
    folder = scratch / f"kdray-load-{zlib.crc32(fields.encode()):08x}"
    options = ["--out", str(folder), "--set", fields, "--shards", "16"]
    if make_checkpoint(options):
        raise SystemExit(f"no checkpoint could be made in {folder}")
    return folder


def load(folder: Path, shard: Shard, device: torch.device, threads: int) -> tuple[float, int]:
    """Seconds until a rank's weights are in place, headers and checks included; bytes it read."""
    forget(sorted(folder.glob("*.safetensors")))
    ops = load_ops(device)
    start = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = TargetModel.load(
        folder, ops=ops, shard=shard, dtype=dtype, device=device, threads=threads
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, bytes_to_read(Checkpoint.open(folder), model.config, shard)


def plain_read(files: Sequence[Path], threads: int) -> float:
    """Seconds to read all files whole into buffers that are used again and again."""
    forget(files)
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_read, files))
    return time.perf_counter() - start


def forget(files: Sequence[Path]) -> None:
    """Out of the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read(path: Path) -> None:
    buffer = bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


if __name__ == "__main__":
    sys.exit(main())
