"""torch.compile over models whose forwards and losses are of different kinds: no more breaks than stock, one graph where
stock has one, and no compilation once lengths have varied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import assert_same_gradients, batch, step, twins
from torch._dynamo.testing import CompileCounter

from loss_plugins import patch_model
from loss_plugins.models.conformance import read_results
from loss_plugins.models.rebind import CrossEntropyLoss, rebound, traceable

WHOLE = {
    "llama": "the library's loss function",
    "gemma2": "a softcap",
    "granite": "a division of the logits",
    "cohere": "a product with the logits",
    "gemma3_image": "images, and float32 logits",
    "t5": "an encoder and a decoder, and a CrossEntropyLoss of its own",
    "bart": "the same with a bias beside the head",
}
"""Models of which stock makes one graph, in the release of transformers that the results are of."""
LENGTHS = (12, 9, 14, 7, 11)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "breaking" in metafunc.fixturenames:
        # gpt2 breaks where bert does
        names = ["bert", "mixtral", *(["gpt2"] if metafunc.config.getoption("--all") else [])]
        metafunc.parametrize("breaking", [pytest.param(name, marks=pytest.mark.slow) for name in names])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(name: str, length: int = 12) -> dict[str, Any]:
    drawn = batch(name, length=length + 6 * (name == "gemma3_image"))
    return {key: value.float() if value.is_floating_point() else value for key, value in drawn.items()}


def makes_one_graph(model: Any, name: str) -> bool:
    try:
        torch.compile(model, backend="eager", fullgraph=True)(**inputs(name))
    except torch._dynamo.exc.Unsupported:
        return False
    finally:
        torch._dynamo.reset()
    return True


# torch 2.13 traces masks of images with an instance of one of its functions
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# Dynamo looks at .grad of every input it traces, where a release breaks the graph
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "t5" else pytest.mark.slow, id=n) for n in WHOLE])
def test_one_graph_and_no_compilation_for_another_length(name: str) -> None:
    model, stock = twins(name, dtype=torch.float32)
    handle = patch_model(model, "cce")
    whole = transformers.__version__ == read_results()["transformers"] or makes_one_graph(stock, name)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=whole)
    frames = []
    for length in LENGTHS:
        expected, expected_gradients = step(stock, inputs(name, length))
        output, gradients = step(compiled, inputs(name, length))
        frames.append(counter.frame_count)
        torch.testing.assert_close(output.loss, expected.loss, atol=1e-5, rtol=1e-5)
        gradients = {key.removeprefix("_orig_mod."): value for key, value in gradients.items()}
        assert_same_gradients(gradients, expected_gradients, 1e-4, 1e-4)
    if whole:
        assert frames[0] == 1
        assert frames[-1] == frames[2] <= 3, "once for the first sums, once for lengths that vary"
    assert (handle.counts.fused, handle.counts.materialised) == (len(LENGTHS), 0)


# Dynamo looks at .grad of every input it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_no_more_breaks_where_stock_breaks(breaking: str) -> None:
    """At a warning, or at an expert's tokens. Our part of the forward is traced by itself then, and has no graph."""
    model, stock = twins(breaking, dtype=torch.float32)
    patch_model(model, "cce")
    counts = []
    for each in (stock, model):
        torch._dynamo.reset()
        counts.append(torch._dynamo.explain(each)(**inputs(breaking)).graph_break_count)
    assert 0 < counts[0] == counts[1]


def test_only_forwards_that_use_torchs_cross_entropy_loss_are_copied() -> None:
    model, _ = twins("llama")
    assert traceable(type(model).forward) is type(model).forward
    model, _ = twins("bart")
    copied = traceable(type(model).forward)
    assert copied is not type(model).forward
    assert copied.__name__ == "forward"
    # eager runs the model's very own
    patch_model(model, "cce")
    assert model(**batch("bart")).loss.isfinite()


def test_a_decorated_function_is_copied_with_its_decorators() -> None:
    assert rebound(decorated, {"PLACE": "there"})(1) == ("there", 1, "wrapped")
    assert decorated(1) == ("here", 1, "wrapped")


@pytest.mark.parametrize("arguments", [{}, {"reduction": "sum", "ignore_index": 0}, {"label_smoothing": 0.3}])
def test_the_stand_in_for_torchs_class_is_torchs(arguments: dict[str, Any]) -> None:
    logits, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    expected = torch.nn.CrossEntropyLoss(**arguments)(logits, target)
    assert CrossEntropyLoss(**arguments)(logits, target) == expected


PLACE = "here"


def marked(function: Any) -> Any:
    from functools import wraps

    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return (*function(*args), "wrapped")

    return wrapper


@marked
def decorated(value: int) -> Any:
    return PLACE, value
