"""The host half of the Ascend backend, on a CPU: chunks, tiles, merging, filters, gradients, memory, the launch table.

The vector kernels themselves are replaced by their meaning in plain torch; tests/ascend compiles and runs them.
"""

from __future__ import annotations

import sys

import ascend_references
import pytest
import torch

from loss_plugins.kernels import ops, reference
from loss_plugins.kernels.ascend import blocks, cross_entropy, memory, soc, vector
from loss_plugins.kernels.ascend.blocks import aligned, forward_block, gradient_block, grid_for, tiles_of
from loss_plugins.testing import assert_within_reference_error, relative_error

NUMBERS = {
    "plain": {},
    "bias": {"bias": True},
    "scale and softcap": {"scale": 0.5, "softcap": 3.0},
    "smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 1e-2},
    "everything": {
        "bias": True,
        "scale": 0.5,
        "softcap": 3.0,
        "label_smoothing": 0.2,
        "z_loss": 1e-2,
        "class_weight": True,
    },
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def seen(monkeypatch):
    """Shapes of all logits whose sums were asked for; the kernels are torch's."""
    return ascend_references.use(monkeypatch)


class Problem:
    """One loss, the same from every entry."""

    def __init__(self, rows, width, vocab, dtype, bias=False, class_weight=False, seed=0, **numbers):
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(rows, width, generator=g).to(dtype).requires_grad_()
        self.weight = (torch.randn(vocab, width, generator=g) / 2).to(dtype).requires_grad_()
        self.bias = torch.randn(vocab, generator=g).to(dtype).requires_grad_() if bias else None
        self.labels = torch.randint(0, vocab, (rows,), generator=g)
        self.labels[1::3] = -100
        self.class_weight = torch.rand(vocab, generator=g) + 0.5 if class_weight else None
        self.row_scale = torch.rand(rows, generator=g) / rows
        self.numbers, self.dtype = (
            {"scale": 1.0, "softcap": 0.0, "label_smoothing": 0.0, "z_loss": 0.0, **numbers},
            dtype,
        )

    @property
    def leaves(self):
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def compare(self, loss, gradients):
        """With the formula in float64, no further from it than plain torch in the same type."""
        wanted, plain = self._with(torch.float64), self._with(self.dtype)
        for what, ours, oracle, same in zip(
            ("loss", "dX", "dW", "db"), (loss, *gradients), wanted, plain, strict=False
        ):
            # float32 gradients inherit the rounding of a log-sum-exp of about 10
            rounded = oracle * 10 if self.dtype == torch.float32 else None
            assert_within_reference_error(what, ours.detach(), oracle, same, rounded)

    def _with(self, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in self.leaves]
        n, acc = self.numbers, torch.promote_types(dtype, torch.float32)
        z = torch.nn.functional.linear(*leaves[:2]).to(acc)
        z = (z + (leaves[2] if self.bias is not None else 0)) * n["scale"]
        z = n["softcap"] * torch.tanh(z / n["softcap"]) if n["softcap"] else z
        loss = torch.nn.functional.cross_entropy(
            z, self.labels, None if self.class_weight is None else self.class_weight.to(acc), reduction="none",
            label_smoothing=n["label_smoothing"],
        ) + n["z_loss"] * torch.where(self.labels != -100, z.logsumexp(1), 0.0).square()  # fmt: skip
        total = (loss * self.row_scale).sum()
        return (loss.detach(), *torch.autograd.grad(total, leaves))

    def linear_ce(self, tile_bytes, filters=(0.0, 0.0), bound=1.0, dropped=False, fields=False):
        return ops.linear_ce(
            self.hidden, self.weight, self.bias, self.labels, self.class_weight, -100, *self.numbers.values(), self.dtype,
            fields, fields, *filters, dropped, tile_bytes, "ascend", "ascend", bound,
        )  # fmt: skip

    def flce(self, chunk, need=(True, True), fields=False):
        return ops.flce(
            self.hidden, self.weight, self.bias, self.labels, self.row_scale, self.class_weight, -100,
            *self.numbers.values(), self.dtype, fields, fields, *need, self.bias is not None, chunk, "ascend",
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("tile_bytes", [1 << 30, 1 << 13], ids=["one tile", "many tiles"])
def test_cce_equals_the_formula(seen, dtype, numbers, tile_bytes):
    problem = Problem(45, 24, 301, dtype, **numbers)
    loss, *_ = problem.linear_ce(tile_bytes)
    problem.compare(loss, torch.autograd.grad((loss * problem.row_scale).sum(), problem.leaves))
    assert max(rows * columns * dtype.itemsize for rows, columns in seen) <= tile_bytes
    assert (len(seen) == 1) == (tile_bytes == 1 << 30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("chunk", [7, 45])
def test_flce_equals_the_formula(seen, dtype, numbers, chunk):
    problem = Problem(45, 24, 301, dtype, **numbers)
    total, d_hidden, d_weight, d_bias, *_ = problem.flce(chunk)
    gradients = (d_hidden, d_weight) if problem.bias is None else (d_hidden, d_weight, d_bias)
    each, *_ = problem.linear_ce(1 << 30)
    problem.compare(each, gradients)
    torch.testing.assert_close(total, (each * problem.row_scale).sum().detach(), rtol=1e-6, atol=0)
    assert {rows for rows, _ in seen[:-1]} <= {chunk, 45 % chunk}


@pytest.mark.parametrize("entry", ["flce", "cce"])
def test_statistics(seen, entry):
    problem = Problem(45, 24, 301, torch.float32, bias=True, softcap=5.0)
    out = problem.flce(16, fields=True) if entry == "flce" else problem.linear_ce(1 << 13, fields=True)
    nll, lse, entropy, predicted = (out[4], *out[5:]) if entry == "flce" else (out[1], out[2], out[3], out[4])
    z = torch.nn.functional.linear(problem.hidden.double(), problem.weight.double(), problem.bias.double()).detach()
    z, valid = 5 * torch.tanh(z / 5), problem.labels != -100
    want = torch.nn.functional.cross_entropy(z, problem.labels, reduction="none")
    for ours, oracle in (
        (nll, want),
        (lse, z.logsumexp(1)),
        (entropy, torch.distributions.Categorical(logits=z).entropy()),
    ):
        assert relative_error(ours, torch.where(valid, oracle, 0.0)) < 1e-6
    assert torch.equal(predicted, torch.where(valid, z.argmax(1), -100))


@pytest.mark.parametrize("need", [(True, False), (False, True), (False, False)], ids=["hidden", "weight", "neither"])
def test_only_what_is_needed_is_computed(seen, need):
    problem = Problem(45, 24, 301, torch.bfloat16)
    full, part = problem.flce(16), problem.flce(16, need)
    for needed, ours, whole in zip(need, part[1:3], full[1:3], strict=True):
        assert torch.equal(ours, whole) if needed else ours.numel() == 0
    problem.hidden.requires_grad_(need[0])
    problem.weight.requires_grad_(need[1])
    loss = problem.linear_ce(1 << 13)[0]
    assert loss.requires_grad == any(need)
    if any(need):
        (loss * problem.row_scale).sum().backward()
        assert [t.grad is not None for t in problem.leaves] == list(need)


def test_the_weight_may_be_wider_than_the_products(seen):
    """A float32 head under autocast."""
    problem = Problem(45, 24, 301, torch.float32)
    half = Problem(45, 24, 301, torch.bfloat16)
    problem.dtype = torch.bfloat16
    for loss in (problem.linear_ce(1 << 13)[0], problem.linear_ce(1 << 30)[0]):
        want = half.linear_ce(1 << 30)[0]
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad((loss * problem.row_scale).sum(), problem.leaves)
        half.compare(want, [g.bfloat16() for g in gradients])
    _, d_hidden, d_weight, *_ = problem.flce(16)
    assert d_weight.dtype == torch.float32
    half.compare(want, (d_hidden.bfloat16(), d_weight.bfloat16()))


def confident(rows=64, vocab=4096, dtype=torch.float32):
    """A trained model: every row's probability is on a few of the first columns."""
    problem = Problem(rows, 24, vocab, dtype)
    with torch.no_grad():
        problem.weight[:, 0] = -30.0
        problem.weight[:64, 0] = 0.0
        problem.hidden[:, 0] = 1.0
    problem.labels.clamp_(max=63)
    return problem


@pytest.mark.parametrize("filters", [(2**-12, 2**-12), (2**-12, 0.0), (0.0, 2**-12)], ids=["both", "dX", "dW"])
def test_a_filter_leaves_out_what_it_says(seen, monkeypatch, filters):
    problem = confident()
    written = []
    monkeypatch.setattr(
        vector, "gradient", lambda z, *rest: (written.append(tuple(z.shape)), ascend_references.gradient(z, *rest))
    )
    loss, _, _, _, _, dropped, marks = problem.linear_ce(1 << 18, filters, dropped=True)
    assert marks.tolist() == [[1, 0, 0, 0]] and marks.shape == vector_marks(problem, 1 << 18)
    d_hidden, d_weight = torch.autograd.grad((loss * problem.row_scale).sum(), problem.leaves)
    assert len(written) == (1 if all(filters) else 4), "tiles that do not count were computed"
    exact = problem.linear_ce(1 << 18)[0]
    want = torch.autograd.grad((exact * problem.row_scale).sum(), problem.leaves)
    assert torch.equal(loss, exact), "a filter has changed the loss"
    valid = problem.labels != -100
    p = torch.nn.functional.linear(problem.hidden, problem.weight).double().softmax(1)
    assert relative_error(dropped[valid], p[valid, 1024:].sum(1).detach()) < 1e-4
    assert 0 < dropped.max() < 2**-12
    assert (d_weight[1024:] == 0).all() == bool(filters[1])
    for filtered, ours, whole in zip(filters, (d_hidden, d_weight), want, strict=True):
        if filtered:
            assert 0 < relative_error(ours, whole) < 1e-3
        else:
            torch.testing.assert_close(ours, whole)


def vector_marks(problem, tile_bytes):
    from loss_plugins.kernels.ascend import marks_shape

    return marks_shape(*problem.hidden.shape[:1], problem.weight.shape[0], tile_bytes, problem.dtype.itemsize)


def test_no_row_loses_more_than_the_bound(seen):
    problem = Problem(64, 24, 4096, torch.float32)
    with torch.no_grad():
        problem.weight.mul_(0.1)  # nearly uniform: no probability reaches the filter's
    problem.labels.clamp_(max=63)
    free = problem.linear_ce(1 << 18, (0.01, 0.01), bound=1.0, dropped=True)
    assert free[5].max() > 0.5 and free[6].sum() == 1
    bounded = problem.linear_ce(1 << 18, (0.01, 0.01), bound=0.5, dropped=True)
    assert (bounded[5] == 0).all() and (bounded[6] == 1).all()


def test_a_tile_that_holds_a_label_or_a_nan_counts(seen):
    problem = confident()
    problem.labels[0] = 4000
    assert problem.linear_ce(1 << 18, (2**-12, 2**-12))[6].tolist() == [[1, 0, 0, 1]]
    with torch.no_grad():
        problem.weight[2000] = torch.nan
    assert problem.linear_ce(1 << 18, (2**-12, 2**-12))[6].all()


@pytest.mark.parametrize("filters", [(0.0, 0.0), (2**-12, 0.0)], ids=["exact", "filtered"])
def test_what_torch_compile_is_told_is_true(seen, filters):
    problem = Problem(20, 8, 300, torch.float32, bias=not filters[0], class_weight=True)
    given = (problem.hidden, problem.weight, problem.bias, problem.labels)
    torch.library.opcheck(
        ops.linear_ce,
        (*given, problem.class_weight, -100, 0.5, 3.0, 0.0, 1e-3, torch.float32, True, True, *filters, True, 1 << 12,
         "ascend", "ascend", 0.5),
    )  # fmt: skip
    torch.library.opcheck(
        ops.flce,
        (*given, problem.row_scale, None, -100, 1.0, 0.0, 0.1, 0.0, torch.float32, True, True, True, True,
         problem.bias is not None, 7, "ascend"),
    )  # fmt: skip
    logits = torch.randn(2, 10, 48, requires_grad=True)
    torch.library.opcheck(
        ops.cross_entropy,
        (logits, problem.labels.clamp(max=47), None, -100, 1.0, 0.0, 0.0, 0.0, True, True, False, "ascend"),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 37, 128), (3, 5, 123), (2, 7, 64)], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("labels", [torch.int64, torch.int32], ids=str)
def test_given_logits(seen, monkeypatch, dtype, shape, inplace, labels):
    monkeypatch.setattr(cross_entropy, "COPY_BYTES", 1 << 11)  # odd rows are copied a few at a time
    g = torch.Generator().manual_seed(0)
    source = (torch.randn(shape, generator=g) * 3).to(dtype).requires_grad_()
    y = torch.randint(0, shape[2], (shape[0] * shape[1],), generator=g)
    y[1::3] = -100
    logits, keep = source * 1, source.detach().clone()
    loss, nll, max_, log_sum, entropy, _ = ops.cross_entropy(
        logits, y.to(labels), None, -100, 0.5, 3.0, 0.1, 1e-3, True, True, inplace, "ascend"
    )
    assert {t.dtype for t in (loss, nll, max_, log_sum, entropy)} == {torch.float32}
    gradient = torch.autograd.grad(loss.sum(), source)[0]
    results = {}
    for kind in (torch.float64, torch.float32):
        leaf = keep.to(kind).requires_grad_()
        z = 3 * torch.tanh(leaf.flatten(0, 1) * 0.5 / 3)
        each = torch.nn.functional.cross_entropy(z, y, reduction="none", label_smoothing=0.1)
        each = each + 1e-3 * torch.where(y != -100, z.logsumexp(1), 0.0).square()
        results[kind] = (each.detach(), torch.autograd.grad(each.sum(), leaf)[0])
    (oracle, d_oracle), (same, d_same) = results.values()
    assert_within_reference_error("loss", loss.detach(), oracle, same)
    assert_within_reference_error("gradient", gradient, d_oracle, d_same.to(dtype))
    assert inplace or torch.equal(logits, keep), "the logits were written over"
    if shape[2] == 123:
        assert max(rows * aligned(123) * dtype.itemsize for rows, _ in seen) <= 1 << 11
    reference_loss = reference.linear_cross_entropy(
        keep.flatten(0, 1).double(), torch.eye(shape[2]).double(), y, logit_scale=0.5, softcap=3.0, label_smoothing=0.1,
        z_loss=1e-3, reduction="none",
    )  # fmt: skip
    torch.testing.assert_close(oracle, reference_loss)


def test_the_launch_table():
    """Blocks for every vocabulary, on every chip: powers of two below what fits, and never many times a short row."""
    switches = [(r, b, e, p) for r in (0, 1) for b in (0, 1) for e in (0, 1) for p in (0, 1)]
    for vocab in range(1, 262_145):
        assert 128 <= gradient_block(vocab) <= 4096
        assert gradient_block(vocab) < max(2 * vocab, 129)
        block = forward_block(vocab, *switches[vocab % 16])
        assert block <= 16384 and block < max(2 * vocab, 129) and block & (block - 1) == 0
    assert forward_block(262_144) == 16384
    assert all(forward_block(262_144, *switch) <= 8192 for switch in switches if any(switch))
    for chip in soc.SOCS.values():
        for rows in (1, 7, 40, 65_535, 65_536, 131_072, 1 << 24):
            assert 1 <= grid_for(rows, chip)[0] <= min(chip.vector_cores, 65_535)
            assert grid_for(rows, chip, blocks.GROUP)[0] * blocks.GROUP < rows + chip.vector_cores * blocks.GROUP


def test_tiles_are_no_larger_than_asked_for():
    for rows in (1, 15, 100, 4096, 131_072):
        for vocab in (1, 17, 1000, 151_936, 262_144):
            for budget in (1 << 10, 1 << 16, 4 << 20, 128 << 20):
                for size in (2, 4):
                    for filtered in (False, True):
                        tiles = tiles_of(rows, vocab, budget, size, filtered)
                        assert tiles.rows * aligned(tiles.columns) * size <= budget
                        assert tiles.row_tiles * tiles.rows >= rows and tiles.vocab_tiles * tiles.columns >= vocab
                        assert (tiles.row_tiles - 1) * tiles.rows < rows and (
                            tiles.vocab_tiles - 1
                        ) * tiles.columns < vocab
    tiles = tiles_of(8192, 151_936, 128 << 20, 2)
    assert tiles.row_tiles == 1 and tiles.columns == 8192, "dW's rows are written by one product each"


def test_chips():
    names = {"Ascend910B3": (40, 192), "Ascend910_9391": (48, 192), "Ascend950PR_9579": (56, 248)}
    for name, (cores, kib) in names.items():
        chip = soc.soc_of(name)
        assert (chip.vector_cores, chip.ub_bytes) == (cores, kib << 10) and chip.cube_cores * 2 == cores
    assert soc.soc_of("Ascend910_9999") == soc.Soc("Ascend910_9999", 20, 40, 192 << 10)
    assert soc.soc_of("Ascend950XX").ub_bytes == 248 << 10
    assert soc.soc_of("a chip of next year").vector_cores == 40
    assert soc.soc_at(torch.device("cpu")) == soc.SMALLEST


def test_importing_needs_no_triton_and_no_driver():
    import subprocess

    code = """
import sys
sys.modules["triton"] = None
import loss_plugins.kernels.ascend as ascend
from loss_plugins.kernels.ascend import blocks, memory, soc, vector
try:
    vector.kernels()
except ImportError as error:
    print("the first launch asks for it:", error.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("the first launch asks for it"), done.stderr


@pytest.mark.parametrize("entry", ["flce", "cce"])
def test_estimates_shrink_with_the_workspace_and_know_what_is_frozen(entry):
    of = memory.flce_bytes if entry == "flce" else memory.cce_bytes
    small, large = (64, 4096) if entry == "flce" else (4 << 20, 128 << 20)
    shape = (8192, 4096, 151_936, 2, 2)
    assert of(*shape, small) < of(*shape, large)
    assert of(*shape, large, need_weight=False) <= of(*shape, large) - 151_936 * 4096 * 2
    assert of(*shape, large, need_hidden=False) < of(*shape, large)
