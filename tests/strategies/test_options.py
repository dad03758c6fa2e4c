"""What each strategy's options do, which strategy "auto" takes, and what the plan says of itself."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from loss_plugins import linear_cross_entropy, linear_cross_entropy_stats
from loss_plugins.device import DeviceProfile
from loss_plugins.errors import ConfigError, UnsupportedError
from loss_plugins.kernels import ops, reference
from loss_plugins.strategies import (
    Problem,
    check_options,
    chosen_by_auto,
    forget_choices,
    projected_cross_entropy_stats,
    select,
)
from loss_plugins.strategies.cce import PRESETS

CPU = DeviceProfile("cpu", "cpu")
H200 = DeviceProfile("cuda", "NVIDIA H200", (9, 0), 139 << 30, has_triton=True)
A100 = DeviceProfile("cuda", "NVIDIA A100", (8, 0), 79 << 30, has_triton=True)
GIB = 1 << 30


def problem(rows=8192, hidden=2304, vocab=256_000, dtype=torch.bfloat16, **kwargs):
    return Problem(rows, hidden, vocab, dtype, **kwargs)


AUTO = {
    "little": (problem(64, 32, 1000), CPU, None, None, "naive"),
    "much, on a CPU": (problem(), CPU, None, None, "flce"),
    "much, on a GPU": (problem(), H200, 100 * GIB, None, "cce"),
    "much, where nothing may be left out": (problem(dense=True), H200, 100 * GIB, None, "flce"),
    "much, but few classes": (problem(vocab=32_000), H200, 100 * GIB, None, "flce"),
    "much, few tokens": (problem(1024, vocab=128_256), H200, 100 * GIB, None, "flce"),
    "much, few tokens of very many classes": (problem(256), H200, 100 * GIB, None, "flce"),
    "little, few tokens": (problem(256, vocab=65_536), H200, 100 * GIB, None, "naive"),
    "much, more tokens of very many classes": (problem(513), H200, 100 * GIB, None, "cce"),
    "as much as is little": (problem(1024, vocab=16_384), H200, 100 * GIB, None, "naive"),
    "more than that": (problem(1024, vocab=16_512), H200, 100 * GIB, None, "flce"),
    "much for few tokens": (problem(512, vocab=131_072), H200, 100 * GIB, None, "flce"),
    "much for another GPU": (problem(512, vocab=131_072), A100, 100 * GIB, None, "flce"),
    "much, in float32": (problem(dtype=torch.float32), H200, 100 * GIB, None, "flce"),
    "much, on a GPU without bulk copies": (problem(), A100, 100 * GIB, None, "flce"),
    "much, hardly any memory": (problem(), A100, 2 * GIB, None, "cce"),
    "no memory at all": (problem(), H200, 0, None, "chunked"),
    "no gradient": (problem(needs_hidden=False, needs_weight=False), H200, 100 * GIB, None, "cce"),
    "per token": (problem(reduced=False), H200, 100 * GIB, None, "cce"),
    "a head to be called": (problem(module=True), H200, 100 * GIB, None, "chunked"),
    "an option of one strategy": (problem(), H200, 100 * GIB, {"filter": "off"}, "cce"),
    "an option of one strategy, little": (problem(8, 8, 8), CPU, None, {"workspace_mb": 4}, "flce"),
}


@pytest.mark.parametrize(("what", "profile", "free", "options", "expected"), AUTO.values(), ids=AUTO.keys())
def test_auto_takes(what, profile, free, options, expected):
    assert select("auto", options, what, profile, free).strategy.name == expected


def test_auto_hands_the_options_on():
    for options, expected in (
        (None, ("cce", "auto")),
        ({"filter": "off", "preset": "cce_kahan"}, ("cce_kahan", "off")),
    ):
        plan = select("auto", options, problem(), H200, 2 * GIB)
        assert plan.strategy.name == "cce" and (plan.options.preset, plan.options.filter) == expected


def test_auto_says_once_what_it_took_and_why(caplog, monkeypatch):
    from loss_plugins.strategies import _select

    monkeypatch.setattr(_select, "_said", set())
    forget_choices()
    hidden, weight, labels = torch.randn(6, 8), torch.randn(17, 8), torch.arange(6)
    for rows in (6, 5, 4):
        linear_cross_entropy(hidden[:rows], weight, labels[:rows], options={"filter": "off"})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "auto chose cce (torch kernels)" in record.message
    assert "0 KiB of logits" in record.message and "not naive: it has no option 'filter'" in record.message
    assert chosen_by_auto() == ("cce",)


T4 = DeviceProfile("cuda", "Tesla T4", (7, 5), 15 << 30, shared_bytes=64 << 10, has_triton=True)


@pytest.mark.parametrize("strategy", ["auto", "flce", "cce"])
def test_a_gpu_that_triton_cannot_use_takes_torch_and_says_why(strategy):
    plan = select(strategy, None, problem(), T4, 100 * GIB)
    why = "no Triton kernels: Triton needs compute capability 8.0 (Ampere), and Tesla T4 has 7.5"
    assert plan.strategy.kernels(T4, plan.options) == "torch"
    assert why in plan.describe(T4)
    assert plan.strategy.kernels(H200, plan.options) == "triton" and "no Triton" not in plan.describe(H200)
    # nobody expects them on a CPU, nor of a strategy that has none
    assert "no Triton" not in plan.describe(CPU)
    assert "no Triton" not in select("chunked", None, problem(), T4).describe(T4)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_exact_without_a_filter(preset):
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(20, 8).double(), torch.randn(50, 8).double(), torch.randint(0, 50, (20,))
    for choice in ("auto", "off", False):
        loss = linear_cross_entropy(
            hidden, weight, labels, strategy="cce", options={"preset": preset, "filter": choice}
        )
        assert torch.allclose(loss, reference.linear_cross_entropy(hidden, weight, labels), rtol=1e-12)


@pytest.mark.parametrize("preset", ["cce", "cce_kahan_full_c", "cce_kahan_full_e"])
def test_a_filter_leaves_out_what_it_says(preset):
    """Columns of a tile in which no |p - onehot| reaches the value vanish from the filtered gradient, and only they."""
    torch.manual_seed(0)
    hidden = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    weight = (2 * torch.randn(300, 8, dtype=torch.float64)).requires_grad_()
    labels, below = torch.randint(0, 300, (16,)), 0.02
    out = linear_cross_entropy_stats(
        hidden, weight, labels, strategy="cce", options={"preset": preset, "filter": below}, fields=("dropped",)
    )
    d_hidden, d_weight = torch.autograd.grad(out.loss, (hidden, weight))

    p = (hidden @ weight.T).softmax(-1)
    dz = (p - torch.nn.functional.one_hot(labels, 300)) / 16
    live = (dz * 16).abs().ge(below).any(0)
    assert 0 < live.sum() < 300
    filter_hidden, filter_weight = PRESETS[preset]
    torch.testing.assert_close(d_hidden, (dz * live if filter_hidden else dz) @ weight, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(d_weight, (dz * live if filter_weight else dz).T @ hidden, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(out.dropped, (p * ~live).sum(1).detach(), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(out.loss, reference.linear_cross_entropy(hidden, weight, labels), rtol=1e-12, atol=0)


def test_auto_filter_does_not_starve_a_flat_softmax():
    """Every p is 1/V: a fixed filter at 2**-12 would drop the whole gradient of the classes that are no label."""
    torch.manual_seed(0)
    weight = (0.01 * torch.randn(8192, 16)).requires_grad_()
    hidden, labels = 0.05 + 0.01 * torch.randn(32, 16), torch.randint(0, 8192, (32,))
    (got,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, strategy="cce"), weight)
    (want,) = torch.autograd.grad(reference.linear_cross_entropy(hidden, weight, labels), weight)
    others = torch.ones(8192, dtype=torch.bool)
    others[labels] = False
    assert (got.double() - want)[others].norm() < 1e-3 * want[others].norm()


# torch's own tracing asks any tensor for its .grad
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_naive_compiled():
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    labels = torch.randint(0, 50, (12,))
    a = linear_cross_entropy(hidden, weight, labels, strategy="naive", options={"compile": True})
    b = linear_cross_entropy(hidden, weight, labels, strategy="naive")
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.autograd.grad(a, weight), torch.autograd.grad(b, weight))


@pytest.mark.parametrize("strategy", ["chunked", "naive", "auto"])
def test_a_head_that_must_be_called(strategy):
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 50)).double()
    hidden, labels = torch.randn(4, 7, 8).double().requires_grad_(), torch.randint(0, 50, (4, 7))
    labels[:, 2:5] = -100
    options = {"workspace_mb": 0.001} if strategy == "chunked" else None
    parameters = [hidden, *head.parameters()]
    got = projected_cross_entropy_stats(
        head, hidden, labels, vocab=50, strategy=strategy, shift=1, label_smoothing=0.1, z_loss=1e-3, options=options
    ).loss
    z = head(hidden)[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(z, labels[:, 1:].flatten(), label_smoothing=0.1)
    valid = labels[:, 1:].flatten() != -100
    want = want + 1e-3 * z.logsumexp(-1)[valid].square().mean()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for a, b in zip(torch.autograd.grad(got, parameters), torch.autograd.grad(want, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


def test_a_called_head_replays_its_random_numbers():
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 50, bias=False)).double()
    hidden, labels = torch.randn(6, 8).double().requires_grad_(), torch.randint(0, 50, (6,))
    torch.manual_seed(1)
    loss = projected_cross_entropy_stats(head, hidden, labels, vocab=50, options={"workspace_mb": 1}).loss
    (got,) = torch.autograd.grad(loss, hidden)
    torch.manual_seed(1)
    (want,) = torch.autograd.grad(torch.nn.functional.cross_entropy(head(hidden), labels), hidden)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)


class TestCheckpointEngines:
    """Why chunks run under the non-reentrant engine: what the other one does to the same chunk."""

    def setup_method(self):
        torch.manual_seed(0)
        self.hidden = torch.randn(6, 8, dtype=torch.float64)
        self.weight = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
        self.labels = torch.randint(0, 50, (6,))

    def chunk(self, hidden):
        return torch.nn.functional.cross_entropy(hidden @ self.weight.T, self.labels)

    def ours(self, hidden):
        return linear_cross_entropy(
            hidden, self.weight, self.labels, strategy="chunked", options={"workspace_mb": 0.001}
        )

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    def test_inputs_without_gradient(self):
        """A frozen trunk: the reentrant engine loses the head's gradient without a word."""
        lost = checkpoint(self.chunk, self.hidden, use_reentrant=True)
        assert not lost.requires_grad
        (got,) = torch.autograd.grad(self.ours(self.hidden), self.weight)
        (want,) = torch.autograd.grad(self.chunk(self.hidden), self.weight)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)

    def test_autograd_grad(self):
        """Gradients of some inputs only: the reentrant engine refuses."""
        hidden = self.hidden.requires_grad_()
        with pytest.raises(RuntimeError, match="reentrant"):
            torch.autograd.grad(checkpoint(self.chunk, hidden, use_reentrant=True), hidden)
        (got,) = torch.autograd.grad(self.ours(hidden), hidden)
        (want,) = torch.autograd.grad(self.chunk(hidden), hidden)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)

    def test_a_detached_part(self):
        """The loss of detached hidden states still trains the head."""
        hidden = self.hidden.requires_grad_()
        (got,) = torch.autograd.grad(self.ours(hidden.detach()) + self.ours(hidden), self.weight)
        (want,) = torch.autograd.grad(2 * self.chunk(hidden), self.weight)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_which_kernels_ran():
    hidden, weight, labels = torch.randn(6, 8), torch.randn(17, 8, requires_grad=True), torch.arange(6)
    ops.forget_launches()
    linear_cross_entropy(hidden, weight, labels, strategy="flce")
    assert ops.launched() == {"torch.flce_forward"}
    linear_cross_entropy(hidden, weight, labels, strategy="cce").backward()
    assert {"torch.linear_ce_forward", "torch.linear_ce_backward"} <= ops.launched()


def test_a_filter_given_as_yaml_off():
    import yaml

    options = yaml.safe_load("filter: off")
    assert options == {"filter": False}
    assert select("cce", options, problem(), CPU).options.filter == "off"
    with pytest.raises(ConfigError):
        select("cce", {"filter": True}, problem(), CPU)


MANY = 196_608
FILTERED = {"rows": 300, "vocab": MANY, "dtype": torch.bfloat16, "options": {}, "profile": H200}
BOTH = (2.0**-12, 2.0**-12)
FILTERS = {
    "auto": ({}, BOTH, 0.5),
    "off": ({"options": {"filter": "off"}}, (0, 0), 0.5),
    "a number": ({"options": {"filter": 1e-3}}, (1e-3, 1e-3), 1.0),
    "full c": ({"options": {"preset": "cce_kahan_full_c"}}, (2.0**-12, 0), 0.5),
    "full e": ({"options": {"preset": "cce_kahan_full_e"}}, (0, 2.0**-12), 0.5),
    "exact": ({"options": {"preset": "cce_exact"}}, (0, 0), 0.5),
    "float32": ({"dtype": torch.float32}, (0, 0), 0.5),
    "few rows": ({"rows": 255}, (0, 0), 0.5),
    "few classes": ({"rows": 2048, "vocab": 65_536}, (0, 0), 0.5),
    "few classes, a number": ({"rows": 2048, "vocab": 65_536, "options": {"filter": 1e-3}}, (1e-3, 1e-3), 1.0),
    "fewer classes and more rows": ({"rows": 2048, "vocab": 98_304}, BOTH, 0.5),
    "fewer classes, not more rows": ({"rows": 2047, "vocab": 98_304}, (0, 0), 0.5),
    "smoothing": ({"label_smoothing": 0.1}, (0, 0), 0.5),
    "a bias that is trained": ({"bias": True}, (0, 0), 0.5),
    "a bias that is not": ({"bias": False}, BOTH, 0.5),
    "frozen trunk": ({"needs": (False, True)}, (0, 2.0**-12), 0.5),
    "frozen head": ({"needs": (True, False)}, (2.0**-12, 0), 0.5),
    "frozen trunk, full c": ({"needs": (False, True), "options": {"preset": "cce_kahan_full_c"}}, (0, 0), 0.5),
    "no gradient": ({"needs": (False, False)}, (0, 0), 0.5),
    "no bulk copies": ({"profile": DeviceProfile("cuda", "A100", (8, 0), has_triton=True)}, (0, 0), 0.5),
    "no bulk copies, a number": (
        {"profile": DeviceProfile("cuda", "A100", (8, 0), has_triton=True), "options": {"filter": 1e-3}},
        (1e-3, 1e-3),
        1.0,
    ),
    "torch's kernels": ({"options": {"kernels": "torch"}}, (0, 0), 0.5),
    "CPU": ({"profile": CPU}, (0, 0), 0.5),
    "CPU, a number": ({"profile": CPU, "options": {"filter": 1e-3}}, (1e-3, 1e-3), 1.0),
}


@pytest.mark.parametrize(("case", "thresholds", "bound"), FILTERS.values(), ids=FILTERS.keys())
def test_what_may_be_left_out(case, thresholds, bound, monkeypatch):
    """What cce asks of its kernels: nothing is marked where nothing would be left out."""
    from loss_plugins.strategies import Rows, cce

    case = {"needs": (True, True), "bias": None, "label_smoothing": 0.0, **FILTERED, **case}
    asked = []
    monkeypatch.setattr(cce, "recomputed", lambda rows, *arguments: asked.append(arguments))
    hidden, weight = (torch.zeros(n, 2, dtype=case["dtype"]) for n in (case["rows"], case["vocab"]))
    bias = (
        None if case["bias"] is None else torch.zeros(case["vocab"], dtype=case["dtype"]).requires_grad_(case["bias"])
    )
    rows = Rows(
        hidden.requires_grad_(case["needs"][0]), weight.requires_grad_(case["needs"][1]), bias,
        torch.zeros(case["rows"], dtype=torch.int64), case["vocab"], torch.ones(case["rows"]), case["dtype"],
        label_smoothing=case["label_smoothing"],
    )  # fmt: skip
    cce.STRATEGY(rows, cce.CceOptions(**case["options"]), case["profile"])
    ((_, filter_hidden, filter_weight, forward, backward, filter_bound),) = asked
    assert (filter_hidden, filter_weight) == thresholds and filter_bound == bound
    # what Triton's kernels do not leave out here, torch's do
    on_torch = case["profile"] is CPU or case["options"].get("kernels") == "torch"
    assert forward == ("torch" if on_torch else "triton")
    assert backward == ("torch" if on_torch or (bound == 1 and case["profile"].name == "A100") else "triton")


def test_auto_takes_the_kernels_that_a_gpu_has_whatever_this_machine_has():
    for kernels in ("triton", "ascend", "native"):
        check_options("auto", {"kernels": kernels})
    assert select("auto", {"kernels": "triton"}, problem(vocab=32_000), H200, 100 * GIB).strategy.name == "flce"
    # logits that are few would go to naive, which has no such kernels
    assert select("auto", {"kernels": "triton"}, problem(64, 32, 1000), H200, 100 * GIB).strategy.name == "flce"
    assert select("auto", {"kernels": "torch"}, problem(64, 32, 1000), CPU).strategy.name == "naive"


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("auto", {"kernels": "tritn"}, "Unknown value of kernels: 'tritn'. Did you mean 'triton'"),
        ("auto", {"workspace_mb": -1}, "workspace_mb must be"),
        ("auto", {"filter": "off", "compile": True}, "No strategy that loss_strategy 'auto' chooses among has all of"),
        ("flce", {"kernels": "native"}, "only strategies naive and cce have"),
        ("naive", {"kernels": "triton"}, "only strategies flce and cce have"),
    ],
)
def test_options_that_no_device_could_take(strategy, options, expected):
    for what in (problem(64, 32, 1000), problem()):
        with pytest.raises(ConfigError, match=expected):
            select(strategy, options, what, CPU)
    with pytest.raises(ConfigError, match=expected):
        check_options(strategy, options)


@pytest.mark.parametrize("kernels", ["triton", "ascend", "native"])
def test_kernels_that_are_not_here_are_left_out(kernels):
    """The advice can be followed."""
    with pytest.raises(UnsupportedError, match="Leave kernels out of loss_options"):
        select("cce", {"kernels": kernels}, problem(), CPU)
    select("cce", {}, problem(), CPU)
    for what in (problem(64, 32, 1000), problem()):
        with pytest.raises(ConfigError, match=f"kernels.*{kernels}"):
            select("auto", {"kernels": kernels}, what, CPU)
