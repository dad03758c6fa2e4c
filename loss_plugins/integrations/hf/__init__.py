"""The Hugging Face Trainer: arguments, a trainer, and a callback for other trainers. Names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import LossPluginArguments
    from .callback import LossPluginCallback
    from .log_probs import serve_trainer
    from .trainer import LossPluginMixin, LossPluginTrainer

_HOMES = {
    "LossPluginArguments": "arguments",
    "LossPluginCallback": "callback",
    "LossPluginMixin": "trainer",
    "LossPluginTrainer": "trainer",
    "serve_trainer": "log_probs",
}

__all__ = ["LossPluginArguments", "LossPluginCallback", "LossPluginMixin", "LossPluginTrainer", "serve_trainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
