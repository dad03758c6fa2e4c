"""One of four processes, two by two: the head's rows are cut over one pair, and FSDP2 shards over the other. Rank 0 prints
one JSON line a case. `test_hybrid.py` starts it."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from collectives import Gathers
from tiny_models import batch, make
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from loss_plugins import patch_model
from loss_plugins.models.conformance.double import all_double
from loss_plugins.testing import leave_group

CASES = [
    *((way, place, strategy) for way in ("dtensor", "torch") for place in ("root", "own") for strategy in ("cce", "chunked")),
    ("torch", "own", "flce"),
]  # fmt: skip


def rows_of(replica: int) -> dict[str, Any]:
    """The second replica's batch is longer and has other counts of labels."""
    return batch(rows=1 + replica, seed=replica)


def run(way: str, place: str, strategy: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    replica, head_mesh = mesh["replica"].get_local_rank(), mesh["part"]
    model = make("llama").train()
    twin = copy.deepcopy(model)
    if way == "torch":
        parallelize_module(model.lm_head, head_mesh, ColwiseParallel(output_layouts=Replicate()))
    else:
        whole = model.lm_head.weight.detach()
        model.lm_head._parameters["weight"] = nn.Parameter(distribute_tensor(whole, head_mesh, [Shard(0)]))
    handle = patch_model(model, strategy)
    for part in (*model.model.layers, *([model.lm_head] if place == "own" else []), model):
        fully_shard(part, mesh=mesh["replica"])
    with all_double():
        losses = [twin(**rows_of(each)).loss for each in range(2)]
        (sum(losses) / 2).backward()
        for _ in range(2):
            model.zero_grad()
            with Gathers() as seen:
                loss = model(**rows_of(replica)).loss
                loss.backward()
    found = {key: p.grad for key, p in model.named_parameters()}
    found = {key: grad.full_tensor() if isinstance(grad, DTensor) else grad for key, grad in found.items()}
    expected = {key: p.grad for key, p in twin.named_parameters()}
    off = [abs(loss.item() - losses[replica].item())]
    off.append(max((found[key] - grad).abs().max().item() for key, grad in expected.items()))
    worst = torch.tensor(off)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {
        "loss": worst[0].item(), "gradient": worst[1].item(), "fused": handle.counts.fused, "sizes": seen.sizes,
        "materialised": handle.counts.materialised, "size": max(g.abs().max().item() for g in expected.values()),
    }  # fmt: skip


def main(path: str, rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    for case in CASES:
        result = run(*case)
        if rank == 0:
            print(json.dumps({"case": ", ".join(case), **result}), flush=True)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
