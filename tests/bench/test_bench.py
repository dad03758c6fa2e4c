"""The measuring protocol: inputs are what they say, wrong results get no time, promises are held against the truth."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from loss_plugins.bench import measure, plots
from loss_plugins.bench import truth as truths
from loss_plugins.bench.contenders import Contender, own
from loss_plugins.bench.inputs import SHAPES, Shape, Trained, each_kind, flat, half_masked, lifted
from loss_plugins.bench.measure import DeviceLostError, run
from loss_plugins.bench.session import Session, grid_of, shapes_of
from loss_plugins.bench.truth import relative, truth
from loss_plugins.errors import ConfigError
from loss_plugins.strategies import linear_cross_entropy

TINY = Shape(48, 16, 300)


def trained(rows=20, hidden=8, vocab=400):
    return Trained(torch.randn(rows, hidden), torch.randn(vocab, hidden), torch.randint(0, vocab, (rows,)))


def test_lifting_keeps_the_logits():
    real = trained()
    made = lifted(TINY, real, torch.float32, "cpu")
    assert made.hidden.shape == (48, 16) and made.weight.shape == (300, 16) and made.labels.max() < 300
    kept = (real.labels < 300).nonzero()[:, 0]
    torch.testing.assert_close(
        made.hidden[: len(kept)] @ made.weight.T, real.hidden[kept] @ real.weight[:300].T, rtol=1e-4, atol=1e-4
    )


def test_lifting_refuses_a_narrower_shape():
    with pytest.raises(ConfigError, match="hidden width 32 and 300 classes, and cannot be brought to 16"):
        lifted(TINY, trained(hidden=32, vocab=300), torch.float32, "cpu")


def test_kinds_share_their_tensors():
    made = list(each_kind(("real", "masked", "flat"), TINY, trained(), torch.float32, "cpu"))
    assert [inputs.kind for inputs in made] == ["flat", "real", "real, half masked"]
    assert made[1].weight is made[2].weight and 0 < (made[2].labels == -100).sum() < 48
    assert [i.kind for i in each_kind(("masked",), TINY, None, torch.float32, "cpu")] == ["flat, half masked"]


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 300 * 8, 1 << 30])
def test_the_truth_is_the_mean_over_labels(chunk_bytes):
    inputs = half_masked(flat(TINY, torch.float32, "cpu"))
    expected = truth(inputs, chunk_bytes)
    hidden, weight = inputs.hidden.double().requires_grad_(), inputs.weight.double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, inputs.labels)
    loss.backward()
    assert expected.loss == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(expected.d_hidden, hidden.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(expected.d_weight, weight.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_naive_way_has_the_errors_that_the_truth_says(dtype):
    inputs = half_masked(flat(TINY, dtype, "cpu"))
    expected = truth(inputs, 7 * 300 * 4)
    hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
    loss = F.cross_entropy((hidden @ weight.T).float(), inputs.labels)
    loss.backward()
    assert expected.naive.hidden == pytest.approx(relative(hidden.grad, expected.d_hidden), rel=0.2)
    assert expected.naive.weight == pytest.approx(relative(weight.grad, expected.d_weight), rel=0.2)
    assert 0 < expected.naive.hidden < 10 * torch.finfo(dtype).eps


def split_product(left, right, wide):
    """What a GPU computes, in float32 products of numbers that fit the half type."""
    if left.dtype == right.dtype:
        return left.to(wide) @ right.to(wide)
    high = left.to(right.dtype)
    low = (left - high).to(right.dtype)
    return high.to(wide) @ right.to(wide) + low.to(wide) @ right.to(wide)


def test_a_factor_in_two_halves_is_near_enough_to_float32(monkeypatch):
    inputs = flat(TINY, torch.bfloat16, "cpu")
    plain = truth(inputs)
    monkeypatch.setattr(truths, "_product", split_product)
    split = truth(inputs)
    assert relative(split.d_hidden, plain.d_hidden) < 1e-5 and relative(split.d_weight, plain.d_weight) < 1e-5
    assert plain.naive.hidden > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fast_truth_on_a_gpu(dtype):
    inputs = half_masked(flat(Shape(1000, 256, 20_001), dtype, "cuda"))
    fast = truth(inputs, 100 * 20_001 * 4)
    hidden, weight = inputs.hidden.double().requires_grad_(), inputs.weight.double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, inputs.labels)
    loss.backward()
    assert fast.loss == pytest.approx(loss.item(), rel=1e-6)
    assert relative(fast.d_hidden, hidden.grad) < 3e-5 and relative(fast.d_weight, weight.grad) < 3e-5


def doubled(hidden, weight, labels):
    return 2 * linear_cross_entropy(hidden, weight, labels, strategy="naive")


def broken(hidden, weight, labels):
    raise ValueError("no such kernel")


def not_a_number(hidden, weight, labels):
    return linear_cross_entropy(hidden, weight, labels) + (hidden * math.nan).sum()


def no_gradient_of_the_head(hidden, weight, labels):
    return linear_cross_entropy(hidden, weight.detach(), labels)


def contenders(*named, **others):
    return {name: own(name) for name in named} | {name: Contender(name, loss) for name, loss in others.items()}


def measured(ways, inputs, mode="both", **settings):
    expected = truth(inputs)
    return {row.name: row for row in run(ways, inputs, expected, mode, **{"iterations": 1, "warm": 1} | settings)}


def test_a_wrong_result_gets_no_time():
    wrong = {"doubled": doubled, "broken": broken, "nan": not_a_number, "half": no_gradient_of_the_head}
    rows = measured(contenders("flce", **wrong), flat(TINY, torch.float32, "cpu"))
    assert all(rows[name].ms is None and rows[name].timed == 0 for name in wrong)
    assert rows["doubled"].failed.startswith("wrong: loss off by")
    assert rows["broken"].failed == "ValueError: no such kernel"
    assert rows["nan"].failed.startswith("wrong: loss off by nan")
    assert rows["half"].failed.endswith("and a gradient is missing")
    assert rows["flce"].failed is None and rows["flce"].ms > 0 and rows["flce"].deterministic
    assert rows["flce"].error_weight < 1e-5


def test_a_loss_in_a_half_type_may_be_rounded():
    def scaled(by, dtype):
        def loss(hidden, weight, labels):
            value = linear_cross_entropy(hidden, weight, labels, strategy="naive")
            return (value + by * value.detach()).to(dtype)

        return Contender("scaled", loss)

    inputs = flat(TINY, torch.bfloat16, "cpu")
    for by, dtype, wrong in ((0.02, torch.bfloat16, False), (0.02, torch.float32, True), (0.05, torch.bfloat16, True)):
        assert (measured({"scaled": scaled(by, dtype)}, inputs)["scaled"].failed is not None) == wrong


def test_a_wrong_loss_without_gradients_is_wrong():
    rows = measured(contenders("naive", doubled=doubled), flat(TINY, torch.float32, "cpu"), "forward only")
    assert rows["doubled"].failed.startswith("wrong: loss off by") and rows["naive"].failed is None


@pytest.mark.parametrize(
    ("mode", "gradients"), [("both", 48 * 16 + 300 * 16), ("frozen head", 48 * 16), ("forward only", 0)]
)
def test_modes(mode, gradients):
    row = measured(contenders("flce"), flat(TINY, torch.float32, "cpu"), mode)["flce"]
    assert row.failed is None and row.first_s > 0 and row.host_ms > 0
    assert (row.error_hidden is None) == (mode == "forward only") and (row.error_weight is None) == (mode != "both")
    assert row.gradients_mib * 2**20 == gradients * 4 and row.peak_mib >= row.gradients_mib


def test_gradients_are_off_where_there_are_none():
    def spy(hidden, weight, labels):
        assert not torch.is_grad_enabled() and not hidden.requires_grad and not weight.requires_grad
        return linear_cross_entropy(hidden, weight, labels)

    assert measured(contenders(spy=spy), flat(TINY, torch.float32, "cpu"), "forward only")["spy"].failed is None


def less_exact(share):
    """The right loss with gradients that are off by this share of them."""

    def loss(hidden, weight, labels):
        value = linear_cross_entropy(hidden, weight, labels, strategy="naive")
        return value + share * (value - value.detach())

    return loss


def test_promises_are_held_against_the_naive_way(monkeypatch):
    inputs = flat(TINY, torch.bfloat16, "cpu")
    ways = {
        "naive": own("naive"),
        "off": Contender("off", less_exact(0.02), "exact"),
        "filter": Contender("filter", less_exact(0.02), "filtered"),
        "peer": Contender("peer", less_exact(0.02)),
    }
    rows = measured(ways, inputs)
    assert rows["naive"].times_naive == pytest.approx(1, abs=0.2) and rows["naive"].broken_promise is None
    assert rows["off"].times_naive > 2 and "times naive's" in rows["off"].broken_promise
    assert "times naive's" in rows["filter"].broken_promise  # on flat inputs everything matters
    assert rows["peer"].broken_promise is None and rows["peer"].ms > 0


def test_a_filter_is_held_against_apples_on_real_inputs():
    inputs = lifted(TINY, trained(), torch.bfloat16, "cpu")
    ways = {
        "much": Contender("much", less_exact(0.09), "filtered"),
        "little": Contender("little", less_exact(0.02), "filtered"),
        "Apple cce": Contender("Apple cce", less_exact(0.04)),
    }
    rows = measured(ways, inputs)
    assert "times Apple cce's" in rows["much"].broken_promise and rows["little"].broken_promise is None
    del ways["Apple cce"]
    assert measured(ways, inputs)["much"].broken_promise is None


def test_what_does_not_fit_is_skipped(monkeypatch):
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1 << 10)
    row = measured(contenders("naive"), flat(TINY, torch.float32, "cpu"))["naive"]
    assert row.skipped == "needs 0.0 GiB, 0.0 GiB are free" and row.ms is None and row.failed is None


def test_out_of_memory_is_said():
    def large(hidden, weight, labels):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    rows = measured(contenders("naive", large=large), flat(TINY, torch.float32, "cpu"))
    assert rows["large"].failed == "out of memory" and rows["naive"].ms > 0


def test_a_lost_device_ends_the_run(monkeypatch):
    monkeypatch.setattr(measure, "_is_lost", lambda device: True)
    session = Session([TINY], contenders(broken=broken, later=doubled), torch.float32, "cpu", ["flat"])
    tables = session.measure(lambda line: None)
    assert [row["name"] for row in next(tables)] == ["broken"]
    with pytest.raises(DeviceLostError, match="After broken"):
        next(tables)


def test_timing_is_interleaved_and_limited(monkeypatch):
    order = []
    monkeypatch.setattr(measure, "_timed", lambda step, device: (order.append(step.contender.name), (1.0, 1.0))[1])
    run(contenders("naive", "flce"), (i := flat(TINY, torch.float32, "cpu")), truth(i), iterations=2)
    assert order[:4] == ["naive", "flce", "flce", "naive"] and len(order) == 20  # quick ones get five times as many
    order.clear()
    run(contenders("naive", "flce"), i, truth(i), iterations=2, seconds=0)
    assert order == ["naive", "flce"]


def test_auto_says_what_it_took():
    session = Session([TINY], contenders("auto", "cce"), torch.float32, "cpu", ["flat"], iterations=1)
    (rows,) = session.measure(lambda line: None)
    assert {row["name"]: (row["chosen"], row["own"]) for row in rows} == {"auto": ("naive", True), "cce": ("", True)}


def test_shapes():
    assert all(shape.rows > 0 and shape.hidden % 8 == 0 and shape.vocab > 0 for shape in SHAPES.values())
    assert [str(s) for s in shapes_of(["tiny"], [8, 16])] == ["tiny (8 x 64 x 4096)", "tiny (16 x 64 x 4096)"]
    assert shapes_of([], [8], 32, [100]) == [Shape(8, 32, 100)]
    assert len(grid_of()) == 20 and grid_of()[-1] == Shape(65_536, 2048, 262_144)
    assert [(s.rows, s.vocab) for s in grid_of([2, 1], 8, [30, 10])] == [(1, 10), (2, 10), (1, 30), (2, 30)]
    with pytest.raises(ConfigError, match="Give both without it"):
        shapes_of(["tiny"], [], 32, [100])


def test_sessions_refuse_unknown_words():
    for words, message in (
        ({"kinds": ["flt"]}, "Unknown kind of inputs 'flt'"),
        ({"kinds": ["real"]}, "Real inputs were asked for without files"),
        ({"kinds": ["flat"], "modes": ["frosen"]}, "Unknown mode 'frosen'. Did you mean 'frozen'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Session([TINY], {}, torch.float32, "cpu", **words)


def test_names_in_a_figure_do_not_lie_on_each_other():
    heights = plots._heights([(1.0, 10.0), (1.1, 10.0), (100.0, 10.0), (1.0, 10.5), (1.0, 20.0)], gap=1.0)
    assert heights == [10.0, 11.0, 10.0, 12.0, 20.0]


class FakeEvent:
    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        self.at = FakeEvent.clock

    def elapsed_time(self, end):
        return end.at - self.at


def test_a_step_that_the_allocator_disturbed_is_timed_again(monkeypatch):
    calls, order = iter([0, 3, 3, 3]), []

    class Step:
        def __call__(self):
            order.append("step")
            FakeEvent.clock += 5.0

    FakeEvent.clock = 0.0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_device_alloc": next(calls)})
    ms, host = measure._undisturbed(Step(), torch.device("cuda"))
    assert ms == 5.0 and host >= 0 and order == ["sleep", "step", "wait"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("mode", list(measure.MODES))
def test_a_table_on_a_gpu(mode):
    inputs = flat(Shape(512, 128, 4096), torch.bfloat16, "cuda")
    rows = measured(contenders("naive", "flce", "cce", "chunked", "auto"), inputs, mode)
    assert all(row.failed is None and row.ms > 0 and row.peak_mib >= row.gradients_mib for row in rows.values())
    assert mode == "forward only" or rows["naive"].times_naive == pytest.approx(1, rel=0.2)
    assert measure.matmul_tflops(torch.device("cuda"), torch.bfloat16, 1024) > 0
