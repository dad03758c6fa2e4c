"""Comparing a model with itself unpatched, where stock's own gradients are at the edge of their type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import batch, make
from torch import Tensor

from loss_plugins import patch_model
from loss_plugins.errors import VerificationError
from loss_plugins.models.verification import check_first_batch, verify_model
from loss_plugins.models.verification.moment import loss_of


def steep(factor: float) -> Any:
    """A float16 llama with one gradient of that many times its size."""
    model = make().to(torch.float16).train()
    model.model.norm.weight.register_hook(lambda gradient: gradient * factor)
    return model


def checked(model: Any, config: Any = "cce") -> Any:
    handle = patch_model(model, config)

    def compute(inputs: dict[str, Any], deferred: bool) -> Tensor:
        with handle.scope(loss_only=deferred):
            return loss_of(model(**inputs))

    return check_first_batch(model, handle, batch(), compute)


def test_gradients_that_only_the_scale_makes_infinite_are_compared() -> None:
    report = verify_model(steep(5e3), batch(), ["chunked", "cce"])
    assert report.equal, report.reason
    assert all(0 <= row.gradient_off <= row.gradient_allowed for row in report.rows)
    assert checked(steep(5e3)) is not None


def test_gradients_that_are_no_numbers_in_stock_are_said_to_be() -> None:
    with pytest.raises(VerificationError, match="unpatched LlamaForCausalLM has gradients on this batch that are inf"):
        verify_model(steep(float("nan")), batch(), ["cce"])
    with pytest.raises(
        VerificationError, match="gradients of the unpatched LlamaForCausalLM on the first batch are inf"
    ):
        checked(steep(float("nan")))


def test_what_a_first_batch_cannot_be_checked_for_is_said() -> None:
    with pytest.raises(VerificationError, match="depends on no parameter that trains"):
        checked(make().train().requires_grad_(False))
    filtered = {"loss_strategy": "cce", "loss_options": {"filter": 0.1}}
    with pytest.raises(VerificationError, match=r"Try loss_strategy 'cce' with filter: off, .* or 'naive', see"):
        checked(make().train(), filtered)
