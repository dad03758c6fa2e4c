"""torch.compile of a patched model: one graph as for the stock one, the same loss, and no compilation at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import assert_same_gradients, batch, step, twins
from torch._dynamo.testing import CompileCounter

from loss_plugins import patch_model
from loss_plugins.models.patch import find_handle


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "strategy"), [("llama", "chunked"), ("llama", "flce"), ("gemma2", "cce")])
def test_no_more_graph_breaks_than_stock(name: str, strategy: str) -> None:
    model, stock = twins(name, dtype=torch.float32)
    patch_model(model, strategy)
    expected = torch._dynamo.explain(stock)(**batch())
    torch._dynamo.reset()
    ours = torch._dynamo.explain(model)(**batch())
    assert ours.graph_break_count <= expected.graph_break_count, ours.break_reasons


@pytest.mark.parametrize("strategy", ["naive", "chunked", "flce", "cce"])
def test_compiled_equals_stock_and_compiles_twice_at_most(strategy: str) -> None:
    model, stock = twins(dtype=torch.float32)
    handle = patch_model(model, {"loss_strategy": strategy, "loss_statistics": ["accuracy"]})
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    expected, expected_gradients = step(stock, batch())
    for i in range(5):
        output, gradients = step(compiled, batch())
        if i == 3:
            handle.statistics.pop()
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert_same_gradients(
        {key.removeprefix("_orig_mod."): value for key, value in gradients.items()}, expected_gradients, 1e-5, 1e-4
    )
    assert output.logits is None
    assert counter.frame_count <= 2
    assert (handle.counts.deferred, handle.counts.fused, handle.counts.materialised) == (5, 5, 0)
    assert handle.statistics.pop().keys() == {"accuracy", "valid_fraction"}
    assert find_handle(compiled) is handle


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo reads it
def test_chunks_that_run_eagerly_inside_what_is_compiled() -> None:
    """Dynamo may leave the chunks of a head that is called to Python, in the middle of a graph."""
    model, stock = twins(dtype=torch.float32)
    for each in (model, stock):
        each.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    handle = patch_model(model, "chunked")
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        expected, expected_gradients = step(stock, batch())
        output, gradients = step(compiled, batch())
        torch.testing.assert_close(output.loss, expected.loss)
        gradients = {name.removeprefix("_orig_mod."): value for name, value in gradients.items()}
        assert_same_gradients(gradients, expected_gradients, 1e-5)
        with torch.no_grad():
            for parameter in (*model.parameters(), *stock.parameters()):
                parameter.mul_(1.1)
    assert handle.counts.materialised == 0


def test_a_compiled_model_follows_scope_mode_and_undo() -> None:
    model, stock = twins(dtype=torch.float32)
    handle = patch_model(model, "cce")
    compiled = torch.compile(model, backend="eager")
    plain = compiled(**batch()).loss
    with handle.scope(label_smoothing=0.2):
        torch.testing.assert_close(compiled(**batch()).loss, model(**batch()).loss, atol=1e-5, rtol=0)
        assert abs(compiled(**batch()).loss - plain) > 1e-4
    weights = torch.rand(2, 12)
    with handle.scope(token_weight=weights):
        torch.testing.assert_close(compiled(**batch()).loss, model(**batch()).loss, atol=1e-5, rtol=0)
        assert abs(compiled(**batch()).loss - plain) > 1e-4
    torch.testing.assert_close(compiled(**batch()).loss, plain)
    model.eval()
    assert compiled(**batch()).logits.shape == (2, 12, 120)
    with handle.scope(loss_only=True):
        assert compiled(**batch()).logits is None
    model.train()
    handle.undo()
    torch.testing.assert_close(compiled(**batch()).logits, stock(**batch()).logits)


@pytest.mark.slow
def test_inductor() -> None:
    model, stock = twins(dtype=torch.float32)
    patch_model(model, "cce")
    compiled = torch.compile(model)
    expected, expected_gradients = step(stock, batch())
    output, gradients = step(compiled, batch())
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert_same_gradients(
        {key.removeprefix("_orig_mod."): value for key, value in gradients.items()}, expected_gradients, 1e-5, 1e-4
    )
