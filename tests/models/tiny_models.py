"""Tiny random models of each family, batches for them, and a comparison of a patched model with the stock one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

VOCAB, WIDTH = 120, 32

COMMON = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def _gemma3_with_image() -> nn.Module:
    text = tf.Gemma3TextConfig(**{**COMMON, "sliding_window": 8, "final_logit_softcapping": 2.0})
    vision = tf.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    config = tf.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=VOCAB - 1,
        image_token_index=VOCAB - 1,
        boi_token_index=VOCAB - 2,
        eoi_token_index=VOCAB - 3,
    )
    return tf.Gemma3ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**COMMON)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**COMMON)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**COMMON, sliding_window=6)),
    # an initial range so large that the cap bends the logits
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**COMMON, sliding_window=6, initializer_range=2.0, query_pre_attn_scalar=8)
    ),
    "gemma3_text": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**COMMON, sliding_window=6)),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**COMMON, logits_scaling=8.0)),
    "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**COMMON, logit_scale=0.0625)),
    "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**COMMON)),
    "mixtral": lambda: tf.MixtralForCausalLM(
        tf.MixtralConfig(
            **COMMON, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5
        )
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    ),
    "gemma3_image": _gemma3_with_image,
    "bart": lambda: tf.BartForConditionalGeneration(
        tf.BartConfig(
            vocab_size=VOCAB, d_model=WIDTH, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0,
        )
    ),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ),
    "bert": lambda: tf.BertLMHeadModel(
        tf.BertConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            max_position_embeddings=64, is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    ),
}  # fmt: skip

DECODERS = [name for name in FAMILIES if name not in ("bart", "t5")]


def make(name: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A model of that family in training mode, every parameter random: also those that start at 0 or 1."""
    torch.manual_seed(seed)
    model = FAMILIES[name]().train()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.3)
    if name == "mixtral":
        model.set_experts_implementation("eager")  # grouped products know no float64
    return model.to(dtype)


def batch(name: str = "llama", rows: int = 2, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Inputs with some labels masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB - 5, (rows, length), generator=generator)
    labels = torch.randint(5, VOCAB - 5, (rows, length), generator=generator)
    labels[0, :4] = -100
    labels[-1, -2:] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    if name == "gemma3_image":
        ids[:, 2:6] = VOCAB - 1
        labels[:, 2:6] = -100
        inputs["pixel_values"] = torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)
        inputs["token_type_ids"] = (ids == VOCAB - 1).long()
    return inputs


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """One forward and backward: the output, and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    output = model(**inputs)
    loss = output[0] if isinstance(output, tuple) else output.loss
    loss.backward()
    return output, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: dict[str, Tensor], stock: dict[str, Tensor], atol: float, rtol: float = 0.0) -> None:
    """Every gradient there is, in value, type and number."""
    assert ours.keys() == stock.keys()
    for key, gradient in stock.items():
        assert ours[key].dtype == gradient.dtype, key
        torch.testing.assert_close(
            ours[key], gradient, atol=atol, rtol=rtol, equal_nan=True, msg=lambda m, k=key: f"{k}: {m}"
        )


def twins(name: str = "llama", **kwargs: Any) -> tuple[Any, Any]:
    """Two equal models."""
    model = make(name, **kwargs)
    return model, copy.deepcopy(model)
