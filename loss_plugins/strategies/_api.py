"""The public functions: check what was given, flatten it to rows, let a strategy compute, give the result its shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import ConfigError, UnsupportedError
from ..kernels._rows import accumulator
from ._base import LossOutput, RowLoss, Rows
from ._select import profile_of, select_on
from ._validate import Checked, check_arguments, check_fields
from ._vocab_parallel import VocabParallel, agree_on_rows, joint_loss

Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    strategy: str = "auto",
    bias: Tensor | None = None,
    shift: int = 0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
    vocab_parallel: VocabParallel | None = None,
) -> Tensor:
    """Cross-entropy of a linear head, without its logits in memory. Equal to::

        logits = (hidden @ weight.T + bias) * logit_scale
        logits = softcap * torch.tanh(logits / softcap)
        F.cross_entropy(logits[..., :-shift, :].flatten(0, -2).float(), labels[..., shift:].flatten(), ...)

    in value, gradients, edge cases, type and shape. Products of half inputs keep their float32 accumulators (``naive``
    rounds its logits to the half type, as Transformers does).

    Args:
        hidden: Shape ``[..., H]``, floating.
        weight: The head, shape ``[V, H]``, floating. Under autocast the products run in its type, else in the wider of
            the two; each gradient has its own tensor's type.
        labels: Shape ``[...]``, any integer type, in ``[0, V)`` or ``ignore_index``.
        strategy: ``auto``, ``naive``, ``chunked``, ``flce``, ``cce``, an installed strategy, or
            ``package.module:ATTRIBUTE``.
        bias: Shape ``[V]``.
        shift: Position t predicts the label at t + shift along the last axis of ``labels``; 1 for an unshifted causal
            batch, 0 where the labels are aligned already.
        ignore_index: Label of tokens that count nothing; they are dropped before any product.
        reduction: ``mean`` over tokens (weighted as below), ``sum``, or ``none`` for a loss a token, 0 where ignored.
        num_items_in_batch: With ``mean``: divide the sum by this instead, as the Trainer's gradient accumulation needs.
            A number or a one-element tensor, whose shape the loss then has.
        logit_scale: Multiplies the logits before the softcap.
        softcap: Bounds the logits by tanh.
        label_smoothing: Share of each target spread evenly over the vocabulary, as in ``F.cross_entropy``, in [0, 1].
        z_loss: Weight of ``lse ** 2``, added to each token's loss.
        class_weight: Shape ``[V]``, as ``F.cross_entropy``'s ``weight``; it does not scale the z-loss.
        token_weight: Shape of ``labels``; multiplies each token's loss. ``mean`` divides by the sum of the weights.
        options: The strategy's own options, see ``loss-plugins strategies``.
        vocab_parallel: This process holds a part of the head's rows, and others hold the rest; see `VocabParallel`.

    Returns:
        Shape ``[]``, or with ``none`` the labels' shape, its last axis shorter by ``shift``. float32; float64 for
        float64 inputs. ``mean`` over no token is NaN with zero gradients.

    Raises:
        ConfigError: an argument's name, type, shape or range is wrong. A label out of range raises on a CPU; elsewhere
            the loss becomes NaN, since reading the labels would make the host wait.
        UnsupportedError: the strategy asked for cannot run on this device or head.
    """
    return linear_cross_entropy_stats(
        hidden, weight, labels, fields=(), strategy=strategy, bias=bias, shift=shift, ignore_index=ignore_index,
        reduction=reduction, num_items_in_batch=num_items_in_batch, logit_scale=logit_scale, softcap=softcap,
        label_smoothing=label_smoothing, z_loss=z_loss, class_weight=class_weight, token_weight=token_weight,
        options=options, vocab_parallel=vocab_parallel,
    ).loss  # fmt: skip


def linear_cross_entropy_stats(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    fields: Sequence[str] = ("nll", "lse", "accuracy"),
    strategy: str = "auto",
    bias: Tensor | None = None,
    shift: int = 0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
    vocab_parallel: VocabParallel | None = None,
) -> LossOutput:
    """`linear_cross_entropy` with per-token statistics from the same pass.

    Args:
        fields: Any of ``nll``, ``lse``, ``entropy``, ``accuracy``, ``predicted``, ``dropped``; see `LossOutput`.

    The other arguments, and what is raised, are `linear_cross_entropy`'s. Only ``loss`` is differentiable; use
    `linear_log_probs` for gradients of single tokens.
    """
    vocab = None
    if vocab_parallel is not None and not isinstance(vocab_parallel, VocabParallel):
        raise ConfigError(
            f"vocab_parallel must say which rows of the head this process holds, got {vocab_parallel!r}. Pass "
            "VocabParallel(start, stop) or VocabParallel.even(vocab), or leave it out."
        )
    if vocab_parallel is not None and isinstance(weight, Tensor) and type(weight).__name__ != "DTensor":
        vocab = vocab_parallel.whole_vocab(weight)
        hidden = vocab_parallel.whole_sequence(hidden, labels)
    checked = check_arguments(
        hidden, weight, labels, vocab=vocab, bias=bias, shift=shift, ignore_index=ignore_index, reduction=reduction,
        num_items_in_batch=num_items_in_batch, logit_scale=logit_scale, softcap=softcap,
        label_smoothing=label_smoothing, z_loss=z_loss, class_weight=class_weight, token_weight=token_weight,
    )  # fmt: skip
    return compute(checked, check_fields(fields), _by_strategy(strategy, options, vocab_parallel))


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    strategy: str = "auto",
    bias: Tensor | None = None,
    shift: int = 0,
    ignore_index: int = -100,
    logit_scale: float | None = None,
    softcap: float | None = None,
    options: Mapping[str, Any] | None = None,
    vocab_parallel: VocabParallel | None = None,
) -> Tensor:
    """Differentiable log-probability of each label: ``log_softmax(logits)[label]``, 0 where ignored, shaped as labels.

    The arguments are `linear_cross_entropy`'s. Preference and policy losses are made of these.
    """
    return -linear_cross_entropy(
        hidden, weight, labels, strategy=strategy, bias=bias, shift=shift, ignore_index=ignore_index, reduction="none",
        logit_scale=logit_scale, softcap=softcap, options=options, vocab_parallel=vocab_parallel,
    )  # fmt: skip


def projected_cross_entropy_stats(
    project: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    vocab: int,
    fields: Sequence[str] = (),
    strategy: str = "chunked",
    shift: int = 0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
) -> LossOutput:
    """`linear_cross_entropy_stats` for a head that is no plain weight.

    Args:
        project: Called with a chunk of rows, shape ``[n, H]``; returns their final logits, shape ``[n, V]``. It is
            called again in the backward, so it must be a function of its argument (random numbers are replayed).
        vocab: V, the width of what ``project`` returns.
        strategy: One that can call a head: ``chunked``, ``naive`` or ``auto``.
    """
    if not callable(project) or isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < 1:
        raise ConfigError(
            f"project must be called with rows of hidden, and vocab be the number of its logits, got "
            f"{type(project).__name__} and {vocab!r}. Pass for example model.lm_head and model.config.vocab_size."
        )
    checked = check_arguments(
        hidden, None, labels, vocab=vocab, bias=None, shift=shift, ignore_index=ignore_index, reduction=reduction,
        num_items_in_batch=num_items_in_batch, logit_scale=None, softcap=None, label_smoothing=label_smoothing,
        z_loss=z_loss, class_weight=class_weight, token_weight=token_weight,
    )  # fmt: skip
    return compute(checked, check_fields(fields), _by_strategy(strategy, options), project)


def _by_strategy(
    strategy: str, options: Mapping[str, Any] | None, parallel: VocabParallel | None = None
) -> Callable[[Rows], RowLoss]:
    def one(rows: Rows) -> RowLoss:
        plan = select_on(strategy, options, rows.problem(), rows.hidden.device)
        if rows.hidden.shape[0] == 0:
            return no_rows(rows)
        return plan.strategy(rows, plan.options, profile_of(rows.hidden.device))

    if parallel is None:
        return one

    def run(rows: Rows) -> RowLoss:
        agree_on_rows(rows, parallel)
        return one(rows) if rows.hidden.shape[0] == 0 else joint_loss(rows, parallel, one)

    return run


def compute(
    given: Checked,
    fields: frozenset[str],
    run: Callable[[Rows], RowLoss],
    project: Callable[[Tensor], Tensor] | None = None,
    flat: bool = True,
) -> LossOutput:
    """One loss, by ``run``. Everything that all ways share happens here, once.

    Without ``flat`` the hidden states keep their shape and their ignored rows: where they are logits, either would copy
    them all.
    """
    shape, labels, hidden, weight = given.labels.shape, given.labels, given.hidden, given.weight
    acc = accumulator(given.dtype)
    labels = labels.reshape(-1)
    hidden = hidden.reshape(-1, hidden.shape[-1]) if flat else hidden
    valid = labels != given.ignore_index
    bad = None
    if hidden.device.type != "cpu" or torch.compiler.is_compiling():
        # no host can look at the labels here: a bad one is computed as ignored and its loss made NaN; in few operators,
        # since the device has nothing else to do yet
        is_class = valid & (labels == labels.clamp(0, given.vocab - 1))
        bad, valid = valid ^ is_class, is_class
        # (a scalar in `where` is copied to the device by a call of its own)
        labels = labels.masked_fill(bad, given.ignore_index)

    each = valid.to(acc)
    if given.token_weight is not None:
        each = given.token_weight.reshape(-1).to(acc).masked_fill(~valid, 0.0)
    counted = each
    if given.class_weight is not None:
        counted = each * given.class_weight.to(acc)[labels.masked_fill(~valid, 0)]
    if given.reduction == "mean":
        items = given.num_items_in_batch
        total = counted.sum() if items is None else items.to(acc).reshape(())
        row_scale = (each / total).masked_fill_(each == 0, 0.0)
    else:
        row_scale = each

    kept = None
    if flat and hidden.device.type == "cpu" and not torch.compiler.is_compiling():
        kept = valid.nonzero()[:, 0]
        if kept.numel() == labels.numel():
            kept = None
        else:
            hidden, labels, row_scale = hidden[kept], labels[kept], row_scale[kept]

    rows = Rows(
        hidden=hidden, weight=weight, bias=given.bias, labels=labels, vocab=given.vocab, row_scale=row_scale,
        dtype=given.dtype, ignore_index=given.ignore_index, scale=given.scale, softcap=given.softcap,
        label_smoothing=given.label_smoothing, z_loss=given.z_loss, class_weight=given.class_weight,
        reduce=given.reduction != "none", fields=fields | ({"lse"} if given.z_loss else set()), project=project,
    )  # fmt: skip
    result = run(rows)
    if not torch.compiler.is_compiling():
        _refuse_lost_tangent(rows, result.loss)

    loss = result.loss
    if given.reduction == "none":
        loss = _scatter(loss, kept, shape, 0.0) if bad is None else (loss + _nan_where(bad, acc)).reshape(shape)
    else:
        wrong = None if bad is None else bad.any()
        if given.reduction == "mean" and given.num_items_in_batch is None:
            wrong = total == 0 if wrong is None else wrong | (total == 0)
        if wrong is not None:
            loss = loss + _nan_where(wrong, acc)
        if given.num_items_in_batch is not None:
            loss = loss.reshape(given.num_items_in_batch.shape)
    return _output(given, rows, fields, result, loss, kept, shape)


def _nan_where(wrong: Tensor, dtype: torch.dtype) -> Tensor:
    """What makes a loss NaN where it is added, and leaves gradients as they are."""
    return torch.zeros_like(wrong, dtype=dtype).masked_fill_(wrong, torch.nan)


def _refuse_lost_tangent(rows: Rows, loss: Tensor) -> None:
    """Forward-mode differentiation passes over operators that know nothing of it, as if their derivative were 0.

    Raises:
        UnsupportedError: it did so.
    """
    if getattr(forward_ad, "_current_level", -1) < 0:
        return
    inputs = (rows.hidden, rows.weight, rows.bias)
    given = any(forward_ad.unpack_dual(each).tangent is not None for each in inputs if each is not None)
    if given and forward_ad.unpack_dual(loss).tangent is None:
        raise UnsupportedError(
            "A forward-mode derivative was asked for (torch.func.jvp, torch.autograd.forward_ad), and the kernels of "
            "this loss have gradients only. Use strategy 'naive' or 'chunked', or torch's own cross_entropy for logits."
        )


def _output(
    given: Checked,
    rows: Rows,
    asked: frozenset[str],
    result: RowLoss,
    loss: Tensor,
    kept: Tensor | None,
    shape: torch.Size,
) -> LossOutput:
    def field(name: str, value: Tensor | None, fill: float = 0.0) -> Tensor | None:
        return None if name not in asked or value is None else _scatter(value.detach(), kept, shape, fill)

    z_loss = None
    if given.z_loss:
        part = given.z_loss * result.lse.detach().square() * rows.row_scale.detach()
        z_loss = part.sum() if given.reduction != "none" else _scatter(part, kept, shape, 0.0)
    predicted, right = result.predicted, None
    if "accuracy" in asked and predicted is not None:
        right = (predicted == rows.labels) & (rows.labels != given.ignore_index)
    dropped = result.dropped
    if "dropped" in asked and dropped is None:
        dropped = torch.zeros_like(rows.row_scale, dtype=rows.accumulator, requires_grad=False)
    return LossOutput(
        loss=loss,
        nll=field("nll", result.nll),
        lse=field("lse", result.lse),
        entropy=field("entropy", result.entropy),
        accuracy=field("accuracy", right),
        predicted=field("predicted", predicted, given.ignore_index),
        z_loss=z_loss,
        dropped=field("dropped", dropped),
    )


def _scatter(values: Tensor, kept: Tensor | None, shape: torch.Size, fill: float) -> Tensor:
    """Per-row values back in the labels' shape."""
    if kept is None:
        return values.reshape(shape)
    whole = values.new_full((shape.numel(),), fill)
    return whole.index_put((kept,), values).reshape(shape)


def no_rows(rows: Rows) -> RowLoss:
    """The loss of no token: 0, tied to the graph so that every parameter gets a zero gradient and not None."""
    acc = rows.accumulator
    if rows.project is not None:
        probe = rows.hidden.new_zeros(1, rows.hidden.shape[1])
        loss = rows.project(probe)[:0].to(acc).sum() + rows.hidden.to(acc).sum()
    else:
        tied = [t for t in (rows.hidden, rows.weight, rows.bias) if t is not None]
        loss = torch.stack([t.flatten()[:0].to(acc).sum() for t in tied]).sum()
    none = rows.hidden.new_zeros(0, dtype=acc)
    if not rows.reduce:
        loss = loss + none
    index = none.to(torch.int64)
    return RowLoss(loss, none, none, none, index, none)
