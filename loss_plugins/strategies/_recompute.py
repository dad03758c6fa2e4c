"""Per-row losses whose backward computes the logits again, tile by tile: cce always, flce where it cannot know the
gradient that will come back."""

from __future__ import annotations

from ..kernels import ops
from ._base import RowLoss, Rows


def recomputed(
    rows: Rows,
    tile_bytes: int,
    filter_hidden: float = 0.0,
    filter_weight: float = 0.0,
    forward_kernels: str = "torch",
    backward_kernels: str = "torch",
    filter_bound: float = 1.0,
) -> RowLoss:
    """The row losses of ``rows``; the filters leave small probabilities out of dX and of dW (0: exact), no more than
    ``filter_bound`` of a row where the kernels can tell."""
    assert rows.weight is not None
    loss, nll, lse, entropy, predicted, dropped, _ = ops.linear_ce(
        rows.hidden, rows.weight, rows.bias, rows.labels, rows.class_weight, rows.ignore_index, rows.scale,
        rows.softcap, rows.label_smoothing, rows.z_loss, rows.dtype, rows.want_entropy,
        rows.want_predicted, filter_hidden, filter_weight, "dropped" in rows.fields,
        tile_bytes, forward_kernels, backward_kernels, filter_bound,
    )  # fmt: skip
    loss = loss * rows.row_scale
    return RowLoss(loss.sum() if rows.reduce else loss, nll, lse, entropy, predicted, dropped)
