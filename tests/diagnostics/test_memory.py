"""`PeakMeter` against allocations whose bytes are known."""

from __future__ import annotations

import pytest
import torch

from loss_plugins import linear_cross_entropy
from loss_plugins.diagnostics.memory import PeakMeter, has_counters, peak_allocated

KB = 1024


def fresh(kilobytes: int) -> torch.Tensor:
    return torch.zeros(kilobytes * KB, dtype=torch.uint8)


def test_counts_exact_bytes() -> None:
    with PeakMeter("cpu") as meter:
        meter.mark()
        assert meter.read() == 0
        one = fresh(3)
        assert meter.read() == 3 * KB
        two = one.to(torch.float32)
        assert meter.read() == 3 * KB + 4 * 3 * KB
        del one, two


def test_views_do_not_count_twice() -> None:
    with PeakMeter("cpu") as meter:
        base = fresh(4)
        views = [base[:10], base.view(4, -1), base.t(), base.detach(), base.view(4, -1).transpose(0, 1)]
        assert meter.read() == 4 * KB
        base += 1
        base.mul_(2)
        assert meter.read() == 4 * KB
        del views


def test_frees_are_noticed() -> None:
    with PeakMeter("cpu") as meter:
        for _ in range(5):
            tensor = fresh(8)
            del tensor
        assert meter.read() == 8 * KB
        keep = fresh(8)
        view = keep[:1]
        del keep
        other = fresh(8)
        assert meter.read() == 16 * KB, "a view keeps its storage alive"
        del view, other


def test_mark_starts_anew() -> None:
    with PeakMeter("cpu") as meter:
        big = fresh(64)
        meter.mark()
        assert meter.read() == 0
        small = fresh(1)
        assert meter.read() == KB
        del big
        medium = fresh(63)
        assert meter.read() == KB, "what died since the mark makes room"
        del small, medium


def test_the_end_of_what_was_there_before_makes_room() -> None:
    before = fresh(10)
    with PeakMeter("cpu") as meter:
        copy = before + 1
        assert meter.read() == 10 * KB
        del before
        again = copy + 1
        assert meter.read() == 10 * KB
        del copy, again


def test_through_the_backward() -> None:
    weight = torch.ones(1024, 1024, requires_grad=True)  # 4 MiB
    with PeakMeter("cpu") as meter:
        loss = (weight * 2).sum()
        assert meter.read() == 4 * KB * KB + 4
        meter.mark()
        loss.backward()
        # the product's storage is dead by now: sum's gradient is an expanded scalar, the only big tensor is weight.grad
        assert weight.grad is not None
        assert 4 * KB * KB <= meter.read() <= 4 * KB * KB + 64


def test_inside_an_operator_written_in_python() -> None:
    """The strategies' registered operators allocate inside one call; that must not hide from the meter."""
    hidden = torch.randn(256, 16, requires_grad=True)
    weight = torch.randn(2048, 16, requires_grad=True)
    labels = torch.randint(0, 2048, (256,))
    logits = 256 * 2048 * 4
    with PeakMeter("cpu") as meter:
        linear_cross_entropy(hidden, weight, labels, strategy="cce", options={"workspace_mb": 1}).backward()
        tiled = meter.read()
    gradients = (256 + 2048) * 16 * 4
    assert gradients + logits // 4 < tiled, "at least a tile of logits and the gradients were there"
    with PeakMeter("cpu") as meter:
        linear_cross_entropy(hidden, weight, labels, strategy="naive").backward()
        assert meter.read() >= 2 * logits


def test_results_are_unchanged() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(99, 8, requires_grad=True)
    labels = torch.randint(0, 99, (64,))
    for strategy in ("naive", "chunked", "flce", "cce"):
        grads = []
        for metered in (False, True):
            hidden.grad = weight.grad = None
            if metered:
                with PeakMeter("cpu"):
                    linear_cross_entropy(hidden, weight, labels, strategy=strategy).backward()
            else:
                linear_cross_entropy(hidden, weight, labels, strategy=strategy).backward()
            grads.append((hidden.grad, weight.grad))
        assert torch.equal(grads[0][0], grads[1][0])
        assert torch.equal(grads[0][1], grads[1][1])


def test_cpu_has_no_counters() -> None:
    assert not has_counters("cpu")
    assert peak_allocated("cpu") == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_reads_the_allocator_and_keeps_the_peak() -> None:
    torch.cuda.reset_peak_memory_stats()
    big = torch.empty(64 * KB * KB, dtype=torch.uint8, device="cuda")
    del big
    highest = torch.cuda.max_memory_allocated()
    with PeakMeter("cuda") as meter:
        meter.mark()
        small = torch.empty(KB * KB, dtype=torch.uint8, device="cuda")
        assert meter.read() == KB * KB
        del small
    assert torch.cuda.max_memory_allocated() < highest
    assert peak_allocated("cuda") >= highest
