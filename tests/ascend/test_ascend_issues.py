"""What users of other losses on Ascend have reported, as tests of these.

Each test's docstring names the report. Kernels are triton-ascend's, run on this CPU.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
from pathlib import Path

import ascend_lowering
import pytest
import torch
import torch.nn.functional as F

from loss_plugins.diagnostics.memory import PeakMeter
from loss_plugins.kernels import ascend, ops, reference
from loss_plugins.kernels.ascend import memory, vector
from loss_plugins.kernels.ascend.blocks import GROUP
from loss_plugins.testing import assert_within_reference_error, relative_error

FOLDER = Path(ascend.__file__).parent


def problem(rows, width, vocab, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=g) / width**0.5 * 2).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (rows,), generator=g)


def cce(hidden, weight, labels, tile_bytes=1 << 22, filters=(0.0, 0.0), dtype=None):
    return ops.linear_ce(
        hidden, weight, None, labels, None, -100, 1.0, 0.0, 0.0, 0.0, dtype or hidden.dtype, False, False, *filters, False,
        tile_bytes, "ascend", "ascend",
    )  # fmt: skip


def flce(hidden, weight, labels, chunk):
    scale = torch.full((len(labels),), 1 / len(labels))
    return ops.flce(
        hidden, weight, None, labels, scale, None, -100, 1.0, 0.0, 0.0, 0.0, hidden.dtype, False, False, True, True, False,
        chunk, "ascend",
    )  # fmt: skip


def given(logits, labels, inplace=False):
    out = ops.cross_entropy(logits[None], labels, None, -100, 1.0, 0.0, 0.0, 0.0, False, False, inplace, "ascend")
    return out[0]


def test_the_grid_stays_small(launches):
    """Liger #1235 and #1256, fla #1001: a grid of as many programs as rows cannot be launched from 65536 rows on."""
    rows = 131_072
    hidden, weight, labels = problem(rows, 8, 33, torch.bfloat16)
    labels[200:] = -100  # so that this CPU has little to do
    flce(hidden, weight, labels, 65_536)
    cce(hidden, weight, labels)[0].sum().backward()
    given(torch.zeros(rows, 48, dtype=torch.bfloat16)[:, :33], labels)
    assert {launch.name for launch in launches} == {"row_sums_kernel", "gradient_kernel"}
    assert all(launch.programs <= 40 for launch in launches)


def test_more_rows_than_programs_are_all_computed():
    hidden, weight, labels = problem(40 * GROUP * 2 + 5, 8, 33, torch.float32)
    loss = cce(hidden, weight, labels)[0]
    assert relative_error(loss, reference.linear_cross_entropy(hidden, weight, labels, reduction="none")) < 1e-6


@pytest.mark.parametrize("entry", ["flce", "cce"])
def test_peak_is_what_is_estimated_and_far_below_the_logits(entry):
    """Liger's FLCE keeps all logits in the forward; ms-swift #7317 and VeOmni #361: chunking behind the head saves nothing."""
    rows, width, vocab = 2048, 32, 8000
    hidden, weight, labels = problem(rows, width, vocab, torch.bfloat16)
    labels[20:] = -100
    meter = PeakMeter(torch.device("cpu"))
    with meter:
        meter.mark()
        loss = (
            flce(hidden, weight, labels, 128)[0] if entry == "flce" else cce(hidden, weight, labels, 1 << 20)[0].mean()
        )
        loss.backward()
        peak = meter.read()
    estimate = (
        memory.flce_bytes(rows, width, vocab, 2, 2, 128)
        if entry == "flce"
        else memory.cce_bytes(rows, width, vocab, 2, 2, 1 << 20)
    )
    logits = rows * vocab * 4
    assert peak <= estimate * 1.05 and peak >= estimate * 0.5
    assert peak < {"flce": 0.15, "cce": 0.05}[entry] * logits


def test_logits_survive_a_backward():
    """ms-swift #10130: the backward of a chunked loss wrote over logits that others read."""
    logits = torch.randn(9, 123).requires_grad_()
    labels = torch.randint(0, 123, (9,))
    keep = logits.detach().clone()
    loss = given(logits, labels).sum()
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, logits)[0], first) and torch.equal(logits, keep)


def test_chunks_do_not_change_the_loss():
    """NeMo Automodel #3804: the loss grew with the number of chunks."""
    hidden, weight, labels = problem(100, 16, 257, torch.float32)
    whole, d_hidden, d_weight, *_ = flce(hidden, weight, labels, 100)
    for chunk in (1, 32, 99):
        total, d_h, d_w, *_ = flce(hidden, weight, labels, chunk)
        assert torch.equal(total, whole)
        for ours, want in ((d_h, d_hidden), (d_w, d_weight)):
            assert relative_error(ours, want) < 1e-6


def test_a_certain_token_keeps_its_gradient():
    """Liger #1341: where the label's probability is nearly 1 the bfloat16 gradient of its logit was wrong."""
    source = torch.randn(32, 1000)
    labels = torch.randint(0, 1000, (32,))
    source[torch.arange(32), labels] += 14
    logits = source.bfloat16().requires_grad_()
    ours = torch.autograd.grad(given(logits, labels).sum(), logits)[0]
    wide = logits.detach().double().requires_grad_()
    oracle = torch.autograd.grad(F.cross_entropy(wide, labels, reduction="sum"), wide)[0]
    same = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), logits)[0]
    at = torch.arange(32), labels
    assert relative_error(ours[at], oracle[at]) <= relative_error(same[at], oracle[at]) < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_loss_of_half_logits_is_float32(dtype):
    """Liger's Ascend kernel returned bfloat16 losses, 2.75e-2 away; Liger #1049, RL-Kernel #406: logits not up-cast."""
    logits, labels = (torch.randn(50, 3001) * 3).to(dtype), torch.randint(0, 3001, (50,))
    out = ops.cross_entropy(logits[None], labels, None, -100, 1.0, 0.0, 0.0, 0.0, False, False, False, "ascend")
    oracle = F.cross_entropy(logits.double(), labels, reduction="none")
    assert {t.dtype for t in out[:4]} == {torch.float32}
    assert (out[0] - oracle).abs().max() < 1e-4
    assert (out[2] + out[3] - logits.double().logsumexp(1)).abs().max() < 1e-4


@pytest.mark.parametrize("vocab", [123, 1003, 4111])
def test_odd_rows(vocab, launches):
    """Liger #1220: rows of 492 bytes stopped an A3 with error 507035. Every row that a kernel meets begins on 32 bytes."""
    logits, labels = torch.randn(9, vocab, requires_grad=True), torch.randint(0, vocab, (9,))
    strides = []
    real = vector.row_sums, vector.gradient
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vector, "row_sums", lambda z, *rest: (strides.append(z.stride()), real[0](z, *rest)))
        patch.setattr(
            vector,
            "gradient",
            lambda z, out, *rest: (strides.extend([z.stride(), out.stride()]), real[1](z, out, *rest)),
        )
        loss = given(logits, labels)
        gradient = torch.autograd.grad(loss.sum(), logits)[0]
        hidden, weight, y = problem(9, 16, vocab, torch.float32)
        flce(hidden, weight, y, 4)
        cce(hidden, weight, y, 1 << 13)[0].sum().backward()
    assert all(row % 16 == 0 and column == 1 for row, column in strides)
    oracle = torch.autograd.grad(F.cross_entropy(logits.double(), labels, reduction="sum"), logits)[0]
    assert relative_error(gradient, oracle) < 1e-6


@pytest.mark.parametrize("entry", ["given", "flce", "cce"])
def test_a_batch_without_labels(entry):
    """PrimeIntellect and VeOmni #841: -100 as an index, or 0 / 0. Memory there is noise, and none of it is read."""
    hidden, weight, _ = problem(20, 16, 123, torch.float32)
    labels = torch.full((20,), -100)
    if entry == "given":
        logits = torch.full((20, 123), torch.nan, requires_grad=True)
        loss, leaves = given(logits, labels), [logits]
    elif entry == "flce":
        loss, leaves = flce(hidden, weight, labels, 7)[0], [hidden, weight]
    else:
        loss, leaves = cce(hidden, weight, labels)[0], [hidden, weight]
    assert (loss == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(loss.sum(), leaves))


def test_results_are_the_same_every_time():
    hidden, weight, labels = problem(70, 16, 301, torch.bfloat16)

    def once():
        loss = cce(hidden, weight, labels, 1 << 13)[0]
        return [loss, *torch.autograd.grad(loss.sum(), (hidden, weight)), *flce(hidden, weight, labels, 16)[:3]]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tile_bytes", "rows", "vocab"), [(1 << 13, 70, 301), (1 << 22, 20, 20_000)], ids=["tiles", "blocks"]
)
def test_a_whole_loss(dtype, tile_bytes, rows, vocab):
    """Forward and backward of cce, in many tiles and in one of several blocks."""
    hidden, weight, labels = problem(rows, 16, vocab, dtype)
    with torch.no_grad():
        weight[-16:] *= 2  # the largest logits come last, so that what was summed before is rescaled
    labels[::5] = -100
    loss = cce(hidden, weight, labels, tile_bytes)[0]
    ours = (loss.detach(), *torch.autograd.grad(loss.sum(), (hidden, weight)))
    results = []
    for kind in (torch.float64, dtype):
        leaves = [t.detach().to(kind).requires_grad_() for t in (hidden, weight)]
        z = F.linear(*leaves)
        each = F.cross_entropy(z if kind == torch.float64 else z.float(), labels, reduction="none")
        results.append((each.detach(), *torch.autograd.grad(each.sum(), leaves)))
    for what, actual, oracle, same in zip(("loss", "dX", "dW"), ours, *results, strict=True):
        assert_within_reference_error(what, actual, oracle, same, oracle * 10 if dtype == torch.float32 else None)


def test_a_filtered_loss():
    hidden, weight, labels = problem(64, 16, 4096, torch.float32)
    with torch.no_grad():
        weight[:, 0], hidden[:, 0] = -30.0, 1.0
        weight[:64, 0] = 0.0
    labels.clamp_(max=63)
    loss, *_, marks = cce(hidden, weight, labels, 1 << 18, (2**-12, 2**-12))
    assert marks.tolist() == [[1, 0, 0, 0]]
    ours = torch.autograd.grad(loss.sum(), (hidden, weight))
    exact = cce(hidden, weight, labels, 1 << 18)[0]
    assert torch.equal(loss, exact)
    for filtered, whole in zip(ours, torch.autograd.grad(exact.sum(), (hidden, weight)), strict=True):
        assert relative_error(filtered, whole) < 1e-3


def test_nothing_is_asked_of_gpus(launches):
    """Liger #1111: warps and stages mean nothing here, and the compiler prints a warning for each."""
    hidden, weight, labels = problem(9, 16, 123, torch.float32)
    cce(hidden, weight, labels)
    assert all((launch.options["num_warps"], launch.options["num_stages"]) == (4, 1) for launch in launches), (
        "not the defaults"
    )
    source = "".join(path.read_text() for path in FOLDER.glob("*.py"))
    words = {
        node.arg
        for node in ast.walk(ast.parse(source.replace("from __future__ import annotations", "")))
        if isinstance(node, ast.keyword)
    }
    assert not words & {
        "num_warps",
        "num_stages",
        "eviction_policy",
        "cache_modifier",
        "multibuffer",
        "input_precision",
    }


def test_the_compilers_faults_are_kept_away_from():
    """No tuning at import, no atomics, no locks, no barriers, no dot (all of #1416, #1738, #1392), and no mask but ``<``."""
    source = (FOLDER / "_kernels.py").read_text()
    tree = ast.parse(source)
    called = {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert called & {"load", "store"}
    assert not [
        name
        for name in called
        if "atomic" in name or name in ("autotune", "dot", "debug_barrier", "static_range", "argmax")
    ]
    names = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        for word in node.keywords if isinstance(node, ast.Call) else ():
            if word.arg == "mask":
                mask = (
                    names.get(word.value.id)
                    if isinstance(word.value, ast.Name) and word.value.id in names
                    else word.value
                )
                prefix = isinstance(mask, ast.Compare) and [type(op) for op in mask.ops] == [ast.Lt]
                assert prefix or ast.unparse(mask) == "m_v", ast.unparse(word.value)


def test_the_lint_finds_faults(tmp_path):
    """It is only worth something if it can fail: a store behind a mask that is no prefix, and a lock."""
    path = tmp_path / "faulty.py"
    path.write_text("""
import triton
import triton.language as tl

@triton.jit
def hole(x, out, n, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(out + o, tl.load(x + o, mask=o < n, other=0.0), mask=(o < n) & (o != 7))

@triton.jit
def lock(x, out, n, B: tl.constexpr):
    while tl.atomic_cas(out, 0, 1) == 1:
        pass
    tl.store(x, n)

@triton.jit
def gather(x, out, n, B: tl.constexpr):
    o = tl.arange(0, B)
    i = tl.load(out + o, mask=o < n, other=0).to(tl.int32)
    tl.store(out + o, tl.load(x + i, mask=o < n, other=0.0), mask=o < n)
""")
    import ascend_driver

    faulty = load(path, "faulty")
    ascend_driver.install(execute=False)
    try:
        found = {}
        for name in ("hole", "lock", "gather"):
            ascend_driver.forget()
            out = torch.zeros(64, dtype=torch.int32) if name == "lock" else torch.zeros(64)
            getattr(faulty, name)[(1,)](torch.zeros(64), out, 50, B=64)
            found[name] = ascend_lowering.lint(ascend_driver.LAUNCHES[0].linalg)
    finally:
        ascend_driver.install()
    assert "read and written" in found["hole"][0]
    assert any("lock is never taken" in fault for fault in found["lock"])
    assert any("scalar loop" in fault for fault in found["gather"])


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_blocks_that_do_not_fit_are_refused(launches, monkeypatch):
    """verl #7950, Liger #985 and #1148: blocks made for GPUs overflow the unified buffer. The check can fail."""
    monkeypatch.setattr(vector, "gradient_block", lambda columns: 16384)
    logits = torch.randn(2, 20_000, requires_grad=True)
    given(logits, torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ascend_lowering.LoweringError, match="bytes of unified buffer wanted, 196608 there"):
        ascend_lowering.to_hivm(launches[-1].linalg)


@pytest.mark.parametrize("home", ["ascend", "cann"])
def test_tanh_is_found_in_either_place(monkeypatch, home):
    """fla #1161: triton-ascend 3.2.1 moved its extras from ``extra.ascend`` to ``extra.cann``."""
    real = importlib.import_module("triton.language.extra.ascend.libdevice")
    for name in ("ascend", "cann"):
        for module in (name, f"{name}.libdevice"):
            monkeypatch.setitem(sys.modules, f"triton.language.extra.{module}", None)
    package, marker = types.ModuleType(home), object()
    package.libdevice = types.ModuleType("libdevice")
    package.libdevice.tanh = marker
    monkeypatch.setitem(sys.modules, f"triton.language.extra.{home}", package)
    monkeypatch.setitem(sys.modules, f"triton.language.extra.{home}.libdevice", package.libdevice)
    found = load(FOLDER / "_math.py", f"math_of_{home}").tanh
    assert found is marker and found is not real.tanh


MUTATIONS = {
    "no rescale of the running sum": ("b_sum = b_sum * b_carry + tl.sum", "b_sum = b_sum + tl.sum"),
    "no rescale where tiles merge": ("b_old_sum * b_there", "b_old_sum"),
    "no label's logit": ("b_target = tl.load(p_row + b_local)", "b_target = 0.0 * tl.load(p_row + b_local)"),
    "no label in the gradient": ("b_dz - b_at_label, b_dz", "b_dz, b_dz"),
    "the first tile's columns in every tile": ("tl.cast(b_label - first_column", "tl.cast(b_label"),
    "no zeros where a row has no label": ("tl.zeros((BLOCK,), out", "1 + tl.zeros((BLOCK,), out"),
}


@pytest.mark.parametrize("mutation", ["none", *MUTATIONS])
def test_these_tests_would_notice(monkeypatch, tmp_path, mutation):
    """The kernels with one fault at a time: the comparison with the formula fails for each, and for none without."""
    source = inspect.getsource(vector.kernels()).replace("from ._math", "from loss_plugins.kernels.ascend._math")
    if mutation != "none":
        before, after = MUTATIONS[mutation]
        assert source.count(before) >= 1
        source = source.replace(before, after)
    path = tmp_path / "mutated.py"
    path.write_text(source)
    module = load(path, "mutated")
    monkeypatch.setattr(vector, "kernels", lambda: module)
    said = ""
    for shape in ((1 << 13, 70, 301), (1 << 22, 20, 20_000)):
        try:
            test_a_whole_loss(torch.float32, *shape)
        except AssertionError as error:
            said = str(error)
    assert said == "" if mutation == "none" else re.search(r"error .* exceeds|not finite", said)
