"""Language-model losses without logits in memory, for models trained with the Hugging Face stack.

Importing this package loads neither torch nor transformers, and patches nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import LossConfig
    from .integrations.hf.arguments import LossPluginArguments
    from .integrations.hf.callback import LossPluginCallback
    from .integrations.hf.trainer import LossPluginTrainer
    from .models.patch import PatchHandle, find_handle, patch_model
    from .strategies import (
        LossOutput,
        VocabParallel,
        cross_entropy,
        cross_entropy_stats,
        linear_cross_entropy,
        linear_cross_entropy_stats,
        linear_log_probs,
    )

__version__ = "0.1.0"

_HOMES = {
    "LossConfig": "config",
    "LossOutput": "strategies",
    "LossPluginArguments": "integrations.hf.arguments",
    "LossPluginCallback": "integrations.hf.callback",
    "LossPluginTrainer": "integrations.hf.trainer",
    "PatchHandle": "models.patch",
    "VocabParallel": "strategies",
    "cross_entropy": "strategies",
    "cross_entropy_stats": "strategies",
    "find_handle": "models.patch",
    "linear_cross_entropy": "strategies",
    "linear_cross_entropy_stats": "strategies",
    "linear_log_probs": "strategies",
    "patch_model": "models.patch",
}

__all__ = [
    "LossConfig", "LossOutput", "LossPluginArguments", "LossPluginCallback", "LossPluginTrainer", "PatchHandle",
    "VocabParallel", "cross_entropy", "cross_entropy_stats", "find_handle", "linear_cross_entropy",
    "linear_cross_entropy_stats", "linear_log_probs", "patch_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
