"""One of two processes that each hold half of every sequence; rank 0 prints one JSON line a case.
`test_context_parallel.py` starts it."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import batch, make
from torch import Tensor, nn
from transformers import AttentionInterface

from loss_plugins import LossConfig, patch_model
from loss_plugins.models.conformance.double import all_double
from loss_plugins.testing import leave_group


class Gathered(torch.autograd.Function):
    """The parts of a sequence behind each other; each process gets the sum of its part's gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        ctx.length = part.shape[2]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.narrow(2, dist.get_rank() * ctx.length, ctx.length)


def over_processes(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention of this process's part of the queries over all keys and values."""
    key, value = (Gathered.apply(t) for t in (key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    own = torch.arange(query.shape[2]) + dist.get_rank() * query.shape[2]
    scores = scores.masked_fill(torch.arange(key.shape[2]) > own[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def run(case: str, strategy: str, *, empty: bool = False, **settings: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make("llama").train()
    whole = copy.deepcopy(model)
    rows = batch()
    del rows["attention_mask"]
    if empty:
        rows["labels"][:, rows["labels"].shape[1] // world :] = -100  # the second process has no label
    shifted = nn.functional.pad(rows["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    count = (shifted != -100).sum()
    config = LossConfig(strategy, **settings)
    handle = patch_model(model, config)
    stock = patch_model(whole, config)
    model.set_attn_implementation("over_processes")
    positions = torch.arange(shifted.shape[1])[None].expand_as(shifted)
    given = {**rows, "shift_labels": shifted, "position_ids": positions}
    own = {key: value.chunk(world, 1)[rank].contiguous() for key, value in given.items()}
    with all_double():
        expected = whole(**rows, num_items_in_batch=count).loss
        expected.backward()
        loss = model(**own, num_items_in_batch=count).loss
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    worst = 0.0
    for (_, mine), (_, theirs) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        dist.all_reduce(mine.grad)
        worst = max(worst, (mine.grad - theirs.grad).abs().max().item())
    numbers, one = handle.statistics.pop(), stock.statistics.pop()
    # mean over this process's tokens, to be weighted by their number
    tokens = (own["shift_labels"] != -100).sum().double()
    entropy = (
        torch.tensor(numbers.get("entropy", 0.0), dtype=torch.float64) * tokens
        if tokens
        else torch.tensor(0.0).double()
    )
    dist.all_reduce(entropy)
    if rank == 0:
        print(
            json.dumps({
                "case": case, "loss": abs(total.item() - expected.item()), "gradient": worst,
                "size": whole.lm_head.weight.grad.abs().max().item(), "fused": handle.counts.fused,
                "materialised": handle.counts.materialised, "entropy": abs(entropy.item() / count.item() - one.get("entropy", 0.0)),
            }),
            flush=True,
        )  # fmt: skip


def main(path: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    AttentionInterface.register("over_processes", over_processes)
    for strategy in ("cce", "flce", "chunked", "naive", "auto"):
        run(strategy, strategy)
    run("smoothing and z-loss", "cce", loss_label_smoothing=0.1, loss_z_loss=1e-2)
    run("statistics", "cce", loss_statistics=("entropy", "accuracy"))
    run("a process without labels", "cce", empty=True)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
