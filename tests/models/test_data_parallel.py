"""Replicas as torch's DataParallel makes them, each in a thread with its part of the batch. On a CPU, where torch itself
copies nothing: the copies here are made as `torch.nn.parallel.replicate` makes them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tiny_models import batch, twins
from torch import Tensor, nn

from loss_plugins import patch_model
from loss_plugins.models.conformance.double import all_double


def replicas(model: nn.Module, count: int) -> list[Any]:
    """Copies whose weights are results of the original's, and no parameters, as after a broadcast."""
    made = []
    for _ in range(count):
        copies: dict[int, Any] = {id(module): module._replicate_for_data_parallel() for module in model.modules()}
        copied: dict[int, Tensor] = {}
        for module in model.modules():
            replica = copies[id(module)]
            for name, child in module._modules.items():
                if child is not None:
                    setattr(replica, name, copies[id(child)])
            for name, parameter in module._parameters.items():
                value = None if parameter is None else copied.setdefault(id(parameter), parameter * 1.0)
                setattr(replica, name, value)
        made.append(copies[id(model)])
    return made


def in_threads(models: list[Any], inputs: list[dict[str, Tensor]]) -> list[Any]:
    outputs: list[Any] = [None] * len(models)

    def run(place: int) -> None:
        try:
            outputs[place] = models[place](**inputs[place])
        except Exception as error:
            outputs[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])  # a head of its own, and tied ones
@pytest.mark.parametrize("strategy", ["cce", "flce", "chunked", "auto"])
def test_replicas_in_threads(strategy: str, name: str) -> None:
    model, stock = twins(name)
    handle = patch_model(model, strategy)
    rows = batch(rows=4)
    parts = [{key: value[half] for key, value in rows.items()} for half in (slice(0, 2), slice(2, 4))]
    with all_double():
        outputs = in_threads(replicas(model, 2), parts)
        expected = [stock(**part).loss for part in parts]
        sum(expected).backward()
    for output in outputs:
        assert not isinstance(output, Exception), output
        assert output.logits is None
    sum(output.loss for output in outputs).backward()
    assert (handle.counts.fused, handle.counts.materialised) == (2, 0)
    for output, loss in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.loss, loss, atol=1e-10, rtol=0)
    theirs = dict(stock.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[key].grad, atol=1e-10, rtol=0, msg=key)
