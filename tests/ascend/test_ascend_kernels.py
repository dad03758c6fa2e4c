"""Every kernel, type and combination of options: compiled for three releases of CANN, its memory and its numbers.

A case is one launch through triton-ascend's own code, of a vocabulary so large that its block is the largest that is ever
taken. What that launch compiled is then given to BiShengIR, and what it computed is compared with the formula.
"""

from __future__ import annotations

import itertools

import ascend_lowering
import pytest
import torch
from ascend_formulas import IGNORED, Options, gradient, inputs, plain_sums, transformed

from loss_plugins.kernels.ascend import vector
from loss_plugins.kernels.ascend.blocks import FORWARD_BLOCK, GRADIENT_BLOCK
from loss_plugins.kernels.ascend.soc import SOCS
from loss_plugins.kernels.ascend.vector import Sums, Transform
from loss_plugins.testing import assert_within_reference_error

UB_BYTES = min(soc.ub_bytes for soc in SOCS.values())
HALF, SINGLE = torch.bfloat16, torch.float32
SMOOTHINGS = [{}, {"smoothing": True}, {"smoothing": True, "class_weight": True}]
ALL = Options(*(True,) * len(Options._fields))


def combinations(*names: str) -> list[Options]:
    return [
        Options(**dict(zip(names, on, strict=True)), **smoothing)
        for on in itertools.product((False, True), repeat=len(names))
        for smoothing in SMOOTHINGS
    ]


FORWARD = [
    *((dtype, options) for dtype in (HALF, SINGLE) for options in combinations("bias", "softcap", "entropy", "predicted")),
    # a scale is one more product in registers, float16 has bfloat16's size
    *((dtype, options) for dtype in (HALF, SINGLE) for options in (Options(scale=True), ALL)),
    *((torch.float16, options) for options in (Options(), ALL._replace(scale=False), ALL)),
]  # fmt: skip
GRADIENT = [
    *((dtype, options) for dtype in (HALF, SINGLE) for options in combinations("bias", "softcap")),
    *((dtype, options) for dtype in (HALF, SINGLE) for options in (Options(scale=True), ALL)),
    *((torch.float16, options) for options in (Options(), ALL)),
]


def name(value) -> str:
    return str(value).removeprefix("torch.")


def check_compiles(launch) -> None:
    assert ascend_lowering.lint(launch.linalg) == []
    for version in ascend_lowering.VERSIONS:
        hivm = ascend_lowering.to_hivm(launch.linalg, version)
        assert hivm.mix_mode == "aiv", "a vector kernel has come to need a cube unit"
        assert 0 < hivm.ub_bytes <= UB_BYTES


def sums_of(given, options, spans, tile=None, labels=None) -> Sums:
    """The kernel's sums over tiles of the vocabulary."""
    rows = given.logits.shape[0]
    before, after = (Sums.zeros(rows, given.logits.device, options.predicted) for _ in range(2))
    for i, (v0, v1) in enumerate(spans):
        vector.row_sums(
            given.logits[:, v0:v1], given.labels, None if given.bias is None else given.bias[v0:v1],
            None if given.class_weight is None else given.class_weight[v0:v1], before if i else None, after, v0, IGNORED,
            Transform(options.factor, options.cap), options.smoothing, options.entropy, options.predicted,
            None if tile is None else (tile[0, i], tile[1, i]),
        )  # fmt: skip
        before, after = after, before
    return before


def check_sums(sums: Sums, given, options) -> None:
    valid = given.labels != IGNORED
    assert (sums.numbers[:, ~valid] == 0).all(), "a row without a label was written"
    z, single = transformed(given, options)[valid], transformed(given, options, torch.float32)[valid]
    max_, sum_, target, weighted, moment = sums.numbers[:, valid]
    weight = torch.ones(z.shape[1]) if given.class_weight is None else given.class_weight
    lse, entropy, total = plain_sums(single, weight)
    assert torch.equal(target, given.logits[valid].gather(1, given.labels[valid].long()[:, None])[:, 0].float())
    assert_within_reference_error("max", max_, z.amax(1), single.amax(1))
    assert_within_reference_error("lse", max_ + sum_.log(), z.logsumexp(1), lse)
    if options.smoothing:
        # a sum of many numbers inherits the rounding of what it adds, not of what is left
        assert_within_reference_error("weighted", weighted, z @ weight.double(), total, z.abs() @ weight.double())
    if options.entropy:
        want = torch.distributions.Categorical(logits=z).entropy()
        assert_within_reference_error("entropy", sum_.log() - moment / sum_, want, entropy, z.amax(1))
    if options.predicted:
        assert torch.equal(sums.best[valid].long(), single.argmax(1))


@pytest.mark.parametrize(("dtype", "options"), FORWARD, ids=name)
def test_sums(dtype, options, launches):
    given = inputs(5, 2 * FORWARD_BLOCK + 77, dtype, options)
    check_sums(sums_of(given, options, [(0, given.logits.shape[1])]), given, options)
    (launch,) = launches
    assert launch.constants["FIRST"]
    check_compiles(launch)


MERGING = [Options(), *(Options(**{name: True}) for name in ("smoothing", "entropy", "predicted")), ALL]


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=name)
@pytest.mark.parametrize("options", MERGING, ids=name)
def test_sums_over_tiles(dtype, options, launches):
    """A later tile merges with those before: a kernel of its own, whose options meet only a few numbers a row."""
    given = inputs(5, 2 * FORWARD_BLOCK + 77, dtype, options)
    vocab = given.logits.shape[1]
    check_sums(sums_of(given, options, [(0, 16), (16, vocab)]), given, options)
    given.logits[:, 16:] -= 40  # then the first tile has the maximum
    check_sums(sums_of(given, options, [(0, 16), (16, vocab)]), given, options)
    launch = launches[1]
    assert not launch.constants["FIRST"]
    check_compiles(launch)


@pytest.mark.parametrize(("dtype", "options"), GRADIENT, ids=name)
def test_gradient(dtype, options, launches):
    given = inputs(5, 2 * GRADIENT_BLOCK + 77, dtype, options)
    valid = given.labels != IGNORED
    g = torch.Generator().manual_seed(1)
    coefficients = tuple(torch.where(valid, torch.rand(5, generator=g), 0.0) for _ in range(3))
    z = transformed(given, options)
    lse = torch.where(valid, z.logsumexp(1), 0.0).float()
    max_ = torch.where(valid, z.amax(1), 0.0).float()
    log_sum = torch.where(valid, (z - z.amax(1, True)).exp().sum(1).log(), 0.0).float()
    want, single = gradient(given, options, coefficients), gradient(given, options, coefficients, torch.float32)
    # the log-sum-exp in one number or in two: kernels of their own
    both = options in (Options(), Options(bias=True), ALL, ALL._replace(scale=False))
    for shift, rest in ((max_, log_sum), (lse, None))[: 1 + both]:
        out = torch.full_like(given.logits, float("nan"))
        vector.gradient(
            given.logits, out, given.labels, given.bias, given.class_weight, shift, rest, coefficients, 0, IGNORED,
            Transform(options.factor, options.cap), options.smoothing,
        )  # fmt: skip
        # exp(z - lse) inherits the rounding of the log-sum-exp, which float32 does not hide
        rounded = want * lse.abs().max() if dtype == torch.float32 else None
        assert_within_reference_error("gradient", out, want, single.to(dtype), rounded)
        assert (out[~valid] == 0).all()
        over = given.logits.clone()
        vector.gradient(
            over, over, given.labels, given.bias, given.class_weight, shift, rest, coefficients, 0, IGNORED,
            Transform(options.factor, options.cap), options.smoothing,
        )  # fmt: skip
        assert torch.equal(over, out), "written over the logits it is another number"
    for launch in launches[::2]:
        check_compiles(launch)


@pytest.mark.parametrize("dtype", [HALF, SINGLE, torch.float16], ids=name)
def test_scale(dtype, launches):
    source = torch.randn(100_003).to(dtype)
    out = torch.full_like(source, float("nan"))
    vector.scale(source, torch.tensor([0.3]), out)
    assert torch.equal(out, (source.float() * torch.tensor(0.3)).to(dtype))
    check_compiles(launches[0])


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=name)
@pytest.mark.parametrize("first", [True, False])
def test_shares_of_a_tile(dtype, first, launches):
    options = Options(predicted=True)
    given = inputs(5, 40_000, dtype, options)
    spans = [(0, 40_000)] if first else [(0, 4096), (4096, 40_000)]
    tile = torch.zeros(2, len(spans), 5)
    check_sums(sums_of(given, options, spans, tile), given, options)
    valid, z = given.labels != IGNORED, transformed(given, options)
    for i, (v0, v1) in enumerate(spans):
        here = z[valid, v0:v1]
        lse, _, _ = plain_sums(here.float(), torch.ones(v1 - v0))
        assert_within_reference_error("share", tile[0, i, valid] + tile[1, i, valid].log(), here.logsumexp(1), lse)
    check_compiles(launches[-1])


@pytest.mark.parametrize("labels", [torch.int64, torch.int32], ids=name)
def test_labels_of_both_kinds(labels, launches):
    given = inputs(7, 1001, HALF, ALL, labels)
    check_sums(sums_of(given, ALL, [(0, 512), (512, 1001)]), given, ALL)
    for launch in launches:
        check_compiles(launch)


@pytest.mark.parametrize("vocab", [1, 2, 15, 123, 128, 129, 4097])
def test_rows_shorter_than_a_block(vocab):
    options = Options(entropy=True, predicted=True)
    given = inputs(35, vocab, HALF, options)
    check_sums(sums_of(given, options, [(0, vocab)]), given, options)


@pytest.mark.parametrize("arch", SOCS)
def test_every_chip(arch, launches):
    """The largest blocks, for every chip of the table. A 950 has a compiler of its own, which CANN 8.5 had not yet."""
    for dtype, options in ((HALF, Options()), (SINGLE, ALL), (HALF, ALL)):
        given = inputs(5, 2 * FORWARD_BLOCK + 77, dtype, options)
        sums = sums_of(given, options, [(0, 16), (16, given.logits.shape[1])])
        vector.gradient(
            given.logits, given.logits, given.labels, given.bias, given.class_weight, sums.numbers[0], sums.numbers[1],
            tuple(sums.numbers[:3]), 0, IGNORED, Transform(options.factor, options.cap), options.smoothing,
        )  # fmt: skip
    for launch in launches:
        for version in ("1.1.0", "1.2.0") if arch.startswith("Ascend950") else ("1.2.0",):
            hivm = ascend_lowering.to_hivm(launch.linalg, version, arch)
            assert hivm.mix_mode == "aiv" and 0 < hivm.ub_bytes <= SOCS[arch].ub_bytes
