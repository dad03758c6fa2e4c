"""What is computed from the log-probability of each label, in place of its negative.

A file of this room exports one as ``OBJECTIVE``; another package's entry point may too (group
``loss_plugins.objectives``), or a path ``package.module:ATTRIBUTE``. Shifts, heads and what a model does to its logits
are none of its business: it sees one number a label.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..registry import Registry

__all__ = ["OBJECTIVES", "Objective"]


class Objective(Protocol):
    """A loss of single tokens."""

    name: str
    summary: str
    """One line for tables and help."""

    def __call__(self, log_probs: Tensor) -> Tensor:
        """The loss of each token, of ``log_probs``, shape ``[N]``, float32 or wider, differentiably. What it returns
        for tokens that do not count, whose log-probability is given as 0, is not looked at."""
        ...


OBJECTIVES = Registry(
    package="loss_plugins.objectives", attribute="OBJECTIVE", kind="loss objective", members=("name", "summary")
)
