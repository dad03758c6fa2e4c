"""One rank of a two-process training with `loss_self_check`, replicated or sharded; `test_self_check_distributed.py`
launches it and reads what rank 0 writes."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from small_runs import arguments, llama, losses, norms, rows
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import Trainer

from loss_plugins import LossPluginCallback, LossPluginTrainer, patch_model
from loss_plugins.errors import LossPluginError
from loss_plugins.models.verification import check_first_batch
from loss_plugins.models.verification.moment import loss_of
from loss_plugins.strategies.cce import Cce
from loss_plugins.testing import leave_group

PLAIN = Cce.__call__


def wrong_on_rank_1(self: Cce, *args: Any) -> Any:
    result = PLAIN(self, *args)
    return result._replace(loss=result.loss * (1.01 if torch.distributed.get_rank() else 1))


class Lines(logging.Handler):
    """What was said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "loss_self_check" in record.getMessage():
            self.lines.append(record.getMessage())


def trained(folder: Path, make: Any = LossPluginTrainer, **settings: Any) -> dict[str, Any]:
    lines = Lines()
    logging.getLogger("loss_plugins").addHandler(lines)
    args = arguments(
        folder, per_device_train_batch_size=2, max_steps=2, ddp_backend="gloo", loss_strategy="cce", **settings
    )
    trainer = make(llama(), args, train_dataset=rows())
    found: dict[str, Any] = {"rank": args.process_index}
    try:
        trainer.train()
        found |= {"losses": losses(trainer), "norms": norms(trainer)}
    except LossPluginError as error:
        found["error"] = str(error)
    logging.getLogger("loss_plugins").removeHandler(lines)
    return found | {"lines": lines.lines}


def with_callback(*args: Any, **kwargs: Any) -> Trainer:
    return Trainer(*args, callbacks=[LossPluginCallback()], **kwargs)


def sharded(kind: str) -> dict[str, Any]:
    """`check_first_batch` on a model that FSDP shards: accelerate does that on GPUs only."""
    model = llama().train()
    handle = patch_model(model, "cce")
    if kind == "fsdp1":
        policy = ModuleWrapPolicy({type(model.model.layers[0])})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in (*model.model.layers, model.lm_head, model):
            fully_shard(layer, mesh=mesh)
    data = rows(4, seed=torch.distributed.get_rank())
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}

    def compute(inputs: dict[str, Any], deferred: bool) -> Tensor:
        with handle.scope(loss_only=deferred):
            return loss_of(model(**inputs, num_items_in_batch=torch.tensor(60)))

    def summed(tensor: Tensor) -> Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    try:
        checked = check_first_batch(model, handle, batch, compute, summed, 2)
    except LossPluginError as error:
        return {"error": str(error)}
    assert checked is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_of(model(**batch)).backward()  # training goes on
    return {"lines": [checked.sentence], "whole": checked.found.whole, "loss": checked.found.loss}


def everything(kind: str, folder: Path) -> dict[str, Any]:
    if kind.startswith("fsdp"):
        found = {"checked": sharded(kind)}
    else:
        make = with_callback if kind == "callback" else LossPluginTrainer
        found = {"plain": trained(folder, make), "checked": trained(folder, make, loss_self_check=True)}
    Cce.__call__ = wrong_on_rank_1  # type: ignore[method-assign]
    found["wrong"] = sharded(kind) if kind.startswith("fsdp") else trained(folder, make, loss_self_check=True)
    Cce.__call__ = PLAIN  # type: ignore[method-assign]
    return found


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    result = {kind: everything(kind, folder) for kind in kinds}
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, result)
    if torch.distributed.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(everyone))
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
