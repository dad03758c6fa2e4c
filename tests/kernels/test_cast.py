"""A float32 head under autocast: the Triton kernels cast it a slice at a time."""

from __future__ import annotations

import pytest
import torch

from loss_plugins.device import DeviceProfile
from loss_plugins.kernels import ops, reference
from loss_plugins.testing import assert_within_reference_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(not DeviceProfile.probe(DEVICE).can_triton, reason="Triton cannot run on this device")


@pytest.mark.parametrize(
    ("columns", "vocab"),
    [(256, 601), (512, 601), (4096, 601), (256, 640)],
    ids=["three slices", "two slices", "one slice", "a last slice of whole tiles, but of fewer"],
)
@pytest.mark.parametrize("settings", [(1.0, 0.0, 0.0), (0.5, 5.0, 0.2)], ids=["plain", "all"])
def test_slices_of_a_cast_head(monkeypatch, columns, vocab, settings):
    """Labels, bias, class weights and predictions in every slice, and the last one smaller."""
    from loss_plugins.kernels.triton import linear_ce

    monkeypatch.setattr(linear_ce, "cast_columns", lambda width, dtype, blocks: columns)
    scale, softcap, smoothing = settings
    hidden = torch.randn(300, 64, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(vocab, 64, device=DEVICE).requires_grad_()
    bias, class_weight = torch.randn(vocab, device=DEVICE), torch.rand(vocab, device=DEVICE) + 0.5
    labels = torch.randint(0, vocab, (300,), device=DEVICE)
    labels[1::3] = -100
    loss, nll, lse, entropy, predicted, *_ = ops.linear_ce(
        hidden, weight, bias, labels, class_weight, -100, scale, softcap, smoothing, 0.0, torch.bfloat16, True, True, 0.0,
        0.0, False, 1 << 16, "triton", "triton",
    )  # fmt: skip
    d_hidden, d_weight = torch.autograd.grad(loss.sum() / 200, (hidden, weight))
    assert d_hidden.dtype == torch.bfloat16 and d_weight.dtype == torch.float32

    rounded = weight.detach().bfloat16().double().requires_grad_()
    wide = hidden.detach().double().requires_grad_()
    oracle = reference.linear_cross_entropy(
        wide, rounded, labels, bias, logit_scale=scale, softcap=softcap or None, label_smoothing=smoothing,
        class_weight=class_weight, reduction="none",
    )  # fmt: skip
    want_hidden, want_weight = torch.autograd.grad(oracle.sum() / 200, (wide, rounded))
    torch.testing.assert_close(loss.double(), oracle, rtol=1e-4, atol=1e-4)

    plain_hidden = hidden.detach().requires_grad_()
    plain_weight = weight.detach().bfloat16().requires_grad_()
    z = (torch.nn.functional.linear(plain_hidden, plain_weight).float() + bias) * scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    same = torch.nn.functional.cross_entropy(z, labels, class_weight, reduction="none", label_smoothing=smoothing)
    same_hidden, same_weight = torch.autograd.grad(same.sum() / 200, (plain_hidden, plain_weight))
    assert_within_reference_error("dX", d_hidden, want_hidden, same_hidden)
    assert_within_reference_error("dW", d_weight.bfloat16(), want_weight, same_weight)

    z = (wide @ rounded.T + bias) * scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    valid = labels != -100
    torch.testing.assert_close(lse.double(), z.logsumexp(1) * valid, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        entropy.double(), -(z.softmax(1) * z.log_softmax(1)).sum(1) * valid, rtol=1e-4, atol=1e-4
    )
    top = z.gather(1, predicted.clamp(min=0)[:, None])[:, 0]
    assert (predicted[~valid] == -100).all() and (z.amax(1) - top)[valid].max() < 1e-4
    assert nll[valid].min() > 0
