"""The cross-entropy of logits that exist, in every backend, against the oracle on a head that is the identity.

Shapes: 301 columns are several blocks and no multiple of anything, 304 are a multiple of 16 (whole vectors), 5 are less
than a block; one row is cut in strips by the backward.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loss_plugins.kernels import ops, reference
from loss_plugins.testing import assert_within_reference_error

BACKENDS = [name for name in ops.backends() if name != "ascend"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(2, 5, 301), (1, 7, 304), (1, 1, 600), (3, 2, 5)]


def inputs(shape, dtype, device, class_weight=False, seed=0, spread=3.0):
    g = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(shape, generator=g)).to(device, dtype)
    labels = torch.randint(0, shape[2], (shape[0] * shape[1],), generator=g)
    labels[1::3] = -100
    return logits, labels.to(device), (torch.rand(shape[2], generator=g) + 0.5).to(device) if class_weight else None


# scale, softcap, label smoothing, z-loss, class weights
SETTINGS = {
    "plain": (1.0, 0.0, 0.0, 0.0, False),
    "scale": (-0.5, 0.0, 0.0, 0.0, False),
    "softcap": (1.0, 5.0, 0.0, 0.0, False),
    "smoothing": (1.0, 0.0, 0.2, 0.0, False),
    "class weights": (1.0, 0.0, 0.0, 0.0, True),
    "z-loss": (1.0, 0.0, 0.0, 1e-2, False),
    "all": (0.5, 5.0, 0.2, 1e-2, True),
}


def transformed(logits, dtype, scale, softcap):
    z = logits.flatten(0, 1).to(dtype) * scale
    return softcap * torch.tanh(z / softcap) if softcap else z


def plain(logits, labels, class_weight, scale, softcap, smoothing, z_loss):
    """What torch does with logits of this type."""
    z = transformed(logits, torch.float32, scale, softcap)
    loss = torch.nn.functional.cross_entropy(z, labels, class_weight, reduction="none", label_smoothing=smoothing)
    return loss + z_loss * torch.where(labels != -100, z.logsumexp(1), 0.0).square()


def exact(logits, labels, class_weight, scale, softcap, smoothing, z_loss):
    head = torch.eye(logits.shape[2], dtype=torch.float64, device=logits.device)
    return reference.linear_cross_entropy(
        logits.flatten(0, 1), head, labels, logit_scale=scale, softcap=softcap, label_smoothing=smoothing,
        z_loss=z_loss, class_weight=class_weight, reduction="none",
    )  # fmt: skip


def forward(logits, labels, class_weight=None, scale=1.0, softcap=0.0, smoothing=0.0, z_loss=0.0, backend="torch"):
    """(loss, nll, maximum, log of the sum, entropy, predicted)."""
    return ops.cross_entropy(
        logits, labels, class_weight, -100, scale, softcap, smoothing, z_loss, True, True, False, backend
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extras", [False, True])
def test_the_operators_pass_opcheck(device, extras):
    logits, labels, class_weight = inputs((2, 3, 33), torch.float32, device, extras)
    numbers = (-100, 0.5, 3.0 * extras, 0.1 * extras, 1e-3)
    leaf = logits.clone().requires_grad_()
    torch.library.opcheck(ops.cross_entropy, (leaf, labels, class_weight, *numbers, extras, extras, False, "torch"))
    _, _, max_, log_sum, _, _ = forward(logits, labels, class_weight, *numbers[1:])
    saved = (torch.rand(6, device=device), logits, labels, class_weight, max_, log_sum, *numbers, "torch")
    torch.library.opcheck(ops.cross_entropy_backward, saved)
    torch.library.opcheck(ops.cross_entropy_backward_inplace, saved)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_forward_equals_the_oracle(backend, device, dtype, shape, settings):
    *numbers, with_class_weight = settings
    logits, labels, class_weight = inputs(shape, dtype, device, with_class_weight)
    ops.forget_launches()
    loss, nll, max_, log_sum, entropy, predicted = forward(logits, labels, class_weight, *numbers, backend)
    assert ops.launched() == {f"{backend}.cross_entropy_forward"}
    valid = labels != -100
    assert_within_reference_error(
        "loss", loss, exact(logits, labels, class_weight, *numbers), plain(logits, labels, class_weight, *numbers)
    )
    z, z32 = (transformed(logits, kind, *numbers[:2]) for kind in (torch.float64, torch.float32))
    want = torch.where(valid, z.logsumexp(1), 0.0)
    assert_within_reference_error("lse", max_ + log_sum, want, torch.where(valid, z32.logsumexp(1), 0.0))
    assert_within_reference_error(
        "nll", nll, torch.nn.functional.cross_entropy(z, labels, reduction="none"),
        torch.nn.functional.cross_entropy(z32, labels, reduction="none"), z.amax(1),
    )  # fmt: skip
    assert_within_reference_error(
        "entropy", entropy, -(z.softmax(1) * z.log_softmax(1)).sum(1) * valid,
        -(z32.softmax(1) * z32.log_softmax(1)).sum(1) * valid, z.amax(1),
    )  # fmt: skip
    if not numbers[1]:  # a softcap may make equals of different logits
        assert torch.equal(predicted, torch.where(valid, z32.argmax(1), -100))
    top = z.gather(1, predicted.clamp(min=0)[:, None])[:, 0]
    assert (predicted[~valid] == -100).all() and (z.amax(1) - top)[valid].max() <= 1e-5 * z.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_backward_equals_the_oracle(backend, device, dtype, shape, settings):
    """Of its own memory and over the logits, to the bit; each row with another gradient that comes back."""
    *numbers, with_class_weight = settings
    logits, labels, class_weight = inputs(shape, dtype, device, with_class_weight)
    grad = torch.randn(len(labels), generator=torch.Generator().manual_seed(1)).to(device)

    def differentiate(loss_of, kind):
        leaf = logits.to(kind).requires_grad_()
        loss = loss_of(leaf, labels, class_weight, *numbers)
        return torch.autograd.grad((loss * grad.to(loss.dtype)).sum(), leaf)[0]

    want, same = differentiate(exact, torch.float64), differentiate(plain, dtype)
    _, _, max_, log_sum, _, _ = forward(logits, labels, class_weight, *numbers)
    given = (labels, class_weight, max_, log_sum, -100, *numbers, backend)
    got = ops.cross_entropy_backward(grad, logits, *given)
    assert got.dtype == dtype and got.shape == logits.shape
    assert_within_reference_error("gradient", got, want, same)
    assert (got.flatten(0, 1)[labels == -100] == 0).all()
    written = logits.clone()
    ops.cross_entropy_backward_inplace(grad, written, *given)
    assert torch.equal(written, got)


def laid(kind, logits):
    """The same logits under other strides."""
    batch, length, vocab = logits.shape
    room = torch.full((batch, length + 2, vocab + 3), torch.nan, dtype=logits.dtype, device=logits.device)
    layouts = {
        "padded rows": room[:, :length, :vocab],
        "turned": room.new_empty(vocab, batch, length).permute(1, 2, 0),
        "every second column": room.new_empty(batch, length, 2 * vocab)[..., ::2],
        "positions first": room.new_empty(length, batch, vocab).transpose(0, 1),
        "not on 16 bytes": room.new_empty(batch * length * vocab + 1)[1:].view(batch, length, vocab),
    }
    return layouts[kind].copy_(logits)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [301, 304])
@pytest.mark.parametrize("kind", ["padded rows", "turned", "every second column", "positions first", "not on 16 bytes"])
def test_any_strides(backend, device, vocab, kind):
    logits, labels, _ = inputs((2, 4, vocab), torch.bfloat16, device)
    strided = laid(kind, logits)
    assert strided.stride() != logits.stride() or kind == "not on 16 bytes"
    want, got = forward(logits, labels, backend=backend), forward(strided, labels, backend=backend)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    given = (labels, None, want[2], want[3], -100, 1.0, 0.0, 0.0, 0.0, backend)
    grad = torch.rand(8, device=device)
    gradient = ops.cross_entropy_backward(grad, logits, *given)
    assert torch.equal(ops.cross_entropy_backward(grad, strided, *given), gradient)
    ops.cross_entropy_backward_inplace(grad, strided, *given)
    assert torch.equal(strided, gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_between_the_rows_is_left_alone(backend, device):
    logits, labels, _ = inputs((2, 4, 301), torch.float32, device)
    room = torch.full((2, 6, 310), 7.0, device=device)
    room[:, :4, :301] = logits
    _, _, max_, log_sum, _, _ = forward(logits, labels)
    given = (labels, None, max_, log_sum, -100, 1.0, 0.0, 0.0, 0.0, backend)
    ops.cross_entropy_backward_inplace(torch.rand(8, device=device), room[:, :4, :301], *given)
    assert (room[:, 4:] == 7).all() and (room[..., 301:] == 7).all() and not (room[:, :4, :301] == 7).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strides", [((1 << 30) + 8, 1), (1, (1 << 30) + 8)], ids=["rows", "columns"])
def test_offsets_beyond_32_bits(backend, strides):
    """Three rows, or three columns, a gibi of entries apart. Pages that nobody touches take no memory."""
    base = torch.from_numpy(np.zeros((1 << 31) + 1024, np.float16))
    logits = base.as_strided((1, 3, 3), (0, *strides))
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1.0, 0.0], [5.0, 7.0, 6.0]], dtype=torch.float16)
    logits[0] = values
    labels = torch.tensor([0, 1, 2])
    want, got = forward(values[None], labels), forward(logits, labels, backend=backend)
    torch.testing.assert_close(got[0], want[0])
    given = (labels, None, want[2], want[3], -100, 1.0, 0.0, 0.0, 0.0, backend)
    gradient = ops.cross_entropy_backward(torch.ones(3), values[None], *given)
    ops.cross_entropy_backward_inplace(torch.ones(3), logits, *given)
    assert torch.equal(logits, gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_large_common_offset_costs_no_accuracy(backend, device):
    """Added in float32 steps of 1/1024: probabilities from a rounded log-sum-exp would be a thousandth off."""
    logits, labels, _ = inputs((1, 6, 301), torch.float32, device)
    logits = (logits * 1024).round() / 1024
    moved = logits + 8192.0
    assert torch.equal(moved - 8192.0, logits)
    for a, b in zip(forward(moved, labels, backend=backend), forward(logits, labels, backend=backend), strict=True):
        if a.is_floating_point():
            a = torch.where(a > 8000, a - 8192.0, a)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    grad = torch.ones(6, device=device)

    def gradient(z):
        _, _, max_, log_sum, _, _ = forward(z, labels, backend=backend)
        return ops.cross_entropy_backward(grad, z, labels, None, max_, log_sum, -100, 1.0, 0.0, 0.0, 0.0, backend)

    torch.testing.assert_close(gradient(moved), gradient(logits), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_columns_that_are_masked_out(backend, device):
    """Whole blocks of -inf, before and behind the rest: they take no probability and no gradient."""
    logits, labels, _ = inputs((1, 6, 601), torch.float32, device)
    alive = slice(270, 310)
    labels = torch.where(labels == -100, labels, labels % 40)
    masked = torch.full_like(logits, -torch.inf)
    masked[..., alive] = logits[..., alive]
    want = forward(logits[..., alive], labels)
    got = forward(masked, torch.where(labels == -100, labels, labels + 270), backend=backend)
    for a, b in zip(got[:5], want[:5], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[5], torch.where(labels == -100, labels, want[5] + 270))
    given = (None, want[2], want[3], -100, 1.0, 0.0, 0.0, 0.0)
    grad = torch.ones(6, device=device)
    gradient = ops.cross_entropy_backward(
        grad, masked, torch.where(labels == -100, labels, labels + 270), *given, backend
    )
    expected = torch.zeros_like(masked)
    expected[..., alive] = ops.cross_entropy_backward(grad, logits[..., alive], labels, *given, "torch")
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_ignored_rows_are_not_read(backend, device):
    logits, labels, _ = inputs((1, 6, 301), torch.float32, device)
    want = forward(logits, labels)
    logits[0, labels == -100] = torch.nan
    got = forward(logits, labels, backend=backend)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    given = (labels, None, got[2], got[3], -100, 1.0, 0.0, 0.0, 0.0, backend)
    gradient = ops.cross_entropy_backward(torch.ones(6, device=device), logits, *given)
    assert torch.isfinite(gradient).all() and (gradient[0, labels == -100] == 0).all()
    ops.cross_entropy_backward_inplace(torch.ones(6, device=device), logits, *given)
    assert torch.equal(logits, gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_first_of_equals_is_predicted(backend, device):
    logits = torch.zeros(1, 4, 601, device=device)
    logits[0, 1, [37, 44, 260]] = 2.0  # of one lane, of two lanes, of two blocks
    logits[0, 2, [513, 600]] = 2.0
    predicted = forward(logits, torch.zeros(4, dtype=torch.int64, device=device), backend=backend)[5]
    assert predicted.tolist() == [0, 37, 513, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_narrow_labels_and_what_is_laid_out_otherwise(backend, device):
    """int32 labels; labels, class weights and gradients that are views with steps."""
    logits, labels, class_weight = inputs((1, 6, 301), torch.float32, device, True)
    numbers = (0.5, 0.0, 0.1, 0.0)
    want = forward(logits, labels, class_weight, *numbers)

    def stepped(t):
        return torch.stack([t, torch.zeros_like(t)], 1)[:, 0]

    for y in (labels.to(torch.int32), stepped(labels)):
        got = forward(logits, y, stepped(class_weight), *numbers, backend)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        grad = torch.rand(1, device=device).expand(6)
        rest = (want[2], want[3], -100, *numbers)
        gradient = ops.cross_entropy_backward(grad, logits, y, stepped(class_weight), *rest, backend)
        expected = ops.cross_entropy_backward(grad.clone(), logits, labels, class_weight, *rest, "torch")
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_every_time(backend, device):
    logits, labels, class_weight = inputs((2, 5, 601), torch.bfloat16, device, True)
    grad = torch.rand(10, device=device)

    def run():
        out = forward(logits, labels, class_weight, 1.0, 5.0, 0.1, 1e-3, backend)
        saved = (labels, class_weight, out[2], out[3], -100, 1.0, 5.0, 0.1, 1e-3, backend)
        return (*out, ops.cross_entropy_backward(grad, logits, *saved))

    first = run()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@pytest.mark.parametrize("rows_at_a_time", [1, 4])
def test_torch_takes_a_few_rows_at_a_time(monkeypatch, rows_at_a_time):
    from loss_plugins.kernels.torch import cross_entropy as module

    logits, labels, class_weight = inputs((2, 5, 301), torch.float32, "cpu", True)
    numbers = (0.5, 5.0, 0.1, 1e-3)
    want = forward(logits, labels, class_weight, *numbers)
    saved = (labels, class_weight, want[2], want[3], -100, *numbers, "torch")
    gradient = ops.cross_entropy_backward(torch.ones(10), logits, *saved)
    monkeypatch.setattr(module, "CHUNK_BYTES", rows_at_a_time * 301 * 4)
    assert len(list(module._chunks(logits))) == {1: 10, 4: 4}[rows_at_a_time]
    for a, b in zip(forward(logits, labels, class_weight, *numbers), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    got = ops.cross_entropy_backward(torch.ones(10), logits, *saved)
    torch.testing.assert_close(got, gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
def test_more_entries_than_32_bits_count():
    """8193 rows of 262144 are above 2 ** 31; the last row is what a wrapped offset would miss."""
    logits = torch.zeros(1, 8193, 262144, dtype=torch.bfloat16, device="cuda")
    labels = torch.full((8193,), -100, device="cuda")
    labels[0], labels[-1] = 5, 262143
    logits[0, -1] = torch.randn(262144, device="cuda")
    want = torch.nn.functional.cross_entropy(logits[0, -1:].double(), labels[-1:])
    loss, _, max_, log_sum, _, _ = forward(logits, labels, backend="triton")
    torch.testing.assert_close(loss[-1].double(), want, rtol=1e-5, atol=1e-5)
    expected = logits[0, -1].double().softmax(0)
    expected[-1] -= 1
    ops.cross_entropy_backward_inplace(
        torch.ones(8193, device="cuda"), logits, labels, None, max_, log_sum, -100, 1.0, 0.0, 0.0, 0.0, "triton"
    )
    torch.testing.assert_close(logits[0, -1].double(), expected, rtol=1e-2, atol=1e-6)
    assert (logits[0, 1:-1] == 0).all()


@pytest.mark.gpu
def test_nothing_of_the_logits_size_is_allocated():
    logits = torch.randn(1, 2048, 32000, device="cuda").bfloat16()
    labels = torch.randint(0, 32000, (2048,), device="cuda")
    for inplace in (False, True):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, _, max_, log_sum, _, _ = forward(logits, labels, backend="triton")
        backward = ops.cross_entropy_backward_inplace if inplace else ops.cross_entropy_backward
        kept = backward(loss, logits, labels, None, max_, log_sum, -100, 1.0, 0.0, 0.0, 0.0, "triton")
        extra = torch.cuda.max_memory_allocated() - before
        assert extra < (1 << 20) + (0 if inplace else logits.numel() * 2)
        del kept


@pytest.mark.gpu
def test_forward_and_backward_are_captured_in_a_graph():
    logits, labels, _ = inputs((2, 5, 3000), torch.bfloat16, "cuda")
    static = logits.clone()

    def run():
        static.copy_(logits)
        out = forward(static, labels, backend="triton")
        saved = (labels, None, out[2], out[3], -100, 1.0, 0.0, 0.0, 0.0, "triton")
        ops.cross_entropy_backward_inplace(torch.ones(10, device="cuda"), static, *saved)
        return out[0]

    want, gradient = run().clone(), static.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    static.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want) and torch.equal(static, gradient)
