"""In which order programs walk rows and columns: rows that are read again and again stay in the cache, results the same."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from loss_plugins.kernels import ops
from loss_plugins.kernels.triton import _common, backward, linear_ce
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
def test_slices_lie_in_rows_that_are_written_later(head, monkeypatch):
    """dZ of a slice may lie in dW, but in no row that its slice or one before has written."""
    rows, columns, vocab, width, step = 256, 128, 5000, 24, 64
    own = torch.empty(rows, columns, dtype=torch.bfloat16)
    spare = None if head is None else torch.empty(vocab, width, dtype=head)
    blocks = Blocks(128, step, 64, 8, 3, True)
    room = 0 if spare is None else width * spare.element_size() // 2
    slices = backward._Slices(rows, vocab, 2, blocks, room, width if head == torch.float32 else 0)
    monkeypatch.setattr(backward, "CAST_BYTES", 320 * width * 2)
    done, inside = 0, 0
    for first, wide, dz in slices.rooms(own, spare):
        assert first == done and wide > 0 and dz.shape[0] == rows and dz.shape[1] >= wide and dz.dtype == torch.bfloat16
        assert wide <= (320 if head == torch.float32 else vocab), "what is cast takes more"
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


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [300, 513])
@pytest.mark.parametrize(("strategy_filter", "frozen"), [(0.0, False), (0.0, True), (2.0**-12, False)], ids=str)
@pytest.mark.parametrize("workspace", [1 << 20, 1 << 10], ids=["float32", "few bits"])
def test_launches_of_what_is_compiled_give_the_same_bits(rows, strategy_filter, frozen, workspace, monkeypatch):
    """Slices of several widths, in dW's room and in the workspace, and rounds."""
    g = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(9000, 72, generator=g, device="cuda").bfloat16().requires_grad_(not frozen)
    labels = torch.randint(0, 9000, (rows,), generator=g, device="cuda")
    hidden = (weight.detach()[labels] * 0.4).requires_grad_()

    def gradients():
        loss = ops.linear_ce(
            hidden, weight, None, labels, None, -100, 1.0, 0.0, 0.0, 0.0, torch.bfloat16, False, False,
            strategy_filter, strategy_filter, False, workspace, "triton", "triton",
        )[0]  # fmt: skip
        return torch.autograd.grad(loss.sum(), [t for t in (hidden, weight) if t.requires_grad])

    assert _common.REUSED
    again = gradients()
    monkeypatch.setattr(_common, "REUSED", False)
    for one, other in zip(again, gradients(), strict=True):
        assert torch.equal(one, other) and one.abs().sum() > 0


def test_a_launch_again_has_all_arguments_in_their_order(monkeypatch):
    seen = []

    class Kernel:
        arg_names = ("a", "b", "SIZE", "FLAG")

        def __getitem__(self, grid):
            return lambda *args, **options: seen.append(("looked up", grid, args, options)) or Compiled()

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: seen.append(("again", grid, args))

    monkeypatch.setattr(_common, "REUSED", True)
    monkeypatch.setattr(_common, "INTERPRETED", False)
    launch = _common.Launches(Kernel())
    for key, number in (("x", 1), ("x", 2), ("y", 3)):
        launch(key, (5,), "t", number, FLAG=True, SIZE=8, num_warps=4)
    options = {"FLAG": True, "SIZE": 8, "num_warps": 4}
    assert seen == [
        ("looked up", (5,), ("t", 1), options),
        ("again", (5, 1, 1), ("t", 2, 8, True)),
        ("looked up", (5,), ("t", 3), options),
    ]
