"""``loss_self_check: true``: the first training batch is computed by stock too, before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, UnsupportedError
from ...models.patch import PatchHandle
from ...models.verification import Checked, check_first_batch
from ...models.verification.moment import Moment, loss_of

logger = logging.getLogger(__name__)

LAYERWISE = ("lomo", "adalomo", "layerwise")


def refuse_self_check(args: Any, accelerator: Any = None) -> None:
    """Where stock cannot be run beside ours.

    Raises:
        UnsupportedError: as said.
    """
    parallel = getattr(accelerator, "parallelism_config", None)
    split = [name for name in ("cp", "sp") if getattr(parallel, f"{name}_enabled", False)]
    why = None
    if args.n_gpu > 1:
        why = f"nn.DataParallel runs the model in {args.n_gpu} threads", "launch with accelerate launch or torchrun"
    elif getattr(args, "deepspeed", None) or str(getattr(accelerator, "distributed_type", "")).endswith("DEEPSPEED"):
        why = "DeepSpeed keeps the gradients to itself", "run a few steps without it"
    elif split:
        why = f"{' and '.join(split)} parallelism splits the sequence", "run a few steps without it"
    elif any(word in str(getattr(args.optim, "value", args.optim)) for word in LAYERWISE):
        why = f"optim {getattr(args.optim, 'value', args.optim)!r} steps in the backward", "use another for a few steps"
    if why is not None:
        raise UnsupportedError(
            f"loss_self_check was asked for, but {why[0]}, so stock's gradients cannot be had beside ours. To check, "
            f"{why[1]}, or run loss-plugins verify; to train as it is, leave loss_self_check out."
        )


def self_check(
    model: torch.nn.Module,
    handle: PatchHandle,
    inputs: dict[str, Any],
    compute: Callable[[dict[str, Any], bool], Tensor],
) -> Checked | None:
    """`check_first_batch` for a Trainer's batch; says what it found, in one line, on the main process.

    Raises:
        ConfigError: the batch has no labels.
        VerificationError: ours differs from stock's.
    """
    if not isinstance(inputs.get("labels"), Tensor):
        raise ConfigError(
            f"loss_self_check was asked for, but the first batch has no labels ({', '.join(inputs)}), so there is no "
            "loss to compare. Give the data labels, or leave it out."
        )
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes, rank = (torch.distributed.get_world_size(), torch.distributed.get_rank()) if distributed else (1, 0)
    checked = check_first_batch(model, handle, inputs, compute, _summed if processes > 1 else None, processes)
    if checked is not None and not rank:
        logger.warning("%s", checked.sentence)
    return checked


def _summed(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    torch.distributed.all_reduce(total)
    return total


def check_from_dataset(args: Any, model: torch.nn.Module, handle: PatchHandle, dataloader: Any) -> None:
    """The same for a callback, which sees no batch: with the first rows of the training data, before training.

    Raises:
        ConfigError: the data can only be read from its beginning, which would be missing from the training.
        UnsupportedError: the model is sharded.
    """
    refuse_self_check(args)
    dataset: Any = getattr(dataloader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            "loss_self_check was asked for with LossPluginCallback, but a callback sees no batch, and rows of a "
            f"{type(dataset).__name__} cannot be taken beforehand. Use LossPluginTrainer, or run loss-plugins verify."
        )
    if getattr(args, "fsdp", None):
        raise UnsupportedError(
            "loss_self_check was asked for with LossPluginCallback, but a callback cannot call a model that FSDP "
            "shards. Use LossPluginTrainer, or run loss-plugins verify."
        )
    training = model.training
    with Moment(model):  # data sets may draw too
        rows = [dataset[place] for place in range(min(args.per_device_train_batch_size, len(dataset)))]
        batch = dict(dataloader.collate_fn(rows))
    batch = {key: value.to(args.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    batch.pop(handle.config.loss_token_weight_key, None)

    def compute(inputs: dict[str, Any], deferred: bool) -> Tensor:
        with handle.scope(loss_only=deferred):
            return loss_of(model(**inputs))

    model.train()
    try:
        self_check(model, handle, batch, compute)
    finally:
        model.train(training)
