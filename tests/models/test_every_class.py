"""Every language model class of the installed transformers, patched, is what it is unpatched.

Without ``--all``: a sample with one class of each kind, and every class that the results in the repository do not know,
so that what a new release brings is run on the day it is installed.
"""

from __future__ import annotations

import datetime
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loss_plugins.models.log_probs
import loss_plugins.models.loss
from loss_plugins import patch_model
from loss_plugins.diagnostics.memory import PeakMeter
from loss_plugins.models.conformance import check_class, read_results
from loss_plugins.models.families import FAMILIES
from loss_plugins.models.patch import PatchHandle
from loss_plugins.models.stand_in import RECORDED
from loss_plugins.models.tiny import exceptions, model_class, model_classes, tiny_image_batches, tiny_inputs, tiny_model
from loss_plugins.strategies import STRATEGIES

RESULTS = read_results()
KNOWN: dict[str, Any] = RESULTS["classes"]
SAMPLE = {
    "BambaForCausalLM": "state space and attention",
    "BartForCausalLM": "loss code of its own",
    "BertLMHeadModel": "a head of several layers with a bias",
    "BlipForConditionalGeneration": "head on a sub-model, smoothing of its own",
    "ChameleonForConditionalGeneration": "logits masked in place",
    "CohereForCausalLM": "scaled logits",
    "DeepseekV3ForCausalLM": "experts, compressed attention",
    "DoryForCausalLM": "a head with a forward of its own",
    "Florence2ForConditionalGeneration": "encoder and decoder, images",
    "Gemma3ForConditionalGeneration": "images",
    "Gemma4AssistantForCausalLM": "no loss",
    "Gemma2ForCausalLM": "softcap",
    "InklingForConditionalGeneration": "a slice of the vocabulary",
    "LlamaForCausalLM": "the plainest",
    "MixtralForCausalLM": "router losses",
    "MllamaForConditionalGeneration": "cross-attention to images",
    "MusicgenForCausalLM": "a head a codebook",
    "NemotronH_Omni_Reasoning_V3": "head on a sub-model",
    "ProphetNetForCausalLM": "log_softmax and nll_loss",
    "Qwen3VLForConditionalGeneration": "images as patches",
    "RecurrentGemmaForCausalLM": "softcap, recurrent state",
    "UdopForConditionalGeneration": "encoder and decoder with boxes, scaled",
    "WhisperForCausalLM": "half an encoder-decoder",
    "XLMWithLMHeadModel": "a head that computes the loss itself",
    "xLSTMForCausalLM": "recurrent, capped in chunks",
}
OPTIONAL = ("scipy", "timm", "torchvision", "torchaudio")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "class_name" in metafunc.fixturenames:
        installed = model_classes()
        wanted = [name for name in installed if name in SAMPLE or name not in KNOWN]
        metafunc.parametrize("class_name", list(installed) if metafunc.config.getoption("--all") else wanted)


@functools.cache
def is_results_version() -> bool:
    import transformers

    return bool(transformers.__version__ == RESULTS["transformers"])


def test_equals_stock(class_name: str) -> None:
    found = check_class(class_name)
    if found.status == "not run" and (missing := [name for name in OPTIONAL if f"'{name}'" in found.reason]):
        pytest.skip(f"{class_name} needs {missing[0]}")
    assert not found.problems
    assert found.status != "wrong"
    if is_results_version():
        assert found.status == KNOWN[class_name]["status"], found.reason
        assert found.checks == KNOWN[class_name].get("checks", []), found.skipped


def test_results_cover_transformers_and_meet_the_promise() -> None:
    assert datetime.date.fromisoformat(RESULTS["date"]) <= datetime.date.today()
    statuses = [entry["status"] for entry in KNOWN.values()]
    assert "wrong" not in statuses
    assert statuses.count("fused") >= 255
    assert statuses.count("not run") <= 10
    for name, entry in KNOWN.items():
        assert entry["status"] == "fused" or entry["reason"], name
        if entry["status"] == "fused":
            assert {"labels", "num_items_in_batch", "evaluation", "no labels", "undo"} <= set(entry["checks"]), name
            assert set(entry["strategies"]) == set(STRATEGIES.builtin()), name
    if is_results_version():
        assert list(KNOWN) == list(model_classes())
        unknown = set(exceptions()) - set(KNOWN)
        assert not unknown, "exceptions.yaml names classes that there are not"


def test_sample_is_of_classes_that_exist() -> None:
    assert set(SAMPLE) <= set(KNOWN)


def test_no_file_is_code_of_a_family() -> None:
    import loss_plugins.models.families as families

    for name in FAMILIES.builtin():
        assert (Path(families.__file__).parent / f"{name}.py").read_text().count("\n") < 20


# That differences are found


class Spoiled:
    """A loss that is off, in its value or in its gradient."""

    def __init__(self, value: float = 0.0, gradient: float = 0.0) -> None:
        self.value, self.gradient = value, gradient
        self.real = loss_plugins.models.loss.linear_cross_entropy_stats

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        output = self.real(hidden, *args, **kwargs)
        loss = output.loss + self.value
        off = self.gradient * (hidden - hidden.detach()).sum()
        return output._replace(loss=loss + off)


@pytest.mark.parametrize("spoiled", [{"value": 1e-9}, {"gradient": 1e-9}])
def test_a_difference_is_found(spoiled: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_plugins.models.loss, "linear_cross_entropy_stats", Spoiled(**spoiled))
    found = check_class("LlamaForCausalLM", ("cce",))
    assert found.status == "wrong"
    assert any(problem.startswith("cce, labels: loss ") for problem in found.problems)


def test_logits_that_were_made_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RECORDED, F.nll_loss)
    found = check_class("ProphetNetForCausalLM", ("cce",))
    assert (found.status, found.reason) == ("materialised", "log_softmax, nll_loss")


def test_a_loss_that_was_not_seen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loss_plugins.models.forwarding._defers", lambda model, scope: False)
    found = check_class("LlamaForCausalLM", ("cce",))
    assert found.status == "wrong"
    assert any("no loss was fused, and nothing says why" in problem for problem in found.problems)


def test_a_patch_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    undo = PatchHandle.undo

    def forgets_the_head(self: PatchHandle) -> None:
        head = self.model.lm_head
        cls = type(head)
        undo(self)
        head.__class__ = cls

    monkeypatch.setattr(PatchHandle, "undo", forgets_the_head)
    found = check_class("LlamaForCausalLM", ("cce",))
    assert "undo: a class stays" in found.problems


def test_a_class_that_fails_by_itself_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: nn.Module, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> None:
        raise RuntimeError("stock cannot")

    monkeypatch.setattr(model_class("LlamaForCausalLM"), "forward", fails)
    found = check_class("LlamaForCausalLM")
    assert (found.status, found.reason) == ("not run", "stock fails here: RuntimeError: stock cannot")


# The tiny models themselves


def test_tiny_batches_mask_some_labels() -> None:
    model = tiny_model("LlamaForCausalLM")
    labels = tiny_inputs(model)["labels"]
    assert 0 < (labels == -100).sum() < labels.numel() / 2
    again = tiny_inputs(tiny_model("LlamaForCausalLM"))["labels"]
    assert torch.equal(labels, again)
    assert all(p.isfinite().all() and p.any() for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) < 200_000


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"])
def test_tiny_images_are_seen(name: str) -> None:
    model = tiny_model(name)
    batches = tiny_image_batches(model)
    assert list(batches) == ["images", "mixed"]
    for batch, rows in zip(batches.values(), ([True, True], [True, False]), strict=True):
        here = batch["input_ids"] == model.config.image_token_id
        assert here.any(1).tolist() == rows
        assert (batch["labels"][here] == -100).all()
        assert (batch["labels"] != -100).any(1).all()
        blank = batch | {"pixel_values": torch.zeros_like(batch["pixel_values"])}
        assert not torch.equal(model(**batch).loss, model(**blank).loss)
    assert tiny_image_batches(tiny_model("LlamaForCausalLM")) == {}


def test_row_of_text_in_a_mixed_batch_sees_no_image() -> None:
    """Where every row has an image, a blank one makes no mixed batch."""
    assert list(tiny_image_batches(tiny_model("GitForCausalLM"))) == ["text"]
    assert list(tiny_image_batches(tiny_model("IdeficsForVisionText2Text"))) == ["text", "mixed"]


def test_exceptions_say_nothing_twice() -> None:
    import loss_plugins.models.tiny.shrink as shrink

    lines = (shrink.HERE / "exceptions.yaml").read_text().splitlines()
    names = [line.rstrip().rstrip(":") for line in lines if re.fullmatch(r"\w+: *", line)]
    also = [
        name.strip() for line in lines if (found := re.match(r"  also: \[(.*)\]", line)) for name in found[1].split(",")
    ]
    assert len(names + also) == len({*names, *also}) == len(exceptions())


# Memory


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "ProphetNetForCausalLM", "BartForCausalLM"])
def test_loss_takes_less_than_a_fifth_of_stocks_memory(name: str) -> None:
    model = wide_model(name)
    inputs = {key: value.repeat(64, 1) for key, value in tiny_inputs(model).items()}
    stock = peak(model, inputs)
    patch_model(model, "cce")
    ours = peak(model, inputs)
    assert stock > 2 * inputs["labels"].numel() * WIDE * 4, "stock makes logits and their gradient"
    assert ours < stock / 5, f"{ours} of {stock} bytes"


WIDE = 20_000


def wide_model(name: str) -> Any:
    """A tiny model with a large vocabulary."""
    model = tiny_model(name)
    model.resize_token_embeddings(WIDE, mean_resizing=False)
    return model


def peak(model: Any, inputs: dict[str, Any]) -> int:
    model.zero_grad(set_to_none=True)
    with PeakMeter("cpu") as meter:
        meter.mark()
        output = model(**inputs)
        output.loss.backward()
        del output
        return meter.read()
