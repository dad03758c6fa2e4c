"""``log_softmax`` of deferred logits, which ``F.nll_loss`` turns into their cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .deferred import DeferredLogits
from .loss import CrossEntropyCall, consume
from .stand_in import RECORDED, StandIn


class DeferredLogProbs(StandIn):
    """Log-probabilities of shape ``[..., vocab]`` that do not exist; views of them are of the logits' views."""

    def __init__(self, logits: DeferredLogits) -> None:
        self.logits, self.frame, self.dtype, self.sources = logits, logits.frame, logits.dtype, logits.sources
        self.real: Tensor | None = None
        if logits.is_real():
            self.real = self.made("log_softmax")
        self.frame.records.append(self)

    @property
    def shape(self) -> torch.Size:
        return self.logits.shape

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def made(self, why: str) -> Tensor:
        return F.log_softmax(self.logits.materialise(f"log_softmax, {why}"), -1)

    def is_real(self) -> bool:
        return self.real is not None or self.logits.is_real()

    def _viewed(self, name: str, *args: Any) -> Any:
        if self.real is None:
            logits = getattr(self.logits, name)(*args)
            if isinstance(logits, DeferredLogits) and logits.vocab == self.logits.vocab:
                return DeferredLogProbs(logits)
        return self._as_real(name)(*args)

    def view(self, *shape: Any) -> Any:
        return self._viewed("view", *shape)

    def reshape(self, *shape: Any) -> Any:
        return self._viewed("reshape", *shape)

    def transpose(self, dim0: int, dim1: int) -> Any:
        return self._viewed("transpose", dim0, dim1)

    def contiguous(self) -> Any:
        return self._viewed("contiguous")

    def __getitem__(self, index: Any) -> Any:
        return self._viewed("__getitem__", index)


def _nll_loss(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None or not isinstance(input, DeferredLogProbs):
        return NotImplemented
    if input.real is not None:
        return NotImplemented
    return consume(input.logits, CrossEntropyCall(target, weight, ignore_index, reduction))


RECORDED[F.nll_loss] = _nll_loss
