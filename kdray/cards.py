"""The memory a rank may take: of a GPU by its name, of the one found here, or a part of a host."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from kdray.errors import ConfigError
from kdray.sizes import bytes_of

MIB = 1 << 20
# What the driver reports, in MiB.
KNOWN_MIB = {
    "RTX PRO 6000": 97_887,
    "RTX 5090": 32_607,
    "RTX 4090": 24_564,
    "L40S": 46_068,
    "A100 80GB": 81_920,
    "H100": 81_559,
    "H20": 97_871,
    "H200": 143_771,
    "B200": 183_359,
}


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or a rank's part of a host: its bytes, and what of them is taken already."""

    name: str
    total: int
    taken: int = 0


def card_named(text: str) -> Card:
    """A card that is not here: by name ("RTX PRO 6000") or by size ("96 GiB").

    Raises ConfigError for others.
    """
    if (size := bytes_of(text)) is not None:
        return Card(f"a card of {text.strip()}", size)
    wanted = _plain(text)
    for name, mib in KNOWN_MIB.items():
        if _plain(name) == wanted:
            return Card(name, mib * MIB)
    # "NVIDIA RTX PRO 6000 Blackwell Server Edition": the longest name it contains.
    for name in sorted(KNOWN_MIB, key=len, reverse=True):
        if re.search(rf"\b{re.escape(name.lower())}\b", text.lower()):
            return Card(name, KNOWN_MIB[name] * MIB)
    raise ConfigError(
        f"gpu {text!r} is not known; give its memory instead ('96 GiB'), or one of "
        f"{', '.join(KNOWN_MIB)}"
    )


def card_found(device: torch.device, ranks: int) -> Card:
    """The device of this rank; on a CPU its part of the host's memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Card(torch.cuda.get_device_name(device), total, total - free - kept)
    return Card(f"1/{ranks} of this host" if ranks > 1 else "this host", host_bytes() // ranks)


def host_bytes() -> int:
    """Memory of this host, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))
