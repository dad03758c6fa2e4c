"""What a bug report needs: versions and the device. Versions can be had where torch cannot be imported."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__

_PACKAGES = (
    "torch", "triton", "torch_npu", "triton-ascend", "transformers", "accelerate", "peft", "trl", "datasets",
    "tokenizers", "gguf", "liger-kernel", "cut-cross-entropy", "deepspeed", "axolotl", "llamafactory", "ms-swift",
    "lightning",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python, of this package, and of those around it that are installed."""
    found = {"python": platform.python_version(), "loss-plugins": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def best_device() -> str:
    """The kind of device that a Trainer would use here."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def report() -> dict[str, Any]:
    """Versions, system, and the facts of the device that a Trainer would use. Facts that are not known are left out."""
    from ..device import DeviceProfile

    profile = DeviceProfile.probe(best_device())
    device = _known(asdict(profile))
    if profile.npu is not None:
        device["npu"] = _known(asdict(profile.npu))
    found: dict[str, Any] = {"versions": versions(), "system": platform.platform()}
    found |= {"cpu": f"{cpu_name()}, {os.cpu_count()} threads"}
    if ram := ram_bytes():
        found["ram_bytes"] = ram
    return found | {"device": device, "triton_can_launch": profile.can_triton}


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if value not in (0, "", (0, 0), (), None) or value is False}


def cpu_name() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, named), "") or platform.processor() or platform.machine()


def ram_bytes() -> int | None:
    """Main memory, where the system tells it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
