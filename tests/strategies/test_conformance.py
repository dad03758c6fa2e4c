"""Every strategy against the float64 oracle: values, gradients, edge cases, and the contract of autograd."""

from __future__ import annotations

import re
import threading

import pytest
import torch
import torch.nn.functional as F

from loss_plugins import linear_cross_entropy, linear_cross_entropy_stats, linear_log_probs
from loss_plugins.errors import LossPluginError
from loss_plugins.kernels import ops, reference
from loss_plugins.strategies import STRATEGIES
from loss_plugins.testing import assert_within_reference_error, relative_error

STRATEGY_NAMES = STRATEGIES.builtin()
# tiny workspaces, so that 40 rows and 131 columns really are several chunks and tiles
SMALL = {
    "naive": None,
    "chunked": {"workspace_mb": 0.004},
    "flce": {"workspace_mb": 0.004},
    "cce": {"workspace_mb": 0.002},
}


def case(rows=40, width=24, vocab=131, dtype=torch.float64, ignored=3, bias=False, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=g, dtype=torch.float64).to(dtype)
    weight = (spread * torch.randn(vocab, width, generator=g, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, vocab, (rows,), generator=g)
    if ignored:
        labels[::ignored] = -100
    tensors = {"hidden": hidden, "weight": weight}
    if bias:
        tensors["bias"] = torch.randn(vocab, generator=g, dtype=torch.float64).to(dtype)
    return tensors, labels, g


def gradients(function, tensors, labels, upstream=None, **kwargs):
    """(loss, gradients by name) of a function called with fresh leaves."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in tensors.items()}
    loss = function(leaves["hidden"], leaves["weight"], labels, bias=leaves.get("bias"), **kwargs)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype))
    return loss.detach(), {k: v.grad for k, v in leaves.items()}


def plain(hidden, weight, labels, bias=None, **kwargs):
    """Same type as given, all logits, plain torch: what a same-type error is measured on."""
    kwargs = {k: v for k, v in kwargs.items() if k not in ("strategy", "options")}
    return linear_cross_entropy(hidden, weight, labels, bias=bias, strategy="naive", **kwargs)


SETTINGS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "items": {"num_items_in_batch": 17},
    "scale and softcap": {"logit_scale": 0.7, "softcap": 3.0},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing and class weights": {"label_smoothing": 0.3, "class_weight": True, "softcap": 2.0},
    "class weights": {"class_weight": True},
    "token weights": {"token_weight": True},
    "both weights": {"class_weight": True, "token_weight": True, "z_loss": 1e-2},
    "z-loss": {"z_loss": 1e-2},
    "z-loss, none": {"z_loss": 1e-2, "reduction": "none", "label_smoothing": 0.2},
    "all": {"logit_scale": 1.3, "softcap": 4.0, "label_smoothing": 0.05, "z_loss": 1e-3, "class_weight": True,
            "token_weight": True, "num_items_in_batch": 5.5},
}  # fmt: skip


def filled(settings, g, rows, vocab, dtype):
    settings = dict(settings)
    if settings.get("class_weight"):
        settings["class_weight"] = (torch.rand(vocab, generator=g) + 0.5).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
    if settings.get("token_weight"):
        settings["token_weight"] = torch.rand(rows, generator=g)
        settings["token_weight"][1] = 0.0
    return settings


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_oracle(strategy, bias, settings, dtype):
    tensors, labels, g = case(dtype=dtype, bias=bias)
    settings = filled(settings, g, 40, 131, dtype)
    upstream = torch.rand(40, generator=g) if settings.get("reduction") == "none" else torch.tensor(0.37)
    expected, expected_grads = gradients(reference.linear_cross_entropy, tensors, labels, upstream, **settings)
    same, same_grads = gradients(plain, tensors, labels, upstream, **settings)
    loss, grads = gradients(
        linear_cross_entropy, tensors, labels, upstream, strategy=strategy, options=SMALL[strategy], **settings
    )
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name, grad in grads.items():
        assert grad.dtype == tensors[name].dtype
        if dtype == torch.float64:  # the oracle's own type: only the order of sums may differ
            assert relative_error(grad, expected_grads[name]) < 1e-12
        else:
            assert_within_reference_error(f"d {name}", grad, expected_grads[name], same_grads[name])
    if dtype == torch.float64:
        assert relative_error(loss, expected) < 1e-12
    else:
        assert_within_reference_error("loss", loss, expected, same)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("label_dtype", [torch.int64, torch.int32, torch.int16], ids=str)
def test_equals_torch_on_a_shifted_batch(strategy, reduction, shift, label_dtype):
    tensors, labels, _ = case(rows=24)
    hidden, labels = tensors["hidden"].view(2, 12, -1), labels.view(2, 12).to(label_dtype)
    logits = hidden @ tensors["weight"].T
    kept = labels[:, shift:].long()
    expected = F.cross_entropy(logits[:, : 12 - shift].flatten(0, 1), kept.flatten(), reduction=reduction)
    loss = linear_cross_entropy(
        hidden, tensors["weight"], labels, strategy=strategy, shift=shift, reduction=reduction, options=SMALL[strategy]
    )
    assert loss.shape == (kept.shape if reduction == "none" else ())
    torch.testing.assert_close(loss.flatten(), expected.flatten(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("form", [16, 16.0, torch.tensor(16), torch.tensor([16]), torch.tensor([[16.0]])], ids=str)
def test_every_form_of_the_item_count(strategy, form):
    tensors, labels, _ = case()
    expected = reference.linear_cross_entropy(tensors["hidden"], tensors["weight"], labels, num_items_in_batch=16)
    loss = linear_cross_entropy(
        tensors["hidden"],
        tensors["weight"],
        labels,
        strategy=strategy,
        num_items_in_batch=form,
        options=SMALL[strategy],
    )
    assert loss.shape == (form.shape if isinstance(form, torch.Tensor) else ())
    torch.testing.assert_close(loss.reshape(()), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_two_micro_batches_are_one_batch(strategy):
    """A mean of means would be another number: 1 label against 9."""
    tensors, labels, _ = case(rows=13, ignored=0)
    labels[:3] = -100
    weight = tensors["weight"].clone().requires_grad_()
    whole = reference.linear_cross_entropy(tensors["hidden"], weight, labels)
    (expected,) = torch.autograd.grad(whole, weight)
    parts = [
        linear_cross_entropy(tensors["hidden"][s], weight, labels[s], strategy=strategy, num_items_in_batch=10)
        for s in (slice(0, 4), slice(4, 13))
    ]
    (grad,) = torch.autograd.grad(sum(parts), weight)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize(
    ("settings", "value"),
    [({}, "nan"), ({"reduction": "sum"}, 0.0), ({"reduction": "none"}, 0.0), ({"num_items_in_batch": 5}, 0.0)],
)
def test_no_label_at_all(strategy, settings, value):
    tensors, labels, _ = case(bias=True)
    loss, grads = gradients(
        linear_cross_entropy,
        tensors,
        torch.full_like(labels, -100),
        strategy=strategy,
        options=SMALL[strategy],
        **settings,
    )
    assert torch.isnan(loss).all() if value == "nan" else (loss == value).all()
    for name, grad in grads.items():
        assert grad is not None and grad.shape == tensors[name].shape and (grad == 0).all()


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("place", [slice(0, 5), slice(-5, None), slice(17, 18)], ids=["first", "last", "middle"])
def test_labels_in_one_place_only(strategy, place):
    tensors, labels, _ = case(ignored=0)
    masked = torch.full_like(labels, -100)
    masked[place] = labels[place]
    expected, expected_grads = gradients(reference.linear_cross_entropy, tensors, masked)
    loss, grads = gradients(linear_cross_entropy, tensors, masked, strategy=strategy, options=SMALL[strategy])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads["weight"], expected_grads["weight"], rtol=1e-10, atol=1e-14)
    outside = torch.ones(40, dtype=torch.bool)
    outside[place] = False
    assert (grads["hidden"][outside] == 0).all() and (grads["hidden"][~outside] != 0).any(1).all()


@pytest.mark.parametrize("strategy", ["flce", "cce"])
@pytest.mark.parametrize("kernels", [name for name in ("torch", "triton") if name in ops.backends()])
def test_bias_and_class_weights_with_steps(strategy, kernels):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors, labels, _ = case(dtype=torch.float32)
    hidden, weight, labels = tensors["hidden"].to(device), tensors["weight"].to(device), labels.to(device)
    bias, class_weight = torch.randn(262, device=device)[::2], (torch.rand(262, device=device) + 0.5)[::2]
    settings = {"label_smoothing": 0.3, "strategy": strategy, "options": {"kernels": kernels}}
    assert not bias.is_contiguous() and not class_weight.is_contiguous()
    bias = bias.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, class_weight=class_weight, **settings)
    twin = bias.detach().contiguous().requires_grad_()
    want = linear_cross_entropy(hidden, weight, labels, bias=twin, class_weight=class_weight.contiguous(), **settings)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, bias)[0], torch.autograd.grad(want, twin)[0])


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("ignore_index", [0, -1, 130])
def test_any_ignore_index(strategy, ignore_index):
    tensors, labels, _ = case(ignored=0)
    labels[::4] = ignore_index
    expected, expected_grads = gradients(reference.linear_cross_entropy, tensors, labels, ignore_index=ignore_index)
    loss, grads = gradients(
        linear_cross_entropy, tensors, labels, strategy=strategy, ignore_index=ignore_index, options=SMALL[strategy]
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads["weight"], expected_grads["weight"], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("strategy", [*STRATEGY_NAMES, "auto"])
@pytest.mark.parametrize("bad", [131, 132, -1, -99, 2**31 + 3, 2**32 + 5])
def test_a_label_out_of_range_raises(strategy, bad):
    tensors, labels, _ = case()
    labels[4] = bad
    with pytest.raises(LossPluginError, match=rf"labels hold {bad}, which is neither in \[0, 131\)"):
        linear_cross_entropy(tensors["hidden"], tensors["weight"], labels, strategy=strategy)


@pytest.mark.parametrize("strategy", [*STRATEGY_NAMES, "auto"])
@pytest.mark.parametrize(("dtype", "ignore_index", "bad"), [(torch.uint8, -100, 156), (torch.int8, 1000, -24)])
def test_a_narrow_label_type_does_not_wrap_ignore_index(strategy, dtype, ignore_index, bad):
    """In 8 bits -100 is 156 and 1000 is -24: compared so, a bad label would pass for an ignored one."""
    tensors, _, _ = case(rows=2)
    labels = torch.tensor([bad, 1], dtype=dtype)
    with pytest.raises(LossPluginError, match=rf"labels hold {bad}, which is neither in \[0, 131\)"):
        linear_cross_entropy(tensors["hidden"], tensors["weight"], labels, strategy=strategy, ignore_index=ignore_index)


@pytest.mark.parametrize("strategy", [*STRATEGY_NAMES, "auto"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("frozen", [False, True])
def test_token_weights_can_be_trained(strategy, reduction, frozen):
    tensors, labels, _ = case()
    found = []
    for function, options in ((linear_cross_entropy, {"strategy": strategy}), (reference.linear_cross_entropy, {})):
        weight = torch.rand(labels.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        weight.requires_grad_()
        hidden = tensors["hidden"].detach().clone().requires_grad_(not frozen)
        head = tensors["weight"].detach().clone().requires_grad_(not frozen)
        loss = function(hidden, head, labels, token_weight=weight, reduction=reduction, **options)
        loss.sum().backward()
        found.append((weight.grad, hidden.grad, head.grad))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("strategy", ["chunked", "flce", "cce"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_what_is_computed_inside(strategy, dtype):
    tensors, labels, _ = case(dtype=dtype, bias=True)
    settings = {"strategy": strategy, "options": SMALL[strategy], "label_smoothing": 0.1}
    loss, grads = gradients(linear_cross_entropy, tensors, labels, **settings)
    with torch.autocast("cpu", dtype):
        cast_loss, cast_grads = gradients(linear_cross_entropy, tensors, labels, **settings)
    assert torch.equal(loss, cast_loss)
    torch.testing.assert_close(cast_grads, grads, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("head", [torch.float16, torch.float32])
@pytest.mark.parametrize("items", [None, 1e6])
def test_a_scaled_float16_loss_does_not_lose_its_gradients(strategy, head, items):
    """Over a million tokens a gradient is below float16's smallest number until the loss scaler's factor is on it."""
    tensors, labels, _ = case(rows=160, dtype=torch.float16, bias=True, spread=0.1)
    tensors["weight"] = tensors["weight"].to(head)
    upstream = torch.tensor(65536.0)
    _, expected = gradients(reference.linear_cross_entropy, tensors, labels, upstream, num_items_in_batch=items)
    with torch.autocast("cpu", torch.float16, enabled=head == torch.float32):
        _, grads = gradients(
            linear_cross_entropy, tensors, labels, upstream, strategy=strategy, num_items_in_batch=items
        )
    for name, grad in grads.items():
        assert relative_error(grad, expected[name]) < 1e-3, name


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_weight_of_nan_on_an_ignored_token_counts_nothing(strategy):
    tensors, labels, _ = case()
    weight = torch.where(labels == -100, torch.nan, 1.0)
    expected = linear_cross_entropy(tensors["hidden"], tensors["weight"], labels, strategy=strategy)
    loss = linear_cross_entropy(tensors["hidden"], tensors["weight"], labels, strategy=strategy, token_weight=weight)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("strategy", [*STRATEGY_NAMES, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_the_meta_device_shapes_are_known(strategy, dtype):
    hidden, weight = (torch.empty(6, 8, device="meta", dtype=dtype, requires_grad=True) for _ in range(2))
    labels = torch.empty(6, dtype=torch.int64, device="meta")
    loss = linear_cross_entropy(hidden, weight, labels, strategy=strategy)
    loss.backward()
    assert loss.shape == () and hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33])
@pytest.mark.parametrize("workspace", [1e-6, 0.004, 64])
def test_any_plan_gives_the_same(strategy, rows, workspace):
    """One row, fewer rows than a chunk, a chunk and one more; a workspace below one row's logits."""
    tensors, labels, _ = case(rows=rows, ignored=0)
    options = None if strategy == "naive" else {"workspace_mb": workspace}
    expected, expected_grads = gradients(reference.linear_cross_entropy, tensors, labels)
    loss, grads = gradients(linear_cross_entropy, tensors, labels, strategy=strategy, options=options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads["weight"], expected_grads["weight"], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1009])
def test_any_vocabulary(strategy, vocab):
    tensors, labels, _ = case(vocab=vocab)
    expected, expected_grads = gradients(reference.linear_cross_entropy, tensors, labels)
    loss, grads = gradients(linear_cross_entropy, tensors, labels, strategy=strategy, options=SMALL[strategy])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grads["weight"], expected_grads["weight"], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_any_strides(strategy):
    tensors, labels, g = case(rows=24)
    wide = torch.randn(8, 3, 24, generator=g, dtype=torch.float64)
    layouts = {
        "transposed": wide.transpose(0, 1),
        "every second": torch.randn(3, 16, 24, generator=g, dtype=torch.float64)[:, ::2],
        "padded": torch.randn(3, 8, 40, generator=g, dtype=torch.float64)[..., :24],
    }
    heads = {
        "column major": tensors["weight"].T.contiguous().T,
        "padded rows": torch.cat([tensors["weight"], tensors["weight"]])[:131],
        "padded columns": torch.cat([tensors["weight"], tensors["weight"]], 1)[:, :24],
    }
    labels = labels.repeat_interleave(2)[::2].view(3, 8)
    for hidden in layouts.values():
        for weight in heads.values():
            got, got_grads = gradients_of(linear_cross_entropy, hidden, weight, labels, strategy=strategy)
            want, want_grads = gradients_of(
                linear_cross_entropy, hidden.contiguous(), weight.contiguous(), labels, strategy=strategy
            )
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
            for a, b in zip(got_grads, want_grads, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def gradients_of(function, hidden, weight, labels, **kwargs):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = function(hidden, weight, labels, **kwargs)
    return loss.detach(), torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("offset", [-500.0, -1e4, 1e4])
def test_a_common_offset_of_all_logits_changes_nothing(strategy, offset):
    tensors, labels, _ = case(dtype=torch.float32)
    tensors["bias"] = torch.full((131,), offset)
    expected = reference.linear_cross_entropy(tensors["hidden"], tensors["weight"], labels)
    loss, grads = gradients(linear_cross_entropy, tensors, labels, strategy=strategy, options=SMALL[strategy])
    # float32 spaces numbers near 1e4 by 1e-3, and so the logits themselves
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-3 if abs(offset) > 1e3 else 1e-4)
    assert all(torch.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_forbidden_class(strategy):
    """A bias of -inf masks a class out, in value and gradients, also when a whole tile is masked."""
    tensors, labels, _ = case(ignored=0)
    labels = labels % 60 + 60
    tensors["bias"] = torch.zeros(131, dtype=torch.float64)
    tensors["bias"][:50] = -torch.inf
    out = linear_cross_entropy_stats(
        tensors["hidden"],
        tensors["weight"],
        labels,
        bias=tensors["bias"],
        strategy=strategy,
        options=SMALL[strategy],
        fields=("entropy", "nll"),
    )
    seen = reference.linear_cross_entropy(tensors["hidden"], tensors["weight"][50:], labels - 50, reduction="none")
    torch.testing.assert_close(out.nll, seen, rtol=1e-10, atol=1e-12)
    assert torch.isfinite(out.entropy).all()


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("factor", [0.0, 1.0, 0.25, 7.5, 65536.0])
def test_any_incoming_gradient(strategy, factor):
    tensors, labels, _ = case(bias=True)
    _, expected = gradients(reference.linear_cross_entropy, tensors, labels)
    _, grads = gradients(
        linear_cross_entropy, tensors, labels, torch.tensor(factor), strategy=strategy, options=SMALL[strategy]
    )
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name] * factor, rtol=1e-10, atol=1e-13 * factor)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", ["weight", "hidden"])
@pytest.mark.parametrize("ignored", [0, 3])
def test_writing_in_place_before_the_backward_is_never_silently_wrong(strategy, dtype, what, ignored):
    """Refused, or without effect where the strategy works on a copy."""
    tensors, labels, _ = case(dtype=dtype, ignored=ignored)
    settings = {"strategy": strategy, "options": SMALL[strategy], "reduction": "none"}
    _, expected = gradients(linear_cross_entropy, tensors, labels, **settings)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    loss = linear_cross_entropy(leaves["hidden"], leaves["weight"], labels, **settings)
    with torch.no_grad():
        leaves[what].mul_(2)
    refused = ""
    try:
        loss.sum().backward()
    except RuntimeError as error:
        refused = str(error)
    if refused:
        assert re.search("in.?place", refused)
        return
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, expected[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_retained_graph_gives_the_same_twice(strategy):
    tensors, labels, _ = case()
    hidden, weight = tensors["hidden"].requires_grad_(), tensors["weight"].requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, strategy=strategy, options=SMALL[strategy])
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [g.clone() for g in first]
    third = torch.autograd.grad(loss, (hidden, weight), torch.tensor(3.0), retain_graph=True)
    only = torch.autograd.grad(loss, weight)
    for before, now, tripled in zip(kept, first, third, strict=True):
        assert torch.equal(before, now)
        assert relative_error(tripled, 3 * before) < 1e-14
    assert relative_error(only[0], kept[1]) < 1e-14


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize(
    "then", [torch.sum, torch.mean, lambda x: (x * torch.arange(40.0)).sum()], ids=["sum", "mean", "weighted"]
)
def test_per_token_losses_take_any_gradient(strategy, then):
    """An expanded gradient of stride 0, and weights whose first is 0 while the first label is ignored."""
    tensors, labels, _ = case()
    hidden, weight = tensors["hidden"].requires_grad_(), tensors["weight"].requires_grad_()
    expected = torch.autograd.grad(
        then(reference.linear_cross_entropy(hidden, weight, labels, reduction="none")), (hidden, weight)
    )
    loss = linear_cross_entropy(hidden, weight, labels, strategy=strategy, reduction="none", options=SMALL[strategy])
    for grad, want in zip(torch.autograd.grad(then(loss), (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_second_derivatives_are_right_or_refused(strategy):
    tensors, labels, _ = case(rows=6)

    def penalty(function, **kwargs):
        hidden, weight = tensors["hidden"].clone().requires_grad_(), tensors["weight"].clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(hidden, weight, labels, **kwargs), hidden, create_graph=True)
        grad.square().sum().backward()
        return weight.grad

    expected = penalty(reference.linear_cross_entropy)
    try:
        got = penalty(linear_cross_entropy, strategy=strategy)
    except RuntimeError:
        assert strategy in ("flce", "cce")
    else:
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_only_what_is_needed_is_computed(strategy, frozen):
    tensors, labels, _ = case(bias=True)
    leaves = {k: v.clone().requires_grad_(k != frozen) for k, v in tensors.items()}
    loss = linear_cross_entropy(
        leaves["hidden"], leaves["weight"], labels, bias=leaves["bias"], strategy=strategy, options=SMALL[strategy]
    )
    loss.backward()
    _, expected = gradients(reference.linear_cross_entropy, tensors, labels)
    for name, leaf in leaves.items():
        if name == frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, expected[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(strategy, mode):
    tensors, labels, _ = case()
    weight = tensors["weight"].requires_grad_()
    with mode():
        loss = linear_cross_entropy(tensors["hidden"], weight, labels, strategy=strategy, options=SMALL[strategy])
    assert not loss.requires_grad
    torch.testing.assert_close(
        loss, reference.linear_cross_entropy(tensors["hidden"], weight, labels).detach(), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_inputs_that_are_views_of_other_things(strategy):
    flat = torch.randn(5 + 131 * 24, dtype=torch.float64, requires_grad=True)
    raw = torch.randn(80, 24, dtype=torch.float64, requires_grad=True)
    _, labels, _ = case()

    def run(function, **kwargs):
        weight = flat.narrow(0, 5, 131 * 24).view(131, 24)
        hidden = torch.chunk(raw.tanh(), 2)[0]
        return torch.autograd.grad(function(hidden, weight, labels, **kwargs), (flat, raw))

    for got, want in zip(
        run(linear_cross_entropy, strategy=strategy, options=SMALL[strategy]),
        run(reference.linear_cross_entropy),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_mixed_types(strategy, dtypes, autocast):
    tensors, labels, _ = case(dtype=torch.float32, bias=True)
    hidden = tensors["hidden"].to(dtypes[0]).requires_grad_()
    weight = tensors["weight"].to(dtypes[1]).requires_grad_()
    bias = tensors["bias"].requires_grad_()
    expected = reference.linear_cross_entropy(hidden, weight, labels, bias=bias)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, strategy=strategy, options=SMALL[strategy])
    loss.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2 if autocast else 1e-5, atol=0)
    assert loss.dtype == torch.float32
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype


@pytest.mark.parametrize("strategy", ["chunked", "flce", "cce"])
@pytest.mark.parametrize("scale", [1.0, 4.0, 16.0])
def test_half_logits_are_never_rounded(strategy, scale):
    """With logits rounded to bfloat16 these errors are 1e-3 to 1.5e-2 before the output's own rounding."""
    tensors, labels, _ = case(rows=512, width=64, vocab=257, dtype=torch.bfloat16, ignored=0)
    tensors["weight"] = (tensors["weight"].float() * scale / 8).bfloat16()
    wide = {k: v.float() for k, v in tensors.items()}
    loss, grads = gradients(linear_cross_entropy, tensors, labels, strategy=strategy, options={"workspace_mb": 0.05})
    loss_wide, grads_wide = gradients(
        linear_cross_entropy, wide, labels, strategy=strategy, options={"workspace_mb": 0.05}
    )
    torch.testing.assert_close(loss, loss_wide, rtol=1e-6, atol=1e-7)
    for name in grads:
        one_rounding = relative_error(grads_wide[name].bfloat16(), grads_wide[name])
        assert relative_error(grads[name], grads_wide[name]) <= 1.05 * one_rounding


@pytest.mark.parametrize("strategy", ["chunked", "flce", "cce"])
def test_the_head_gradient_is_summed_in_float32(strategy):
    """Summed in bfloat16 over 256 chunks it would be 1.9e-2 away; one rounding is 1.6e-3."""
    tensors, labels, _ = case(rows=1024, width=32, vocab=257, dtype=torch.bfloat16, ignored=0)
    _, expected_grads = gradients(reference.linear_cross_entropy, tensors, labels)
    _, grads = gradients(linear_cross_entropy, tensors, labels, strategy=strategy, options={"workspace_mb": 0.004})
    assert relative_error(grads["weight"], expected_grads["weight"]) <= 2.5e-3


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_statistics_equal_those_of_real_logits(strategy, dtype):
    tensors, labels, _ = case(dtype=dtype, rows=24)
    hidden, labels = tensors["hidden"].view(2, 12, -1), labels.view(2, 12)
    settings = {"logit_scale": 0.5, "softcap": 4.0, "shift": 1}
    fields = ("nll", "lse", "entropy", "accuracy", "predicted", "dropped")
    out = linear_cross_entropy_stats(
        hidden,
        tensors["weight"],
        labels,
        strategy=strategy,
        fields=fields,
        z_loss=1e-2,
        options=SMALL[strategy],
        **settings,
    )
    z = 4.0 * torch.tanh(0.5 * (hidden.double() @ tensors["weight"].double().T) / 4.0)[:, :-1]
    kept, valid = labels[:, 1:], labels[:, 1:] != -100
    p = z.softmax(-1)
    nll = -z.log_softmax(-1).gather(-1, kept.clamp(min=0)[..., None])[..., 0]
    expected = {
        "nll": nll * valid,
        "lse": z.logsumexp(-1) * valid,
        "entropy": -(p * p.log()).sum(-1) * valid,
        "dropped": torch.zeros(2, 11, dtype=torch.float64),
    }
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2 if strategy == "naive" else 1e-5
    for name, want in expected.items():
        got = getattr(out, name)
        assert got.shape == kept.shape and not got.requires_grad
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    if dtype == torch.float64:
        assert torch.equal(out.predicted, torch.where(valid, z.argmax(-1), -100))
        assert torch.equal(out.accuracy, (z.argmax(-1) == kept) & valid)
        z_part = 1e-2 * (expected["lse"].square() * valid).sum() / valid.sum()
        torch.testing.assert_close(out.z_loss, z_part, rtol=1e-12, atol=0)
        torch.testing.assert_close(out.loss - out.z_loss, expected["nll"].sum() / valid.sum(), rtol=1e-10, atol=0)


def test_fields_not_asked_for_are_none():
    tensors, labels, _ = case()
    out = linear_cross_entropy_stats(tensors["hidden"], tensors["weight"], labels)
    assert out.nll is not None and out.lse is not None and out.accuracy is not None
    assert out.entropy is None and out.predicted is None and out.dropped is None and out.z_loss is None


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_the_first_of_equal_logits_is_predicted(strategy):
    hidden, weight = torch.ones(8, 4), torch.zeros(300, 4)
    weight[[7, 150, 299]] = 1.0
    out = linear_cross_entropy_stats(
        hidden,
        weight,
        torch.full((8,), 7),
        fields=("predicted", "accuracy"),
        strategy=strategy,
        options=SMALL[strategy],
    )
    assert (out.predicted == 7).all() and out.accuracy.all()


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_log_probs(strategy):
    tensors, labels, _ = case()
    hidden = tensors["hidden"].requires_grad_()
    got = linear_log_probs(hidden, tensors["weight"], labels, strategy=strategy, options=SMALL[strategy])
    want = (hidden @ tensors["weight"].T).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    want = torch.where(labels == -100, 0.0, want)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (a,) = torch.autograd.grad(got.exp().sum(), hidden)
    (b,) = torch.autograd.grad(want.exp().sum(), hidden)
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_backward_from_another_thread(strategy):
    tensors, labels, _ = case()
    weight = tensors["weight"].requires_grad_()
    loss = linear_cross_entropy(tensors["hidden"], weight, labels, strategy=strategy, options=SMALL[strategy])
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert weight.grad is not None


@pytest.mark.parametrize("strategy", [*STRATEGY_NAMES, "auto"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_whole_with_a_dynamic_number_of_tokens(strategy, backend):
    torch._dynamo.reset()
    tensors, labels, _ = case(dtype=torch.float32)
    weight = tensors["weight"].requires_grad_()

    def loss_of(hidden, labels):
        return linear_cross_entropy(hidden, weight, labels, strategy=strategy, options=SMALL.get(strategy))

    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=backend)
    for rows in (40, 33, 17):
        hidden, y = tensors["hidden"][:rows], labels[:rows]
        loss, expected = compiled(hidden, y), loss_of(hidden, y)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            torch.autograd.grad(loss, weight)[0], torch.autograd.grad(expected, weight)[0], rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_compiled_loss_never_trusts_a_bad_label(strategy):
    torch._dynamo.reset()
    tensors, labels, _ = case(dtype=torch.float32)
    labels[4] = 131
    compiled = torch.compile(
        lambda h, w, y: linear_cross_entropy(h, w, y, strategy=strategy), fullgraph=True, backend="aot_eager"
    )
    assert torch.isnan(compiled(tensors["hidden"], tensors["weight"], labels))
