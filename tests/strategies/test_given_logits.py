"""`cross_entropy` on logits that exist: values, gradients, edge cases, and when the gradient may lie over the logits."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from loss_plugins import cross_entropy, cross_entropy_stats, linear_cross_entropy_stats
from loss_plugins.diagnostics.memory import PeakMeter
from loss_plugins.errors import ConfigError, UnsupportedError
from loss_plugins.kernels import ops, reference
from loss_plugins.testing import assert_within_reference_error, relative_error

KERNELS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif("triton" not in ops.backends(), reason="no Triton")),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, VOCAB = 10, 131


def case(dtype=torch.float32, shape=(ROWS,), vocab=VOCAB, ignored=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, vocab, generator=g, dtype=torch.float64)
    labels = torch.randint(0, vocab, shape, generator=g)
    if ignored:
        labels.view(-1)[::ignored] = -100
    return logits.to(DEVICE, dtype), labels.to(DEVICE), g


def exact(logits, labels, **arguments):
    """The oracle with the identity for a head; ``logits`` (N, V)."""
    head = torch.eye(logits.shape[-1], dtype=torch.float64, device=logits.device)
    return reference.linear_cross_entropy(logits, head, labels, **arguments)


def plain(logits, labels, logit_scale=1.0, softcap=None, z_loss=0.0, label_smoothing=0.0, class_weight=None,
          token_weight=None, reduction="mean", num_items_in_batch=None):  # fmt: skip
    """What torch gives for logits of this type."""
    z = logits.float() * logit_scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    loss = F.cross_entropy(z, labels, class_weight, reduction="none", label_smoothing=label_smoothing)
    valid = labels != -100
    loss = loss + z_loss * torch.where(valid, z.logsumexp(1), 0.0).square()
    each = valid.float() if token_weight is None else token_weight * valid
    loss = loss * each
    if reduction != "mean":
        return loss if reduction == "none" else loss.sum()
    if num_items_in_batch is not None:
        return loss.sum() / num_items_in_batch
    return loss.sum() / (each if class_weight is None else each * class_weight[labels.clamp(min=0)]).sum()


def differentiated(function, logits, labels, upstream, **arguments):
    """(loss, gradient) of a function called with logits that are another operation's result."""
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf.view_as(leaf) if function is not cross_entropy else leaf * 1, labels, **arguments)
    loss.backward(upstream.to(loss.dtype).expand_as(loss))
    return loss.detach(), leaf.grad


def check(kernels, dtype, inplace, arguments, upstream=None, **shape):
    logits, labels, g = case(dtype, **shape)
    arguments = dict(arguments)
    if arguments.pop("class_weight", False):
        arguments["class_weight"] = (torch.rand(logits.shape[-1], generator=g) + 0.5).to(DEVICE)
    if arguments.pop("token_weight", False):
        arguments["token_weight"] = torch.rand(labels.shape, generator=g).to(DEVICE)
        arguments["token_weight"][1] = 0.0
    if upstream is None:
        per_token = arguments.get("reduction") == "none"
        upstream = torch.randn(labels.shape if per_token else (), generator=g).to(DEVICE)
    want, want_grad = differentiated(exact, logits.double(), labels, upstream, **arguments)
    same, same_grad = differentiated(plain, logits, labels, upstream, **arguments)
    loss, grad = differentiated(cross_entropy, logits, labels, upstream, kernels=kernels, inplace=inplace, **arguments)
    assert grad.dtype == dtype
    if dtype == torch.float64:
        assert loss.dtype == torch.float64 and relative_error(loss, want) < 1e-13
        assert relative_error(grad, want_grad) < 1e-13
    else:
        assert loss.dtype == torch.float32
        # a capped logit has the rounding of the cap, not its own: so have a row's loss and its probabilities
        cap = arguments.get("softcap") or 0.0
        tokens = len(labels) if arguments.get("reduction") == "sum" or arguments.get("num_items_in_batch") else 1
        assert_within_reference_error("loss", loss, want, same, want.abs() + 2 * cap * tokens)
        # what smoothing leaves of a gradient has the rounding of what was there
        _, terms = differentiated(exact, logits.double(), labels, upstream, **{**arguments, "label_smoothing": 0.0})
        # and the label's entry, the difference of a probability and 1, has the rounding of both
        at_label = torch.zeros_like(logits, dtype=torch.float64).scatter(
            -1, labels.long().clamp(min=0)[..., None], -60.0
        )
        _, ones = differentiated(exact, at_label, labels, upstream, **{**arguments, "label_smoothing": 0.0})
        terms = terms.abs() + ones.abs() * (at_label != 0)
        rounded = (want_grad.abs() + terms) * (1 + cap) if dtype == torch.float32 else None
        assert_within_reference_error("gradient", grad, want_grad, same_grad, rounded)


SETTINGS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "items": {"num_items_in_batch": 17},
    "scale and softcap": {"logit_scale": 0.7, "softcap": 3.0},
    "smoothing and class weights": {"label_smoothing": 0.3, "class_weight": True, "softcap": 2.0},
    "class weights": {"class_weight": True},
    "token weights": {"token_weight": True},
    "both weights": {"class_weight": True, "token_weight": True, "z_loss": 1e-2},
    "z-loss, none": {"z_loss": 1e-2, "reduction": "none", "label_smoothing": 0.2, "token_weight": True},
    "all": {"logit_scale": 1.3, "softcap": 4.0, "label_smoothing": 0.05, "z_loss": 1e-3, "class_weight": True,
            "token_weight": True, "num_items_in_batch": 5.5},
}  # fmt: skip


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("arguments", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_oracle(kernels, inplace, arguments, dtype):
    if (kernels, dtype) != ("triton", torch.float64):
        check(kernels, dtype, inplace, arguments)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kernels=st.sampled_from(["torch", "triton"]),
    inplace=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    rows=st.integers(1, 6),
    vocab=st.integers(2, 300),
    ignored=st.sampled_from([0, 2, 3]),
    seed=st.integers(0, 99),
    reduction=st.sampled_from(["mean", "items", "sum", "none"]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "logit_scale": st.sampled_from([-1.0, 0.5, 2.0]),
            "softcap": st.sampled_from([2.0, 30.0]),
            "label_smoothing": st.sampled_from([0.1, 1.0]),
            "z_loss": st.sampled_from([1e-4, 0.1]),
            "class_weight": st.just(True),
            "token_weight": st.just(True),
        },
    ),
)
def test_any_combination_equals_the_oracle(kernels, inplace, dtype, rows, vocab, ignored, seed, reduction, options):
    if kernels not in ops.backends():
        return
    # the first row is ignored where any is, and the second has no weight: three leave one that counts
    rows += 3
    how = {"reduction": "mean", "num_items_in_batch": 7} if reduction == "items" else {"reduction": reduction}
    check(kernels, dtype, inplace, {**options, **how}, shape=(rows,), vocab=vocab, ignored=ignored, seed=seed)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("label_dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_equals_torch_on_a_shifted_batch(kernels, inplace, reduction, shift, label_dtype):
    logits, labels, _ = case(shape=(2, 5), ignored=0 if label_dtype == torch.uint8 else 3)
    weight = torch.rand(2, 5, device=DEVICE)
    want_leaf, leaf = logits.double().requires_grad_(), logits.clone().requires_grad_()
    kept = labels[:, shift:].long()
    want = F.cross_entropy(want_leaf[:, : 5 - shift].flatten(0, 1), kept.flatten(), reduction="none").view(kept.shape)
    want = want * weight[:, shift:]
    if reduction != "none":
        count = (weight[:, shift:] * (kept != -100)).sum().double()
        want = want.sum() / (count if reduction == "mean" else 1.0)
    want.sum().backward()
    loss = cross_entropy(
        leaf * 1, labels.to(label_dtype), shift=shift, reduction=reduction, token_weight=weight, kernels=kernels,
        inplace=inplace,
    )  # fmt: skip
    loss.sum().backward()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), want_leaf.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fields_are_those_of_a_linear_head(kernels, shift, reduction):
    logits, labels, _ = case(shape=(2, 5))
    fields = ("nll", "lse", "entropy", "accuracy", "predicted", "dropped")
    labels[0, 1] = logits[0, 1 - shift].argmax()
    same = {"fields": fields, "shift": shift, "reduction": reduction, "z_loss": 1e-2, "softcap": 4.0}
    head = torch.eye(VOCAB, dtype=torch.float64, device=DEVICE)
    want = linear_cross_entropy_stats(logits.double(), head, labels, strategy="naive", **same)
    got = cross_entropy_stats(logits, labels, kernels=kernels, **same)
    assert want.accuracy.any()
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert a is not None, name
        b = b.to(a.dtype)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert cross_entropy_stats(logits, labels, fields=()).entropy is None


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("arguments", "value"),
    [({}, "nan"), ({"reduction": "sum"}, 0.0), ({"reduction": "none"}, 0.0), ({"num_items_in_batch": 5}, 0.0)],
)
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,), (2, 0)], ids=str)
def test_no_label_at_all(kernels, arguments, value, shape):
    logits, labels, _ = case(shape=shape, ignored=0)
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf * 1, torch.full_like(labels, -100), kernels=kernels, inplace=True, **arguments)
    assert torch.isnan(loss).all() if value == "nan" else (loss == value).all()
    loss.sum().backward()
    assert leaf.grad.shape == logits.shape and (leaf.grad == 0).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "cut",
    [
        lambda full: full[:, :-1],
        lambda full: full[..., :VOCAB],
        lambda full: full[:, 1:, 5 : VOCAB + 5],
        lambda full: full.transpose(0, 1),
        lambda full: full[:, None].transpose(0, 2)[..., ::2],
        lambda full: full[0, 0],
    ],
    ids=["positions", "columns", "both", "turned", "four axes, every second column", "one row"],
)
def test_views_of_larger_logits(kernels, inplace, cut):
    full, _, g = case(shape=(2, 4), vocab=VOCAB + 9)
    leaf = full.requires_grad_()
    oracle_leaf = full.detach().double().requires_grad_()
    oracle = cut(oracle_leaf)
    labels = torch.randint(0, oracle.shape[-1], oracle.shape[:-1], generator=g).to(DEVICE)
    want = F.cross_entropy(oracle.reshape(-1, oracle.shape[-1]), labels.reshape(-1))
    want.backward()
    loss = cross_entropy(cut(leaf * 1), labels, kernels=kernels, inplace=inplace)
    loss.backward()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), oracle_leaf.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernels", KERNELS)
def test_expanded_logits_are_read(kernels):
    logits, labels, _ = case()
    leaf = logits[:1].clone().requires_grad_()
    loss = cross_entropy(leaf.expand(ROWS, VOCAB), labels, kernels=kernels)
    loss.backward()
    oracle = logits[:1].double().requires_grad_()
    want = F.cross_entropy(oracle.expand(ROWS, VOCAB), labels)
    want.backward()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), oracle.grad, rtol=1e-4, atol=1e-6)


def test_weights_of_tokens_are_trained():
    logits, labels, _ = case(torch.float64)
    weight = torch.rand(ROWS, dtype=torch.float64, device=DEVICE).requires_grad_()
    twin = weight.detach().clone().requires_grad_()
    cross_entropy(logits, labels, token_weight=weight).backward()
    exact(logits, labels, token_weight=twin).backward()
    torch.testing.assert_close(weight.grad, twin.grad, rtol=1e-10, atol=1e-14)


def test_gradcheck():
    logits, labels, g = case(torch.float64, shape=(4,), vocab=7)
    class_weight = torch.rand(7, generator=g, dtype=torch.float64).to(DEVICE)

    def loss(z):
        return cross_entropy(
            z, labels, reduction="none", softcap=3.0, logit_scale=0.7, label_smoothing=0.1, z_loss=1e-2,
            class_weight=class_weight,
        )  # fmt: skip

    torch.autograd.gradcheck(loss, logits.requires_grad_())


# Autograd


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_retained_graph_gives_the_same_twice(kernels):
    logits, labels, _ = case()
    logits.requires_grad_()
    loss = cross_entropy(logits, labels, kernels=kernels)
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, logits, retain_graph=True)[0], first)
    tripled = torch.autograd.grad(loss, logits, torch.tensor(3.0, device=DEVICE))[0]
    torch.testing.assert_close(tripled, 3 * first, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("inplace", [False, True])
def test_logits_written_before_the_backward_are_noticed(kernels, inplace):
    logits, labels, _ = case()
    z = logits.requires_grad_() * 1
    loss = cross_entropy(z, labels, kernels=kernels, inplace=inplace)
    z.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_second_derivatives_are_refused(inplace):
    logits, labels, _ = case(torch.float64)
    loss = cross_entropy(logits.requires_grad_() * 1, labels, inplace=inplace)

    def penalty():
        (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
        grad.square().sum().backward()

    with pytest.raises(RuntimeError, match="create_graph=True" if inplace else "no autograd formula"):
        penalty()


def test_backward_from_another_thread():
    logits, labels, _ = case()
    logits.requires_grad_()
    loss = cross_entropy(logits * 1, labels, inplace=True)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    torch.testing.assert_close(logits.grad, torch.autograd.grad(F.cross_entropy(logits, labels), logits)[0])


@pytest.mark.parametrize("kernels", KERNELS)
def test_autocast_changes_nothing(kernels):
    logits, labels, _ = case()
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = cross_entropy(logits, labels, kernels=kernels, class_weight=torch.rand(VOCAB, device=DEVICE))
    assert loss.dtype == torch.float32
    with torch.autocast(DEVICE, torch.bfloat16):
        plain_loss = cross_entropy(logits, labels, kernels=kernels)
    assert torch.equal(plain_loss, cross_entropy(logits, labels, kernels=kernels))


def test_inference_mode():
    logits, labels, _ = case()
    want = cross_entropy(logits, labels)
    with torch.inference_mode():
        assert torch.equal(cross_entropy(logits * 1, labels, inplace=True), want)


# The gradient over the logits


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_gradient_lies_where_the_logits_were(kernels):
    logits, labels, _ = case()
    z = logits.requires_grad_() * 1
    before, seen = z.detach().clone(), []
    z.register_hook(lambda grad: seen.append((grad.data_ptr(), grad.clone())))
    loss = cross_entropy(z, labels, kernels=kernels, inplace=True)
    assert torch.equal(z, before)  # the forward only reads
    loss.backward()
    ((address, grad),) = seen
    assert address == z.data_ptr() and torch.equal(z.detach(), grad)
    apart = logits.detach().requires_grad_()
    cross_entropy(apart, labels, kernels=kernels).backward()
    assert torch.equal(logits.grad, apart.grad)


@pytest.mark.parametrize("shift", [0, 1])
def test_nothing_of_the_logits_size_is_allocated(monkeypatch, shift):
    """On a CPU; a chunk of rows is what the torch kernels take."""
    from loss_plugins.kernels.torch import cross_entropy as module

    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 14)
    logits = torch.randn(2, 64, 2000)
    labels = torch.randint(0, 2000, (2, 64))
    size = logits.numel() * 4
    for inplace, most in ((False, 1.3), (True, 0.3)):
        leaf = torch.zeros((), requires_grad=True)
        z = torch.add(logits, leaf)
        seen = []
        z.register_hook(seen.append)
        meter = PeakMeter("cpu")
        with meter:
            meter.mark()
            loss = cross_entropy(z, labels, kernels="torch", inplace=inplace, shift=shift)
            assert meter.read() < 0.3 * size
            torch.autograd.grad(loss, z)
        assert meter.read() < most * size
        assert len(seen) == 1


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_second_backward_over_written_logits_raises(kernels):
    logits, labels, _ = case()
    z = logits.requires_grad_() * 1
    loss = cross_entropy(z, labels, kernels=kernels, inplace=True)
    version = z._version
    loss.backward(retain_graph=True)
    assert z._version > version
    first = logits.grad.clone()
    with pytest.raises(RuntimeError, match=r"inplace=True.*written the gradient over the logits"):
        loss.backward()
    assert torch.equal(logits.grad, first)


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_operation_that_saved_the_logits_is_told(kernels):
    """The derivative of tanh is computed from its result, which is not there any more."""
    logits, labels, _ = case()
    loss = cross_entropy(torch.tanh(logits.requires_grad_()), labels, kernels=kernels, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert logits.grad is None


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("first_inplace", [False, True])
@pytest.mark.parametrize("second_inplace", [False, True])
@pytest.mark.parametrize("other", ["cross_entropy", "square", "sum"])
def test_two_losses_of_the_same_logits_are_right_or_refused(kernels, first_inplace, second_inplace, other):
    logits, labels, _ = case()

    def total(z, first, second):
        a = cross_entropy(z, labels, kernels=kernels, inplace=first)
        if other == "cross_entropy":
            b = cross_entropy(z, labels, kernels=kernels, inplace=second, reduction="sum", softcap=3.0)
        else:
            b = getattr(z, other)()
        c = cross_entropy(z, labels, kernels=kernels, inplace=second, z_loss=0.1)
        return a + b.sum() + c

    want_leaf = logits.clone().requires_grad_()
    total(want_leaf, False, False).backward()
    leaf = logits.clone().requires_grad_()
    refused = ""
    try:
        total(leaf * 1, first_inplace, second_inplace).backward()
    except RuntimeError as error:
        refused = str(error)
    if refused:
        assert "modified by an inplace operation" in refused
        assert first_inplace or second_inplace
        return
    torch.testing.assert_close(leaf.grad, want_leaf.grad, rtol=1e-5, atol=1e-6)
    # what runs last may write: nobody reads after it
    assert not second_inplace


REFUSED = {
    "leaf": (lambda z: z.detach().requires_grad_(), r"a leaf that requires a gradient"),
    "view of a leaf": (lambda z: z.detach().requires_grad_().view(5, 2, -1)[1:], r"or a view of one"),
    "expanded": (lambda z: (z[:1] * 1).expand_as(z), r"entries that share memory"),
    "overlapping": (lambda z: (z * 1).as_strided((ROWS, VOCAB), (VOCAB - 1, 1)), r"strides \(130, 1\)"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_logits_that_must_not_be_written(make, message):
    logits, labels, _ = case()
    z = make(logits.requires_grad_())
    labels = labels.view(5, 2)[1:] if z.dim() == 3 else labels
    with pytest.raises(ConfigError, match=message):
        cross_entropy(z, labels, inplace=True)
    with torch.no_grad():  # nothing will be written
        cross_entropy(z, labels, inplace=True)
    cross_entropy(z, labels)


def test_saved_tensor_hooks_hide_who_needs_the_logits():
    """A checkpoint would give tanh the overwritten result, and nobody would notice."""
    logits, labels, _ = case()
    logits.requires_grad_()

    def loss_of(x, inplace):
        return cross_entropy(torch.tanh(x), labels, inplace=inplace)

    with pytest.raises(UnsupportedError, match="saved-tensor hooks"):
        checkpoint(loss_of, logits, True, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(UnsupportedError, match="saved-tensor hooks"):
        loss_of(logits, True)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss_of(logits, True)
    checkpoint(loss_of, logits, False, use_reentrant=False).backward()
    want = torch.autograd.grad(F.cross_entropy(torch.tanh(logits), labels), logits)[0]
    torch.testing.assert_close(logits.grad, want)


BAD = {
    "logits of integers": ({"logits": torch.zeros(6, 17, dtype=torch.int64)}, r"logits must be a floating tensor of shape \[\.\.\., V\], got int64"),
    "logits no tensor": ({"logits": [1.0]}, r"logits must be a floating tensor.*got list"),
    "logits of no class": ({"logits": torch.zeros(6, 0)}, r"logits must be a floating tensor.*\(6, 0\)"),
    "logits of 8 bits": ({"logits": torch.zeros(6, 17).to(torch.float8_e4m3fn)}, r"got float8_e4m3fn"),
    "labels of another shape": ({"labels": torch.zeros(5, dtype=torch.int64)}, r"labels must have the shape of logits without its last axis, \(6,\), got \(5,\)"),
    "labels elsewhere": ({"labels": torch.zeros(6, dtype=torch.int64, device="meta")}, r"labels are on meta and logits on cpu"),
    "labels out of range": ({"labels": torch.full((6,), 17)}, r"labels hold 17, which is neither in \[0, 17\)"),
    "class weight of another size": ({"class_weight": torch.ones(8)}, r"class_weight must be a floating tensor of shape \[17\]"),
    "class weight elsewhere": ({"class_weight": torch.ones(17, device="meta")}, r"class_weight is on meta and logits on cpu"),
    "shift too large": ({"shift": 7}, r"shift=7 was asked for"),
    "kernels misspelt": ({"kernels": "tritn"}, r"Did you mean 'triton'"),
    "inplace no bool": ({"inplace": 1}, r"inplace must be true or false, got 1"),
    "reduction misspelt": ({"reduction": "maen"}, r"Did you mean 'mean'"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        cross_entropy(**{"logits": torch.randn(6, 17), "labels": torch.arange(6), **arguments})


def test_an_unknown_field():
    with pytest.raises(ConfigError, match=r"Unknown field 'entropie'"):
        cross_entropy_stats(torch.randn(6, 17), torch.arange(6), fields=("entropie",))


@pytest.mark.skipif("triton" not in ops.backends(), reason="no Triton")
def test_triton_asked_for_where_it_has_no_such_type():
    with pytest.raises(UnsupportedError, match=r"no float64.*kernels='auto'"):
        cross_entropy(torch.randn(6, 17, dtype=torch.float64), torch.arange(6), kernels="triton")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_whole_with_a_dynamic_number_of_tokens(backend, inplace):
    head = torch.randn(8, VOCAB, dtype=torch.float64, device=DEVICE)

    def loss_of(hidden, y):
        out = cross_entropy_stats(hidden @ head, y, fields=("entropy",), softcap=3.0, shift=1, inplace=inplace)
        return out.loss, out.entropy

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=backend)
    for length in (6, 9):
        hidden = torch.randn(2, length, 8, dtype=torch.float64, device=DEVICE).requires_grad_()
        y = torch.randint(0, VOCAB, (2, length), device=DEVICE)
        y[0, 2] = -100
        (loss, entropy), (want, want_entropy) = compiled(hidden, y), loss_of(hidden, y)
        torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
        torch.testing.assert_close(entropy, want_entropy, rtol=1e-12, atol=1e-12)
        (grad,), (want_grad,) = torch.autograd.grad(loss, hidden), torch.autograd.grad(want, hidden)
        torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("inplace", [False, True])
def test_no_step_waits_for_the_device(kernels, inplace):
    logits, labels, _ = case(torch.bfloat16, shape=(2, 50), vocab=5000)
    leaf = logits.requires_grad_()

    def step():
        out = cross_entropy_stats(
            leaf * 1, labels, fields=("entropy", "accuracy"), kernels=kernels, inplace=inplace, shift=1,
            num_items_in_batch=100, label_smoothing=0.1, z_loss=1e-4,
        )  # fmt: skip
        out.loss.backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_bad_label_on_a_device_is_nan():
    logits, labels, _ = case(torch.bfloat16, vocab=500)
    for bad in (500, -1, 2**31 + 3, 2**32 + 5):
        y = labels.clone()
        y[0] = bad
        assert torch.isnan(cross_entropy(logits, y))
        rows = cross_entropy(logits, y, reduction="none")
        assert torch.isnan(rows[0]) and torch.isfinite(rows[1:]).all()


@pytest.mark.gpu
def test_auto_takes_triton_on_a_gpu():
    logits, labels, _ = case(torch.bfloat16)
    ops.forget_launches()
    cross_entropy(logits.requires_grad_(), labels).backward()
    assert ops.launched() == {"triton.cross_entropy_forward", "triton.cross_entropy_backward"}
