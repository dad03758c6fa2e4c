"""What a strategy is given, what it returns, and what it must answer about itself.

Letters: N rows (tokens), H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..device import DeviceProfile
from ..kernels._rows import accumulator

FIELDS = ("nll", "lse", "entropy", "accuracy", "predicted", "dropped")
FEWEST_ROWS = 256
"""With fewer the lists of a filter cost more than they save; `kernels/triton/marks.py` marks nothing then."""


class LossOutput(NamedTuple):
    """A loss and what was computed beside it in the same pass.

    Per-token fields have the shape of the labels (their last axis shorter by ``shift``); ignored tokens hold 0, False,
    or ``ignore_index`` in ``predicted``. Only ``loss`` is differentiable. A field that was not asked for is None.
    """

    loss: Tensor
    """Shape ``()``, or the labels' with ``reduction="none"``; float32, or float64 for float64 inputs."""
    nll: Tensor | None = None
    """Negative log-likelihood of each label: no smoothing, no weights."""
    lse: Tensor | None = None
    """Log-sum-exp of each token's logits."""
    entropy: Tensor | None = None
    """Entropy of each token's distribution, in nats."""
    accuracy: Tensor | None = None
    """Whether each token's largest logit is its label's, bool."""
    predicted: Tensor | None = None
    """Index of each token's largest logit, the first of equals, int64."""
    z_loss: Tensor | None = None
    """The part of ``loss`` that the z-loss added, reduced as ``loss`` is; None where its weight is 0."""
    dropped: Tensor | None = None
    """Share of each token's probability that the gradient leaves out; 0 everywhere without a filter."""


@dataclass(frozen=True)
class Problem:
    """One loss as plain values, so that `check`, `peak_bytes` and `auto` can be asked without tensors."""

    rows: int
    hidden: int
    vocab: int
    dtype: torch.dtype = torch.float32
    """The type that products are computed in."""
    weight_dtype: torch.dtype | None = None
    """The type of the head's weight where it differs from ``dtype``."""
    needs_hidden: bool = True
    needs_weight: bool = True
    reduced: bool = True
    """False for ``reduction="none"``."""
    module: bool = False
    """The head is a module to be called, not a weight to be multiplied."""
    dense: bool = False
    """Every entry of the logits' gradient counts (label smoothing, a bias that is trained): no filter may thin it."""
    triton: bool = False
    """Triton kernels compute wherever the options leave that open, see `on`."""
    ascend: bool = False
    """Likewise triton-ascend's kernels on an NPU."""
    bulk_copies: bool = False
    """The GPU is a Hopper or later, whose Triton kernels filter and make flce in one pass, see `on`."""

    def on(self, profile: DeviceProfile) -> Problem:
        """The same on a device, so that `peak_bytes` can tell whose kernels will run there."""
        on_gpu = profile.can_triton and not profile.interpreted
        bulk_copies = on_gpu and profile.kind == "cuda" and profile.capability >= (9, 0)
        ascend = profile.ascend_obstacle is None
        wide = self.dtype == torch.float64
        return replace(self, triton=on_gpu and not wide, ascend=ascend and not wide, bulk_copies=bulk_copies)

    @property
    def is_filterable(self) -> bool:
        """Whether Triton's kernels leave small probabilities out by default, once a model is not untrained any more."""
        return self.bulk_copies and self.triton and self.dtype.itemsize == 2 and self.filter_pays

    @property
    def filter_pays(self) -> bool:
        """Whether so much is left out of the gradients that finding it costs less.

        About as many classes count for 128 tokens whether there are many others or few, so where there are few, most
        count; and few tokens tell the marks little of what counts. See the grid in `bench/results`.
        """
        enough = self.rows >= FEWEST_ROWS if self.vocab >= 3 << 16 else self.rows >= 2048 and self.vocab >= 3 << 15
        return enough and self.differentiable and not self.dense

    @property
    def differentiable(self) -> bool:
        return self.needs_hidden or self.needs_weight

    @property
    def accumulator(self) -> torch.dtype:
        """The type that sums and per-row results are kept in."""
        return accumulator(self.dtype)

    @property
    def logits_bytes(self) -> int:
        """What the whole logits matrix would take in the accumulator's type."""
        return self.rows * self.vocab * self.accumulator.itemsize

    @property
    def gradient_bytes(self) -> int:
        """What the gradients that are handed back take."""
        weight_dtype = self.weight_dtype or self.dtype
        hidden = self.rows * self.hidden * self.dtype.itemsize if self.needs_hidden else 0
        return hidden + (self.vocab * self.hidden * weight_dtype.itemsize if self.needs_weight else 0)


@dataclass(frozen=True)
class Rows:
    """The tensors and numbers of one loss, flattened to rows and checked. Labels are in range or ``ignore_index``."""

    hidden: Tensor  # (N, H)
    weight: Tensor | None  # (V, H); None with project
    bias: Tensor | None  # (V,)
    labels: Tensor  # (N,) int64
    vocab: int
    row_scale: Tensor  # (N,) what each row's loss counts in the total; 0 where ignored
    dtype: torch.dtype
    ignore_index: int = -100
    scale: float = 1.0
    softcap: float = 0.0  # 0 is none
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weight: Tensor | None = None  # (V,)
    reduce: bool = True
    fields: frozenset[str] = frozenset()
    project: Callable[[Tensor], Tensor] | None = None  # (n, H) -> (n, V): a head that must be called
    shard: bool = False
    """The head is a part of one, so ``nll`` and ``lse`` must be differentiable too; only without ``reduce``."""

    @property
    def accumulator(self) -> torch.dtype:
        """The type that sums and per-row results are kept in."""
        return accumulator(self.dtype)

    @property
    def want_entropy(self) -> bool:
        return "entropy" in self.fields

    @property
    def want_predicted(self) -> bool:
        return bool(self.fields & {"predicted", "accuracy"})

    def problem(self) -> Problem:
        grad = torch.is_grad_enabled()
        weight = self.weight
        return Problem(
            rows=self.hidden.shape[0],
            hidden=self.hidden.shape[1],
            vocab=self.vocab,
            dtype=self.dtype,
            weight_dtype=None if weight is None else weight.dtype,
            needs_hidden=grad and self.hidden.requires_grad,
            needs_weight=grad
            and (weight is None or weight.requires_grad or (self.bias is not None and self.bias.requires_grad)),
            reduced=self.reduce,
            module=self.project is not None,
            dense=self.label_smoothing > 0 or (grad and self.bias is not None and self.bias.requires_grad),
        )


class RowLoss(NamedTuple):
    """What a strategy returns: the total ``(loss * row_scale).sum()``, or each row's ``loss * row_scale``; and fields.

    Only fields that ``Rows.fields`` asks for are read; ``predicted`` is the one behind ``accuracy`` too.
    """

    loss: Tensor
    nll: Tensor  # (N,)
    lse: Tensor  # (N,)
    entropy: Tensor | None = None
    predicted: Tensor | None = None
    dropped: Tensor | None = None  # None: nothing was


class Strategy(Protocol):
    """An algorithm. A file of this room exports one as ``STRATEGY``; an entry point may too."""

    name: str
    summary: str
    """One line for tables and help."""
    Options: type
    """A frozen dataclass: the names, types, defaults and help of ``loss_options``."""

    def check(self, problem: Problem, profile: DeviceProfile, options: Any) -> str | None:
        """Why this cannot run here, or None."""
        ...

    def peak_bytes(self, problem: Problem, options: Any) -> int:
        """Extra memory of forward and backward at their worst, gradients included, in bytes."""
        ...

    def kernels(self, profile: DeviceProfile, options: Any) -> str:
        """Which kernels would run, for people: ``torch``, ``triton forward, torch backward``."""
        ...

    def __call__(self, rows: Rows, options: Any, profile: DeviceProfile) -> RowLoss:
        """Compute. ``rows`` has at least one row."""
        ...
