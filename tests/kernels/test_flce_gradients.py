"""What flce keeps of its gradients while it sums them, and that its backward needs no room of its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from one_step import Inputs, inputs, loss_of, oracle, step

from loss_plugins import linear_cross_entropy
from loss_plugins.diagnostics.memory import PeakMeter
from loss_plugins.kernels import ops
from loss_plugins.strategies import STRATEGIES, Problem
from loss_plugins.strategies import flce as strategy
from loss_plugins.strategies.flce import FlceOptions
from loss_plugins.testing import relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rounded_once(exact: torch.Tensor) -> torch.Tensor:
    """In bfloat16: to the nearest, or toward zero, as Triton's interpreter does."""
    if exact.is_cuda:
        return exact.bfloat16()
    return (exact.float().view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunks", [1, 3, 17], ids="{} chunks".format)
def test_an_untrained_model_is_rounded_once(device, chunks):
    """There nearly all of the gradient is the labels' entries."""
    given = inputs(chunks * 128, 64, 600, device, ignored=0)
    given = Inputs(given.hidden, (given.weight.float() / 16).bfloat16(), given.labels)
    variant = "flce, chunks" if chunks > 1 else "flce"
    for found, exact in zip(step(variant, given)[1:], oracle(given)[1:], strict=True):
        assert relative_error(found, exact) <= 1.02 * relative_error(rounded_once(exact), exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("digits", "margin"), [(4, 1.03), (8, 1.005)])
def test_many_chunks_sum_as_float32_does(device, digits, margin, monkeypatch):
    """Beside one chunk of all rows: what is rounded on the way is little beside the last rounding."""
    from loss_plugins.kernels.triton import sums

    monkeypatch.setattr(sums, "MOST_OF_FOUR", 17 if digits == 4 else 16)
    assert sums.digits_for(17) == digits
    given = inputs(17 * 128, 64, 300, device)
    want = oracle(given).d_weight
    whole, parts = (relative_error(step(v, given).d_weight, want) for v in ("flce", "flce, chunks"))
    assert parts <= margin * whole


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 200, 384, 1000], ids="{} wide".format)
@pytest.mark.parametrize("chunks", [1, 2, 5], ids="{} chunks".format)
@pytest.mark.parametrize("ignored", [0, 2])
def test_hoppers_kernel_sums_as_the_other_one_does(width, chunks, ignored, monkeypatch):
    """A tile that is wide and one that is tall, each cut off, and chunks in which no row counts."""
    from loss_plugins.kernels.triton import flce_gradients, flce_hopper

    if not flce_gradients.has_warpgroups(torch.device("cuda")):
        pytest.skip("this is not Hopper, or a Triton whose Gluon is another one")
    given = inputs(chunks * 128 + 130, width, 1000, "cuda", ignored=ignored)
    variant = "flce, chunks" if chunks > 1 else "flce"
    runs = []
    monkeypatch.setattr(
        flce_hopper.HopperHeadGradient, "add", _counting(flce_hopper.HopperHeadGradient.add, runs), raising=True
    )
    found = step(variant, given).d_weight
    assert len(runs) == (chunks + 2 if chunks > 1 else 1)
    monkeypatch.setattr(flce_gradients, "has_warpgroups", lambda device: False)
    other = step(variant, given).d_weight
    want = oracle(given).d_weight
    assert relative_error(found, other) <= 1e-4
    assert relative_error(found, want) <= 1.001 * relative_error(other, want)


def _counting(function, runs):
    def counted(*args):
        runs.append(args)
        return function(*args)

    return counted


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("device", DEVICES)
def test_a_number_that_is_none_stays_so_through_the_sums(device):
    given = inputs(3 * 128, 64, 300, device)
    for value in (float("inf"), float("nan")):
        given.hidden[0] = value
        poisoned = step("flce, chunks", given).d_weight
        assert not torch.isfinite(poisoned).all(1).any()


def test_the_closed_form_knows_the_sums():
    from loss_plugins.kernels.triton.sums import digits_for

    problem = Problem(8192, 2304, 256_000, torch.bfloat16)
    for chunks in (2, 64, 65, 100):
        assert strategy._low_bytes(problem, chunks) == 2304 * 256_000 * digits_for(chunks) / 8
    assert strategy._low_bytes(problem, 1) == 0


def test_a_float32_head_takes_two_passes():
    """As under autocast: no chunk of all columns is kept then, and no sum of dW."""
    flce, options = STRATEGIES.get("flce"), FlceOptions(kernels="triton")
    problem = Problem(8192, 2304, 256_000, torch.bfloat16, bulk_copies=True, triton=True)
    same, other = (replace(problem, weight_dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert flce.chunk_rows(same, options, "triton") == flce.chunk_rows(problem, options, "triton") == 1408
    assert flce.chunk_rows(other, options, "triton") == 8192 * 4 // 8 // 2  # an eighth of all float32 logits


@pytest.mark.parametrize(("hidden", "vocab"), [(2304, 256_000), (4096, 128_256), (640, 262_144)])
@pytest.mark.parametrize("rows", [1024, 8192, 65536])
def test_all_beside_the_gradients_is_a_gibibyte(hidden, vocab, rows):
    problem = Problem(rows, hidden, vocab, torch.bfloat16, bulk_copies=True, triton=True)
    flce = STRATEGIES.get("flce")
    options = flce.Options(kernels="triton")
    step_rows = flce.chunk_rows(problem, options, "triton")
    beside = flce.peak_bytes(problem, options) - problem.gradient_bytes
    assert beside <= 1024 << 20 or (step_rows == 1024 and hidden * vocab > 1 << 29)
    assert step_rows == rows or step_rows % 128 == 0
    assert beside > 700 << 20 or step_rows == rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_last_backward_scales_in_place(device, kernels, factor):
    hidden, weight, labels = inputs(300, 64, 4096, device)
    hidden.requires_grad_(), weight.requires_grad_()

    def loss():
        args = hidden, weight, None, labels, torch.ones(len(labels), device=device) / 300, None, -100
        return ops.flce(*args, 1.0, 0.0, 0.0, 0.0, torch.bfloat16, False, False, True, True, False, 512, kernels)[0]

    kept = loss()
    expected = [torch.autograd.grad(kept, (hidden, weight), torch.full_like(kept, factor), True) for _ in range(2)]
    total = loss()
    with PeakMeter(torch.device(device)) as meter:
        meter.mark()
        (total * factor).backward()
        peak = meter.read()
    assert peak < weight.numel(), "a copy of dW takes twice as much"
    for again in expected:
        assert torch.equal(hidden.grad, again[0]) and torch.equal(weight.grad, again[1])


def test_two_losses_of_one_head_add_up():
    """The first one's gradient, scaled in place, becomes ``weight.grad`` itself; the second must not be lost."""
    given = [inputs(40, 32, 200, "cpu", torch.float32, seed=seed) for seed in (0, 1)]
    weight = given[0].weight.requires_grad_()
    alone = [torch.autograd.grad(loss_of("flce", g.hidden, weight, g.labels), weight)[0] for g in given]
    for g in given:
        (2 * loss_of("flce", g.hidden, weight, g.labels)).backward()
    torch.testing.assert_close(weight.grad, 2 * (alone[0] + alone[1]))


def _checkpointed(reentrant):
    def run(loss, *leaves):
        return torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=reentrant)

    return run


def _kept_by_a_hook(loss, *leaves):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        return loss(*leaves)


def _kept_elsewhere(loss, *leaves):
    with torch.autograd.graph.save_on_cpu():
        return loss(*leaves)


WAYS = {
    "checkpoint": _checkpointed(False),
    "reentrant checkpoint": _checkpointed(True),
    "hooks": _kept_by_a_hook,
    "save_on_cpu": _kept_elsewhere,
    "compiled": lambda loss, *leaves: torch.compile(loss, backend="aot_eager")(*leaves),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", ["flce", "cce"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_whoever_keeps_what_was_saved(strategy, way, device):
    given = inputs(40, 32, 200, device, torch.float32)
    leaves = [given.hidden.requires_grad_(), given.weight.requires_grad_()]

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, given.labels, strategy=strategy, options={"kernels": "torch"})

    want = torch.autograd.grad(loss(*leaves), leaves)
    (3 * way(loss, *leaves)).backward()
    for leaf, gradient in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, 3 * gradient)


def test_gradients_of_a_batch_of_factors():
    given = inputs(40, 32, 200, "cpu", torch.float32)
    leaves = [given.hidden.requires_grad_(), given.weight.requires_grad_()]
    loss = linear_cross_entropy(*leaves, given.labels, strategy="flce")
    want = torch.autograd.grad(loss, leaves, retain_graph=True)
    got = torch.autograd.grad(loss, leaves, torch.tensor([1.0, -2.0]), is_grads_batched=True)
    for both, one in zip(got, want, strict=True):
        torch.testing.assert_close(both, torch.stack([one, -2 * one]))


def test_a_backend_that_cannot_scale_in_place(monkeypatch):
    from loss_plugins.kernels import torch as plain

    monkeypatch.setitem(ops._added, "plain", SimpleNamespace(flce_forward=plain.flce_forward, scaled=plain.scaled))
    given = inputs(40, 32, 200, "cpu", torch.float32)
    leaves = [given.hidden.requires_grad_(), given.weight.requires_grad_()]

    def gradients(kernels):
        args = *leaves, None, given.labels, torch.ones(40), None, -100, 1.0, 0.0, 0.0, 0.0, torch.float32, False, False
        return torch.autograd.grad(3 * ops.flce(*args, True, True, False, 16, kernels)[0], leaves)

    for one, other in zip(gradients("plain"), gradients("torch"), strict=True):
        assert torch.equal(one, other)
