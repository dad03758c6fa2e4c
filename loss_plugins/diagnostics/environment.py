"""What a bug report needs: versions and the device."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import __version__
from ..device import DeviceProfile

_PACKAGES = (
    "torch", "triton", "transformers", "accelerate", "peft", "trl", "datasets", "tokenizers", "gguf", "liger-kernel",
    "cut-cross-entropy",
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
    """Versions, system, and the facts of the device that a Trainer would use."""
    profile = DeviceProfile.probe(best_device())
    return {
        "versions": versions(),
        "system": platform.platform(),
        "device": asdict(profile),
        "triton_can_launch": profile.can_triton,
    }
