"""A head on another device than the rest of its model, as ``device_map`` leaves it on the last: everything meets there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VOCAB, batch, twins

from loss_plugins import LossConfig, patch_model
from loss_plugins.models.conformance.double import all_double

hooks = pytest.importorskip("accelerate.hooks", reason="these tests move heads with accelerate")
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def on_the_last(model: Any, device: str) -> Any:
    """The head there, and what it is given moved before it is called; its logits stay, as in a pipeline."""
    model.lm_head.to(device)
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook(execution_device=torch.device(device)))
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", ["cce", "flce", "chunked", "naive", "auto"])
def test_head_on_the_last_device(strategy: str, device: str) -> None:
    model, stock = twins()
    weights = torch.linspace(0.2, 1.8, VOCAB).tolist()
    config = LossConfig(strategy, loss_class_weight=weights, loss_statistics=("accuracy", "entropy"))
    rows = batch()
    token_weight = torch.linspace(0.5, 1.5, rows["labels"].numel()).reshape(rows["labels"].shape)
    found: list[Any] = []
    for each in (on_the_last(model, device), stock):
        handle = patch_model(each, config)
        with all_double(), handle.scope(token_weight=token_weight):
            loss = each(**rows).loss
            loss.backward()
        assert (handle.counts.fused, handle.counts.materialised) == (1, 0)
        gradients = {key: p.grad.cpu() for key, p in each.named_parameters()}
        found.append((loss, handle.statistics.pop(), gradients))
    (loss, statistics, gradients), (expected, numbers, theirs) = found
    assert loss.device.type == torch.device(device).type
    assert statistics == pytest.approx(numbers, abs=1e-10)
    torch.testing.assert_close(loss.cpu(), expected, atol=1e-10, rtol=0)
    for key, gradient in theirs.items():
        torch.testing.assert_close(gradients[key], gradient, atol=1e-10, rtol=0, msg=key)
