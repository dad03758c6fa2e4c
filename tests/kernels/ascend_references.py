"""The vector kernels of kernels/ascend in plain torch: what each launch means, for its host code where there is no chip."""

from __future__ import annotations

import torch
from torch import Tensor

from loss_plugins.kernels.ascend import vector
from loss_plugins.kernels.ascend.vector import Sums, Transform


def use(monkeypatch) -> list[tuple[int, int]]:
    """Put them in the kernels' place. Returns the shapes of all logits that `row_sums` is called with."""
    seen: list[tuple[int, int]] = []

    def counted(logits, *rest) -> None:
        seen.append(tuple(logits.shape))
        row_sums(logits, *rest)

    monkeypatch.setattr(vector, "row_sums", counted)
    monkeypatch.setattr(vector, "gradient", gradient)
    monkeypatch.setattr(vector, "scale", scale)
    return seen


def transformed(logits: Tensor, bias: Tensor | None, transform: Transform) -> Tensor:
    z = (logits.float() + (0 if bias is None else bias.float())) * transform.scale
    return transform.softcap * torch.tanh(z / transform.softcap) if transform.softcap else z


def row_sums(
    logits: Tensor, labels: Tensor, bias: Tensor | None, class_weight: Tensor | None, before: Sums | None, after: Sums,
    first_column: int, ignore_index: int, transform: Transform, smoothing: bool, want_entropy: bool, want_predicted: bool,
    tile: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    counts = (labels != ignore_index).nonzero()[:, 0]
    z, local = transformed(logits, bias, transform)[counts], labels[counts].long() - first_column
    low = z - z.amax(1, True)
    share = low.exp()
    here = (z.amax(1), share.sum(1), (share * torch.where(share > 0, low, 0.0)).sum(1))
    best = z.argmax(1) + first_column
    if tile is not None:
        tile[0][counts], tile[1][counts] = here[0], here[1]
    inside = (local >= 0) & (local < z.shape[1])
    target = logits[counts].float().gather(1, local.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    weighted = z.sum(1) if class_weight is None else z @ class_weight.float()
    max_, sum_, moment = here
    if before is None:
        target = torch.where(inside, target, 0.0)
    else:
        old_max, old_sum, old_target, old_weighted, old_moment = before.numbers[:, counts]
        target, weighted = torch.where(inside, target, old_target), weighted + old_weighted
        if want_predicted:
            best = torch.where(max_ > old_max, best, before.best[counts])
        top = torch.maximum(max_, old_max)
        moment = (moment + (max_ - top) * sum_) * (max_ - top).exp()
        moment = moment + (old_moment + (old_max - top) * old_sum) * (old_max - top).exp()
        sum_, max_ = sum_ * (max_ - top).exp() + old_sum * (old_max - top).exp(), top
    after.numbers[:3, counts] = torch.stack([max_, sum_, target])
    if smoothing:
        after.numbers[3, counts] = weighted
    if want_entropy:
        after.numbers[4, counts] = moment
    if want_predicted:
        after.best[counts] = best.int()


def gradient(
    logits: Tensor, out: Tensor, labels: Tensor, bias: Tensor | None, class_weight: Tensor | None, max_: Tensor,
    log_sum: Tensor | None, coefficients: tuple[Tensor, ...], first_column: int, ignore_index: int, transform: Transform,
    smoothing: bool,
) -> None:  # fmt: skip
    coef_p, coef_label, coef_weight = (c[:, None] for c in coefficients)
    z = transformed(logits, bias, transform)
    low = z - max_[:, None] - (0 if log_sum is None else log_sum[:, None])
    columns = torch.arange(logits.shape[1]) + first_column
    d = coef_p * low.exp() - coef_label * (columns == labels[:, None])
    if smoothing:
        d = d - coef_weight * (1.0 if class_weight is None else class_weight.float())
    if transform.softcap:
        d = d * (1 - (z / transform.softcap).square())
    out.copy_(torch.where((labels != ignore_index)[:, None], d * transform.scale, 0.0))


def scale(source: Tensor, factor: Tensor, out: Tensor) -> None:
    out.copy_(source.float() * factor)
