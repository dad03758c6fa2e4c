"""The patch itself: what it refuses, what it survives, and that it goes without a trace."""

from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import pickle
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from test_deferred import Toy, inputs, plain
from tiny_models import assert_same_gradients, batch, make, step, twins
from torch import nn
from transformers import LlamaForCausalLM

from loss_plugins import LossConfig, PatchHandle, patch_model
from loss_plugins.errors import ConfigError, PatchError
from loss_plugins.models.conformance.double import all_double
from loss_plugins.models.families import FAMILIES, ModelFamily, family_of
from loss_plugins.models.patch import find_handle

STRATEGIES = ["naive", "chunked", "flce", "cce"]


def loss_of(model: Any) -> torch.Tensor:
    return model(**batch()).loss


# what is refused, before anything is touched


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("cc", "Did you mean 'cce'"),
        ({"loss_strategy": "flce", "loss_options": {"filter": "off"}}, "filter"),
        ({"loss_strategy": "cce", "loss_options": {"preset": "fast"}}, "preset"),
        ({"loss_strategy": "auto", "loss_options": {"nonsense": 1}}, "nonsense"),
        ({"strategy": "cce"}, "loss_strategy"),
        ({"loss_class_weight": [1.0, 2.0]}, "2 entries"),
    ],
)
def test_bad_configurations(config: Any, message: str) -> None:
    model = make()
    cls = type(model)
    with pytest.raises(ConfigError, match=message):
        patch_model(model, config)
    assert type(model) is cls
    assert type(model.lm_head) is nn.Linear
    assert find_handle(model) is None


def test_patching_twice_names_the_patch_that_is_there() -> None:
    model = make()
    handle = patch_model(model, "cce")
    for config in ("cce", "flce"):
        with pytest.raises(PatchError, match=r"patched already, with loss_strategy 'cce'.*undo\(\).*find_handle"):
            patch_model(model, config)
    assert find_handle(model) is handle
    handle.undo()
    assert patch_model(model, "flce").config.loss_strategy == "flce"


def _module(name: str, source: str) -> Any:
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    return module


FOREIGN = {
    "liger_kernel.transformers.model.llama": ("def lce_forward(self, *args, **kwargs): pass", "lce_forward", "Liger"),
    "cut_cross_entropy.transformers.llama": (
        "def cce_forward(self, *args, **kwargs): pass",
        "cce_forward",
        "cut-cross",
    ),
    "trl.trainer.utils": ("def _fused_forward(self, *args, fused_lm_head=False): pass", "_fused_forward", "TRL"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("where", ["instance", "class", "decorated"])
def test_models_that_others_patched(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, function, said = FOREIGN[name]
    forward = getattr(_module(name, source), function)
    model = make()
    if where == "class":
        monkeypatch.setattr(type(model), "forward", forward)
    elif where == "instance":
        model.forward = types.MethodType(functools.wraps(type(model).forward)(forward), model)
    else:
        model.forward = functools.partial(functools.wraps(forward)(lambda *a, **k: forward(*a, **k)), model)
    with pytest.raises(PatchError, match=said):
        patch_model(model, "cce")
    assert find_handle(model) is None


def test_the_fused_head_of_trl_itself() -> None:
    utils = pytest.importorskip("trl.trainer.utils", reason="needs TRL")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head")
    model = make()
    utils.add_fused_lm_head(model)
    with pytest.raises(PatchError, match="TRL"):
        patch_model(model, "cce")


def test_a_forward_that_comes_after_the_patch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    patch_model(model, "cce")
    source, function, _ = FOREIGN["liger_kernel.transformers.model.llama"]
    model.forward = types.MethodType(getattr(_module("liger_kernel.x", source), function), model)
    for _ in range(2):
        model(**batch())
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "Liger" in record.getMessage()
    assert "not in force" in record.getMessage()


# what goes on working


def test_undo_is_idempotent_and_the_handle_a_context() -> None:
    model, stock = twins()
    cls = type(model)
    with patch_model(model, "cce") as handle:
        assert isinstance(handle, PatchHandle)
        assert handle.active
        assert handle.model is model
        assert loss_of(model).dtype == torch.float64
    handle.undo()
    handle.undo()
    assert not handle.active
    assert type(model) is cls
    assert torch.equal(model(**batch()).logits, stock(**batch()).logits)
    assert find_handle(model) is None
    assert "(undone)" in handle.explain()


def test_undo_below_a_class_that_was_put_on_top(caplog: pytest.LogCaptureFixture) -> None:
    """FSDP2 does that. The classes stay, and pass everything on."""
    model, stock = twins()
    handle = patch_model(model, "cce")
    for module in (model, model.lm_head):
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    assert model(**batch()).logits is None
    handle.undo()
    assert "FSDP2" in caplog.text
    assert torch.equal(model(**batch()).logits, stock(**batch()).logits)
    assert find_handle(model) is None
    assert patch_model(model, "flce").counts.fused == 0
    assert model(**batch()).logits is None


def test_a_dropped_model_goes_at_once() -> None:
    """No cycle keeps its memory until a collection: not after a step, not after an error in its forward."""
    model = make()
    handle = patch_model(model, "cce")
    loss_of(model).backward()
    with pytest.raises(IndexError):
        model(**batch() | {"input_ids": torch.full((2, 12), 10**6)})
    gone = weakref.ref(model.lm_head)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(PatchError, match="gone"):
        _ = handle.model


def test_two_models_with_two_configurations() -> None:
    (first, stock), second = twins(), make(seed=1)
    one, two = patch_model(first, LossConfig("cce")), patch_model(second, {"loss_strategy": "flce", "loss_z_loss": 1.0})
    with all_double():
        torch.testing.assert_close(loss_of(first), loss_of(stock), atol=1e-10, rtol=0)
        assert loss_of(second) > loss_of(make(seed=1)) + 1
    assert (one.counts.fused, two.counts.fused) == (1, 1)
    one.undo()
    assert second(**batch()).logits is None


def zeroed(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_copies_are_patched_on_their_own(name: str, duplicate: Any) -> None:
    model = make(name)
    handle = patch_model(model, {"loss_strategy": "cce", "loss_z_loss": 0.1})
    handle.before_loss.append(lambda: None)
    loss = loss_of(model)
    other = duplicate(model)
    mine = find_handle(other)
    assert mine is not handle
    assert mine.model is other
    assert mine.config == handle.config
    assert (mine.counts.fused, mine.before_loss) == (0, [])
    assert torch.equal(loss_of(other), loss)
    assert (mine.counts.fused, handle.counts.fused) == (1, 1)
    zeroed(other)
    assert not torch.equal(loss_of(other), loss)
    assert torch.equal(loss_of(model), loss)
    mine.undo()
    assert type(other) is type(model).__mro__[1]
    assert type(other.get_output_embeddings()) is nn.Linear
    assert find_handle(model) is handle
    assert other(**batch()).logits is not None


def test_save_pretrained(tmp_path: Path) -> None:
    import json

    from transformers import AutoModelForCausalLM

    model = make()
    patch_model(model, "cce")
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model).__mro__[1]
    assert find_handle(loaded) is None
    torch.testing.assert_close(loss_of(loaded.train()), loss_of(model), atol=1e-6, rtol=0, check_dtype=False)


def test_through_wrappers() -> None:
    peft = pytest.importorskip("peft", reason="needs PEFT")
    model = make()
    wrapped = nn.DataParallel(
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    )
    compiled = torch.compile(wrapped, backend="eager")
    handle = patch_model(compiled, "cce")
    assert handle.model is model
    for outer in (compiled, wrapped, wrapped.module, model):
        assert find_handle(outer) is handle
    with pytest.raises(PatchError, match="already"):
        patch_model(wrapped.module, "cce")
    assert wrapped.train()(**batch()).logits is None
    assert handle.counts.fused == 1


def test_trainer_sees_the_same_model(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    stock, model = make(dtype=torch.float32), make(dtype=torch.float32)
    patch_model(model, "cce")
    args = TrainingArguments(use_cpu=True, report_to=[], output_dir=str(tmp_path))
    facts = [
        [
            getattr(Trainer(model=m, args=args), a, None)
            for a in ("model_accepts_loss_kwargs", "_loss_shifts_labels", "label_names")
        ]
        for m in (stock, model)
    ]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_checkpointing(strategy: str, reentrant: bool) -> None:
    model, stock = twins()
    patch_model(model, strategy)
    for m in (model, stock):
        m.gradient_checkpointing_enable({"use_reentrant": reentrant})
        m.enable_input_require_grads()
    with all_double():
        expected, expected_gradients = step(stock, batch())
        output, gradients = step(model, batch())
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-10, rtol=0)
    assert_same_gradients(gradients, expected_gradients, atol=1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi", "bart"])
def test_bf16_autocast(name: str, strategy: str) -> None:
    model, stock = twins(name, dtype=torch.float32)
    handle = patch_model(model, strategy)
    outcome = []
    for m in (model, stock):
        m.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(**batch()).loss
        loss.backward()
        outcome.append((loss, {k: p.grad for k, p in m.named_parameters() if p.grad is not None}))
    (loss, ours), (expected, theirs) = outcome
    assert handle.counts.fused == 1
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), atol=0, rtol=3e-3)
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        assert ours[key].dtype == gradient.dtype == torch.float32
        assert (ours[key] - gradient).norm() <= 3e-2 * gradient.norm() + 1e-6, key


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_parameters(strategy: str) -> None:
    model, stock = twins(dtype=torch.bfloat16)
    patch_model(model, strategy)
    output, ours = step(model, batch())
    expected, theirs = step(stock, batch())
    assert output.loss.dtype == expected.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, expected.loss, atol=0, rtol=3e-3)
    for key, gradient in theirs.items():
        assert ours[key].dtype == torch.bfloat16
        assert (ours[key] - gradient).float().norm() <= 5e-2 * gradient.float().norm() + 1e-6, key


def test_accelerates_autocast_put_on_before_the_patch(request: pytest.FixtureRequest) -> None:
    """It binds the stock forward to the instance, so the patched class's forward never runs."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model, stock = twins(dtype=torch.float32)
    AcceleratorState._reset_state(True)
    request.addfinalizer(lambda: AcceleratorState._reset_state(True))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare_model(model, device_placement=False)
    assert "forward" in model.__dict__
    handle = patch_model(model, "cce")
    output = prepared(**batch())
    assert handle.counts.fused == 1
    assert output.logits is None
    torch.testing.assert_close(output.loss, loss_of(stock), atol=0, rtol=3e-3)
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(**batch()).logits is None


def test_generic_exceptions_in_user_code_do_not_hide_the_patch() -> None:
    toy = Toy(lambda m, z, y: 1 / 0).double()
    patch_model(toy, "cce")
    with pytest.raises(ZeroDivisionError):
        toy(**inputs())
    toy.post = lambda m, z, y: plain(z, y)
    assert toy(**inputs())["logits"] is None


def test_positional_labels() -> None:
    toy = Toy(lambda m, z, y: plain(z, y)).double()
    expected = toy(*inputs().values())["loss"]
    handle = patch_model(toy, "cce")
    torch.testing.assert_close(toy(*inputs().values())["loss"], expected, atol=1e-10, rtol=0)
    assert handle.counts.fused == 1


# what is told


def test_explain() -> None:
    model = make("gemma2")
    handle = patch_model(model, {"loss_strategy": "cce", "loss_options": {"filter": "off"}})
    loss_of(model)
    text = handle.explain()
    for words in (
        "Gemma2ForCausalLM",
        "'cce'",
        "filter",
        "lm_head",
        "120 x 32",
        "1 deferred",
        "1 losses without logits",
    ):
        assert words in text
    assert len(text.splitlines()) <= 6


def test_families_are_data_and_known_to_transformers() -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from loss_plugins.models.conformance import read_results

    newest = read_results()["transformers"]  # older ones have fewer models
    seen: dict[str, str] = {}
    for name in FAMILIES.names():
        family = FAMILIES.get(name)
        assert isinstance(family, ModelFamily)
        assert (family.reason is None) == (family.status == "fused")
        for model_type in family.model_types:
            assert seen.setdefault(model_type, name) == name
            decoders = ("musicgen_decoder", "musicgen_melody_decoder")
            assert model_type in CONFIG_MAPPING_NAMES or model_type in decoders or transformers.__version__ != newest
            assert family_of(model_type) is family
    assert family_of("llama") is None
    assert family_of("pi0").status == "unsupported"


def test_importing_patches_nothing_and_needs_no_peft() -> None:
    import subprocess

    code = (
        "import sys; sys.modules['peft'] = None; import loss_plugins.models.patch, torch; "
        "assert 'trl' not in sys.modules and 'transformers' not in sys.modules; "
        "assert torch.nn.functional.cross_entropy.__module__ == 'torch.nn.functional'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("given", "what"),
    [(None, "NoneType"), ("model", "str"), (object(), "object"), (LlamaForCausalLM, "the class LlamaForCausalLM")],
)
def test_what_is_no_model_is_refused(given: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=f"takes a model that is built.* was given {what}. Load it first"):
        patch_model(given, "cce")
    assert find_handle(given) is None


def test_a_head_alone_is_refused() -> None:
    """Nothing gives it labels, so nothing would ever be computed by a strategy."""
    with pytest.raises(PatchError, match=r"Linear is a head itself.*linear_cross_entropy"):
        patch_model(nn.Linear(8, 20), "cce")


def test_arguments_in_place_of_their_config_are_refused() -> None:
    class Arguments:
        def loss_config(self) -> LossConfig:
            return LossConfig("cce")

    with pytest.raises(ConfigError, match=r"got Arguments. Pass what its loss_config\(\) returns"):
        patch_model(make(), Arguments())
    with pytest.raises(ConfigError, match=r"got list. Write for example cce"):
        patch_model(make(), ["cce"])
