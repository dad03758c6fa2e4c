"""How a job gets several devices: by a launcher, which this package leaves to accelerate and torchrun."""

from __future__ import annotations

import os
import shlex
import sys

import torch

from ...errors import ConfigError


def launch_line(processes: int) -> str:
    """What to type for ``processes`` devices in place of the command that is running."""
    words = sys.argv[1:]
    job = shlex.join(words) if words[:1] == ["train"] else "train job.yaml"
    return f"accelerate launch --multi_gpu --num_processes {processes} -m loss_plugins {job}"


def tensor_parallel_size() -> int:
    """Over how many processes `accelerate launch` was told to cut each layer; 1: over none."""
    asked = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    return int(os.environ.get("PARALLELISM_CONFIG_TP_SIZE", "1")) if asked else 1


def refuse_what_a_cpu_leaves_out(device: torch.device) -> None:
    """Refuse FSDP and tensor parallelism on a CPU, where accelerate trains whole copies instead or fails late.

    Raises:
        ConfigError: the launcher was asked for one of them.
    """
    if device.type != "cpu":
        return
    asked = "fsdp_config" if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" else ""
    asked = "parallelism_config_tp_size" if tensor_parallel_size() > 1 else asked
    if asked:
        raise ConfigError(
            f"accelerate was launched with {asked}, but this process trains on a CPU, where accelerate cuts no model: "
            "it would train whole copies. Train on GPUs, or launch with configs/accelerate/ddp.yaml."
        )
