"""In which order programs walk rows and columns: rows that are read again and again stay in the cache, results the same."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from loss_plugins.kernels import ops
from loss_plugins.kernels.triton import backward, linear_ce
from loss_plugins.kernels.triton.tuning import Blocks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TALL = Blocks(256, 128, 64, 8, 4, True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("width", "cached"), [(64, 1), (64, 768), (60, 512)])
def test_groups_of_rows_give_the_same_bits(device, width, cached, monkeypatch):
    """Four blocks of 128 rows: groups of one, of three with a rest, of two."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(390, width, generator=g).to(device, torch.bfloat16)
    weight = torch.randn(300, width, generator=g).to(device, torch.bfloat16)
    labels = torch.randint(0, 300, (390,), generator=g).to(device)
    labels[::3] = -100

    def gradients():
        lse = (hidden.float() @ weight.float().T).logsumexp(1)
        return ops.linear_ce_backward(
            torch.full((390,), 1e-3, device=device), hidden, weight, None, labels, None, lse, -100, 1.0, 0.0, 0.0, 0.0,
            torch.bfloat16, 0.0, 0.0, True, True, False, 1 << 20, "triton",
        )  # fmt: skip

    want = gradients()
    monkeypatch.setattr(backward, "cached_rows", lambda device, row_bytes: cached)
    for a, b in zip(gradients(), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [1, 255, 8192, 8200, 32768, 65536])
@pytest.mark.parametrize("row_bytes", [1280, 4608, 8192, 1 << 20])
def test_rows_of_programs_that_run_at_a_time_stay_in_the_cache(rows, row_bytes, monkeypatch):
    slots, cache, tiles = 132, 25 << 20, 1002
    monkeypatch.setattr(linear_ce, "processors", lambda device: slots)
    monkeypatch.setattr(linear_ce, "cached_rows", lambda device, row_bytes: max(1, cache // row_bytes))
    programs = linear_ce.programs_for(rows, row_bytes, tiles, TALL, torch.device("cpu"))
    height = math.ceil(rows / TALL.n)
    strips = programs // height
    assert programs == strips * height and 1 <= strips <= tiles
    at_a_time = min(height, math.ceil(slots / strips))
    # one block more may have begun; a block that is larger than the cache alone cannot be helped
    # (rows of 38 and 67 MB are as fast without, with a cache of 60)
    few = rows * row_bytes <= 3 * cache
    assert few or (at_a_time - 1) * TALL.n * row_bytes <= cache or strips >= slots
    assert programs / (math.ceil(programs / slots) * slots) >= 0.9 or programs > 3 * slots or strips == 4 * slots


@pytest.mark.parametrize("head", [torch.bfloat16, torch.float32, None], ids=str)
def test_slices_lie_in_rows_that_are_written_later(head):
    """dZ of a slice may lie in dW, but in no row that its slice or one before has written."""
    rows, columns, vocab, width, step = 256, 128, 5000, 24, 64
    own = torch.empty(rows, columns, dtype=torch.bfloat16)
    spare = None if head is None else torch.empty(vocab, width, dtype=head)
    done, inside = 0, 0
    for first, wide, dz in backward._slices(rows, columns, vocab, step, own, spare):
        assert first == done and wide > 0 and dz.shape[0] == rows and dz.shape[1] >= wide and dz.dtype == torch.bfloat16
        done += wide
        if dz.data_ptr() == own.data_ptr():
            continue
        inside += wide
        begin = dz.data_ptr() - spare.data_ptr()
        assert begin % 16 == 0 and dz.is_contiguous() and wide % step == 0 and wide >= columns
        assert done * width * spare.element_size() <= begin
        assert begin + dz.numel() * 2 <= spare.numel() * spare.element_size()
    assert done == vocab
    assert inside > vocab / 2 if head is not None else inside == 0
