"""A plugin of axolotl that `axolotl_runs.py` names in its jobs: each process writes what its training took into the
folder of its output.

The process ends where axolotl would save the model, whose weights are random."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from loss_plugins import find_handle
from loss_plugins.diagnostics.memory import MIB, has_counters, peak_allocated
from loss_plugins.kernels.ops import launched


class Watch(TrainerCallback):  # type: ignore[misc]
    """Times each step, and reads the allocator's peak before axolotl resets it for its own log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: list[float] = []
        self.peak, self._begin = 0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait(args.device)
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait(args.device)
        self.seconds.append(time.perf_counter() - self._begin)
        self.peak = max(self.peak, peak_allocated(args.device))

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        logged = [entry for entry in state.log_history if "loss" in entry]
        handle = find_handle(model)
        found: dict[str, Any] = {
            "losses": [entry["loss"] for entry in logged],
            "grad_norms": [entry.get("grad_norm") for entry in logged],
            "seconds": self.seconds,
            "peak_mib": self.peak / MIB if has_counters(args.device) else None,
            "peak_loss_mib": max((entry.get("loss_plugins/peak_loss_mib", 0.0) for entry in logged), default=0.0),
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "sharded": any(isinstance(p, DTensor) for p in model.parameters()),
            "weights": sorted({kind_of(p) for p in model.parameters()}),
        }
        if handle is not None:
            found |= {"strategy": handle.config.loss_strategy, "kernels": sorted(launched())}
            found |= {"hits": handle.counts.fused, "materialised": handle.counts.materialised}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"meter-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


class Meter(BasePlugin):  # type: ignore[misc]
    """What axolotl's plugin manager calls."""

    def register(self, cfg: Any) -> None:
        if cfg.get("fsdp_config") and not torch.accelerator.is_available():
            cut_over_cpus()

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return [Watch(Path(cfg.output_dir))]

    def post_train(self, cfg: Any, model: Any) -> None:
        raise SystemExit(0)


def cut_over_cpus() -> None:
    """Without an accelerator: axolotl asks for a mesh of CUDA devices by name, and accelerate knows no FSDP on CPUs."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType, ParallelismConfig

    build, start = ParallelismConfig.build_device_mesh, PartialState.__init__

    def start_as_several(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if self._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    ParallelismConfig.build_device_mesh = lambda self, device_type: build(self, "cpu")
    PartialState.__init__ = start_as_several


def kind_of(weight: torch.Tensor) -> str:
    """The type of a weight; bitsandbytes keeps its 4 bits in tensors of other types."""
    return "4 bits" if type(weight).__name__ == "Params4bit" else str(weight.dtype).removeprefix("torch.")


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
