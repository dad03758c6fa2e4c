"""Peak memory of a step with LoRA on the head: no logits, and which of the two ways costs a copy of the head."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf

from loss_plugins import patch_model
from loss_plugins.diagnostics.memory import PeakMeter

peft = pytest.importorskip("peft", reason="these tests adapt heads with PEFT")

VOCAB, ROWS = 16384, 512
LOGITS = VOCAB * ROWS * 4


def build(width: int, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=width, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    lora = peft.LoraConfig(r=8, target_modules=["lm_head"], task_type="CAUSAL_LM", **kwargs)
    return peft.get_peft_model(tf.LlamaForCausalLM(config), lora).train()


@cache
def peak(width: int, strategy: str | None, dora: bool = False) -> int:
    """Bytes of a step above what lives before it."""
    model = build(width, use_dora=dora)
    if strategy is not None:
        patch_model(model, {"loss_strategy": strategy, "loss_options": options(strategy)})
    ids = torch.randint(0, VOCAB, (2, ROWS // 2))
    with PeakMeter("cpu") as meter:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            meter.mark()
            model(input_ids=ids, labels=ids).loss.backward()
        return meter.read()


def options(strategy: str) -> dict[str, Any] | None:
    return {"workspace_mb": 1} if strategy != "naive" else None


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("strategy", ["chunked", "flce", "cce"])
def test_a_fifth_of_stock_where_the_head_is_narrow(strategy: str, dora: bool) -> None:
    stock = peak(16, None, dora)
    assert stock > 2.9 * LOGITS
    assert peak(16, strategy, dora) < stock / 5


@pytest.mark.parametrize("dora", [False, True])
def test_chunks_copy_no_head_and_give_a_frozen_one_no_gradient(dora: bool) -> None:
    narrow, wide = 16, 512
    head = VOCAB * wide * 4
    grown = peak(wide, "chunked", dora) - peak(narrow, "chunked", dora)
    assert grown < head / 4  # DoRA takes the norms of some rows at a time
    # side by side: the copy, and its gradient
    assert peak(wide, "cce", dora) > 2 * head
