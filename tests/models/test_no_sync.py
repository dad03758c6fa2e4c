"""The host waits for no value on the way: on meta tensors, which have none, any look at one is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, batch

from loss_plugins import patch_model

EXTRAS = {
    "loss_label_smoothing": 0.1, "loss_z_loss": 0.1, "loss_statistics": ["accuracy", "entropy"],
    "loss_class_weight": [1.0] * VOCAB,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not know meta there."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)


def on_meta(dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        model = FAMILIES["llama"]().to(dtype).train()
    rows = {key: value.to("meta") for key, value in batch().items() if key != "attention_mask"}
    return model, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["naive", "chunked", "flce", "cce"])
@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])
def test_a_step_reads_no_tensor(strategy: str, extras: dict[str, Any], dtype: torch.dtype) -> None:
    model, rows = on_meta(dtype)
    handle = patch_model(model, {"loss_strategy": strategy, **extras})
    weights = torch.rand(rows["labels"].shape, device="meta")
    with handle.scope(token_weight=weights) if extras else handle.scope():
        output = model(**rows, num_items_in_batch=torch.tensor(7, device="meta"))
    output.loss.backward()
    assert output.loss.shape == ()
    assert output.loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {dtype}
    assert handle.counts.fused == 1


def test_a_look_would_be_seen() -> None:
    model, rows = on_meta(torch.float32)
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(**rows).loss.item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool((rows["labels"] == -100).any())
    with pytest.raises((RuntimeError, NotImplementedError)):
        rows["labels"].nonzero()
