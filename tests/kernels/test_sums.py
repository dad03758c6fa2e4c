"""dX of cce in fewer bits than float32: what the sums keep, when they are taken, and the gradients that come of them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from one_step import assert_right, inputs, step
from test_filtered import BELOW, Case

from loss_plugins.device import DeviceProfile
from loss_plugins.kernels.triton import backward, product, sampled, sums
from loss_plugins.kernels.triton.sums import RowSums, row_digits
from loss_plugins.kernels.triton.tuning import Blocks
from loss_plugins.strategies import Problem, _recompute
from loss_plugins.testing import relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def add(total, left, right):
    """As the slices do."""
    count = torch.tensor(len(left), device=left.device)
    product.add_product(left, right, total, count, False, product.products())


def rounded(total, dtype=torch.float32, place=None):
    rows, device = len(total.total), total.total.device
    place = torch.arange(rows, device=device) if place is None else place
    return total.rounded(place, torch.ones((), device=device), dtype)


def to_digits(numbers, digits):
    """To the nearest number of 16 + ``digits`` bits."""
    step = 1 << (16 - digits)
    return ((numbers.view(torch.int32) + step // 2) & -step).view(torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("digits", [4, 8])
@pytest.mark.parametrize(("rows", "width"), [(128, 256), (100, 264), (300, 72)])
def test_every_number_has_its_own_digits(device, digits, rows, width):
    """Sums that a product makes exactly: of each row one number of the right side."""
    g = torch.Generator().manual_seed(0)
    total, want = RowSums(rows, width, digits, torch.device(device)), torch.zeros(rows, width, device=device)
    for scale in (1.0, 2.0**-5, -(2.0**-9)):
        left = torch.nn.functional.one_hot(torch.randint(0, 64, (rows,), generator=g), 64).to(device, torch.bfloat16)
        right = (torch.randn(64, width, generator=g) * scale).to(device, torch.bfloat16)
        add(total, left, right)
        want = to_digits(want + left.float() @ right.float(), digits)
    assert torch.equal(rounded(total), want)
    assert not torch.equal(to_digits(want, 0), want)
    place = torch.randperm(rows, generator=g).to(device)
    assert torch.equal(rounded(total, place=place), want[place])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("digits", "additions"), [(4, sums.MOST_OF_FOUR), (8, 100)])
def test_many_additions_cost_a_third_of_a_rounding(device, digits, additions):
    g = torch.Generator().manual_seed(0)
    total, exact = RowSums(128, 96, digits, torch.device(device)), torch.zeros(128, 96, dtype=torch.float64)
    for _ in range(additions):
        left, right = (torch.randn(n, 16, generator=g).bfloat16() for n in (128, 96))
        add(total, left.to(device), right.to(device).T.contiguous())
        exact += left.double() @ right.double().T
    kept = relative_error(rounded(total).cpu(), exact)
    last = relative_error(exact.bfloat16(), exact)
    assert kept < 0.37 * last / (1 if digits == 4 else 10)
    assert kept**2 + last**2 < (1.07 * last) ** 2
    assert digits == 8 or kept > last / 6  # so few bits it is


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("digits", [4, 8])
def test_a_number_that_is_none_stays_so(device, digits):
    total = RowSums(128, 128, digits, torch.device(device))
    left, right = torch.eye(128, device=device).bfloat16(), torch.ones(128, 128, device=device).bfloat16()
    for value in (float("nan"), 1.0):
        left[7, 7] = value
        add(total, left, right)
    assert rounded(total).isfinite().all(1).logical_not().nonzero().tolist() == [[7]]


def digits_of(rows, width, dtype=torch.bfloat16, out=None, workspace=128 << 20, additions=1, head=None):
    packed, weight = torch.zeros(1, width, dtype=dtype), torch.zeros(1, width, dtype=head or dtype)
    return row_digits(packed.expand(rows, width), weight, out or dtype, workspace, lambda digits: additions)


@pytest.fixture
def hopper(monkeypatch):
    """Its copies and tiles, wherever this runs."""
    monkeypatch.setattr("loss_plugins.kernels.triton._common.has_bulk_copies", lambda device: True)
    for module in (sums, backward, sampled):
        monkeypatch.setattr(module, "blocks_for", lambda *_, **__: Blocks(128, 256, 64, 8, 3, True))
    monkeypatch.setattr(sampled, "_is_bulk", lambda *_: True)
    monkeypatch.setattr(backward, "INTERPRETED", False)


def test_when_few_bits_are_taken(hopper):
    assert digits_of(8192, 4096) == 4
    assert digits_of(8192, 2304) == digits_of(8192, 2560) == 0 and digits_of(8192, 2568) == 4
    assert [digits_of(8192, 4096, additions=n) for n in (64, 65, 1 << 14, (1 << 14) + 1)] == [4, 8, 8, 0]
    assert [digits_of(8192, 4096, torch.float16, additions=n) for n in (1, 2, 256, 257)] == [4, 8, 8, 0]
    assert digits_of(8192, 4096, head=torch.float32) == 4  # cast by slices
    assert digits_of(8192, 4096, out=torch.float32) == digits_of(8192, 4096, torch.float32) == 0
    assert digits_of(8192, 4092) == 0  # rows that no bulk copy reads


@pytest.fixture
def chosen(monkeypatch):
    """The digits that were taken, and how many additions they were taken for."""
    seen = []

    def noted(*given):
        seen.append(row_digits(*given))
        return seen[-1]

    monkeypatch.setattr(backward, "row_digits", noted)
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(300, 264, 2100), (40, 64, 300)], ids=str)
def test_exact_gradients(device, dtype, shape, chosen):
    """Widths that are no multiples of a tile; one slice and two."""
    given = inputs(*shape, device, dtype)
    assert_right("cce, few bits", given)
    assert chosen == [8 if dtype == torch.float16 and shape[2] > 2048 else 4]
    whole = step("cce, no filter", given)
    assert chosen[1:] == [0] and torch.equal(step("cce, few bits", given).d_weight, whole.d_weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("left", [0, 1, 128, 129])
def test_ignored_rows(device, left, chosen):
    """They are sorted to the end, and stay zeros; what lies there is nobody's."""
    case = Case(device, shape=(300, 72, 2100), tile_bytes=1)
    case.labels = torch.where(case.labels == -100, 0, case.labels)
    ignored = torch.randperm(300, generator=torch.Generator().manual_seed(0))[left:].to(device)
    case.labels[ignored], case.hidden[ignored] = -100, float("nan")
    got = case.run((0.0, 0.0))[1]
    case.tile_bytes = 1 << 23
    want = case.run((0.0, 0.0))[1]
    assert chosen == [4, 0] and torch.equal(got[1], want[1])
    assert not got[0][ignored].any() and (left == 0 or relative_error(got[0], want[0]) < 2e-3)
    assert not left or got[0].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("below", [BELOW, 0.0], ids=["filtered", "exact"])
def test_the_copy_of_the_rows_is_gone_when_dx_is_rounded(device, below, monkeypatch):
    """Which takes its room."""
    copies, alive = [], []
    pack, finish = backward.pack, RowSums.rounded

    def noted(*given, **options):
        made = pack(*given, **options)
        copies.append(weakref.ref(made.rows))
        return made

    def looked(*given):
        alive.append(copies[-1]() is not None)
        return finish(*given)

    monkeypatch.setattr(backward, "pack", noted)
    monkeypatch.setattr(RowSums, "rounded", looked)
    for workspace in (1, 1 << 23):
        Case(device, shape=(256, 64, 300), tile_bytes=workspace).run((below, below))
    assert alive == [False, False]


FILTERED = {
    "plain": {},
    "float16": {"dtype": torch.float16},
    "wider than a tile": {"shape": (300, 264, 1000)},
    "rounds": {"shape": (700, 64, 4001), "often": 260, "token_weight": True, "z_loss": 1e-2},
    "frozen head": {"needs": (True, False, False), "below": (BELOW, 0.0)},
    "float32 head": {"head": torch.float32},
}


@pytest.mark.usefixtures("one_strip")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", FILTERED.values(), ids=FILTERED)
def test_filtered_gradients(device, case, chosen, monkeypatch):
    if "often" in case:
        monkeypatch.setattr(backward, "LEAST_VECTORS", 1)
    case = Case(device, **case, tile_bytes=1)
    _, _, got = case.check()
    assert chosen == [8 if case.dtype == torch.float16 else 4]
    assert (got[0][case.labels == -100] == 0).all()


@pytest.mark.usefixtures("one_strip")
@pytest.mark.parametrize("device", DEVICES)
def test_everything_is_computed_into_few_bits_too(device, chosen):
    """Where the device finds that too much would be lost, the lists are empty, and slices add."""
    case = Case(device, shape=(256, 64, 801), bound=0.5, tile_bytes=1)
    case.hidden *= 0.01
    (out, got), (_, want) = case.run(), case.run((0.0, 0.0))
    assert (out[5] == 0).all() and chosen == [4, 4]
    assert all(relative_error(a, b) < 1e-3 for a, b in zip(got[:2], want[:2], strict=True))


@pytest.mark.parametrize("needs_weight", [True, False], ids=["both", "frozen head"])
@pytest.mark.parametrize("marks", [True, False], ids=["filtered", "exact"])
@pytest.mark.parametrize("head", [torch.bfloat16, torch.float32], ids=["", "cast head"])
@pytest.mark.parametrize(
    ("rows", "hidden", "vocab"),
    [(8192, 2304, 256_000), (8192, 4096, 128_256), (8192, 640, 262_144), (8192, 3072, 256_000), (65536, 4096, 128_256)],
)
def test_the_closed_form_is_the_kernels(rows, hidden, vocab, head, marks, needs_weight, hopper, monkeypatch):
    """What `peak_bytes` says beside the gradients is how `backward.py` divides the workspace."""
    workspace = 128 << 20
    h200 = DeviceProfile("cuda", "NVIDIA H200", (9, 0), has_triton=True)
    problem = Problem(rows, hidden, vocab, torch.bfloat16, weight_dtype=head, needs_weight=needs_weight).on(h200)
    packed, weight = (
        torch.zeros(1, hidden, dtype=dtype).expand(n, hidden) for n, dtype in ((rows, torch.bfloat16), (vocab, head))
    )
    slices = backward._Slices.of(packed, weight, needs_weight)
    # the sums are not made, so that what was asked for can be as large as it likes
    monkeypatch.setattr(backward, "RowSums", lambda rows, width, digits, device: SimpleNamespace(digits=digits))
    digits = backward._row_sums(packed, weight, torch.bfloat16, slices, marks, workspace).digits
    total = sums.sum_bytes(rows, hidden, digits)
    assert _recompute._sum_bytes(problem, workspace, marks) == total
    columns = slices.columns(total, workspace)
    work = rows * columns * 2
    if head == torch.float32:
        work += max(wide for _, wide, _ in slices.cuts(columns)) * hidden * 2
    if marks:
        capacity = backward._capacity(rows, vocab, 2, total, workspace)
        lists = backward.listed_bytes(-(-rows // 128), vocab)
        work = max(work, lists + capacity * 260)
    beside = _recompute.triton_bytes(problem, workspace, marks) - problem.gradient_bytes
    tile = 256 * (rows + hidden) * 2 if head == torch.float32 else 0  # the form knows no tiles
    assert total + work <= beside <= 1.01 * (total + work) + tile
    assert total + work <= workspace + (head == torch.float32) * (64 << 20) or rows > 8192
