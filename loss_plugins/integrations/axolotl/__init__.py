"""axolotl: `plugins: [loss_plugins.integrations.axolotl.LossPlugin]`, and `loss_strategy` beside its own keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plugin import LossPlugin

__all__ = ["LossPlugin"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .plugin import LossPlugin

    globals()[name] = LossPlugin
    return LossPlugin
