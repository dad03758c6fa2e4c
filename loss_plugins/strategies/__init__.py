"""Room 1, the algorithms: a file a strategy, `_select.py` for "auto", and the public functions.

Names are loaded on first use, so that listing the strategies imports none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._api import linear_cross_entropy, linear_cross_entropy_stats, linear_log_probs, projected_cross_entropy_stats
    from ._base import FIELDS, LossOutput, Problem, RowLoss, Rows, Strategy
    from ._given import cross_entropy, cross_entropy_stats
    from ._select import STRATEGIES, Plan, check_options, chosen_by_auto, forget_choices, select, select_on
    from ._vocab_parallel import VocabParallel

_HOMES = {
    "linear_cross_entropy": "_api",
    "linear_cross_entropy_stats": "_api",
    "linear_log_probs": "_api",
    "projected_cross_entropy_stats": "_api",
    "cross_entropy": "_given",
    "cross_entropy_stats": "_given",
    "FIELDS": "_base",
    "LossOutput": "_base",
    "Problem": "_base",
    "RowLoss": "_base",
    "Rows": "_base",
    "Strategy": "_base",
    "STRATEGIES": "_select",
    "Plan": "_select",
    "check_options": "_select",
    "chosen_by_auto": "_select",
    "forget_choices": "_select",
    "select": "_select",
    "select_on": "_select",
    "VocabParallel": "_vocab_parallel",
}

__all__ = [
    "FIELDS", "STRATEGIES", "LossOutput", "Plan", "Problem", "RowLoss", "Rows", "Strategy", "VocabParallel",
    "check_options", "chosen_by_auto", "cross_entropy", "cross_entropy_stats", "forget_choices", "linear_cross_entropy",
    "linear_cross_entropy_stats", "linear_log_probs", "projected_cross_entropy_stats", "select", "select_on",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
