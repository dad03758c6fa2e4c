"""The registered operators: schema, fake, autograd; and every backend's entry functions against the oracle.

Shapes: 33 rows and 131 columns are no multiple of any block; 300 columns are several blocks; 1 row is the least.
The Triton backend runs here on a GPU, or on a CPU under its interpreter (the shared fixtures switch that on).
"""

from __future__ import annotations

import pytest
import torch

from loss_plugins.kernels import ops, reference
from loss_plugins.testing import assert_within_reference_error

BACKENDS = [name for name in ops.backends() if name != "ascend"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs(rows, width, vocab, dtype, device, bias=True, class_weight=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=g).to(device, dtype)
    weight = torch.randn(vocab, width, generator=g).to(device, dtype)
    labels = torch.randint(0, vocab, (rows,), generator=g)
    labels[1::3] = -100
    return (
        hidden,
        weight,
        torch.randn(vocab, generator=g).to(device, dtype) if bias else None,
        labels.to(device),
        (torch.rand(vocab, generator=g) + 0.5).to(device) if class_weight else None,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extras", [False, True])
def test_linear_ce_passes_opcheck(device, extras):
    hidden, weight, bias, labels, class_weight = inputs(9, 8, 33, torch.float32, device, extras, extras)
    for t in (hidden, weight, bias):
        if t is not None:
            t.requires_grad_()
    torch.library.opcheck(
        ops.linear_ce,
        (hidden, weight, bias, labels, class_weight, -100, 0.5, 3.0 * extras, 0.0, 1e-3, torch.float32, extras, extras,
         1e-3 * extras, 0.0, extras, 256, "torch", "torch"),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extras", [False, True])
def test_flce_passes_opcheck(device, extras):
    hidden, weight, bias, labels, class_weight = inputs(9, 8, 33, torch.float32, device, extras, extras)
    for t in (hidden, weight, bias):
        if t is not None:
            t.requires_grad_()
    torch.library.opcheck(
        ops.flce,
        (hidden, weight, bias, labels, torch.rand(9, device=device), class_weight, -100, 0.5, 3.0 * extras, 0.1, 1e-3,
         torch.float32, extras, extras, True, True, extras, 4, "torch"),
    )  # fmt: skip


SETTINGS = {
    "plain": (1.0, 0.0, 0.0, 0.0, False, False),
    "bias": (1.0, 0.0, 0.0, 0.0, True, False),
    "scale": (0.5, 0.0, 0.0, 0.0, False, False),
    "softcap": (1.0, 5.0, 0.0, 0.0, True, False),
    "smoothing": (1.0, 0.0, 0.2, 0.0, False, False),
    "all": (0.5, 5.0, 0.2, 1e-2, True, True),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(33, 24, 131), (1, 40, 300), (140, 64, 257)], ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_forward_equals_the_oracle(backend, device, dtype, shape, settings):
    scale, softcap, smoothing, z_loss, with_bias, with_class_weight = settings
    hidden, weight, bias, labels, class_weight = inputs(*shape, dtype, device, with_bias, with_class_weight)
    labels[0] = 0
    got = ops.linear_ce(
        hidden, weight, bias, labels, class_weight, -100, scale, softcap, smoothing, z_loss, dtype, True, True, 0.0, 0.0,
        False, 1 << 14, backend, "torch",
    )  # fmt: skip
    loss, nll, lse, entropy, predicted, dropped, marks = got
    assert f"{backend}.linear_ce_forward" in ops.launched() and dropped.numel() == marks.numel() == 0
    valid = labels != -100

    def transformed(dtype):
        z = (hidden.to(dtype) @ weight.to(dtype).T + (0 if bias is None else bias.to(dtype))) * scale
        return softcap * torch.tanh(z / softcap) if softcap else z

    z, z32 = transformed(torch.float64), transformed(torch.float32)
    oracle = reference.linear_cross_entropy(
        hidden, weight, labels, bias, logit_scale=scale, softcap=softcap, label_smoothing=smoothing, z_loss=z_loss,
        class_weight=class_weight, reduction="none",
    )  # fmt: skip
    same = (
        torch.nn.functional.cross_entropy(
            z32, labels, None if class_weight is None else class_weight, reduction="none", label_smoothing=smoothing
        )
        + z_loss * torch.where(valid, z32.logsumexp(1), 0.0).square()
    )
    assert_within_reference_error("loss", loss, oracle, same)
    want = torch.where(valid, z.logsumexp(1), 0.0)
    assert_within_reference_error("lse", lse, want, torch.where(valid, z32.logsumexp(1), 0.0))
    p, p32 = z.softmax(1), z32.softmax(1)
    assert_within_reference_error(
        "entropy", entropy, -(p * p.log()).sum(1) * valid,
        -(p32 * z32.log_softmax(1)).sum(1) * valid, z.amax(1),
    )  # fmt: skip
    nll64 = torch.nn.functional.cross_entropy(z, labels, reduction="none")
    assert_within_reference_error("nll", nll, nll64, torch.nn.functional.cross_entropy(z32, labels, reduction="none"))
    top = z.gather(1, predicted.clamp(min=0)[:, None])[:, 0]
    assert (predicted[~valid] == -100).all() and (z.amax(1) - top)[valid].max() <= 1e-5 * z.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(33, 24, 131), (1, 40, 300), (300, 64, 601)], ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("need", [(True, True), (True, False), (False, True)], ids=["both", "hidden", "weight"])
def test_the_backward_equals_the_oracle(backend, device, dtype, shape, settings, need):
    """300 rows are three row blocks of which the last holds no row that counts; 601 columns are several slices."""
    scale, softcap, smoothing, z_loss, with_bias, with_class_weight = settings
    hidden, weight, bias, labels, class_weight = inputs(*shape, dtype, device, with_bias, with_class_weight)
    labels[0] = 0
    grad = (torch.rand(shape[0], generator=torch.Generator().manual_seed(1)) / 1000).to(device)

    def differentiate(loss_of, kind):
        leaves = [None if t is None else t.to(kind).requires_grad_() for t in (hidden, weight, bias)]
        loss = loss_of(*leaves)
        return torch.autograd.grad((loss * grad.to(loss.dtype)).sum(), [t for t in leaves if t is not None])

    def plain(h, w, b):
        """The same type throughout, as torch would."""
        z = torch.nn.functional.linear(h, w, b).float() * scale
        z = softcap * torch.tanh(z / softcap) if softcap else z
        loss = torch.nn.functional.cross_entropy(z, labels, class_weight, reduction="none", label_smoothing=smoothing)
        return loss + z_loss * torch.where(labels != -100, z.logsumexp(1), 0.0).square()

    want = differentiate(
        lambda h, w, b: reference.linear_cross_entropy(
            h, w, labels, b, logit_scale=scale, softcap=softcap, label_smoothing=smoothing, z_loss=z_loss,
            class_weight=class_weight, reduction="none",
        ),
        torch.float64,
    )  # fmt: skip
    same = differentiate(plain, dtype)
    common = (hidden, weight, bias, labels, class_weight)
    lse = ops.linear_ce(
        *common,
        -100,
        scale,
        softcap,
        smoothing,
        z_loss,
        dtype,
        False,
        False,
        0.0,
        0.0,
        False,
        1 << 14,
        "torch",
        "torch",
    )[2]
    got = ops.linear_ce_backward(
        grad, *common, lse, -100, scale, softcap, smoothing, z_loss, dtype, 0.0, 0.0, *need, with_bias, 1 << 16, backend
    )
    for name, needed, actual, oracle, reference_grad in zip(
        ("dX", "dW", "db"), (*need, with_bias), got, (*want, None)[:3], (*same, None)[:3], strict=False
    ):
        if needed:
            # exp(z - lse) inherits the rounding of the log-sum-exp, which float32 does not hide
            rounded = oracle * lse.abs().max() if dtype == torch.float32 else None
            assert_within_reference_error(name, actual, oracle, reference_grad, rounded)
        else:
            assert actual.numel() == 0
    assert not need[0] or (got[0][labels == -100] == 0).all()


FLCE_CASES = {
    **{name: (settings, False) for name, settings in SETTINGS.items()},
    "all but smoothing": ((0.5, 5.0, 0.0, 1e-2, True, True), False),
    "z-loss": ((1.0, 0.0, 0.0, 1e-2, False, False), False),
    "wild": (SETTINGS["plain"], True),
    "wild, z-loss, scale, bias": ((0.5, 0.0, 0.0, 1e-2, True, True), True),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "chunk"), [((33, 24, 131), 7), ((300, 64, 601), 128), ((300, 64, 601), 512)], ids=str
)
@pytest.mark.parametrize(("settings", "wild"), FLCE_CASES.values(), ids=FLCE_CASES.keys())
def test_flce_equals_the_oracle(backend, device, dtype, shape, chunk, settings, wild):
    """Several chunks or one. Wild: a column that for half of the rows lies more than 60 above every label's logit."""
    scale, softcap, smoothing, z_loss, with_bias, with_class_weight = settings
    hidden, weight, bias, labels, class_weight = inputs(*shape, dtype, device, with_bias, with_class_weight)
    labels[0] = 0
    if wild:
        weight[shape[2] // 2] *= 64
        labels[labels == shape[2] // 2] = 1
    row_scale = (torch.rand(shape[0], generator=torch.Generator().manual_seed(1)) / 100).to(device)

    def differentiate(loss_of, kind):
        leaves = [None if t is None else t.to(kind).requires_grad_() for t in (hidden, weight, bias)]
        total = (loss_of(*leaves) * row_scale.to(kind)).sum()
        return [total.detach(), *torch.autograd.grad(total, [t for t in leaves if t is not None])]

    def plain(h, w, b):
        z = torch.nn.functional.linear(h, w, b).float() * scale
        z = softcap * torch.tanh(z / softcap) if softcap else z
        loss = torch.nn.functional.cross_entropy(z, labels, class_weight, reduction="none", label_smoothing=smoothing)
        return loss + z_loss * torch.where(labels != -100, z.logsumexp(1), 0.0).square()

    want = differentiate(
        lambda h, w, b: reference.linear_cross_entropy(
            h, w, labels, b, logit_scale=scale, softcap=softcap, label_smoothing=smoothing, z_loss=z_loss,
            class_weight=class_weight, reduction="none",
        ),
        torch.float64,
    )  # fmt: skip
    same = differentiate(plain, dtype)
    got = ops.flce(
        hidden, weight, bias, labels, row_scale, class_weight, -100, scale, softcap, smoothing, z_loss, dtype, True, True,
        True, True, with_bias, chunk, backend,
    )  # fmt: skip
    z = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) * scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    valid = labels != -100
    for name, actual, oracle, reference_grad in zip(("total", "dX", "dW", "db"), got, want, same, strict=False):
        rounded = oracle * z.logsumexp(1).abs().max() if dtype == torch.float32 or name == "total" else None
        assert_within_reference_error(name, actual, oracle, reference_grad, rounded)
    lse, nll, entropy, predicted = got[5], got[4], got[6], got[7]
    z32 = z.float()
    assert_within_reference_error("lse", lse, z.logsumexp(1) * valid, z32.logsumexp(1) * valid)
    want_nll = torch.nn.functional.cross_entropy(z, labels, reduction="none")
    assert_within_reference_error("nll", nll, want_nll, want_nll.float(), z.amax(1))
    p = z.softmax(1)
    want_entropy = -(p * z.log_softmax(1)).sum(1) * valid
    assert_within_reference_error("entropy", entropy, want_entropy, want_entropy.float(), z.amax(1))
    top = z.gather(1, predicted.clamp(min=0)[:, None])[:, 0]
    assert (predicted[~valid] == -100).all() and (z.amax(1) - top)[valid].max() <= 1e-5 * z.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_forward_is_the_same_every_time(backend, device):
    args = inputs(140, 64, 257, torch.float32, device)
    runs = [
        ops.linear_ce(
            *args, -100, 1.0, 0.0, 0.0, 0.0, torch.float32, True, True, 0.0, 0.0, False, 1 << 14, backend, "torch"
        )
        for _ in range(5)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_strides_and_mixed_types(backend, device):
    hidden, weight, bias, labels, _ = inputs(33, 24, 131, torch.float32, device)
    plain = (hidden, weight, bias, labels, None, -100, 1.0, 0.0, 0.0, 0.0)
    want = ops.linear_ce(*plain, torch.float32, False, False, 0.0, 0.0, False, 1 << 14, "torch", "torch")
    turned = (hidden.T.contiguous().T, torch.cat([weight, weight], 1)[:, :24], *plain[2:])
    got = ops.linear_ce(*turned, torch.float32, False, False, 0.0, 0.0, False, 1 << 14, backend, "torch")
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    mixed = (hidden.half(), weight, bias, labels, *plain[4:])
    got = ops.linear_ce(*mixed, torch.float32, False, False, 0.0, 0.0, False, 1 << 14, backend, "torch")
    want = ops.linear_ce(
        hidden.half().float(), *plain[1:], torch.float32, False, False, 0.0, 0.0, False, 1 << 14, "torch", "torch"
    )
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)


def test_cce_through_the_triton_kernels(monkeypatch):
    """The seam as a user reaches it: an option of the strategy, values and gradients."""
    from loss_plugins import linear_cross_entropy
    from loss_plugins.device import DeviceProfile

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not DeviceProfile.probe(device).can_triton:
        pytest.skip("Triton can neither launch nor interpret here")
    hidden, weight, _, labels, _ = inputs(33, 24, 131, torch.float32, device)
    hidden.requires_grad_()
    weight.requires_grad_()
    ops.forget_launches()
    loss = linear_cross_entropy(hidden, weight, labels, strategy="cce", options={"kernels": "triton"})
    loss.backward()
    assert "triton.linear_ce_forward" in ops.launched()
    want = reference.linear_cross_entropy(hidden.detach(), weight.detach().requires_grad_(), labels)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    same = torch.nn.functional.cross_entropy(hidden.detach() @ weight.T, labels)
    (reference_grad,) = torch.autograd.grad(same, weight)
    torch.testing.assert_close(weight.grad, reference_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_waits_for_the_device():
    from loss_plugins import linear_cross_entropy
    from loss_plugins.strategies import STRATEGIES

    hidden, weight, _, labels, _ = inputs(300, 64, 5000, torch.bfloat16, "cuda")
    hidden.requires_grad_()
    weight.requires_grad_()
    for strategy in STRATEGIES.builtin():
        linear_cross_entropy(hidden, weight, labels, strategy=strategy).backward()  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            linear_cross_entropy(hidden, weight, labels, strategy=strategy, num_items_in_batch=100).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_bad_label_on_a_device_is_nan():
    from loss_plugins import linear_cross_entropy
    from loss_plugins.strategies import STRATEGIES

    hidden, weight, _, labels, _ = inputs(30, 64, 500, torch.bfloat16, "cuda")
    for strategy in STRATEGIES.builtin():
        for bad in (500, -1, 2**31 + 3, 2**32 + 5):
            y = labels.clone()
            y[0] = bad
            assert torch.isnan(linear_cross_entropy(hidden, weight, y, strategy=strategy))
            rows = linear_cross_entropy(hidden, weight, y, strategy=strategy, reduction="none")
            assert torch.isnan(rows[0]) and torch.isfinite(rows[1:]).all()
