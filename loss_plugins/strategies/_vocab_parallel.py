"""A head whose rows lie in several processes: each computes the loss over its own part, and they are put together.

A process's part of the vocabulary gives each row a log-sum-exp ``l`` and, if the label is in it, ``nll = l - z_label``.
With ``top`` the largest ``l`` of all parts and ``share = exp(l - top)``:

    lse = top + log(sum(share))            nll = log(sum(share)) + (nll + top - l where the label is)

which takes one all-reduce of maxima and one of sums, a few numbers a row. Entropy, the smoothed part and what a filter
leaves out are sums of the same kind. In the backward a part's probabilities count ``share / sum(share)``, which every
process knows already; only dX, of which each has its own part's share, is summed.

Any strategy computes a part, since it needs no more than per-row losses whose ``nll`` and ``lse`` are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ConfigError, UnsupportedError
from ._base import RowLoss, Rows
from ._logits import transform

NONE = -100  # ``ignore_index`` of a part, whose labels begin at 0
CHECKED = 4096  # labels are compared by their remainders, whose sums are exact in float32


@dataclass(frozen=True)
class VocabParallel:
    """This process holds rows ``[start, stop)`` of a head of which other processes of a group hold the rest.

    ``weight`` and ``bias`` are then this process's part of them, ``class_weight`` has an entry for each class of the
    whole vocabulary, and everything else is the same in every process of the group: hidden states, labels, weights of
    tokens, options. So is the result. Every process must call, and call ``backward`` with the same gradient; its hidden
    states then get their whole gradient, its weight and bias their own part's. ``torch.compile`` breaks its graph here.

    Args:
        start: The first class of this process.
        stop: The class after its last one. Parts may differ in size.
        group: The group, of ``torch.distributed``; None for all processes.
        sequence_axis: An axis of ``hidden``, if each process has only an equal part of it along that axis: the parts
            are gathered in the order of the ranks, and each process gets the gradient of its own. Labels are whole.
        vocab: How many classes all have together, if that is known. The processes tell each other once, and check that
            their parts make a whole, and this one. Parts of `even` do so by themselves.

    Raises:
        ConfigError: bounds that are none.
    """

    start: int
    stop: int
    group: Any = None
    sequence_axis: int | None = None
    vocab: int | None = None
    _agreed: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.vocab is not None:
            _check_vocab(self.vocab)
        bounds = (self.start, self.stop)
        is_whole = all(isinstance(n, int) and not isinstance(n, bool) for n in bounds)
        if not is_whole or not 0 <= self.start < self.stop or (self.vocab is not None and self.stop > self.vocab):
            raise ConfigError(
                f"VocabParallel must hold rows [start, stop) with 0 <= start < stop{_up_to(self.vocab)}, got "
                f"[{self.start!r}, {self.stop!r}). Give each process at least one row."
            )

    @classmethod
    def even(cls, vocab: int, group: Any = None, *, sequence_axis: int | None = None) -> VocabParallel:
        """This process's part where all but the last are of one size, as ``torch.chunk`` and DTensor cut."""
        _check_vocab(vocab)
        rank, world = _place(group)
        size = -(-vocab // world)
        parallel = cls(min(rank * size, vocab), min((rank + 1) * size, vocab), group, sequence_axis, vocab)
        parallel._agreed.append(vocab)
        return parallel

    @property
    def rows(self) -> slice:
        """Of the whole weight, those of this process."""
        return slice(self.start, self.stop)

    @torch.compiler.disable
    def whole_vocab(self, weight: Tensor) -> int:
        """V, of which ``weight`` holds this process's rows. The first call asks the others.

        Raises:
            ConfigError: the parts are no whole, or ``weight`` is not this process's.
        """
        rank, world = _place(self.group)
        if not self._agreed:
            own = torch.tensor([self.start, self.stop, weight.shape[0], self.vocab or 0], device=weight.device)
            parts = [torch.empty_like(own) for _ in range(world)]
            torch.distributed.all_gather(parts, own, group=self.group)
            self._agreed.append(_sum_of_parts([[int(n) for n in part] for part in parts]))
        if weight.shape[0] != self.stop - self.start:
            raise ConfigError(
                f"weight must have the rows [{self.start}, {self.stop}) of process {rank}, {self.stop - self.start}, "
                f"got {weight.shape[0]}. Pass the part of the head that this process holds: weight[vocab_parallel.rows]"
            )
        return self._agreed[0]

    @torch.compiler.disable
    def whole_sequence(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """``hidden`` of all processes, if each has a part of it."""
        if self.sequence_axis is None:
            return hidden
        axis, (_, world) = self.sequence_axis, _place(self.group)
        known = isinstance(axis, int) and -hidden.dim() < axis < hidden.dim() - 1 and axis != -1
        axis = axis % hidden.dim() if known else axis
        if not known or axis >= labels.dim() or labels.shape[axis] != hidden.shape[axis] * world:
            raise ConfigError(
                f"sequence_axis={self.sequence_axis} was given, so labels must be {world} times as long there as "
                f"hidden in each of the {world} processes, got labels of shape {tuple(labels.shape)} and hidden of "
                f"shape {tuple(hidden.shape)}. Pad the sequence so that all parts are equal, and pass whole labels."
            )
        gathered: Tensor = _Gathered.apply(hidden, axis, self.group)
        return gathered


@torch.compiler.disable
def agree_on_rows(rows: Rows, parallel: VocabParallel) -> None:
    """Refuse other numbers of tokens in other processes, which would wait for each other for ever. On a CPU only:
    elsewhere the host must not wait, and labels are not compacted."""
    if rows.hidden.device.type != "cpu":
        return
    numbers = [rows.hidden.shape[0], len(rows.fields), int(rows.label_smoothing > 0)]
    own = torch.tensor([*numbers, *(-n for n in numbers)])
    most = own.clone()
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, parallel.group)
    if not torch.equal(most, own):
        raise ConfigError(
            f"Process {_place(parallel.group)[0]} computes {numbers[0]} tokens and {sorted(rows.fields)}, and another "
            "one of the vocabulary-parallel group something else. Give all of them the same batch and options; "
            "processes with batches of their own belong to other groups."
        )


@torch.compiler.disable
def joint_loss(rows: Rows, parallel: VocabParallel, run: Callable[[Rows], RowLoss]) -> RowLoss:
    """The loss of ``rows``, whose weight is this process's part and whose other tensors are whole; ``run`` computes
    that of a part. At least one row."""
    labels, acc, group = rows.labels, rows.accumulator, parallel.group
    valid = labels != rows.ignore_index
    here = valid & (labels >= parallel.start) & (labels < parallel.stop)
    smoothing, weight_of_all, weight_here = (
        rows.label_smoothing,
        float(rows.vocab),
        float(parallel.stop - parallel.start),
    )
    class_weight: Tensor | None = None
    if rows.class_weight is not None:
        class_weight = rows.class_weight[parallel.rows]
        weight_of_all, weight_here = rows.class_weight.to(acc).sum(), class_weight.to(acc).sum()  # type: ignore[assignment]
    hidden = rows.hidden
    if hidden.requires_grad and torch.is_grad_enabled():
        hidden = _SummedGradient.apply(hidden, group)
    # a label that is elsewhere is replaced by any one, whose nll is not read; smoothing alone is what 1.0 leaves
    part = replace(
        rows, hidden=hidden, labels=torch.where(here, labels - parallel.start, torch.where(valid, 0, NONE)),
        vocab=parallel.stop - parallel.start, row_scale=torch.ones_like(rows.row_scale, requires_grad=False),
        ignore_index=NONE, label_smoothing=float(smoothing > 0), z_loss=0.0,
        class_weight=class_weight if smoothing else None, reduce=False, fields=rows.fields | {"nll", "lse"}, shard=True,
    )  # fmt: skip
    result = run(part)
    if part.problem().differentiable and not (result.lse.requires_grad and result.nll.requires_grad):
        raise UnsupportedError(
            "vocab_parallel was asked for with a strategy whose nll and lse of single rows have no gradient. Use "
            "'cce', 'flce', 'chunked' or 'naive'."
        )
    spread = result.loss * part.vocab if smoothing else None
    entropy = result.entropy if rows.want_entropy else None
    dropped = result.dropped if "dropped" in rows.fields else None
    if "dropped" in rows.fields and dropped is None:
        dropped = torch.zeros_like(result.lse, requires_grad=False)
    nll, lse, spread, entropy, dropped, found = _Joined.apply(
        result.lse, result.nll, spread, weight_here, weight_of_all, here, labels, entropy, dropped, group
    )
    wrong = _in_no_part(found, labels, valid, _place(group)[1])
    loss = nll + torch.where(wrong, torch.nan, 0.0).to(acc)
    if rows.class_weight is not None:
        loss = loss * rows.class_weight.to(acc)[torch.where(valid, labels, 0)]
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing / rows.vocab * spread
    if rows.z_loss:
        loss = loss + rows.z_loss * lse.square()
    loss = torch.where(valid, loss, 0.0) * rows.row_scale
    fields = [None if f is None else torch.where(valid, f.detach(), 0.0) for f in (nll, lse, entropy, dropped)]
    predicted = _predicted(rows, parallel, result.predicted, valid) if rows.want_predicted else None
    return RowLoss(loss.sum() if rows.reduce else loss, fields[0], fields[1], fields[2], predicted, fields[3])  # type: ignore[arg-type]


class _Joined(torch.autograd.Function):
    """(nll, lse, spread, entropy, dropped, found) over all parts from those of one, see the top of this file.

    ``spread`` is ``sum(w * (lse - z))`` over the classes. The upstream gradients are the same in every process.
    """

    @staticmethod
    def forward(
        ctx: Any,
        lse: Tensor,  # (N,), as all others
        nll: Tensor,
        spread: Tensor | None,
        weight_here: Tensor | float,  # sum of the classes' weights, of this part
        weight_of_all: Tensor | float,
        here: Tensor,
        labels: Tensor,
        entropy: Tensor | None,
        dropped: Tensor | None,
        group: Any,
    ) -> tuple[Tensor | None, ...]:
        top = lse.clone()
        torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group)
        behind = top - lse
        share = torch.exp(-behind)
        sums = [share, torch.where(here, nll + behind, 0.0), here.to(lse.dtype), (labels % CHECKED).to(lse.dtype)]
        if spread is not None:
            sums.append(spread + weight_here * behind)
        if entropy is not None:
            sums.append(torch.where(share > 0, share * (entropy + behind), 0.0))
        if dropped is not None:
            sums.append(share * dropped)
        packed = torch.stack(sums)
        torch.distributed.all_reduce(packed, group=group)
        total, nll, *found = packed[:4]
        others = iter(packed[4:])
        log_total = total.log()
        spread = None if spread is None else next(others) + weight_of_all * log_total
        entropy = None if entropy is None else next(others) / total + log_total
        dropped = None if dropped is None else next(others) / total
        ctx.save_for_backward(share / total, here)
        ctx.weights = (weight_here, weight_of_all)
        ctx.set_materialize_grads(False)
        counted = torch.stack(found)
        ctx.mark_non_differentiable(*(t for t in (entropy, dropped, counted) if t is not None))
        return nll + log_total, top + log_total, spread, entropy, dropped, counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nll: Tensor | None, lse: Tensor | None, spread: Tensor | None, *_: Any) -> tuple[Any, ...]:
        part, here = ctx.saved_tensors
        weight_here, weight_of_all = ctx.weights
        d_lse, d_nll = torch.zeros_like(part), torch.zeros_like(part)
        if lse is not None:
            d_lse = d_lse + part * lse
        if nll is not None:
            d_nll = torch.where(here, nll, 0.0)
            d_lse = d_lse + part * nll - d_nll
        if spread is not None:
            d_lse = d_lse + (weight_of_all * part - weight_here) * spread
        return d_lse, d_nll, spread, *(None,) * 7


class _SummedGradient(torch.autograd.Function):
    """The hidden states as they are; their gradients are added up over the parts."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # nobody else has this one: it was made for the view
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gathered(torch.autograd.Function):
    """The hidden states of all processes along an axis; of their gradient, which is whole, this process's part."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, axis: int, group: Any) -> Tensor:
        rank, world = _place(group)
        ctx.axis, ctx.size, ctx.rank = axis, hidden.shape[axis], rank
        hidden = hidden.contiguous()
        parts = [torch.empty_like(hidden) for _ in range(world)]
        torch.distributed.all_gather(parts, hidden, group=group)
        return torch.cat(parts, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(ctx.axis, ctx.rank * ctx.size, ctx.size), None, None


def _in_no_part(found: Tensor, labels: Tensor, valid: Tensor, world: int) -> Tensor:
    """(N,) bool: whose label is not in exactly one part, or is another one elsewhere.

    Raises:
        ConfigError: on a CPU; elsewhere the host must not wait, and the loss becomes NaN.
    """
    wrong = valid & ((found[0] != 1) | (found[1] != (labels % CHECKED) * world))
    if labels.device.type == "cpu" and bool(wrong.any()):
        raise ConfigError(
            f"{int(wrong.sum())} labels are not the same in every process of the vocabulary-parallel group, or are in "
            "no part of the vocabulary or in several. Give all processes of the group the same batch, and each row of "
            "the head to one of them."
        )
    return wrong


@torch.no_grad()
def _predicted(rows: Rows, parallel: VocabParallel, own: Tensor | None, valid: Tensor) -> Tensor:
    """The first of the classes with the largest logit, over all parts."""
    assert own is not None and rows.weight is not None
    best = torch.cat([
        _logits_at(rows, hidden, index) for hidden, index in zip(rows.hidden.split(1024), own.split(1024), strict=True)
    ])  # fmt: skip
    largest = best.clone()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, parallel.group)
    first = torch.where(best == largest, own + parallel.start, rows.vocab - 1)
    torch.distributed.all_reduce(first, torch.distributed.ReduceOp.MIN, parallel.group)
    return torch.where(valid, first, rows.ignore_index)


def _logits_at(rows: Rows, hidden: Tensor, index: Tensor) -> Tensor:
    """(n,) the logit of one class a row, shape (n,)."""
    assert rows.weight is not None
    acc, index = rows.accumulator, index.clamp(min=0)
    with torch.autocast(hidden.device.type, enabled=False):
        picked = rows.weight[index].to(rows.dtype).to(acc)
        z = (hidden.to(rows.dtype).to(acc) * picked).sum(1)
        return transform(rows, z if rows.bias is None else z + rows.bias[index].to(acc))


def _place(group: Any) -> tuple[int, int]:
    """(rank, processes) in the group."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        raise ConfigError(
            "vocab_parallel was asked for, but torch.distributed has no process group. Start with torchrun or "
            "accelerate launch and call torch.distributed.init_process_group, or leave vocab_parallel out."
        )
    rank = distributed.get_rank(group)
    if rank < 0:
        raise ConfigError(
            "vocab_parallel has a group that this process is not in. Pass the group that holds the parts of this "
            "process's head."
        )
    return rank, distributed.get_world_size(group)


def _sum_of_parts(parts: list[list[int]]) -> int:
    """V of parts ``[start, stop, rows of the weight, V as far as it is known]``."""
    stop = 0
    for start, end, *_ in sorted(parts):
        if start != stop:
            stop = -1
            break
        stop = end
    if stop < 0 or any(rows != end - start for start, end, rows, _ in parts):
        listed = ", ".join(f"[{start}, {end}) with {rows} rows of weight" for start, end, rows, _ in parts)
        raise ConfigError(
            f"The parts of a vocabulary-parallel head must make a whole without gaps, got {listed}. Give each process "
            "the rows that follow those of another, as VocabParallel.even does."
        )
    others = sorted({vocab for *_, vocab in parts if vocab not in (0, stop)})
    if others:
        raise ConfigError(
            f"The parts of a vocabulary-parallel head have {stop} classes together, and vocab={others[0]} was given. "
            f"Give vocab={stop}, or leave it out."
        )
    return stop


def _check_vocab(vocab: object) -> None:
    if isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < 1:
        raise ConfigError(
            f"vocab must be how many classes all processes have together, got {vocab!r}. Leave it out of "
            "VocabParallel(start, stop), and the processes tell each other."
        )


def _up_to(vocab: int | None) -> str:
    return "" if vocab is None else f" <= {vocab}"
