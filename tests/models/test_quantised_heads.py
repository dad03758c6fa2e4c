"""Heads that bitsandbytes and torchao have quantised, as far as they run on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from odd_heads import STRATEGIES, compare
from tiny_models import COMMON, VOCAB, batch
from torch import nn

from loss_plugins import patch_model
from loss_plugins.errors import UnsupportedError

WIDTH = 64
"""bitsandbytes quantises blocks of 64."""


def model_of(change: Any) -> Any:
    torch.manual_seed(0)
    config = tf.LlamaConfig(**{**COMMON, "hidden_size": WIDTH, "head_dim": 16})
    model = tf.LlamaForCausalLM(config).train()
    torch.manual_seed(1)
    model.lm_head = change(model.lm_head)
    return model


def bits(name: str, **kwargs: Any) -> Any:
    """A model with bitsandbytes' layer as its head."""
    bnb = pytest.importorskip("bitsandbytes", reason="this test quantises the head with bitsandbytes")

    def change(head: nn.Linear) -> nn.Module:
        bias = kwargs.get("bias", False)
        layer = getattr(bnb.nn, name)(WIDTH, VOCAB, **{"bias": False} | kwargs)
        layer.load_state_dict({"weight": head.weight.detach().clone()} | ({"bias": torch.randn(VOCAB)} if bias else {}))
        return layer.to("cpu")

    return model_of(change)


def torchao(name: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="this test quantises the head with torchao")

    def change(head: nn.Linear) -> nn.Module:
        holder = nn.Sequential(head)
        quantization.quantize_(holder, getattr(quantization, name)())
        return holder[0]

    return model_of(change)


def with_lora(model: Any, **kwargs: Any) -> Any:
    peft = pytest.importorskip("peft", reason="this test adapts heads with PEFT")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM", **kwargs)
    return peft.get_peft_model(model, config).train()


def loaded_in_four_bits() -> Any:
    """PEFT then takes its own layer for it."""
    model = bits("Linear4bit", quant_type="nf4")
    model.is_loaded_in_4bit = True
    model = with_lora(model)
    assert type(model.base_model.model.lm_head).__name__ == "Linear4bit"
    return model


FOUR_BITS = {
    "nf4": lambda: bits("Linear4bit", quant_type="nf4", compute_dtype=torch.float32),
    "nf4 with bias": lambda: bits("Linear4bit", quant_type="nf4", bias=True),
    "fp4, twice": lambda: bits("Linear4bit", quant_type="fp4", compress_statistics=True),
    "lora": lambda: with_lora(bits("Linear4bit", quant_type="nf4")),
    "dora": lambda: with_lora(bits("Linear4bit", quant_type="nf4"), use_dora=True),
    "lora of its own": loaded_in_four_bits,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", FOUR_BITS)
def test_four_bits_are_unpacked_for_the_strategy(what: str, strategy: str) -> None:
    seen = compare(FOUR_BITS[what], strategy, atol=1e-6, double=False)
    assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_bits_that_compute_in_half(strategy: str) -> None:
    compare(
        lambda: bits("Linear4bit", quant_type="nf4", compute_dtype=torch.bfloat16), strategy, atol=1e-3, double=False
    )


CALLED = {
    "8 bits": lambda: bits("Linear8bitLt", has_fp16_weights=False),
    "8 bits with lora": lambda: with_lora(bits("Linear8bitLt", has_fp16_weights=False)),
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao float8": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao int8 with lora": lambda: with_lora(torchao("Int8WeightOnlyConfig")),
}


@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning")
@pytest.mark.parametrize("what", CALLED)
def test_others_are_called_on_chunks(what: str) -> None:
    for strategy in ("naive", "chunked", "auto"):
        seen = compare(CALLED[what], strategy, atol=1e-6, double=False)
        assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained
    for strategy in ("flce", "cce"):
        with pytest.raises(UnsupportedError, match="needs the head's weight"):
            patch_model(CALLED[what](), strategy)(**batch())
