"""The verify pass with its attention kernel against transformers, node by node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kdray.kernels import cuda_attention
from kdray.kernels.attention_batch import AttentionBatch, DeviceAttentionBatch
from kdray.kernels.ops import Ops, load_ops
from kdray.model.batch import ForwardBatch
from kdray.model.target import TargetModel
from tests.model.paged import PagedRunner, Part, ancestors, make_batch
from tests.model.test_target import DRAFT, PARENTS, PROMPT, linear_logits, tree_logits

KIND = "wide_latent"
PREFIX = 20


@torch.inference_mode()
def check_every_node(
    folder: Path, ops: Ops, device: torch.device, page_size: int, *, resident: bool
) -> None:
    """Every node of a tree has the logits of its path; folder holds the model of KIND.

    resident   the step as a device round plans it, else as the host does
    """
    host = PagedRunner(TargetModel.load(folder, ops=load_ops("cpu")), page_size, num_pages=80)
    text = host.text(60)
    host.run(Part(text, PROMPT[:PREFIX]))
    batch = make_batch([Part(text, PROMPT[PREFIX : PREFIX + 1], DRAFT, PARENTS)], page_size)
    model = TargetModel.load(folder, ops=ops, device=device)
    caches = [cache.to(device) for cache in host.caches]  # unwritten slots are NaN and stay unread
    query = torch.zeros(1, 1, model.kv_width, device=device)
    assert cuda_attention.takes(query, caches[0], page_size, model.config.kv_lora_rank)
    step = moved(batch, device, resident=resident)
    found = model.logits(model.forward(step, caches).hidden).cpu()
    close(found, tree_logits(KIND, PROMPT[: PREFIX + 1], DRAFT, PARENTS))
    for node, path in enumerate(ancestors(PARENTS)):
        tokens = PROMPT[: PREFIX + 1] + [DRAFT[i - 1] for i in sorted(path) if i > 0]
        close(found[node], linear_logits(KIND, tokens)[-1])


def moved(batch: ForwardBatch, device: torch.device, *, resident: bool) -> ForwardBatch:
    """A step of one root and its tree, its tensors on the device."""
    host = batch.attention
    assert isinstance(host, AttentionBatch)
    table, mask = host.page_table.to(device), host.mask.to(device)
    attention: AttentionBatch | DeviceAttentionBatch = replace(host, page_table=table, mask=mask)
    if resident:
        numbers = torch.tensor([host.num_cached[0], host.row_start[1]], dtype=torch.int32)
        attention = DeviceAttentionBatch(
            num_cached=numbers[:1].to(device),
            num_nodes=numbers[1:].to(device),
            page_table=table,
            page_size=host.page_size,
            mask=mask,
        )
    return ForwardBatch(
        token=batch.token.to(device),
        position=batch.position.to(device),
        slot=batch.slot.to(device),
        attention=attention,
    )


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
