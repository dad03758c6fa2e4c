"""`liger_ops`: Liger's other kernels beside any of our losses, in this model only, and out of it again."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import types
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import assert_same_gradients, batch, make, step, twins
from torch import nn

from loss_plugins import LossConfig, find_handle, patch_model
from loss_plugins.errors import ConfigError, MissingDependencyError, PatchError, UnsupportedError
from loss_plugins.models import liger
from loss_plugins.models.tiny import class_of_type, tiny_model

pytest.importorskip("triton", reason="liger-kernel needs Triton, which is not installed")
monkey_patch = pytest.importorskip(
    "liger_kernel.transformers.monkey_patch", reason="liger-kernel is not installed (extra: liger)"
)
from liger_kernels import DEVICE, state, watch  # noqa: E402 - it imports what may not be installed

TYPES = [name for name in sorted(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN) if class_of_type(name) is not None]
"""The others are parts of models, without a head."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return watch(monkeypatch)


def pair(name: str = "llama") -> tuple[Any, Any]:
    model, stock = twins(name, dtype=torch.float32)
    return model.to(DEVICE), stock.to(DEVICE)


def inputs() -> dict[str, torch.Tensor]:
    return {key: value.to(DEVICE) for key, value in batch(rows=2, length=6).items()}


def transformers_now() -> dict[str, Any]:
    """All names of all of its models' modules, and of torch.nn."""
    from transformers.activations import ACT2FN

    homes = {name: module for name, module in sys.modules.items() if name.startswith("transformers.models.")}
    homes |= {"nn": nn, "F": F}
    found = {
        f"{home}.{name}": value
        for home, module in homes.items()
        for name, value in list(vars(module).items())
        if not isinstance(value, types.ModuleType)
    }
    return found | {f"ACT2FN.{name}": value for name, value in dict.items(ACT2FN)}


def assert_transformers_is(before: dict[str, Any]) -> None:
    now = transformers_now()
    assert [name for name in before if now[name] is not before[name]] == []
    assert [name for name in now.keys() - before.keys() if liger._is_ligers(now[name])] == []


@pytest.mark.parametrize("strategy", ["naive", "chunked", "flce", "cce"])
def test_equals_stock_with_every_loss(strategy: str, launched: set[str]) -> None:
    model, stock = pair()
    handle = patch_model(model, LossConfig(strategy, liger_ops=True))
    expected, expected_gradients = step(stock, inputs())
    assert launched == set()
    output, gradients = step(model, inputs())
    assert launched == {"rms_norm", "swiglu", "rope"}
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert_same_gradients(gradients, expected_gradients, 1e-5, 1e-4)
    assert output.logits is None
    assert (handle.counts.fused, handle.counts.materialised) == (1, 0)
    assert "rope, rms_norm, swiglu, in 9 modules" in handle.explain()


@pytest.mark.parametrize("strategy", ["chunked", "flce", "cce"])
def test_a_norm_that_writes_into_its_gradient_spoils_no_loss(strategy: str, launched: set[str]) -> None:
    """Liger's RMSNorm takes the gradient it is given as its workspace, and that of the last norm is the loss's."""
    model, _ = pair()
    patch_model(model, LossConfig(strategy, liger_ops={"rope": False, "swiglu": False}))
    loss = model(**inputs()).loss
    loss.backward(retain_graph=True)
    once = model.model.layers[0].mlp.up_proj.weight.grad.clone()
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(model.model.layers[0].mlp.up_proj.weight.grad, once)
    assert launched == {"rms_norm"}


def test_what_is_named_is_followed_and_the_rest_is_ligers_choice(launched: set[str]) -> None:
    model, _ = pair()
    with patch_model(model, LossConfig("cce", liger_ops={"rms_norm": False, "cross_entropy": False})):
        step(model, inputs())
    assert launched == {"swiglu", "rope"}
    launched.clear()
    with patch_model(model, LossConfig("cce", liger_ops=False)) as handle:
        step(model, inputs())
        assert handle.liger is None
    assert launched == set()


@pytest.mark.parametrize("model_type", TYPES)
def test_nothing_else_changes_and_undo_leaves_nothing(model_type: str) -> None:
    name = class_of_type(model_type)
    assert name is not None
    model = tiny_model(name)
    before, names = state(model), transformers_now()
    parameters = {name: id(p) for name, p in model.named_parameters()}
    handle, refused = None, ""
    try:
        handle = patch_model(model, LossConfig("auto", liger_ops=True))
    except UnsupportedError as error:
        refused = str(error)
    if handle is None:
        reasons = ("ImportError: cannot import name", "it could only be done for all models at once")
        assert any(reason in refused for reason in reasons), "this Liger and this transformers do not go together"
    else:
        assert {name: id(p) for name, p in model.named_parameters() if name in parameters} == parameters
        assert sum(type(module) is not cls for module, cls, _, _ in before) > 2 or model_type == "nemotron"
        assert all(type(module).__name__ == cls.__name__ for module, cls, _, _ in before)
        assert all("forward" not in vars(module) for module in model.modules())
        assert_transformers_is(names)
        handle.undo()
    assert_transformers_is(names)
    assert state(model) == before
    assert [list(vars(module)) for module, *_ in state(model)] == [list(attributes) for _, _, attributes, _ in before]


def test_copies_have_the_kernels_and_pickles_too(launched: set[str]) -> None:
    model, stock = pair()
    handle = patch_model(model, LossConfig("cce", liger_ops=True))
    expected, expected_gradients = step(stock, inputs())
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [copy.deepcopy(model), torch.load(stream, weights_only=False), pickle.loads(pickle.dumps(model))]
    for other in copies:
        launched.clear()
        output, gradients = step(other, inputs())
        assert launched == {"rms_norm", "swiglu", "rope"}
        torch.testing.assert_close(output.loss, expected.loss, atol=1e-5, rtol=1e-5)
        assert_same_gradients(gradients, expected_gradients, 1e-5, 1e-4)
        find_handle(other).undo()  # type: ignore[union-attr]
        assert [type(m) for m in other.modules()] == [type(m) for m in stock.modules()]
    launched.clear()
    step(model, inputs())
    assert launched == {"rms_norm", "swiglu", "rope"}, "the copies' undo is their own"
    handle.undo()
    launched.clear()
    step(model, inputs())
    assert launched == set()


def test_a_handle_does_not_keep_the_layers_alive() -> None:
    model = make(dtype=torch.float32).to(DEVICE)
    handle = patch_model(model, LossConfig("cce", liger_ops=True))
    layer = weakref.ref(model.model.layers[0].mlp)
    del model
    gc.collect()
    assert layer() is None
    handle.undo()


def test_generation_runs_with_the_kernels(launched: set[str]) -> None:
    model, stock = pair()
    patch_model(model, LossConfig("cce", liger_ops=True))
    ids = inputs()["input_ids"][:1, :4]
    made = [m.eval().generate(ids, max_new_tokens=4, do_sample=False) for m in (model, stock)]
    assert torch.equal(*made)
    assert launched == {"rms_norm", "swiglu", "rope"}


def test_under_peft(launched: set[str]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (extra: peft)")
    settings = peft.LoraConfig(target_modules=["q_proj", "up_proj"], modules_to_save=["norm"], init_lora_weights=False)
    model = peft.get_peft_model(make(dtype=torch.float32).to(DEVICE), settings)
    stock = copy.deepcopy(model)
    patch_model(model, LossConfig("cce", liger_ops=True))
    expected, expected_gradients = step(stock, inputs())
    output, gradients = step(model, inputs())
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert_same_gradients(gradients, expected_gradients, 1e-5, 1e-4)
    assert launched == {"rms_norm", "swiglu", "rope"}


# refusals


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("all", r"liger_ops must be true, or a mapping .* got 'all'"),
        ({"rms_norm": 1}, r"liger_ops must be true, or a mapping .* got \{'rms_norm': 1\}"),
        (
            {"fused_linear_cross_entropy": True},
            "liger_ops turns on fused_linear_cross_entropy, and loss_strategy 'cce' .* Take fused_linear_cross_entropy",
        ),
        ({"cross_entropy": True, "rope": True}, "turns on cross_entropy.*two losses for one model"),
    ],
)
def test_wrong_values(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossConfig("cce", liger_ops=value)


@pytest.mark.parametrize(
    ("name", "ops", "error", "message"),
    [
        ("gpt2", True, UnsupportedError, "no kernels for GPT2LMHeadModel. Unknown model type 'gpt2'.*Known: .*llama"),
        ("llama", {"geglu": True}, ConfigError, "Did you mean 'swiglu'.*Known: rms_norm, rope, swiglu.*LlamaForCausal"),
        ("llama", {"rmsnorm": True}, ConfigError, "Unknown entry of liger_ops 'rmsnorm'. Did you mean 'rms_norm'"),
    ],
)
def test_what_liger_cannot_do_is_refused(name: str, ops: Any, error: type[Exception], message: str) -> None:
    model = make(name, dtype=torch.float32).to(DEVICE)
    before = state(model)
    with pytest.raises(error, match=message):
        patch_model(model, LossConfig("cce", liger_ops=ops))
    assert state(model) == before
    assert find_handle(model) is None


def test_an_error_of_ligers_own_leaves_the_model_alone() -> None:
    model = tiny_model("Glm4ForCausalLM")
    before, names = state(model), transformers_now()
    with pytest.raises(UnsupportedError, match=r"cannot put it into Glm4ForCausalLM.*NotImplementedError"):
        patch_model(model, LossConfig("cce", liger_ops={"rope": True}))
    assert state(model) == before
    assert_transformers_is(names)


def test_liger_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.raises(
        MissingDependencyError, match=r"liger_ops true was asked for.*pip install 'loss-plugins\[liger\]'"
    ):
        patch_model(make(), LossConfig("cce", liger_ops=True))


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loss_plugins.device._interpreting", lambda: False)
    model = make()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="the model is on cpu, where Liger's kernels cannot run: Triton cannot"):
        patch_model(model, LossConfig("cce", liger_ops=True))
    assert find_handle(model) is None
    # it may be moved to the GPU that there is; each forward looks
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    patch_model(model, LossConfig("cce", liger_ops=True))
    with pytest.raises(UnsupportedError, match="Move the model to a GPU, or leave liger_ops out"):
        model(**batch())


def test_a_forward_of_its_own_is_not_overwritten() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = make(dtype=torch.float32).to(DEVICE)
    add_hook_to_module(model.model.layers[1].mlp, AlignDevicesHook(DEVICE))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.mlp of LlamaForCausalLM has a forward of its own"):
        patch_model(model, LossConfig("cce", liger_ops=True))


@pytest.mark.parametrize("place", ["functional.cross_entropy", "CrossEntropyLoss"])
def test_ligers_cross_entropy_in_torch_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "CrossEntropyLoss":
        monkeypatch.setattr(nn, "CrossEntropyLoss", monkey_patch.LigerCrossEntropyLoss)
    else:
        monkeypatch.setattr(F, "cross_entropy", monkey_patch.liger_cross_entropy)
    with pytest.raises(
        PatchError, match=rf"Liger has replaced torch.nn.{place} for this whole process.*'cross_entropy'"
    ):
        patch_model(make(), "cce")
