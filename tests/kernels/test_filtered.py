"""The filtered backward against a float64 oracle that computes exactly the pairs which the forward marked."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from test_marks import bits_of, mass, peaked

from loss_plugins.kernels import ops
from loss_plugins.kernels._rows import row_coefficients
from loss_plugins.kernels.triton import filtered, lists, marks, sampled
from loss_plugins.kernels.triton.marks import MARKED_ROWS, most_pairs
from loss_plugins.testing import assert_within_reference_error, relative_error

pytestmark = pytest.mark.usefixtures("one_strip")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BELOW = 2.0**-7


def in_half(numbers, dtype):
    """As the kernels round: Triton's interpreter cuts bfloat16 off."""
    if dtype == torch.bfloat16 and numbers.device.type == "cpu":
        numbers = (numbers.float().view(torch.int32) & -0x10000).view(torch.float32)
    return numbers.to(dtype)


class Case:
    """One loss, as the operator is given it."""

    def __init__(
        self, device, dtype=torch.bfloat16, shape=(300, 64, 1001), scale=1.0, softcap=0.0, z_loss=0.0, bias=False,
        class_weight=False, token_weight=False, smoothing=0.0, head=None, tile_bytes=1 << 20, below=(BELOW, BELOW),
        bound=1.0, needs=(True, True, False), trunk=None, often=20,
    ):  # fmt: skip
        rows, width, vocab = shape
        self.hidden, self.weight, self.labels = peaked(rows, width, vocab, dtype, device, often)
        # a part in common moves no probability, but what is missing to a row's sum shows
        self.weight = (self.weight.float() + 0.3).to(head or dtype)
        self.hidden = self.hidden.to(trunk or dtype)
        g = torch.Generator().manual_seed(3)
        self.bias = torch.randn(vocab, generator=g).div(2).to(device, dtype) if bias else None
        self.class_weight = (torch.rand(vocab, generator=g) + 0.5).to(device) if class_weight else None
        self.grad = torch.full((rows,), 1 / rows, device=device)
        if token_weight:
            self.grad = torch.rand(rows, generator=g).to(device) / rows
            self.grad[::5] = 0
        self.scale, self.softcap, self.z_loss, self.smoothing = scale, softcap, z_loss, smoothing
        self.dtype, self.tile_bytes, self.below, self.bound, self.needs = dtype, tile_bytes, below, bound, needs

    def run(self, below=None, retain=False):
        """(outputs of the forward, gradients of hidden, weight, bias; None where not needed)."""
        leaves = [
            None if t is None else t.detach().clone().requires_grad_(need)
            for t, need in zip((self.hidden, self.weight, self.bias), self.needs, strict=True)
        ]
        out = ops.linear_ce(
            *leaves, self.labels, self.class_weight, -100, self.scale, self.softcap, self.smoothing, self.z_loss,
            self.dtype, False, False, *(self.below if below is None else below), True, self.tile_bytes, "triton",
            "triton", self.bound,
        )  # fmt: skip
        loss = (out[0] * self.grad).sum()
        if retain:
            loss.backward(retain_graph=True)
            for leaf in leaves:
                if leaf is not None:
                    leaf.grad = None
        loss.backward()
        return out, [None if t is None else t.grad for t in leaves]

    def order(self):
        valid = self.labels != -100
        return torch.cat([valid.nonzero()[:, 0], (~valid).nonzero()[:, 0]])

    def logits(self):
        h, w = (t.to(self.dtype).double() for t in (self.hidden, self.weight))
        z = (h @ w.T + (0 if self.bias is None else self.bias.double())) * self.scale
        return self.softcap * torch.tanh(z / self.softcap) if self.softcap else z

    def wanted(self, bits):
        """((dX, dW) in float64, the same from operands and results that are rounded as a GPU's library does), with dZ
        where ``bits`` say, a sample of the rest, and what is still missing to a row's sum on the mean row of the head:
        eq. (11) and (12)."""
        h, w = (t.to(self.dtype).double() for t in (self.hidden, self.weight))
        z, order, valid = self.logits(), self.order(), self.labels != -100
        vocab = len(w)
        keep = torch.zeros(z.shape, dtype=torch.bool, device=z.device)
        keep[order] = bits.to(z.device).repeat_interleave(MARKED_ROWS, 0)[: len(z)]
        lse = z.logsumexp(1)
        coefficients = row_coefficients(
            self.grad.double(), lse, self.labels, valid, self.class_weight, self.smoothing, self.z_loss, vocab
        )
        coef_p, coef_label, _ = (c[:, None] for c in coefficients)
        at_label = torch.nn.functional.one_hot(self.labels.clamp(min=0), vocab) * valid[:, None]
        dz = coef_p * z.softmax(1) - coef_label * at_label
        factor = self.scale * (1 - (z / self.softcap) ** 2 if self.softcap else 1)
        kept, sample = torch.where(keep, dz, 0.0), torch.where(keep, 0.0, dz) * self.sample(z)
        missing = (dz - kept - sample).sum(1, keepdim=True) * self.scale
        kept, sample = kept * factor, sample * factor
        oracle = (kept + sample) @ w + missing * w.mean(0), (kept + sample).T @ h
        unit = 2.0 ** kept.abs().max().clamp(min=1e-30).log2().floor()  # which rounds as without it
        kept, sample = (in_half(numbers / unit, self.dtype).double() * unit for numbers in (kept, sample))
        spread = (sample.T @ h).to(self.weight.dtype).double()
        same = (kept + sample) @ w + missing * w.mean(0).to(self.dtype).double(), kept.T @ h + spread
        return oracle, [t.to(like.dtype) for t, like in zip(same, (self.hidden, self.weight), strict=True)]

    def sample(self, z):
        """How often each entry counts that is left out, eq. (12)."""
        rows, vocab = z.shape
        apart = sampled.columns_apart(-(-rows // MARKED_ROWS))
        block = torch.arange(rows, device=z.device)[:, None] // MARKED_ROWS
        column = torch.arange(vocab, device=z.device)
        own = (column % 32 - block - self.labels.sum()) % apart == 0
        often = torch.empty_like(z)
        often[self.order()] = (own & (column < vocab // 32 * 32)).to(z.dtype) * apart
        return often

    def check(self):
        """Run, and compare with what the marks say. Returns the marks and the gradients."""
        out, got = self.run()
        bits = bits_of(out[6], len(self.weight))
        assert int(bits.sum()) <= most_pairs(*bits.shape)
        oracle, same = self.wanted(bits)
        for name, need, below, actual, want, like in zip(
            ("dX", "dW"), self.needs, self.below, got, oracle, same, strict=False
        ):
            if need:
                assert below
                assert_within_reference_error(name, actual, want, like)
        return out, bits, got


def assert_of_the_same_sums(case, out, off, got, want):
    """Where columns are marked a row's log-sum-exp is summed from another anchor, so its last bits are others; and the
    gradients are, by what those bits move, and where an entry is rounded to the other side."""
    lse = off[2].detach().double()
    bits = 4 * torch.finfo(torch.float32).eps * lse.abs().max()
    for a, b in zip(out[:3], off[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=float(bits * 2 * (1 + 2 * case.z_loss * lse.abs().max())))
    z, valid = case.logits(), case.labels != -100
    coef_p = row_coefficients(
        case.grad.double(), lse, case.labels, valid, case.class_weight, case.smoothing, case.z_loss, len(case.weight)
    )[0]
    moved = coef_p[:, None] * z.softmax(1) * case.scale * (1 - (z / case.softcap) ** 2 if case.softcap else 1)
    h, w = torch.where(valid[:, None], case.hidden.double(), 0.0), case.weight.double()
    for a, b, by in zip(got, want, (moved @ w, moved.T @ h, moved.sum(0)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            rounding = torch.finfo(a.dtype).eps / 8 * b.double().norm()
            assert (a.double() - b.double()).norm() <= rounding + bits * by.norm()


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


CASES = {
    "plain": {},
    "float16": {"dtype": torch.float16},
    "softcap": {"softcap": 40.0},
    "scale": {"scale": 0.8},
    "z-loss": {"z_loss": 1e-2},
    "class weight": {"class_weight": True},
    "token weights": {"token_weight": True},
    "bias, not trained": {"bias": True},
    "all": {"softcap": 40.0, "scale": 1.2, "z_loss": 1e-2, "class_weight": True, "token_weight": True, "bias": True},
    "all, float16": {
        "dtype": torch.float16, "softcap": 40.0, "scale": 1.2, "z_loss": 1e-2, "class_weight": True,
        "token_weight": True, "bias": True,
    },
    "float32 head": {"head": torch.float32},
    "float32 hidden": {"trunk": torch.float32},
    "frozen head": {"needs": (True, False, False), "below": (BELOW, 0.0)},
    "frozen trunk": {"needs": (False, True, False), "below": (0.0, BELOW)},
    "two whole blocks": {"shape": (256, 64, 1001)},
    "no multiple of 8 wide": {"shape": (389, 60, 1001)},
    "odd": {"shape": (389, 61, 1001)},
    "wider than a tile": {"shape": (300, 264, 1000)},
    "a vocabulary of whole tiles": {"shape": (300, 64, 2048)},
    "rounds": {"shape": (700, 64, 4001), "tile_bytes": 1, "often": 260, "token_weight": True, "z_loss": 1e-2},
    "rounds, odd": {"shape": (389, 61, 1001), "tile_bytes": 1},
    "rounds, float16, float32 head": {"dtype": torch.float16, "head": torch.float32, "tile_bytes": 1},
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_is_marked_is_computed(device, case, monkeypatch):
    if "tile_bytes" in case:
        monkeypatch.setattr("loss_plugins.kernels.triton.backward.LEAST_VECTORS", 1)
    case = Case(device, **case)
    rows = len(case.labels)
    out, bits, got = case.check()
    valid = (case.labels != -100).cpu()
    pairs = int(bits.sum())
    assert pairs > 0
    assert (bits_of(out[6], len(case.weight) + -len(case.weight) % 32).sum()) == pairs
    # and that is not what would have been computed without a filter
    lost = mass(case.logits().softmax(1).cpu(), bits, case.order().cpu(), valid)
    assert lost.max() > 0.01 and (lost <= out[5].cpu() + 1e-5).all()
    exact = case.run((0.0, 0.0))
    assert (exact[0][5] == 0).all()
    for a, b in zip(got, exact[1], strict=True):
        assert a is None or 1e-3 < relative_error(a, b) < 0.3
    if case.needs[1]:
        # columns that count nowhere get what the sample says of them
        unmarked = ~bits.any(0)
        sampled_rows, rows_wanted = (t.cpu()[unmarked].double() for t in (got[1], exact[1][1]))
        nearness = torch.nn.functional.cosine_similarity(sampled_rows, rows_wanted)[sampled_rows.any(1)]
        assert len(nearness) >= unmarked.sum() / 16 and nearness.mean() > 0.5
    if case.needs[0]:
        assert not got[0].cpu()[~valid].any() and got[0].shape[0] == rows


@pytest.mark.parametrize("device", DEVICES)
def test_rounds_give_what_one_gives(device, monkeypatch):
    """dW of a tile is computed in one round, dX is summed over them."""
    case = Case(device, shape=(700, 64, 4001), often=260)
    _, one = case.run()
    seen = []
    real = lists.listed
    monkeypatch.setattr("loss_plugins.kernels.triton.backward.LEAST_VECTORS", 1)
    monkeypatch.setattr("loss_plugins.kernels.triton.backward.listed", lambda *a: seen.append(real(*a)) or seen[-1])
    case.tile_bytes = 1
    _, several = case.run()
    (found,) = seen
    assert found.decided[1].item() >= 2 and (found.sizes.sum(0) > 0).sum() >= 2
    assert torch.equal(one[1], several[1])
    assert relative_error(several[0], one[0]) < 4e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case", [{}, {"dtype": torch.float16}, {"shape": (300, 60, 1001)}, {"head": torch.float32}], ids=str
)
@pytest.mark.parametrize("exact", ["hidden", "weight"])
def test_one_gradient_is_filtered_and_the_other_exact(device, case, exact):
    """The presets cce_kahan_full_e and cce_kahan_full_c: what is exact is what filter: off gives."""
    case = Case(device, **case)
    (out, off), both = case.run((0.0, 0.0)), case.run()[1]
    marked, got = case.run((0.0, BELOW) if exact == "hidden" else (BELOW, 0.0))
    i = ["hidden", "weight"].index(exact)
    alone = [g if j == i else None for j, g in enumerate(got)]
    assert_of_the_same_sums(case, marked, out, alone, [off[i] if j == i else None for j in range(3)])
    # a block's columns are in another order where dW does not need one
    assert torch.equal(got[1 - i], both[1 - i]) or (i == 1 and relative_error(got[0], both[0]) < 4e-3)
    assert not torch.equal(off[0], both[0]) and not torch.equal(off[1], both[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("why", ["flat", "too many", "certain", "bias", "smoothing", "few rows"])
@pytest.mark.parametrize(
    ("case", "needs"),
    [
        ({}, (True, True)),
        ({}, (True, False)),
        ({}, (False, True)),
        ({"shape": (300, 60, 801)}, (True, True)),
        ({"dtype": torch.float16, "bias": True}, (True, True)),
        ({"z_loss": 1e-2, "softcap": 30.0}, (True, True)),
    ],
    ids=["both", "hidden", "weight", "no bulk copies", "float16", "z-loss"],
)
def test_exact_where_it_must_be(device, case, why, needs, monkeypatch):
    """What filter: off gives, and nothing is said to be lost."""
    case = Case(device, **{"shape": (256, 64, 801), **case}, bound=0.5, needs=(*needs, False))
    if why == "flat":
        case.hidden *= 0.01
    elif why == "too many":  # one more than are listed
        case.bound = 1.0
        bits = bits_of(case.run()[0][6], 801)
        monkeypatch.setattr(marks, "MOST_PAIRS", (int(bits.sum()) - 0.5) / bits.numel())
    elif why == "certain":
        case.labels = (case.hidden.double() @ case.weight.double().T).argmax(1)
        case.hidden *= 1.6
    elif why == "bias":
        case.bias = torch.zeros(801, device=device, dtype=case.dtype)
        case.needs, case.bound = (*needs, True), 1.0
    elif why == "smoothing":
        case.smoothing, case.bound = 0.1, 1.0
    elif why == "few rows":
        case.bound = 1.0
        case.hidden, case.labels, case.grad = case.hidden[:255], case.labels[:255], case.grad[:255]
    out, got = case.run()
    off, want = case.run((0.0, 0.0))
    assert_of_the_same_sums(case, out, off, got, want)
    if why not in ("bias", "smoothing"):  # only the backward knows of these
        assert (out[5] == 0).all()
    assert all(g is None or g.abs().sum() > 0 for g in got)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_listed_just_fits(device, monkeypatch):
    case = Case(device)
    bits = bits_of(case.run()[0][6], 1001)
    monkeypatch.setattr(marks, "MOST_PAIRS", (int(bits.sum()) + 0.5) / bits.numel())
    out, _, _ = case.check()
    assert out[5].max() > 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "left"), [(300, 0), (300, 1), (300, 128), (300, 129), (640, 100)])
def test_ignored_rows(device, rows, left):
    """Rows that carry a label end inside a block or on its edge; blocks behind hold none; NaN there is nobody's."""
    case = Case(device, shape=(rows, 64, 1001))
    case.labels = torch.where(case.labels == -100, 0, case.labels)
    ignored = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[left:].to(device)
    case.labels[ignored] = -100
    _, bits, got = case.check()
    assert not bits[-(-left // MARKED_ROWS) :, 1:].any()
    assert not got[0][ignored].any() and (left > 0) == bool(got[1].any())
    case.hidden[ignored] = float("nan")
    assert_same_bits(case.run()[1], got)


@pytest.mark.parametrize("device", DEVICES)
def test_improbable_labels(device):
    """Every label has next to no probability, so that its column is in no row's list but for the label."""
    case = Case(device, shape=(300, 64, 5003))
    case.labels = torch.where(case.labels == -100, -100, torch.arange(300, device=device) % 20 + 900)
    p = case.logits().softmax(1)
    valid = case.labels != -100
    assert p[valid].gather(1, case.labels[valid][:, None]).max() < BELOW
    _, bits, got = case.check()
    assert bits[:, 900:920].any(0).all() and (got[1][900:920].abs().sum(1) > 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_label_only_the_last_row_has(device):
    case = Case(device, shape=(300, 64, 5003))
    case.labels[:] = 3
    case.labels[-1] = 1000
    _, bits, got = case.check()
    assert bits[:, 1000].tolist() == [False, False, True] and got[1][1000].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [{}, {"shape": (389, 60, 1001), "dtype": torch.float16}], ids=str)
def test_the_same_every_time(device, case):
    case = Case(device, **case)
    out, got = case.run()
    again, others = case.run()
    assert_same_bits(again, out)
    assert_same_bits(others, got)
    assert_same_bits(case.run(retain=True)[1], got)  # a second backward over a graph that was kept


@pytest.mark.parametrize("device", DEVICES)
def test_a_float32_head_under_autocast(device):
    """As a user reaches it: dW in float32 of products in the half type."""
    from loss_plugins import linear_cross_entropy_stats

    case = Case(device, head=torch.float32, trunk=torch.float32)
    valid = case.labels != -100
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        out = linear_cross_entropy_stats(
            hidden, weight, case.labels, strategy="cce", options={"kernels": "triton", "filter": BELOW},
            fields=("dropped",),
        )  # fmt: skip
        out.loss.backward()
    assert out.dropped.max() > 0.01 and not out.dropped[~valid].any()
    case.grad[:] = 1 / valid.sum()
    case.hidden, case.weight = hidden.detach(), weight.detach()
    if device == "cpu":  # ignored rows are gone before the kernels there
        case.hidden, case.labels, case.grad = case.hidden[valid], case.labels[valid], case.grad[valid]
    _, _, got = case.check()
    assert torch.equal(weight.grad, got[1]) and weight.grad.dtype == torch.float32
    assert torch.equal(hidden.grad[valid], got[0][case.labels != -100])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bound", [0.5, 1.0])
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_a_nan_is_not_left_out(device, bound):
    """It is in the gradient of its own row, in that of no other row, and in dW."""
    case = Case(device, bound=bound)
    case.labels[[7, 250]] = 3
    case.hidden[[7, 250], 5] = float("nan")
    out, got = case.run()
    assert out[0].isnan().nonzero()[:, 0].tolist() == [7, 250]
    assert got[0].isnan().all(1).nonzero()[:, 0].tolist() == [7, 250]
    # on a GPU another block's vectors may be read beside a block's own, times zero; only a number as a filter allows it
    assert (device == "cuda" and bound == 1) or got[0].isnan().any(1).nonzero()[:, 0].tolist() == [7, 250]
    assert got[1][3].isnan().any()
    if bound < 1:
        assert (out[5] == 0).all() and got[1].isnan().any(1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_mean_row(device, dtype):
    weight = torch.randn(1000, 40, generator=torch.Generator().manual_seed(0)).add(0.1).to(device, dtype)
    got = filtered.mean_row(weight)
    assert got.dtype == torch.float32
    assert_within_reference_error("mean", got.to(dtype), weight.double().mean(0), weight.mean(0), weight.abs().mean(0))
    assert torch.equal(filtered.mean_row(weight, most=250), filtered.mean_row(weight[::4].contiguous()))


@pytest.mark.parametrize("device", DEVICES)
def test_the_sample_is_right_on_average(device, monkeypatch):
    """Over all places where the shares of the columns may begin, nothing is left out of either gradient."""
    monkeypatch.setattr(sampled, "LEAST_APART", 2)
    case = Case(device, shape=(300, 64, 1024))
    row = (case.labels != -100).nonzero()[0, 0]
    wrong = []
    for _ in range(sampled.columns_apart(3)):
        case.labels[row] = (case.labels[row] + 1) % 1024  # begins one further
        exact = [t.double() for t in case.run((0.0, 0.0))[1][:2]]
        wrong.append([(got - t) / t.norm() for got, t in zip(case.run()[1][:2], exact, strict=True)])
    for name, errors in zip(("dX", "dW"), zip(*wrong, strict=True), strict=True):
        single = sum(error.norm() for error in errors) / len(errors)
        assert single > 4 * (sum(errors) / len(errors)).norm(), name


@pytest.mark.parametrize("device", DEVICES)
def test_fewer_classes_than_a_word_of_the_marks_has(device):
    case = Case(device, shape=(300, 64, 20))
    got, exact = case.run()[1], case.run((0.0, 0.0))[1]
    assert all(relative_error(a, b) < 0.1 for a, b in zip(got[:2], exact[:2], strict=True))


def test_torchs_backward_says_itself_what_it_leaves_out():
    """Triton's forward marks nothing for it: not in float32, nor where there are no bulk copies."""
    from loss_plugins import linear_cross_entropy_stats

    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = Case(device, dtype=torch.float32, shape=(40, 32, 300))
    out = {
        kernels: linear_cross_entropy_stats(
            case.hidden.requires_grad_(), case.weight.requires_grad_(), case.labels, strategy="cce",
            options={"kernels": kernels, "filter": BELOW}, fields=("dropped",),
        )
        for kernels in ("torch", "triton")
    }  # fmt: skip
    assert out["torch"].dropped.max() > 0.01
    torch.testing.assert_close(out["triton"].dropped, out["torch"].dropped, rtol=1e-4, atol=1e-6)
    ops.forget_launches()
    gradients = [torch.autograd.grad(out[k].loss, (case.hidden, case.weight)) for k in ("torch", "triton")]
    assert ops.launched() == {"torch.linear_ce_backward"}
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
