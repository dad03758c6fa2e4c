"""One of two processes that train in float64, by hand and by the Trainer; `test_exact_distributed.py` launches both and
reads what rank 0 writes."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_runs import arguments, llama, rows
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler

from loss_plugins import LossPluginTrainer, patch_model
from loss_plugins.models.conformance.double import all_double
from loss_plugins.testing import leave_group

STRATEGIES = ("cce", "flce", "chunked", "auto")
KINDS = ("unequal", "empty", "empty, static graph", "checkpointed, static graph", "no token at all")


class InOrder(LossPluginTrainer):
    """Two processes with half the batch then see the very rows of one."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def uneven_rows() -> list[dict[str, Tensor]]:
    """Batches of two, for two processes in turn: different counts of labels, and now and then one process has none."""
    made = rows(32)
    for first in (2, 12, 22):
        for row in made[first : first + 2]:
            row["labels"] = torch.full_like(row["labels"], -100)
    return made


def train(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """The weights after four steps, with the token count of all processes as denominator."""
    args = arguments(
        folder, loss_strategy="cce", optim="sgd", learning_rate=0.5, max_grad_norm=0.0, lr_scheduler_type="constant",
        average_tokens_across_devices=True, **settings,
    )  # fmt: skip
    trainer = InOrder(llama().double(), args, train_dataset=uneven_rows())
    with all_double():
        trainer.train()
    return {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}


def micro_batch(rank: int, kind: str) -> dict[str, Tensor]:
    batch = rows(2, seed=5 + rank)
    stacked = {key: torch.stack([row[key] for row in batch]) for key in batch[0]}
    if rank:
        stacked["labels"][:, : (12 if "empty" in kind else 8)] = -100
    if kind == "no token at all":
        stacked["labels"][:] = -100
    return stacked


def by_hand(kind: str, strategy: str) -> dict[str, Any]:
    """DistributedDataParallel's gradients against those of one process with all rows; each rank's loss is divided by
    the count of all and multiplied by their number, as the Trainer does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = llama().double().train()
    whole = copy.deepcopy(model)
    batches = [micro_batch(each, kind) for each in range(world)]
    count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches).clamp(min=1)
    if "checkpointed" in kind:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    handle = patch_model(model, strategy)
    # find_unused_parameters stays off: DDP raises in the next forward if a parameter got no gradient
    wrapped = DistributedDataParallel(model, static_graph="static" in kind)
    with all_double():
        losses = [whole(**batch, num_items_in_batch=count).loss for batch in batches]
        sum(losses).backward()
        for _ in range(3):
            wrapped.zero_grad()
            loss = wrapped(**batches[rank], num_items_in_batch=count).loss
            (loss * world).backward()
    expected = dict(whole.named_parameters())
    error = max((p.grad - expected[key].grad).abs().max() for key, p in model.named_parameters())
    size = max(p.grad.abs().max() for p in expected.values())
    errors = torch.stack([error, (loss.detach() - losses[rank].detach()).abs()])
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return {"gradient": errors[0].item(), "loss": errors[1].item(), "size": size.item(), "fused": handle.counts.fused}


def fifty_steps(strategy: str) -> dict[str, Any]:
    """Whether the ranks still have the same weights, to the bit, and have learnt something."""
    torch.manual_seed(0)
    model = llama().train()
    patch_model(model, strategy)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(50):
        kind = "empty" if step % 7 == 3 else "unequal"
        optimizer.zero_grad()
        loss = wrapped(**micro_batch(dist.get_rank(), kind), num_items_in_batch=torch.tensor(20)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    return {"digests": digests, "first": losses[0], "last": losses[-1]}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    weights = train(folder, per_device_train_batch_size=2, ddp_backend="gloo")
    result: dict[str, Any] = {"fifty": {name: fifty_steps(name) for name in ("cce", "auto")}}
    for kind in KINDS:
        for strategy in STRATEGIES:
            result[f"{kind}, {strategy}"] = by_hand(kind, strategy)
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")
        (folder / "result.json").write_text(json.dumps(result))
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
