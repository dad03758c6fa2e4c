"""Heads as PEFT, resizing, quantisation, hooks and users leave them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_deferred import Toy, gradients, inputs, plain
from tiny_models import VOCAB, WIDTH, assert_same_gradients, batch, make, step, twins
from torch import Tensor, nn

from loss_plugins import patch_model
from loss_plugins.errors import PatchError, UnsupportedError
from loss_plugins.models.conformance.double import all_double
from loss_plugins.models.patch import find_handle
from loss_plugins.models.tiny import tiny_inputs, tiny_model

peft = pytest.importorskip("peft", reason="these tests adapt heads with PEFT")

STRATEGIES = ["naive", "chunked", "flce", "cce"]


def adapted(tied: bool = False, **kwargs: Any) -> Any:
    model = make()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    torch.manual_seed(1)
    given = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["q_proj"]} | kwargs
    return peft.get_peft_model(model, peft.LoraConfig(**given)).double().train()


def compare(build: Any, strategy: str) -> str:
    """Loss and gradients of a patched and a stock PEFT model; what the handle explains."""
    stock = build()
    model = build()
    handle = patch_model(model, strategy)
    assert find_handle(model) is handle
    with all_double():
        torch.manual_seed(7)
        expected, expected_gradients = step(stock, batch())
        torch.manual_seed(7)
        output, gradients_ = step(model, batch())
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=0)
    assert_same_gradients(gradients_, expected_gradients, atol=1e-10)
    assert (handle.counts.fused, handle.counts.materialised) == (1, 0), handle.explain()
    return handle.explain()


WEIGHT_HEADS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved embedding and tied head": {"modules_to_save": ["lm_head", "embed_tokens"], "tied": True},
    "tokens, tied": {"trainable_token_indices": [7, 8, 9], "tied": True},
    "tokens, untied": {"trainable_token_indices": {"embed_tokens": [7, 8]}},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", WEIGHT_HEADS)
def test_adapters_that_leave_a_weight(what: str, strategy: str) -> None:
    assert "handed to the strategy" in compare(lambda: adapted(**WEIGHT_HEADS[what]), strategy)


@pytest.mark.parametrize("strategy", ["flce", "cce"])
@pytest.mark.parametrize("late", [False, True])
def test_a_strategy_that_needs_the_weight_refuses_a_head_it_cannot_take_apart(strategy: str, late: bool) -> None:
    model = make()
    handle = patch_model(model, strategy) if late else None
    config = peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config).train()
    attempt = (lambda: wrapped(**batch())) if late else (lambda: patch_model(wrapped, strategy))
    with pytest.raises(UnsupportedError) as error:
        attempt()
    assert "PEFT adapter" in str(error.value)
    assert "'chunked'" in str(error.value)
    assert "target_modules" in str(error.value)
    if handle is None:
        assert find_handle(wrapped) is None
        assert "loss_plugins" not in str(type(model).__mro__)


@pytest.mark.parametrize(
    "kwargs", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj"]}]
)
def test_adapting_after_patching(kwargs: dict[str, Any]) -> None:
    def build(patched: bool) -> Any:
        model = make()
        if patched:
            patch_model(model, "chunked")
        torch.manual_seed(1)
        config = peft.LoraConfig(
            **{"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["q_proj"]} | kwargs
        )
        return peft.get_peft_model(model, config).double().train()

    stock, model = build(False), build(True)
    handle = find_handle(model)
    with all_double():
        expected, expected_gradients = step(stock, batch())
        output, gradients_ = step(model, batch())
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=0)
    assert_same_gradients(gradients_, expected_gradients, atol=1e-10)
    assert (handle.counts.fused, handle.counts.materialised) == (1, 0)
    handle.undo()
    assert {type(m) for m in model.modules()} == {type(m) for m in stock.modules()}
    assert torch.equal(model(**batch()).logits, stock(**batch()).logits)


def test_a_disabled_adapter_leaves_the_plain_head() -> None:
    model = adapted(target_modules=["lm_head"])
    with model.disable_adapter():
        handle = patch_model(model, "cce")
        stock = adapted(target_modules=["lm_head"])
        with stock.disable_adapter():
            torch.testing.assert_close(model(**batch()).loss, stock(**batch()).loss.double(), atol=1e-6, rtol=0)
    assert handle.counts.fused == 1


def test_prompt_tuning() -> None:
    def build() -> Any:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return peft.get_peft_model(make(), config).double().train()

    torch.manual_seed(0)
    stock = build()
    torch.manual_seed(0)
    model = build()
    handle = patch_model(model, "cce")
    with all_double():
        expected, expected_gradients = step(stock, batch())
        output, gradients_ = step(model, batch())
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=0)
    assert_same_gradients(gradients_, expected_gradients, atol=1e-10)
    assert handle.counts.fused == 1


@pytest.mark.parametrize("multiple", [None, 64])
def test_a_resized_vocabulary(multiple: int | None) -> None:
    model, stock = twins()
    for m in (model, stock):
        torch.manual_seed(2)
        m.resize_token_embeddings(VOCAB + 3, pad_to_multiple_of=multiple, mean_resizing=False)
    patch_model(model, "cce")
    rows = batch()
    rows["labels"][0, -1] = VOCAB + 2
    with all_double():
        expected, expected_gradients = step(stock, rows)
        output, gradients_ = step(model, rows)
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=0)
    assert_same_gradients(gradients_, expected_gradients, atol=1e-10)


def test_resizing_after_patching() -> None:
    model, stock = twins()
    handle = patch_model(model, "cce")
    for m in (model, stock):
        torch.manual_seed(2)
        m.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    with all_double():
        expected, _ = step(stock, batch())
        output, _ = step(model, batch())
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=0)
    assert handle.counts.fused == 1
    handle.undo()
    assert type(model.lm_head) is nn.Linear


def test_tied_weights_get_both_parts_of_their_gradient_over_two_steps() -> None:
    model, stock = twins("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    patch_model(model, "flce")
    with all_double():
        for m in (model, stock):
            for seed in (0, 1):
                m(**batch(seed=seed)).loss.backward()
    assert_same_gradients(gradients(model), gradients(stock), atol=1e-10)


class Packed(nn.Module):
    """A quantised head: packed weight, own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = WIDTH, VOCAB
        self.register_buffer("weight", torch.randint(0, 255, (VOCAB * WIDTH, 1), dtype=torch.uint8))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, (self.weight.view(VOCAB, WIDTH).to(hidden.dtype) - 127) / 300)


class Wider(nn.Linear):
    """More logits than ``out_features`` says."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([super().forward(hidden), hidden[..., :2]], -1)


def test_a_packed_head_is_called() -> None:
    torch.manual_seed(0)
    head = Packed()
    ours, stock = (Toy(lambda m, z, y: plain(z, y), head=head).double() for _ in range(2))
    stock.load_state_dict(ours.state_dict())
    handle = patch_model(ours, "chunked")
    for m in (ours, stock):
        m(**inputs())["loss"].backward()
    assert_same_gradients(gradients(ours), gradients(stock), atol=1e-10)
    assert handle.counts.fused == 1
    handle.undo()
    with pytest.raises(UnsupportedError, match="forward of its own"):
        patch_model(ours, "cce")


class Dropping(nn.Linear):
    """Draws random numbers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(F.dropout(hidden, 0.4))


def test_dropout_in_a_head_is_drawn_once_and_replayed_in_the_backward() -> None:
    torch.manual_seed(0)
    post = lambda m, z, y: F.cross_entropy(z.view(-1, VOCAB), y.clamp(min=0).view(-1))  # noqa: E731
    ours, stock = (Toy(post, head=Dropping(WIDTH, VOCAB)).double() for _ in range(2))
    stock.load_state_dict(ours.state_dict())
    patch_model(ours, "chunked")
    for m in (ours, stock):
        torch.manual_seed(5)
        m(**inputs())["loss"].backward()
    assert_same_gradients(gradients(ours), gradients(stock), atol=1e-10)


def test_the_width_of_an_unknown_head_is_asked_for_once() -> None:
    torch.manual_seed(0)
    head = Wider(WIDTH, VOCAB)
    post = lambda m, z, y: F.cross_entropy(z.reshape(-1, VOCAB + 2), y.reshape(-1))  # noqa: E731
    ours = Toy(post, head=head).double()
    handle = patch_model(ours, "chunked")
    loss = ours(**inputs())["loss"]
    assert (handle.counts.fused, handle.counts.materialised) == (1, 0)
    handle.undo()
    torch.testing.assert_close(ours(**inputs())["loss"], loss, atol=1e-10, rtol=0)


def test_a_hook_on_the_head_sees_logits() -> None:
    """Here it doubles them, so a loss that left it out would be another."""
    ours = Toy(lambda m, z, y: plain(z, y)).double()
    ours.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    expected = ours(**inputs())["loss"]
    with patch_model(ours, "chunked") as handle:
        loss = ours(**inputs())["loss"]
        assert (handle.counts.fused, handle.counts.materialised) == (1, 0)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    with pytest.raises(UnsupportedError, match="forward hook"):
        patch_model(ours, "flce")


def test_a_forward_that_was_put_on_the_head_is_called() -> None:
    ours = Toy(lambda m, z, y: plain(z, y)).double()
    weight = ours.lm_head.weight
    ours.lm_head.forward = lambda hidden: F.linear(hidden, weight) * 3
    expected = ours(**inputs())["loss"]
    patch_model(ours, "chunked")
    loss = ours(**inputs())["loss"]
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("strategy", ["chunked", "cce"])
def test_hooks_of_accelerate(strategy: str, before: bool) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model, stock = twins()
    calls = []

    class Noting(AlignDevicesHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(module)
            return super().pre_forward(module, *args, **kwargs)

    def hook() -> None:
        add_hook_to_module(model.lm_head, Noting(execution_device="cpu"))
        add_hook_to_module(model, AlignDevicesHook(execution_device="cpu", io_same_device=True))

    if before:
        hook()
    handle = patch_model(model, strategy)
    if not before:
        hook()
    with all_double():
        expected, expected_gradients = step(stock, batch())
        output, gradients_ = step(model, batch())
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=0)
    assert_same_gradients(gradients_, expected_gradients, atol=1e-10)
    assert handle.counts.fused == 1
    assert len(calls) == 1


def test_a_model_without_a_head() -> None:
    model = make().model
    with pytest.raises(PatchError, match="no language-model head"):
        patch_model(model, "cce")
    assert find_handle(model) is None


def test_a_head_deeper_down_is_found() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = make()

        def get_output_embeddings(self) -> None:
            return None

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            return self.text(input_ids=input_ids, labels=labels)

    model = Outer().train()
    expected = model(batch()["input_ids"], batch()["labels"]).loss
    handle = patch_model(model, "cce")
    assert handle.head_path == "text"
    output = model(batch()["input_ids"], batch()["labels"])
    torch.testing.assert_close(output.loss, expected.double(), atol=1e-6, rtol=0)
    assert (handle.counts.fused, handle.counts.materialised) == (1, 0)
    assert output.logits is None


def test_several_heads_or_a_dictionary_of_them_are_refused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = make(), make()

    with pytest.raises(PatchError, match="several sub-models"):
        patch_model(Two(), "cce")

    class Books(nn.Module):
        def get_output_embeddings(self) -> nn.Module:
            return self.heads

        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"text": nn.Linear(4, 4)})

    with pytest.raises(PatchError, match="ModuleDict"):
        patch_model(Books(), "cce")


def test_head_that_a_family_names() -> None:
    model = tiny_model("FSMTForConditionalGeneration")
    assert isinstance(model.get_output_embeddings(), nn.Embedding)
    with patch_model(model, "cce") as handle:
        assert "head model.decoder.output_projection: Linear" in handle.explain()
        model(**tiny_inputs(model)).loss.backward()
        assert (handle.counts.fused, handle.counts.materialised) == (1, 0)
    assert type(model.model.decoder.output_projection) is nn.Linear
    with pytest.raises(PatchError, match="Embedding"):
        patch_model(model.model, "cce")


def test_explain_names_a_list_of_heads_once() -> None:
    model = tiny_model("MusicgenForCausalLM")
    with patch_model(model, "cce") as handle:
        assert "head lm_heads (4 of them): Linear" in handle.explain()
