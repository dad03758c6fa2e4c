"""What is computed once a row, in one launch each, against the same in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from test_marks import bits_of

from loss_plugins.kernels._rows import row_coefficients, row_terms
from loss_plugins.kernels.triton.row_numbers import coefficients, losses, pack

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB = 70


def labels_of(rows, ignore_index, which, device):
    labels = torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(0))
    ignored = {"some": torch.arange(rows) % 3 == 1, "none": torch.zeros(rows), "all": torch.ones(rows)}[which].bool()
    return torch.where(ignored, ignore_index, labels).to(device)


def order_of(labels, ignore_index):
    valid = labels != ignore_index
    return torch.cat([valid.nonzero()[:, 0], (~valid).nonzero()[:, 0]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["some", "none", "all"])
@pytest.mark.parametrize("rows", [1, 131])
@pytest.mark.parametrize(("width", "dtype"), [(40, torch.float16), (1100, torch.float32)])
def test_packed_rows(device, rows, width, dtype, which):
    """Also of a view whose rows and columns lie apart; what is ignored may hold anything."""
    labels = labels_of(rows, -100, which, device)
    hidden = torch.randn(width, 2 * rows, generator=torch.Generator().manual_seed(1)).to(device).T[::2]
    hidden[labels == -100] = torch.nan
    packed = pack(hidden, labels, -100, dtype, VOCAB)
    order = order_of(labels, -100)
    count = int((labels != -100).sum())
    assert torch.equal(packed.order, order) and packed.count.item() == count
    assert torch.equal(packed.labels, labels[order]) and torch.equal(packed.place[order], torch.arange(rows).to(device))
    assert packed.rows.dtype == dtype and torch.equal(packed.rows[:count], hidden[order[:count]].to(dtype))
    assert not packed.rows[count:].any()
    assert packed.count.data_ptr() % 16 == 0  # whatever the number of rows, or kernels would be compiled again


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ignore_index", [-100, 7, 2**40])
def test_classes_of_rows(device, ignore_index):
    """Labels that are classes, and none that is not; strided ones."""
    labels = labels_of(262, ignore_index, "some", device)[::2]
    labels[4], labels[5], labels[6] = VOCAB, -1, 2**33
    words = torch.zeros(3, dtype=torch.int32, device=device)
    packed = pack(torch.zeros(131, 8, device=device), labels, ignore_index, torch.float32, VOCAB, words)
    want = torch.zeros(VOCAB, dtype=torch.bool)
    want[labels[(labels >= 0) & (labels < VOCAB)].cpu()] = True
    assert torch.equal(bits_of(words[None], VOCAB)[0], want)
    assert packed.count.item() == int((labels != ignore_index).sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 600])
@pytest.mark.parametrize(
    ("smoothing", "z_loss", "weighted"), [(0.0, 0.0, False), (0.1, 0.0, False), (0.1, 1e-2, True), (0.0, 0.3, True)]
)
@pytest.mark.parametrize("want", [True, False])
def test_losses(device, rows, smoothing, z_loss, weighted, want):
    g = torch.Generator().manual_seed(0)
    labels = labels_of(rows, -100, "some", device)
    order, valid = order_of(labels, -100), labels != -100
    sums = torch.rand(6, rows, generator=g).to(device) + 0.5
    target, lost = (torch.rand(rows, generator=g).to(device) for _ in range(2))
    best = torch.randint(0, VOCAB, (rows,), generator=g).to(device, torch.int32)
    weight = (torch.rand(VOCAB, generator=g) + 0.5).to(device) if weighted else None
    sums[:, int(valid.sum()) :], target[int(valid.sum()) :] = torch.nan, torch.nan  # never computed
    place = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=device))
    got = losses(sums, target, best, lost, labels, place, weight, -100, smoothing, z_loss, VOCAB, want, want, want)
    max_, sum_, _, spread, moment, _ = sums[:, place]
    terms = row_terms(
        max_, sum_, target[place], spread if smoothing else None, labels, valid, weight, smoothing, z_loss, VOCAB
    )
    for actual, expected in zip(got, terms, strict=False):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        assert not actual[~valid].any()
    if not want:
        assert [len(each) for each in got[3:]] == [0, 0, 0]
        return
    torch.testing.assert_close(got[3], torch.where(valid, sum_.log() - moment / sum_, 0.0), rtol=1e-6, atol=1e-6)
    assert torch.equal(got[4], torch.where(valid, best[place].long(), -100))
    assert torch.equal(got[5], torch.where(valid, lost[place], 0.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("smoothing", "z_loss", "weighted"), [(0.0, 0.0, False), (0.1, 1e-2, True)])
@pytest.mark.parametrize("given", [(True, False, False), (True, True, False), (True, False, True), (True, True, True)])
def test_coefficients(device, smoothing, z_loss, weighted, given):
    g = torch.Generator().manual_seed(0)
    rows = 601
    labels = labels_of(rows, -100, "some", device)
    order, valid = order_of(labels, -100), labels != -100
    lse = torch.rand(rows, generator=g).to(device) + 3
    weight = (torch.rand(VOCAB, generator=g) + 0.5).to(device) if weighted else None
    gradients = tuple((torch.randn(rows, generator=g) * 1e-3).to(device) if each else None for each in given)
    for gradient in gradients:
        if gradient is not None:
            gradient[~valid] = torch.nan  # of rows that do not count
    largest = sum(gradient.abs() for gradient in gradients if gradient is not None)[valid].max()
    *got, found = coefficients(
        gradients, lse, labels[order], order, valid.sum(), largest.view(torch.int32), weight, smoothing, z_loss, VOCAB
    )
    assert found.item() == 2.0 ** largest.log2().floor().item()
    of_unit = [None if gradient is None else gradient / found for gradient in gradients]
    want = row_coefficients(of_unit[0], lse, labels, valid, weight, smoothing, z_loss, VOCAB, *of_unit[1:])
    for actual, expected in zip(got[1:], want, strict=True):
        torch.testing.assert_close(actual[:rows], expected[order], rtol=1e-6, atol=1e-7)
        assert not actual[int(valid.sum()) : rows].any()
    assert torch.equal(got[0][: int(valid.sum())], lse[order[: int(valid.sum())]])
    assert all(each.data_ptr() % 16 == 0 for each in got)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [(True, False, False), (True, True, True)])
def test_largest_gradient(device, given):
    """Of the rows that count; an expanded one, as .sum() sends it back; a NaN is larger than any."""
    labels = labels_of(131, -100, "some", device)
    g = torch.Generator().manual_seed(0)
    first = torch.tensor(-0.25, device=device).expand(131)
    gradients = [
        first,
        *((torch.randn(131, generator=g)).to(device, torch.float64) if each else None for each in given[1:]),
    ]
    sizes = sum(gradient.abs().float() for gradient in gradients if gradient is not None)
    want = sizes[labels != -100].max().item()
    for number in (want, torch.nan):
        largest = torch.zeros((), dtype=torch.int32, device=device)
        if number != number:
            gradients[0] = torch.where(torch.arange(131, device=device) == 0, number, first)
        pack(torch.zeros(131, 8, device=device), labels, -100, torch.float32, VOCAB, None, largest, tuple(gradients))
        found = largest.view(torch.float32).item()
        assert found == pytest.approx(number, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("largest", "unit"),
    [
        (0.0, 1.0),
        (1.0, 1.0),
        (-3.9, 2.0),
        (0.75, 0.5),
        (3e38, 2.0**127),
        (1e-37, 2.0**-123),
        (1e-40, 2.0**-126),
        (float("nan"), 1.0),
    ],
)
def test_unit(device, largest, unit):
    """A power of two, also of what has none."""
    labels = torch.zeros(600, dtype=torch.int64, device=device)
    gradient = torch.zeros(600, device=device)
    gradient[599] = largest
    order, count = torch.arange(600, device=device), torch.tensor(600, device=device)
    bits = gradient.abs().max().view(torch.int32) & 0x7FFFFFFF
    *got, result = coefficients((gradient, None, None), gradient, labels, order, count, bits, None, 0.0, 0.0, VOCAB)
    assert result.item() == unit
    assert (abs(got[2][599].item()) <= 2) == (largest == largest) and not got[2][:599].any()
