"""torch_npu's own operators behind `kernels: native`, against a stand-in that refuses what they refuse."""

from __future__ import annotations

import dataclasses

import npu_operators
import pytest
import torch
import torch.nn.functional as F

from loss_plugins import linear_cross_entropy, linear_cross_entropy_stats
from loss_plugins.device import DeviceProfile
from loss_plugins.errors import ConfigError, UnsupportedError
from loss_plugins.kernels import native, ops
from loss_plugins.npu import FUSED, Npu
from loss_plugins.strategies import Problem, _select, select

NPU = DeviceProfile("npu", "Ascend910B3", npu=Npu(chip="Ascend910B3", operators=FUSED, obstacle="no compiler here"))
ROWS, WIDTH, VOCAB = 37, 24, 200


@pytest.fixture(autouse=True)
def operators():
    return npu_operators.offer()


@pytest.fixture
def on_npu(monkeypatch):
    """Tensors of the CPU count as an NPU's."""
    monkeypatch.setitem(_select._PROFILES, "cpu", NPU)


def inputs(dtype=torch.bfloat16, ignored=True):
    hidden = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (ROWS,))
    if ignored:
        labels[::4] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ignored_rows_have_no_loss_and_no_gradient(dtype):
    hidden, weight, labels = inputs(dtype)
    valid = labels != -100
    nll, lse = native.linear_nll(hidden, weight, labels, valid)
    logits = hidden.double() @ weight.double().T
    wanted = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(nll.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), torch.where(valid, logits.logsumexp(1), 0.0), rtol=1e-5, atol=1e-5)
    assert not lse.requires_grad
    weights = torch.rand(ROWS)
    got = torch.autograd.grad((nll * weights).sum(), (hidden, weight))
    want = torch.autograd.grad((wanted * weights).sum(), (hidden, weight))
    close = 2 * torch.finfo(dtype).eps  # two numbers rounded once
    assert torch.equal(got[0][~valid], torch.zeros_like(got[0][~valid]))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=close, atol=1e-5)


def test_operator_is_whole():
    hidden, weight, labels = inputs(ignored=False)
    torch.library.opcheck(native._linear, (hidden, weight, labels), test_utils=(
        "test_schema", "test_autograd_registration", "test_faketensor",
    ))  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("strategy", ["cce", "naive"])
@pytest.mark.usefixtures("on_npu")
def test_equals_torch(strategy, reduction):
    hidden, weight, labels = inputs()
    class_weight, token_weight = torch.rand(VOCAB), torch.rand(ROWS)
    given = {"reduction": reduction, "class_weight": class_weight, "token_weight": token_weight}
    results = []
    for kernels in ("torch", "native"):
        ops.forget_launches()
        loss = linear_cross_entropy(hidden, weight, labels, strategy=strategy, options={"kernels": kernels}, **given)
        results.append((loss, *torch.autograd.grad(loss.sum(), (hidden, weight))))
        assert any(name.startswith("native.") for name in ops.launched()) == (kernels == "native")
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        # both are summed in float32, and gradients rounded once: they differ by no more than the last place
        close = 1e-5 if ours.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=close, atol=1e-6)


@pytest.mark.usefixtures("on_npu")
def test_float32_head_under_half_products():
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, strategy="cce", options={"kernels": "native"})
    loss.backward()
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels), rtol=2e-2, atol=0)


@pytest.mark.usefixtures("on_npu")
def test_naive_has_all_but_smoothing():
    hidden, weight, labels = inputs(torch.float32)
    given = {"bias": torch.randn(VOCAB), "softcap": 20.0, "logit_scale": 0.7, "z_loss": 1e-2}
    fields = ("nll", "lse", "entropy", "accuracy")
    ours, theirs = (
        linear_cross_entropy_stats(
            hidden, weight, labels, strategy="naive", options={"kernels": kernels}, fields=fields, **given
        )
        for kernels in ("native", "torch")
    )
    for name in ("loss", *fields):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-6)
    both = [torch.autograd.grad(out.loss, (hidden, weight)) for out in (ours, theirs)]
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    with pytest.raises(UnsupportedError, match=r"label_smoothing=0.1, which torch_npu's operator"):
        linear_cross_entropy(
            hidden, weight, labels, strategy="naive", options={"kernels": "native"}, label_smoothing=0.1
        )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"bias": torch.zeros(VOCAB)}, "a bias"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"softcap": 30.0, "z_loss": 1e-4}, "softcap and z_loss"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"fields": ("entropy",)}, "the statistic entropy"),
        ({"fields": ("accuracy",)}, "the statistic accuracy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("on_npu")
def test_what_the_operator_does_not_compute_is_refused(given, named):
    hidden, weight, labels = inputs()
    with pytest.raises(UnsupportedError, match=f"kernels='native' was asked for with {named}, and"):
        linear_cross_entropy_stats(
            hidden, weight, labels, strategy="cce", options={"kernels": "native"}, **{"fields": (), **given}
        )


def half(rows=64, vocab=VOCAB, dtype=torch.bfloat16):
    return Problem(rows, WIDTH, vocab, dtype)


@pytest.mark.parametrize(
    ("strategy", "problem", "profile", "why"),
    [
        ("cce", half(dtype=torch.float32), NPU, "takes bfloat16 and float16 only, and the products are in float32"),
        ("cce", half(vocab=127), NPU, "needs a vocabulary of 128 or more, and this has 127"),
        ("naive", half(rows=200_001), NPU, "takes 200000 tokens at most, and this loss has 200001"),
        ("naive", half(dtype=torch.float64), NPU, "has no float64"),
        ("cce", half(), DeviceProfile("cpu"), "they are torch_npu's, and this is a cpu device"),
        (
            "cce", half(), dataclasses.replace(NPU, npu=Npu(torch_npu="2.9.0", operators=FUSED[:1])),
            "torch_npu 2.9.0 has no npu_fused_linear_online_max_sum and no npu_fused.*`loss-plugins doctor`",
        ),
    ],
)  # fmt: skip
def test_native_asked_for_where_it_cannot_run(strategy, problem, profile, why):
    with pytest.raises(UnsupportedError, match=why):
        select(strategy, {"kernels": "native"}, problem, profile)


def test_native_is_opt_in():
    """`auto` never takes it, though it is there and the compiler is not."""
    for strategy in ("auto", "cce", "flce", "naive"):
        plan = select(strategy, None, Problem(100_000, WIDTH, 50_000, torch.bfloat16), NPU)
        assert "native" not in plan.describe(NPU)
        assert plan.strategy.kernels(NPU, plan.options) == "torch"


def test_native_and_a_filter_exclude_each_other():
    with pytest.raises(ConfigError, match=r"kernels='native' and filter=0.001 were both asked for"):
        select("cce", {"kernels": "native", "filter": 1e-3}, half(), NPU)
    with pytest.raises(ConfigError, match="compile: true and kernels: native"):
        select("naive", {"kernels": "native", "compile": True}, half(), NPU)
    with pytest.raises(ConfigError, match="only strategies naive and cce have"):
        select("flce", {"kernels": "native"}, half(), NPU)


def test_peak_is_the_gradients():
    plan = select("cce", {"kernels": "native"}, half(4096, 100_000), NPU)
    assert plan.strategy.peak_bytes(half(4096, 100_000), plan.options) == (4096 + 100_000) * WIDTH * 2
