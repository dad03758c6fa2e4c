"""One of two processes of a model whose head tensor parallelism cuts by rows; rank 0 prints one JSON line a case.
`test_tensor_parallel.py` starts it."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import VOCAB, batch, make
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers.loss.loss_utils import ForCausalLMLoss

from loss_plugins import LossConfig, patch_model
from loss_plugins.errors import LossPluginError
from loss_plugins.models.conformance.double import all_double
from loss_plugins.testing import leave_group

CLASSES = tuple(1 + (i % 7) / 7 for i in range(VOCAB))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "softcap": ("gemma2", {}),
    "scale": ("granite", {}),
    "bias": ("phi", {}),
    "smoothing, z-loss, class weights": (
        "llama", {"loss_label_smoothing": 0.1, "loss_z_loss": 1e-2, "loss_class_weight": CLASSES},
    ),
    "statistics": ("llama", {"loss_statistics": ("accuracy", "entropy")}),
    "token weights": ("llama", {}),
    "items": ("llama", {}),
    "uneven": ("llama", {}),
    "columns": ("llama", {}),
}  # fmt: skip
_gathered: list[None] = []


def say(case: str, **result: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"case": case, **result}), flush=True)


def cut(head: Any, mesh: Any, way: str) -> None:
    if way == "torch":
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
        return
    for name, tensor in list(head._parameters.items()):
        if tensor is not None:
            head._parameters[name] = nn.Parameter(distribute_tensor(tensor.detach(), mesh, [Shard(0)]))


def counting_gathers() -> None:
    original = DTensor.full_tensor

    def full_tensor(self: Any, *args: Any, **kwargs: Any) -> Any:
        _gathered.append(None)
        return original(self, *args, **kwargs)

    DTensor.full_tensor = full_tensor


def widened(model: Any) -> Any:
    """One more class, so that the parts differ."""
    model.resize_token_embeddings(VOCAB + 1)
    return model.double()


def without_the_last(logits: Any, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> Any:
    return ForCausalLMLoss(logits[..., : vocab_size - 5], labels, vocab_size - 5, **kwargs)


def run(case: str, strategy: str, way: str = "plain") -> None:
    family, settings = CASES[case]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make(family).train()
    model = widened(model) if case == "uneven" else model
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # not the embedding's
    if case == "columns":  # of other classes the model makes no use in its loss
        model.loss_function = without_the_last
    twin = copy.deepcopy(model)
    rows: dict[str, Any] = batch()
    if case == "items":
        rows["num_items_in_batch"] = torch.tensor(11)
    weights = torch.linspace(0.2, 1.8, rows["labels"].numel()).reshape(rows["labels"].shape)
    config = LossConfig(strategy, **settings)
    found = []
    for each in (twin, model):
        if each is model:
            cut(model.lm_head, mesh, way)
        handle = patch_model(each, config)
        _gathered.clear()
        with all_double(), handle.scope(token_weight=weights if case == "token weights" else None):
            for _ in range(2):
                each.zero_grad()
                loss = each(**rows).loss
                loss.backward()
        gathers = len(_gathered)
        gradients = {
            key: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for key, p in each.named_parameters()
        }
        found.append((loss.detach(), gradients, handle.statistics.pop(), handle.counts, gathers, handle.explain()))
    (loss, gradients, numbers, *_), (ours, own, statistics, counts, gathers, explained) = found
    say(
        f"{case}, {strategy}{', torch' * (way == 'torch')}",
        loss=abs(loss.item() - ours.item()),
        gradient=max((own[key] - g).abs().max().item() for key, g in gradients.items()),
        size=gradients["lm_head.weight"].abs().max().item(), statistics=[numbers, statistics], fused=counts.fused,
        materialised=counts.materialised, gathers=gathers, explained=explained, kind=type(loss).__name__,
    )  # fmt: skip


def distributed_hidden() -> None:
    """Hidden states that are a DTensor reach the head as they are: real logits, and that is counted."""
    mesh = init_device_mesh("cpu", (2,))
    model = make("llama").train()
    stock = model(**batch()).loss
    cut(model.lm_head, mesh, "torch")
    handle = patch_model(model, "cce")
    model.model.register_forward_hook(
        lambda module, args, output: output.__setitem__(
            "last_hidden_state", DTensor.from_local(output["last_hidden_state"], mesh, [Replicate()])
        )
    )
    loss = model(**batch()).loss
    loss.backward()
    say(
        "hidden is a DTensor", loss=abs(loss.item() - stock.item()), materialised=handle.counts.materialised,
        why=handle.materialised_by,
    )  # fmt: skip


def own_batches() -> None:
    """Each process with a batch of its own is data parallelism, and no part of a head."""
    model = make("llama").train()
    cut(model.lm_head, init_device_mesh("cpu", (2,)), "plain")
    patch_model(model, "cce")
    said = ""
    try:
        model(**batch(seed=dist.get_rank()))
    except LossPluginError as error:
        said = f"{type(error).__name__}: {error}"
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, said)
    say("own batches", said=everywhere)


def main(path: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    counting_gathers()
    for case in CASES:
        run(case, "cce")
    for strategy in ("flce", "chunked", "naive"):
        run("llama", strategy)
    run("llama", "cce", "torch")
    distributed_hidden()
    own_batches()
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
