"""What only a GPU shows: graphs, compilation, streams, devices, waiting, memory nobody has written, 64-bit offsets."""

from __future__ import annotations

import gc
import pkgutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from one_step import OWN, VARIANTS, Inputs, Step, assert_right, inputs, loss_of, same_bits, step
from torch import Tensor

from loss_plugins import linear_cross_entropy_stats
from loss_plugins.diagnostics.memory import PeakMeter
from loss_plugins.strategies import FIELDS
from loss_plugins.testing import relative_error

pytestmark = [
    pytest.mark.gpu,
    # torch says so of its own thread where a process's first product runs in a backward
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
every_variant = pytest.mark.parametrize("variant", list(VARIANTS))
every_variant_and_auto = pytest.mark.parametrize("variant", [*VARIANTS, "auto"])
SHAPE = (300, 128, 3001)  # several blocks of rows, the last one cut; an odd vocabulary


def assert_close(got: Step, want: Step, bound: float = 8e-3) -> None:
    for name, a, b in zip(Step._fields, got, want, strict=True):
        assert relative_error(a, b) < bound, name


@every_variant_and_auto
def test_a_graph_of_a_step_replays_with_other_inputs(variant: str) -> None:
    """Other hidden states, weights and labels, and another number of ignored tokens, which the host never learnt."""
    given = inputs(*SHAPE, "cuda")
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()

    def run() -> Step:
        loss = loss_of(variant, hidden, weight, given.labels)
        return Step(loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed, ignored in ((1, 2), (2, 7), (3, 0)):
        other = inputs(*SHAPE, "cuda", seed=seed, ignored=ignored)
        with torch.no_grad():
            for old, new in zip((hidden, weight, given.labels), other, strict=True):
                old.copy_(new)
        graph.replay()
        assert_close(captured, step(variant, other))


@pytest.mark.filterwarnings("default")  # the compiler has advice of its own
@pytest.mark.parametrize(
    ("variant", "backend"),
    [("naive", "aot_eager"), ("auto", "aot_eager"), *((name, "inductor") for name in OWN if "filter" not in name)],
)
def test_compiles_whole_and_once_for_all_numbers_of_tokens(variant: str, backend: str) -> None:
    """``chunked`` is left out: its chunks are torch's checkpoints, which take no symbolic size."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda h, w, y: loss_of(variant, h, w, y), fullgraph=True, backend=counter)
    for rows in (300, 301, 257, 512, 1000):
        given = inputs(rows, *SHAPE[1:], "cuda", seed=rows)
        hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()
        loss = compiled(hidden, weight, given.labels)
        assert_close(Step(loss.detach(), *torch.autograd.grad(loss, (hidden, weight))), step(variant, given))
    most = 3 if variant == "auto" else 2  # it takes another strategy from some number of tokens on
    assert counter.frame_count <= most, f"compiled {counter.frame_count} times: once as it is, once for any number"


def compiled_kernels() -> dict[str, int]:
    """How many binaries each Triton kernel has on this device."""
    import triton

    package = import_module("loss_plugins.kernels.triton")
    found = {}
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if info.ispkg:
            continue
        for name, value in vars(import_module(info.name)).items():
            if isinstance(value, triton.JITFunction) and value.__module__ == info.name:
                found[f"{info.name}.{name}"] = len(value.device_caches[torch.cuda.current_device()][0])
    return found


@pytest.mark.parametrize("variant", OWN)
def test_a_hundred_lengths_need_few_kernels(variant: str) -> None:
    given = inputs(1100, 128, 3001, "cuda")
    step(variant, Inputs(given.hidden[:1000], given.weight, given.labels[:1000]))
    before = compiled_kernels()
    assert sum(before.values()) > 0
    for rows in range(1001, 1100):
        step(variant, Inputs(given.hidden[:rows], given.weight, given.labels[:rows]))
    more = {name: count - before[name] for name, count in compiled_kernels().items() if count > before[name] + 2}
    assert not more, f"compiled again for other lengths: {more}"


@every_variant
def test_all_work_is_on_the_callers_stream(variant: str) -> None:
    """The default stream sleeps meanwhile; what was launched there would not be done when the result is read."""
    given, other = inputs(*SHAPE, "cuda"), inputs(*SHAPE, "cuda", seed=1)
    want = step(variant, given)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(2):
            step(variant, other)  # takes the memory, and leaves wrong numbers there
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # cycles
    with torch.cuda.stream(side):
        got = step(variant, given)
        results = [t.to("cpu") for t in got]
    asleep = not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
    assert asleep, "something waited for the whole device, so nothing was shown"
    assert all(torch.equal(a, b.cpu()) for a, b in zip(results, want, strict=True))


@every_variant
def test_backward_under_another_stream(variant: str) -> None:
    given = inputs(*SHAPE, "cuda")
    want = step(variant, given)
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()
    loss = loss_of(variant, hidden, weight, given.labels)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients = torch.autograd.grad(loss, (hidden, weight))
    torch.cuda.synchronize()
    assert same_bits(Step(loss.detach(), *gradients), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")
@every_variant_and_auto
def test_on_a_device_that_is_not_the_current_one(variant: str) -> None:
    given = inputs(*SHAPE, "cuda:0")
    want = step(variant, given)
    got = step(variant, Inputs(*(t.to("cuda:1") for t in given)))
    assert torch.cuda.current_device() == 0
    assert all(t.device == torch.device("cuda", 1) for t in got)
    assert_close(Step(*(t.to("cuda:0") for t in got)), want)
    if variant in OWN:
        assert same_bits(Step(*(t.to("cuda:0") for t in got)), want)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_waiting_would_be_noticed() -> None:
    ones = torch.ones(3, device="cuda")
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchronizing"):
        ones.sum().item()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@every_variant_and_auto
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_step_waits_for_the_device_with_everything_on(variant: str, reduction: str) -> None:
    given = inputs(*SHAPE, "cuda")
    vocab = SHAPE[2]
    strategy, options = VARIANTS.get(variant, (variant, None))
    options = None if options and "rows" in options else options
    bias = torch.randn(vocab, device="cuda", requires_grad=True)
    settings: dict[str, Any] = {
        "bias": bias, "class_weight": torch.rand(vocab, device="cuda"), "token_weight": torch.rand(300, device="cuda"),
        "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 30.0, "logit_scale": 0.5, "reduction": reduction,
        "fields": FIELDS, "strategy": strategy, "options": options,
    }  # fmt: skip
    plain: dict[str, Any] = {"reduction": reduction, "fields": (), "strategy": strategy, "options": options}
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()

    def run(chosen: dict[str, Any]) -> None:
        linear_cross_entropy_stats(hidden, weight, given.labels, **chosen).loss.sum().backward()

    for chosen in (plain, settings):
        run(chosen)  # compiles
        with waiting_is_an_error():
            run(chosen)


def poison() -> None:
    """Fill the memory that the allocator will hand out next with NaN."""
    torch.cuda.empty_cache()
    # the larger ones also fill what is left of pieces that hold something
    sizes = [1 << 28, 1 << 23, *(1 << bits for bits in range(22, 17, -1) for _ in range(4))]
    sizes += [1 << bits for bits in range(6, 18)] * 40
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in sizes]
    del blocks


@every_variant
@pytest.mark.parametrize("shape", [(1, 64, 300), (33, 24, 131), (300, 128, 5000), (1000, 64, 2049)], ids=str)
def test_nothing_is_read_that_nobody_wrote(variant: str, shape: tuple[int, int, int]) -> None:
    given = inputs(*shape, "cuda", ignored=3)
    step(variant, given)
    poison()
    assert torch.empty(1 << 22, device="cuda").isnan().any(), "the memory is not poisoned"
    poison()
    got = step(variant, given)
    assert all(torch.isfinite(t).all() for t in got)
    assert_right(variant, given, got)
    poison()
    out = [linear_cross_entropy_stats(given.hidden, given.weight, given.labels, strategy=VARIANTS[variant][0],
                                      fields=FIELDS)]  # fmt: skip
    assert all(torch.isfinite(value).all() for value in out[0] if value is not None)


@pytest.mark.parametrize("trained", ["both", "hidden"])
@pytest.mark.parametrize("options", [{}, {"filter": "off"}, {"filter": 2**-12}], ids=str)
@pytest.mark.parametrize(("width", "vocab"), [(4096, 128_256), (2304, 256_000), (640, 262_144)], ids=str)
def test_cce_keeps_to_its_workspace(width: int, vocab: int, options: dict[str, Any], trained: str) -> None:
    """128 MiB beside the gradients of 8192 tokens, whatever the device decides to leave out."""
    given = inputs(8192, width, vocab, "cuda", ignored=0)
    leaves = [given.hidden.requires_grad_(), given.weight.requires_grad_(trained == "both")]

    def run() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy_stats(*leaves, given.labels, strategy="cce", options=options).loss
        return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])

    run()  # the first product takes cuBLAS's workspace, once a process
    # autograd's thread lets go of the last gradients a little later
    torch.cuda.synchronize()
    gc.collect()
    with PeakMeter("cuda") as meter:
        meter.mark()
        results = sum(gradient.nbytes for gradient in run())
        beside = meter.read() - results
    assert beside <= 128 << 20, f"{beside / 2**20:.1f} MiB"
    assert beside > 100 << 20


LARGE = {
    "N * V": (8200, 64, 262144),
    "V * H": (200, 8448, 262144),
    "N * H": (524544, 4096, 300),
}
"""The smallest that cross 2**31 with a width and a vocabulary that models have."""


def by_rows(given: Inputs) -> Step:
    """Loss and gradients in float32, a few rows at a time; results in float32 for the weight, in half for the rows."""
    (rows, width), vocab = given.hidden.shape, given.weight.shape[0]
    weight = given.weight.float()
    d_hidden, d_weight = torch.empty_like(given.hidden), torch.zeros_like(weight)
    count = (given.labels != -100).sum()
    loss = torch.zeros((), device="cuda", dtype=torch.float64)
    step_rows = max(1, min((1 << 28) // vocab, (1 << 28) // width))
    for start in range(0, rows, step_rows):
        part = slice(start, start + step_rows)
        labels = given.labels[part]
        valid = (labels != -100)[:, None]
        hidden = given.hidden[part].float()
        z = (hidden @ weight.T).log_softmax(1)
        at_label = labels.clamp(min=0)[:, None]
        loss -= (z.gather(1, at_label) * valid).sum(dtype=torch.float64)
        dz = z.exp_().scatter_add_(1, at_label, -torch.ones_like(at_label, dtype=torch.float32)).mul_(valid / count)
        d_hidden[part] = (dz @ weight).to(d_hidden.dtype)
        d_weight.addmm_(dz.T, hidden)
    return Step(loss / count, d_hidden, d_weight)


def places(matrix: Tensor) -> dict[str, slice]:
    """Rows at the ends, in the middle, and where an offset in elements passes 2**31."""
    rows, crossing = len(matrix), (1 << 31) // matrix.shape[1]
    found = {"first": slice(0, 8), "middle": slice(rows // 2, rows // 2 + 8), "last": slice(rows - 8, rows)}
    return found if crossing + 4 > rows else {**found, "crossing": slice(crossing - 4, crossing + 4)}


@pytest.fixture(params=LARGE.values(), ids=LARGE.keys(), scope="module")
def large(request: pytest.FixtureRequest) -> Iterator[tuple[Inputs, Step]]:
    rows, width, vocab = request.param
    needed = 24 * max(rows * vocab, vocab * width, rows * width)
    if torch.cuda.mem_get_info()[1] < needed:
        pytest.skip(f"the GPU has less than {needed >> 30} GiB")
    given = inputs(rows, width, vocab, "cuda", ignored=5)
    # the columns that are compared are labels, so that no filter may leave them out
    columns = torch.cat([torch.arange(vocab, device="cuda")[part] for part in places(given.weight).values()])
    given.labels[: 5 * len(columns) : 5][: len(columns)] = columns[: len(given.labels[: 5 * len(columns) : 5])]
    given.labels[-1], given.labels[-2] = vocab - 1, vocab // 2
    assert max(rows * vocab, vocab * width, rows * width) > 1 << 31
    yield given, by_rows(given)
    del given
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("variant", ["naive", "chunked", "flce", "cce", "cce, no filter"])
def test_more_than_two_to_the_31_elements(variant: str, large: tuple[Inputs, Step]) -> None:
    given, want = large
    got = step(variant, given)
    # naive rounds its logits to half, as Transformers does
    bound = 3e-2 if variant == "naive" else 1e-2
    assert relative_error(got.loss, want.loss) < 1e-3
    for name in ("d_hidden", "d_weight"):
        actual, expected = getattr(got, name), getattr(want, name)
        for place, part in places(actual).items():
            assert (expected[part] != 0).any()
            assert relative_error(actual[part], expected[part].float()) < bound, f"{name}, {place}"
    assert (got.d_hidden[given.labels == -100][:1000] == 0).all()


@pytest.mark.parametrize("variant", ["naive", "chunked", "flce", "cce", "cce, no filter"])
def test_more_than_two_to_the_31_logits_one_by_one(variant: str) -> None:
    """Hidden states of zero: every token's loss is the logarithm of the vocabulary, in the last rows too."""
    rows, vocab = 16400, 131072
    given = inputs(rows, 16, vocab, "cuda", ignored=0)
    given.hidden.zero_()
    with torch.no_grad():
        losses = loss_of(variant, *given, reduction="none")
    torch.testing.assert_close(losses, torch.full_like(losses, vocab).log(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("variant", OWN)
def test_nothing_of_a_step_stays(variant: str) -> None:
    given = inputs(*SHAPE, "cuda")
    step(variant, given)
    gc.collect()
    before = torch.cuda.memory_allocated()
    step(variant, given)
    # autograd's thread may let go of its last tensors a moment after the backward has returned
    end = time.monotonic() + 2
    while torch.cuda.memory_allocated() != before and time.monotonic() < end:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == before
