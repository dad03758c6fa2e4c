"""Cross-entropy of logits that exist: read once in the forward, read once and written once in the backward.

Rows that do not begin on whole 16 entries (an odd vocabulary, or columns that are no neighbours) stop an A3 with an
error; they are copied a few at a time, `COPY_BYTES`. Otherwise the peak beside the gradient is a few numbers a row.

Letters: N = B * T rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .._rows import row_coefficients
from . import vector
from ._slabs import new_slab, results, view_of
from .blocks import aligned, spans
from .soc import ROW_ALIGNMENT
from .vector import Sums, Transform

COPY_BYTES = 32 << 20


def cross_entropy_forward(
    logits: Tensor,  # (B, T, V)
    labels: Tensor,  # (N,)
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    want_entropy: bool,
    want_predicted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, maximum, log of the sum, entropy, predicted) of each row; the last two empty unless asked for."""
    labels, transform = labels.contiguous(), Transform(scale, softcap)
    class_weight = None if class_weight is None else class_weight.contiguous()
    sums = Sums.zeros(labels.shape[0], logits.device, want_predicted)
    direct = _is_readable(logits)
    for part, r0, r1 in _parts(logits, direct):
        vector.row_sums(
            part if direct else _copied(part), labels[r0:r1], None, class_weight, None, sums.of(r0, r1), 0,
            ignore_index, transform, label_smoothing > 0, want_entropy, want_predicted,
        )  # fmt: skip
    out = results(
        sums, labels, None, class_weight, ignore_index, transform, label_smoothing, z_loss, logits.shape[2],
        want_entropy,
    )  # fmt: skip
    return out.loss, out.nll, out.max_, out.log_sum, out.entropy, out.predicted


def cross_entropy_backward(
    grad: Tensor,  # (N,) d total / d loss of the row
    logits: Tensor,  # (B, T, V)
    out: Tensor,  # (B, T, V) written; may be the logits
    labels: Tensor,  # (N,)
    class_weight: Tensor | None,  # (V,)
    max_: Tensor,  # (N,)
    log_sum: Tensor,  # (N,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Write the gradient of the logits to ``out``, zeros where a row has no label."""
    labels, transform = labels.contiguous(), Transform(scale, softcap)
    coefficients = row_coefficients(
        grad, max_ + log_sum, labels.long(), labels != ignore_index, class_weight, label_smoothing, z_loss,
        logits.shape[2],
    )  # fmt: skip
    class_weight = None if class_weight is None else class_weight.contiguous()
    direct = _is_readable(logits) and _is_readable(out)
    for (part, r0, r1), (written, _, _) in zip(_parts(logits, direct), _parts(out, direct), strict=True):
        read = part if direct else _copied(part)
        target = written if direct else read
        here = tuple(c[r0:r1].contiguous() for c in coefficients)
        vector.gradient(
            read, target, labels[r0:r1], None, class_weight, max_[r0:r1], log_sum[r0:r1], here, 0, ignore_index,
            transform, label_smoothing > 0,
        )  # fmt: skip
        if not direct:
            written.copy_(target)


def _parts(logits: Tensor, direct: bool) -> Iterator[tuple[Tensor, int, int]]:
    """Views (n, V) with the numbers of their rows: whole batches, or a few rows where they must be copied."""
    batch, length, vocab = logits.shape
    step = length if direct else max(1, COPY_BYTES // (aligned(vocab) * logits.element_size()))
    for i in range(batch):
        for t0, t1 in spans(length, step):
            yield logits[i, t0:t1], i * length + t0, i * length + t1


def _is_readable(logits: Tensor) -> bool:
    """Whether the kernels may read, and write, rows where they are."""
    steps = zip(logits.stride()[:2], logits.shape[:2], strict=True)
    return logits.stride(2) == 1 and all(stride % ROW_ALIGNMENT == 0 for stride, size in steps if size > 1)


def _copied(part: Tensor) -> Tensor:
    rows, columns = part.shape
    return view_of(new_slab(rows, columns, part.dtype, part.device), rows, columns).copy_(part)
