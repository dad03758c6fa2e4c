"""Deferred logits that leave the forward, for trainers that take log-probabilities of single labels themselves.

Inside `PatchHandle.scope(leaving=True)` the model returns them, with and without labels. What preference and policy
trainers do with logits is answered without making them: log-probability and entropy of given labels, cross-entropy,
the largest logit, and sums over the vocabulary, which their logs show. Anything else makes the real logits, as ever.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError, UnsupportedError
from .deferred import DeferredLogits
from .log_probs import DeferredLogProbs
from .loss import LossJob, plain_arguments, run_job
from .record import normalise, replay
from .stand_in import RECORDED, by_method

CHUNK_BYTES = 64 << 20
"""Of logits that exist at a time where a sum over the vocabulary has no closed form."""


class LabelLogProbs(NamedTuple):
    """Of one label a position; 0 where the label does not count. Only ``log_probs`` is differentiable."""

    log_probs: Tensor
    entropy: Tensor | None = None
    is_top1: Tensor | None = None


class LeavingLogits(DeferredLogits):
    """Deferred logits that outlive the forward. They cannot be written to: nobody knows any more what aliases them."""

    def label_log_probs(
        self, labels: Tensor, counted: Tensor | None = None, fields: tuple[str, ...] = ()
    ) -> LabelLogProbs:
        """``log_softmax(logits)[label]``, without logits.

        Args:
            labels: Shape of the logits without the vocabulary, in ``[0, V)`` where they count.
            counted: Same shape: which labels count. Default: all.
            fields: ``entropy`` and ``accuracy``, if they are wanted.

        Raises:
            ConfigError: shapes that do not belong together, or the configuration adds something to the loss.
        """
        if labels.shape != self.shape[:-1]:
            raise ConfigError(
                f"Log-probabilities of labels of shape {tuple(labels.shape)} were asked of logits of shape "
                f"{tuple(self.shape)}. Give one label a position."
            )
        handle = self.frame.handle
        asked = [name for name in handle.extras(self.frame.scope) if name != "loss_statistics"]
        if asked:
            raise ConfigError(
                f"{', '.join(asked)} was asked for, but this trainer computes its objective from plain "
                "log-probabilities, to which nothing can be added. Leave it out."
            )
        target = labels if counted is None else labels.masked_fill(counted == 0, -100)
        flat: Any = self.reshape(-1, self.vocab)
        flat.check_hidden()
        target = handle.counts.add_loss(target.reshape(-1).to(self.device))
        for listener in handle.before_loss:
            listener()
        job = LossJob(flat, target, plain_arguments(fields), records=False)
        loss = run_job(flat, job)
        assert job.output is not None

        def shaped(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.reshape(labels.shape)

        return LabelLogProbs(-loss.reshape(labels.shape), shaped(job.output.entropy), shaped(job.output.accuracy))

    # along the tokens

    def index_select(self, dim: int, index: Tensor) -> Any:
        if dim % self.ndim == self.ndim - 1:
            return self._as_real("index_select")(dim, index)
        return self._with(lambda t: t.index_select(dim, index), hidden=self.hidden.index_select(dim, index))

    def split(self, size: Any, dim: int = 0) -> Any:
        return self._parts("split", size, dim)

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        return self._parts("chunk", chunks, dim)

    def _parts(self, name: str, how: Any, dim: int) -> Any:
        axis = dim % self.ndim
        if axis == self.ndim - 1:
            return self._as_real(name)(how, dim)
        parts = getattr(self.hidden, name)(how, axis)

        def part(place: int) -> Callable[[Tensor], Tensor]:
            return lambda t: getattr(t, name)(how, axis)[place]

        return tuple(self._with(part(place), hidden=hidden) for place, hidden in enumerate(parts))

    # over the vocabulary

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        return self._reduced("mean", args, kwargs, lambda rows: rows / self.vocab, torch.mean)

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return self._reduced("sum", args, kwargs, lambda rows: rows, torch.sum)

    def nansum(self, *args: Any, **kwargs: Any) -> Any:
        return self._reduced("nansum", args, kwargs, lambda rows: rows, torch.nansum)

    def _reduced(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        a_row: Callable[[Tensor], Tensor],
        whole: Callable[[Tensor], Tensor],
    ) -> Any:
        over_all = not args and not kwargs
        over_vocab = not kwargs and len(args) == 1 and args[0] in (-1, self.ndim - 1)
        if self.is_real() or not (over_all or over_vocab):
            return self._as_real(name)(*args, **kwargs)
        rows = a_row(self._row_sums())
        return (whole(rows) if over_all else rows.reshape(self.shape[:-1])).to(self.dtype)

    def _row_sums(self) -> Tensor:
        """The sum of each row's logits, shape ``[N]``, float32 or wider."""
        flat: Any = self.reshape(-1, self.vocab)
        flat.check_hidden()
        return run_job(flat, _SumJob(flat))

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Any:
        if self.is_real() or dim is None or dim % self.ndim != self.ndim - 1 or keepdim:
            return self._as_real("argmax")(dim, keepdim)
        flat: Any = self.detach().reshape(-1, self.vocab)
        target = torch.zeros(flat.shape[0], dtype=torch.int64, device=self.device)
        job = LossJob(flat, target, plain_arguments(("predicted",)), records=False, tells=False)
        run_job(flat, job)
        assert job.output is not None and job.output.predicted is not None
        return job.output.predicted.reshape(self.shape[:-1])

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> Any:
        if dim % self.ndim != self.ndim - 1:
            return self._as_real("log_softmax")(dim, dtype=dtype)
        return LeavingLogProbs(self if dtype is None else self.to(dtype))

    # the real logits

    def made(self, why: str) -> Tensor:
        with self.frame.as_it_was():
            return super().made(why)

    def write(self, why: str) -> Tensor:
        if self.frame.left:
            raise UnsupportedError(
                f"{why} would write to logits that {type(self.frame.model).__name__} has returned without making them. "
                "Train without loss_plugins, or change that line to an out-of-place operation."
            )
        return super().write(why)


class LeavingLogProbs(DeferredLogProbs):
    """``log_softmax`` of leaving logits, of which single entries are gathered."""

    logits: LeavingLogits

    def gather(self, dim: int, index: Tensor, **others: Any) -> Any:
        one = index.shape == (*self.shape[:-1], 1) and dim % self.ndim == self.ndim - 1
        if self.is_real() or not one or others:
            return self._as_real("gather")(dim, index, **others)
        return self.logits.label_log_probs(index[..., 0]).log_probs.unsqueeze(-1).to(self.dtype)


class _SumJob(LossJob):
    """The sum over the vocabulary of each row's logits."""

    def __init__(self, logits: DeferredLogits) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
        super().__init__(logits, nothing, plain_arguments(()))

    def _run(self, hidden: Tensor) -> Tensor:
        terms, normal = self.head.terms(hidden), normalise(self.steps)
        if not isinstance(terms, str) and terms.is_plain and normal is not None and normal.softcap is None:
            rows, weight, bias = normal.layer(terms.terms[0].inputs, terms.terms[0].weight, terms.bias)
            wide = torch.promote_types(rows.dtype, torch.float32)
            with torch.autocast(hidden.device.type, enabled=False):
                sums = rows.to(wide) @ weight.sum(0, dtype=wide)
                self.loss = (sums if bias is None else sums + bias.to(wide).sum()) * normal.scale
            return self.loss
        rows, project = (hidden, self._module_call()) if isinstance(terms, str) else terms.in_chunks()
        many = max(1, CHUNK_BYTES // (4 * self.vocab))

        def sums_of(part: Tensor) -> Tensor:
            return replay(project(part), self.steps).sum(-1)

        parts = [checkpoint(sums_of, part, use_reentrant=False) for part in rows.split(many)]
        self.loss = torch.cat(parts) if parts else rows.new_zeros(0)
        return self.loss


RECORDED.update(
    {
        getattr(torch, name): by_method(name)
        for name in ("gather", "index_select", "split", "chunk", "mean", "sum", "nansum", "argmax")
    }
)
