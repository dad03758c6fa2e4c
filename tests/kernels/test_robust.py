"""What callers do to a loss: odd sizes, strides, types, masks, gradients and threads.

On a GPU with all strategies; on a CPU with the Triton kernels under their interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_step import OWN, VARIANTS, Inputs, Step, assert_right, inputs, loss_of, oracle, same_bits, step

from loss_plugins.device import DeviceProfile
from loss_plugins.testing import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = torch.cuda.is_available()
NAMES = list(VARIANTS) if GPU else ["flce, chunks", "cce"]  # the interpreter takes a second a step
pytestmark = [
    pytest.mark.skipif(not DeviceProfile.probe(DEVICE).can_triton, reason="Triton cannot run on this device"),
    # the interpreter computes with numpy, which warns of log(0), a device's -inf
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
every_variant = pytest.mark.parametrize("variant", NAMES)

VOCAB = 1009 if GPU else 300
ROWS = list(range(1, 258, 2)) if GPU else [1, 15, 33, 129]
WIDTHS = [1, 7, 100, 129] if GPU else [7, 100]
VOCABULARIES = [2, 127, 257, 32003, 50257, 151936, 262144] if GPU else [2, 127, 257, 601]


@every_variant
def test_any_number_of_tokens(variant: str) -> None:
    for rows in ROWS:
        assert_right(variant, inputs(rows, 64, VOCAB, DEVICE))


@every_variant
@pytest.mark.parametrize("width", WIDTHS)
def test_a_width_that_no_bulk_copy_reads(variant: str, width: int) -> None:
    assert_right(variant, inputs(200, width, VOCAB, DEVICE))


@every_variant
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_any_vocabulary(variant: str, vocab: int) -> None:
    """Odd, prime, below a tile, and those of large models. The last columns are labels too."""
    given = inputs(201, 64, vocab, DEVICE)
    given.labels[0], given.labels[2] = vocab - 1, 0
    got = step(variant, given, reduction="none")
    assert (got.loss >= 0).all()
    assert_right(variant, given, got, reduction="none")
    assert (got.d_weight[-1] != 0).any()


@every_variant
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16], ids=str)
def test_narrow_labels_give_the_same_bits(variant: str, dtype: torch.dtype) -> None:
    given = inputs(200, 64, VOCAB, DEVICE)
    assert same_bits(step(variant, given), step(variant, given._replace(labels=given.labels.to(dtype))))


PAIRS = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32),
         (torch.float32, torch.float32), (torch.float16, torch.float16)]  # fmt: skip


@every_variant
@pytest.mark.parametrize(("hidden", "weight"), PAIRS, ids=str)
def test_types(variant: str, hidden: torch.dtype, weight: torch.dtype) -> None:
    assert_right(variant, inputs(200, 64, VOCAB, DEVICE, hidden, weight))


@every_variant
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_with_a_float32_head(variant: str, half: torch.dtype) -> None:
    given = inputs(200, 64, VOCAB, DEVICE, half, torch.float32)
    with torch.autocast(DEVICE, half):
        got = step(variant, given)
    assert (got.d_hidden.dtype, got.d_weight.dtype) == (half, torch.float32)
    want = oracle(given._replace(weight=given.weight.to(half)))
    assert relative_error(got.loss, want.loss) < 1e-3
    assert relative_error(got.d_hidden, want.d_hidden) < 8e-3
    assert relative_error(got.d_weight, want.d_weight) < 8e-3


@every_variant
@pytest.mark.parametrize("head", [torch.float16, torch.float32], ids=str)
def test_float16_under_a_loss_scaler(variant: str, head: torch.dtype) -> None:
    """Over 100,000 tokens a gradient is below float16's smallest number until the scaler's factor is on it."""
    given = inputs(200, 64, VOCAB, DEVICE, torch.float16, head)
    with torch.autocast(DEVICE, torch.float16, enabled=head == torch.float32):
        got = step(variant, given, 65536.0, num_items_in_batch=100_000)
    want = oracle(given, 65536.0, num_items_in_batch=100_000)
    assert relative_error(got.d_hidden, want.d_hidden) < 4e-3
    assert relative_error(got.d_weight, want.d_weight) < 4e-3


@every_variant
@pytest.mark.parametrize(
    ("settings", "value"), [({}, "nan"), ({"reduction": "sum"}, 0.0), ({"num_items_in_batch": 7}, 0.0)], ids=str
)
def test_all_tokens_ignored(variant: str, settings: dict[str, Any], value: Any) -> None:
    given = inputs(200, 64, VOCAB, DEVICE)
    given.labels.fill_(-100)
    got = step(variant, given, **settings)
    assert torch.isnan(got.loss) if value == "nan" else got.loss == value
    assert (got.d_hidden == 0).all() and (got.d_weight == 0).all()


def layouts(given: Inputs) -> dict[str, Inputs]:
    """The same numbers in other places."""
    hidden, weight, labels = given
    (rows, width), vocab = hidden.shape, weight.shape[0]
    wide = torch.full((rows, 2 * width + 3), float("nan"), dtype=hidden.dtype, device=hidden.device)
    wide[:, 3 : 3 + width] = hidden
    every_second = hidden.repeat_interleave(2, 0)[::2]
    tall = torch.cat([weight, torch.full_like(weight, float("nan"))])
    off = torch.full((vocab, 2 * width + 3), float("nan"), dtype=weight.dtype, device=weight.device)
    off[:, 3 : 3 + width] = weight
    return {
        "hidden in columns": given._replace(hidden=hidden.T.contiguous().T),
        "hidden in wider rows, off 16 bytes": given._replace(hidden=wide[:, 3 : 3 + width]),
        "every second row": given._replace(hidden=every_second, labels=labels.repeat_interleave(2)[::2]),
        "weight in columns": given._replace(weight=weight.T.contiguous().T),
        "the first rows of a weight": given._replace(weight=tall[:vocab]),
        "weight in wider rows": given._replace(weight=torch.cat([weight, weight], 1)[:, width:]),
        "weight off 16 bytes": given._replace(weight=off[:, 3 : 3 + width]),
    }


@every_variant
@pytest.mark.parametrize(
    "layout",
    ["hidden in columns", "hidden in wider rows, off 16 bytes", "every second row", "weight in columns",
     "the first rows of a weight", "weight in wider rows", "weight off 16 bytes"],
)  # fmt: skip
def test_any_strides(variant: str, layout: str) -> None:
    given = inputs(200, 64, VOCAB, DEVICE)
    moved = layouts(given)[layout]
    assert all(torch.equal(a, b) for a, b in zip(moved, given, strict=True))
    assert_right(variant, given, step(variant, moved))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter, past the last column
@every_variant
@pytest.mark.parametrize("offset", [-1e4, -500.0, 500.0])
def test_a_common_offset_of_all_logits(variant: str, offset: float) -> None:
    given = inputs(200, 64, VOCAB, DEVICE)
    bias = torch.full((VOCAB,), offset, device=DEVICE, dtype=torch.bfloat16)
    got, want = step(variant, given, bias=bias), oracle(given, bias=bias)
    if variant == "naive" and GPU:
        # its logits are rounded to bfloat16 with the bias in them, as Transformers does: finite is all that it can be
        assert all(torch.isfinite(t).all() for t in got)
        return
    assert relative_error(got.loss, want.loss) < 1e-3
    assert relative_error(got.d_hidden, want.d_hidden) < 8e-3 and relative_error(got.d_weight, want.d_weight) < 8e-3


@every_variant
@pytest.mark.parametrize("sure", [0, 2, 8], ids=["all flat", "half is sure", "an eighth is sure"])
def test_a_flat_softmax_is_not_starved(variant: str, sure: int) -> None:
    """Every probability is 4e-6 (1e-4 on a CPU), below any filter's threshold, and rows of the head that are no label
    learn from nothing else. Tokens that the model is sure of must not hide those it is not."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows, width, vocab = (1024, 32, 262144) if GPU else (256, 16, 8192)
    hidden = 0.05 + 0.01 * torch.randn(rows, width, generator=generator, device=DEVICE)
    weight = 0.01 * torch.randn(vocab, width, generator=generator, device=DEVICE)
    labels = torch.randint(0, vocab, (rows,), generator=generator, device=DEVICE)
    if sure:
        weight[labels[::sure]] *= 20
        known = weight[labels[::sure]]
        hidden[::sure] = 30 * known / known.square().sum(1, keepdim=True)  # the label's logit is 30
    given = Inputs(hidden.bfloat16(), weight.bfloat16(), labels)
    got, want = step(variant, given), oracle(given)
    unseen = torch.ones(vocab, dtype=torch.bool, device=DEVICE)
    unseen[labels] = False
    assert relative_error(got.d_weight[unseen], want.d_weight[unseen]) < 1e-2
    flat = torch.ones(rows, dtype=torch.bool, device=DEVICE)
    if sure:
        flat[::sure] = False
    assert relative_error(got.d_hidden[flat], want.d_hidden[flat]) < 1e-2


@every_variant
@pytest.mark.parametrize("factor", [0.0, 0.25, 7.0, 65536.0])
def test_any_incoming_gradient(variant: str, factor: float) -> None:
    given = inputs(200, 64, VOCAB, DEVICE)
    got, one = step(variant, given, factor), step(variant, given)
    for scaled, plain in zip(got[1:], one[1:], strict=True):
        if factor == 0:
            assert (scaled == 0).all()
        else:
            assert relative_error(scaled, plain.double() * factor) < 8e-3


@every_variant
def test_a_gradient_for_each_token(variant: str) -> None:
    """One element expanded to all tokens, and another number for each, 0 for the first and for an ignored one."""
    given = inputs(200, 64, VOCAB, DEVICE)
    upstream = torch.rand(200, device=DEVICE)
    upstream[:2] = 0
    for incoming in (0.01, upstream):
        got, want = step(variant, given, incoming, reduction="none"), oracle(given, incoming, reduction="none")
        assert relative_error(got.d_hidden, want.d_hidden) < 8e-3
        assert relative_error(got.d_weight, want.d_weight) < 8e-3


@every_variant
def test_a_second_backward_over_a_retained_graph(variant: str) -> None:
    given = inputs(200, 64, VOCAB, DEVICE)
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()
    loss = loss_of(variant, hidden, weight, given.labels)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [g.clone() for g in first]
    tripled = torch.autograd.grad(loss, (hidden, weight), torch.full_like(loss, 3.0), retain_graph=True)
    (alone,) = torch.autograd.grad(loss, weight, retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    for one, was, three, last in zip(first, kept, tripled, again, strict=True):
        assert torch.equal(one, was), "a gradient that was handed out has changed"
        assert torch.equal(one, last)
        assert relative_error(three, 3 * one.double()) < 8e-3
    assert relative_error(alone, first[1]) < 8e-3


@every_variant
def test_two_runs_give_the_same_bits(variant: str) -> None:
    rows, vocab = (4096, 32003) if GPU else (260, VOCAB)
    given = inputs(rows, 64, vocab, DEVICE)
    first = step(variant, given)
    for _ in range(5 if GPU else 1):
        noise = torch.randn(2048, 2048, device=DEVICE) if GPU else None
        for _ in range(20 if GPU else 0):
            noise = noise @ noise / 64  # other work on the device, so that programs start at other times
        assert same_bits(first, step(variant, given))


def in_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, or raises, in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert found, "the thread did not end"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@every_variant
def test_backward_in_another_thread(variant: str) -> None:
    given = inputs(200, 64, VOCAB, DEVICE)
    want = step(variant, given)
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()
    loss = loss_of(variant, hidden, weight, given.labels)
    got = in_thread(lambda: torch.autograd.grad(loss, (hidden, weight)))
    assert torch.equal(got[0], want.d_hidden) and torch.equal(got[1], want.d_weight)
    with torch.autograd.set_multithreading_enabled(False):
        assert same_bits(want, step(variant, given))


@pytest.mark.skipif(not GPU, reason="Triton's interpreter keeps its state in globals, so it takes one thread")
@every_variant
def test_several_threads_at_once(variant: str) -> None:
    all_given = [inputs(200, 64, VOCAB, DEVICE, seed=seed) for seed in range(4)]
    wanted = [step(variant, given) for given in all_given]
    results: list[list[bool]] = [[] for _ in all_given]

    def work(i: int) -> None:
        for _ in range(10):
            results[i].append(same_bits(step(variant, all_given[i]), wanted[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [[True] * 10] * 4


# the interpreter computes with numpy, which warns of what a device does silently in rows that are then left out
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("variant", OWN)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_hidden_states_of_ignored_tokens_reach_nothing(variant: str, bad: float) -> None:
    """Attention over nothing but padding gives NaN. The kernels drop these rows before any product; ``naive`` and
    ``chunked`` multiply all rows on a device, as torch does."""
    given = inputs(200, 64, VOCAB, DEVICE)
    spoilt = given._replace(hidden=given.hidden.masked_fill((given.labels == -100)[:, None], bad))
    clean, got = (whole_step(variant, each) for each in (given, spoilt))
    assert torch.equal(clean.loss, got.loss), "the loss has changed"
    assert torch.equal(clean.d_hidden, got.d_hidden) and (got.d_hidden[given.labels == -100] == 0).all()
    assert torch.equal(clean.d_weight, got.d_weight), f"dW has {int(got.d_weight.isnan().sum())} NaN"


def whole_step(variant: str, given: Inputs) -> Step:
    """A step whose kernels see the ignored rows. On a CPU the host drops them, except in a compiled function."""
    if GPU:
        return step(variant, given)
    torch._dynamo.reset()
    hidden, weight = given.hidden.detach().requires_grad_(), given.weight.detach().requires_grad_()
    compiled = torch.compile(lambda h, w, y: loss_of(variant, h, w, y), backend="eager")
    loss = compiled(hidden, weight, given.labels)
    return Step(loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))


@every_variant
def test_ignored_tokens_change_nothing(variant: str) -> None:
    """The loss of all rows is that of the rows that count."""
    given = inputs(200, 64, VOCAB, DEVICE, ignored=3)
    kept = given.labels != -100
    got = whole_step(variant, given)
    assert_right(variant, given, got)
    few = step(variant, Inputs(given.hidden[kept], given.weight, given.labels[kept]))
    assert relative_error(got.d_hidden[kept], few.d_hidden) < 8e-3 and relative_error(got.d_weight, few.d_weight) < 8e-3


@every_variant
def test_several_blocks_of_rows_and_columns(variant: str) -> None:
    """Some of the blocks hold ignored rows only."""
    given = inputs(600, 64, 1500, DEVICE, ignored=2)
    assert_right(variant, given, whole_step(variant, given))
