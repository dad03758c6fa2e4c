"""LoRA and its relatives on the head: loss and gradients of stock PEFT, without logits."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from odd_heads import STRATEGIES, adapted, compare
from packaging.version import Version
from test_deferred import gradients
from tiny_models import VOCAB, assert_same_gradients, batch, make
from torch import nn

from loss_plugins import patch_model
from loss_plugins.errors import UnsupportedError
from loss_plugins.models.conformance.double import all_double

peft = pytest.importorskip("peft", reason="these tests adapt heads with PEFT")

TYING = ("saved head, tied", "tied adapters")
TIES = Version(peft.__version__) >= Version("0.19")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed:UserWarning"),
]


def two(**kwargs: Any) -> Any:
    """Two adapters on the head at once, of different ranks."""
    model = adapted(**kwargs)
    other = {"r": 3, "lora_alpha": 5, "target_modules": ["lm_head"], "init_lora_weights": False}
    model.add_adapter("other", peft.LoraConfig(**other, task_type="CAUSAL_LM", **kwargs))
    model.base_model.set_adapter(["default", "other"])
    return model.double()


def warm(model: Any) -> Any:
    """Something to train where no adapter is."""
    for name, parameter in model.named_parameters():
        if "layers.0" in name:
            parameter.requires_grad_(True)
    return model


def merged(**kwargs: Any) -> Any:
    model = adapted(**kwargs)
    model.merge_adapter()
    return warm(model)


def disabled(**kwargs: Any) -> Any:
    model = adapted(**kwargs)
    model.base_model.disable_adapter_layers()
    return warm(model)


def trained_base(**kwargs: Any) -> Any:
    """W itself gets a gradient too."""
    return adapted(**kwargs).requires_grad_(True)


def with_bias(**kwargs: Any) -> Any:
    """phi's head has a bias."""
    return adapted(family="phi", **kwargs)


TOKENS = {"tied": True, "target_modules": ["q_proj"], "trainable_token_indices": [7, 8, 9]}
SAVED = {"tied": True, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}

ONE_WEIGHT = {
    "disabled": disabled,
    "merged": merged,
    "merged dora": lambda: merged(use_dora=True),
    "saved head, tied": lambda: adapted(**SAVED, ensure_weight_tying=True),
    "tokens": lambda: adapted(**TOKENS),
    "tokens of the head alone": lambda: adapted(target_modules=["q_proj"], trainable_token_indices={"lm_head": [7, 8]}),
    "tokens, off": lambda: disabled(**TOKENS),
    "tokens, merged": lambda: merged(**TOKENS),
}
PRODUCTS = {
    "lora": adapted,
    "dropout": lambda: adapted(lora_dropout=0.4),
    "rslora": lambda: adapted(use_rslora=True),
    "two adapters": two,
    "two with dropout": lambda: two(lora_dropout=0.3),
    "bias of lora": lambda: adapted(lora_bias=True),
    "bias of the head": with_bias,
    "bias of both, trained": lambda: with_bias(lora_bias=True, bias="all"),
    "base trained": trained_base,
    "tied": lambda: adapted(tied=True),
    "tied adapters": lambda: adapted(tied=True, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
    "over tokens": lambda: adapted(tied=True, trainable_token_indices=[7, 8, 9]),
    "dora": lambda: adapted(use_dora=True),
    "dora, base trained": lambda: trained_base(use_dora=True),
    "dora with bias": lambda: with_bias(use_dora=True),
    "dora with dropout": lambda: adapted(use_dora=True, lora_dropout=0.4),
    "dora with dropout and bias": lambda: with_bias(use_dora=True, lora_dropout=0.4),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", ONE_WEIGHT)
def test_one_weight(what: str, strategy: str) -> None:
    if what in TYING and not TIES:
        pytest.skip("PEFT ties saved heads from 0.19 on")
    seen = compare(ONE_WEIGHT[what], strategy)
    assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", PRODUCTS)
def test_products(what: str, strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    if what in TYING and not TIES:
        pytest.skip("PEFT ties adapters from 0.19 on")
    caplog.set_level(logging.INFO, "loss_plugins.models")
    seen = compare(PRODUCTS[what], strategy)
    assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained
    copies = [r for r in caplog.records if "[W, B] side by side: a copy" in r.getMessage()]
    assert len(copies) == (strategy in ("flce", "cce"))
    assert not [r for r in caplog.records if "calls its head on chunks" in r.getMessage()]


@pytest.mark.parametrize("what", ["lora", "dropout", "two adapters", "dora with dropout", "bias of both, trained"])
def test_products_in_many_chunks(what: str) -> None:
    """Also dropout, whose mask is drawn for all rows at once, as the unpatched model draws it."""
    seen = compare(PRODUCTS[what], "chunked", options={"workspace_mb": 3 * VOCAB * 8 / 2**20})
    assert seen.counts.fused == 1


@pytest.mark.parametrize("strategy", ["chunked", "flce", "cce", "auto"])
@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "qwen3"])
def test_models_that_scale_or_bound_their_logits(family: str, strategy: str) -> None:
    seen = compare(lambda: adapted(family=family, use_dora=family == "gemma2"), strategy)
    assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_configuration_adds(strategy: str) -> None:
    added = {"loss_label_smoothing": 0.1, "loss_z_loss": 0.02, "loss_class_weight": [1.0, 3.0] * (VOCAB // 2)}
    model, stock = adapted(), adapted()
    stock.base_model.model.lm_head.base_layer.register_forward_hook(lambda *_: None)
    with all_double():
        losses = []
        for each, config in ((model, added | {"loss_strategy": strategy}), (stock, added | {"loss_strategy": "naive"})):
            patch_model(each, config)
            losses.append(each(**batch()).loss)
            losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], atol=1e-10, rtol=0)
    assert_same_gradients(gradients(model), gradients(stock), atol=1e-10)


@pytest.mark.parametrize("strategy", ["chunked", "cce"])
def test_it_says_which_way_the_head_goes(strategy: str) -> None:
    model = adapted()
    with patch_model(model, strategy) as handle:
        way = {"chunked": "are taken in chunks", "cce": "are one weight for the strategy"}[strategy]
        assert way in handle.explain()
        model(**batch())
    assert isinstance(model(**batch()).logits, torch.Tensor)
    assert type(model.base_model.model.lm_head) is peft.tuners.lora.Linear


@pytest.mark.parametrize("strategy", ["naive", "chunked", "flce", "cce"])
@pytest.mark.parametrize("autocast", [False, True])
def test_float32_adapters_on_a_half_model(strategy: str, autocast: bool) -> None:
    def build() -> Any:
        model = make(dtype=torch.bfloat16)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config).train()

    def around(model: nn.Module) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()

    head = build().base_model.model.lm_head
    assert head.lora_A["default"].weight.dtype == torch.float32
    assert head.base_layer.weight.dtype == torch.bfloat16
    seen = compare(build, strategy, atol=2e-2, double=False, around=around)
    assert seen.counts.fused == 1


@pytest.mark.parametrize("strategy", ["chunked", "cce"])
def test_an_adapter_for_each_sequence(strategy: str) -> None:
    """PEFT gives the head their names, which fit nothing but the whole batch."""
    model = adapted().eval()
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False))
    model = model.double()
    rows = batch() | {"adapter_names": ["default", "other"]}
    with all_double():
        expected = model(**rows).loss
        assert (model(**batch()).loss - expected).abs() > 1e-3
        with patch_model(model, strategy) as handle, handle.scope(loss_only=True):
            torch.testing.assert_close(model(**rows).loss, expected, atol=1e-10, rtol=0)
    assert (handle.counts.fused, handle.counts.materialised) == (0, 1)
    assert "adapter of its own" in handle.materialised_by[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_label_at_all(strategy: str) -> None:
    """Every parameter gets a gradient, and none of it is a number."""
    rows = batch()
    rows["labels"][:] = -100
    model = adapted()
    patch_model(model, strategy)
    loss = model(**rows).loss
    assert loss.isnan()
    loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = gradients(model)
    assert found.keys() == trained
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_are_written_before_the_backward(strategy: str) -> None:
    model = adapted()
    patch_model(model, strategy)
    loss = model(**batch()).loss
    with torch.no_grad():
        model.base_model.model.lm_head.lora_B["default"].weight.mul_(2)
    if strategy in ("flce", "cce"):  # these hold a copy
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match=r"in.?place"):
            loss.backward()


def hooked() -> Any:
    model = adapted()
    model.base_model.model.lm_head.base_layer.register_forward_hook(lambda module, args, output: output * 1.5)
    return model


def of_another_kind(config: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(make(), config).double().train()


CALLED = {
    "a hook inside": hooked,
    "two, one of them dora": lambda: two(use_dora=True),
    "a parameter": lambda: adapted(target_modules=["q_proj"], target_parameters=["lm_head.weight"]),
    "ia3": lambda: of_another_kind(
        peft.IA3Config(
            target_modules=["lm_head"], feedforward_modules=[], init_ia3_weights=False, task_type="CAUSAL_LM"
        )
    ),
    "vera": lambda: of_another_kind(
        peft.VeraConfig(r=4, target_modules=["lm_head"], init_weights=False, task_type="CAUSAL_LM")
    ),
    "oft": lambda: of_another_kind(
        peft.OFTConfig(oft_block_size=8, target_modules=["lm_head"], init_weights=False, task_type="CAUSAL_LM")
    ),
}


@pytest.mark.parametrize("what", CALLED)
def test_other_adapters_are_called_on_chunks(what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loss_plugins.models")
    for strategy in ("naive", "chunked", "auto"):
        seen = compare(CALLED[what], strategy)
        assert (seen.counts.fused, seen.counts.materialised) == (1, 0), seen.explained
        assert "PEFT adapter" in seen.explained
    assert len([r for r in caplog.records if "calls its head on chunks" in r.getMessage()]) == 3
    with pytest.raises(UnsupportedError, match="PEFT adapter"):
        patch_model(CALLED[what](), "cce")


@pytest.mark.parametrize("way", ["disable", "merge"])
def test_an_idle_adapter_does_not_round_the_loss(way: str) -> None:
    """OFT and others cast what they return to the type of the hidden states, which here would be the loss."""
    torch.manual_seed(1)
    config = peft.OFTConfig(oft_block_size=8, target_modules=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(make(dtype=torch.bfloat16), config, autocast_adapter_dtype=False).train()
    model.base_model.disable_adapter_layers() if way == "disable" else model.merge_adapter()
    expected = warm(model)(**batch()).loss
    assert expected.dtype == torch.float32
    for strategy in STRATEGIES:
        with patch_model(model, strategy) as handle:
            loss = model(**batch()).loss
            torch.testing.assert_close(loss, expected, atol=2e-4, rtol=0)
            loss.backward()
        assert handle.counts.fused == 1


def test_merging_and_adapting_a_patched_model() -> None:
    """The head is looked at in every forward."""
    model, stock = adapted(), adapted()
    patch_model(model, "cce")
    with all_double():
        for change in ("merge_adapter", "unmerge_adapter"):
            for each in (model, stock):
                getattr(each, change)()
            torch.testing.assert_close(model(**batch()).loss, stock(**batch()).loss, atol=1e-10, rtol=0)
        for each in (model, stock):
            torch.manual_seed(3)
            each.add_adapter("other", peft.LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False))
            each.set_adapter("other")
            each.double()
            each(**batch()).loss.backward()
    assert_same_gradients(gradients(model), gradients(stock), atol=1e-10)
