"""Sequences that share a row, attention of each kind, and gradient checkpointing, beside every strategy: stock's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, assert_same_gradients, batch, make, step, twins
from torch import Tensor
from transformers import DataCollatorWithFlattening

from loss_plugins import patch_model
from loss_plugins.models.conformance.double import all_double

STRATEGIES = ("naive", "chunked", "flce", "cce")
ATTENTIONS = ("eager", "sdpa")


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    with all_double():
        yield


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(5, VOCAB, (n,), generator=generator).tolist()} for n in (5, 9, 3, 7)]


def apart(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of the documents, each in a row of its own without padding."""
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    number = sum(len(document["input_ids"]) - 1 for document in documents())
    for document in documents():
        ids = torch.tensor([document["input_ids"]])
        loss = loss + model(input_ids=ids, labels=ids, num_items_in_batch=number).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_padding_free_batch_is_its_documents(attention: str, strategy: str) -> None:
    """transformers' collator: one row, positions that start again, and no label for the first token of each."""
    model, stock = twins()
    for each in (model, stock):
        each.set_attn_implementation(attention)
        each.config.use_cache = False  # with a cache transformers does not look for borders among the positions
    flat = DataCollatorWithFlattening(return_tensors="pt")(documents())
    assert flat["input_ids"].shape == (1, 24)
    assert flat["labels"][0, [0, 5, 14, 17]].tolist() == [-100] * 4
    handle = patch_model(model, strategy)
    output, gradients = step(model, flat)
    expected, expected_gradients = step(stock, flat)
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=1e-10)
    assert_same_gradients(gradients, expected_gradients, 1e-10)
    assert (handle.counts.fused, handle.counts.materialised) == (1, 0)
    alone, alone_gradients = apart(stock)
    torch.testing.assert_close(output.loss, alone, atol=1e-10, rtol=1e-10)
    assert_same_gradients(gradients, alone_gradients, 1e-10)


def test_a_label_across_a_border_would_be_seen() -> None:
    """What the test above can tell: with the first token's label left in, the loss is another."""
    model = make()
    patch_model(model, "cce")
    flat = DataCollatorWithFlattening(return_tensors="pt")(documents())
    expected = model(**flat).loss
    across = {**flat, "labels": flat["input_ids"]}
    assert abs(model(**across).loss - expected) > 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_packed_rows(name: str, attention: str) -> None:
    """Several rows of several documents each, as packing makes them; sliding windows too."""
    model, stock = twins(name)
    for each in (model, stock):
        each.set_attn_implementation(attention)
        each.config.use_cache = False
    rows = batch(name)
    del rows["attention_mask"]
    rows["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    rows["labels"][rows["position_ids"] == 0] = -100
    patch_model(model, "cce")
    output, gradients = step(model, rows)
    expected, expected_gradients = step(stock, rows)
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=1e-10)
    assert_same_gradients(gradients, expected_gradients, 1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_checkpointing_of_a_padding_free_batch(attention: str, strategy: str, reentrant: bool) -> None:
    model, stock = twins()
    for each in (model, stock):
        each.set_attn_implementation(attention)
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            each.enable_input_require_grads()
    flat = DataCollatorWithFlattening(return_tensors="pt")(documents())
    handle = patch_model(model, {"loss_strategy": strategy, "loss_statistics": ["accuracy", "entropy"]})
    output, gradients = step(model, flat)
    expected, expected_gradients = step(stock, flat)
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=1e-10)
    assert_same_gradients(gradients, expected_gradients, 1e-10)
    assert (handle.counts.fused, handle.counts.materialised) == (1, 0)


@pytest.mark.parametrize("name", ["mixtral", "t5", "bart", "gpt2", "gemma3_image"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_forwards_of_each_kind(name: str, reentrant: bool) -> None:
    model, stock = twins(name)
    for each in (model, stock):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            each.enable_input_require_grads()
    handle = patch_model(model, "cce")
    output, gradients = step(model, batch(name))
    expected, expected_gradients = step(stock, batch(name))
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=1e-10)
    assert_same_gradients(gradients, expected_gradients, 1e-10)
    assert (handle.counts.fused, handle.counts.materialised) == (1, 0)


def test_flash_attention_where_it_is_installed() -> None:
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    if not torch.cuda.is_available():
        pytest.skip("flash-attn needs a GPU")
    model, stock = (each.cuda().bfloat16() for each in twins())
    for each in (model, stock):
        each.set_attn_implementation("flash_attention_2")
    flat = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)(documents())
    flat = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in flat.items()}
    patch_model(model, "cce")
    torch.testing.assert_close(model(**flat).loss, stock(**flat).loss, atol=1e-2, rtol=1e-2)
