"""``loss-plugins verify``: equal models, different ones, models that cannot be patched, and what cannot be asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_job import MODEL, POEM, Job, write_jsonl
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from loss_plugins.strategies import STRATEGIES
from loss_plugins.strategies.cce import Cce

Invoke = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A model with its tokenizer, on disk."""
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("model")
    settings = dict(MODEL)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).save_pretrained(made)
    for file in tokenizer_folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    return made


def report(invoke: Invoke, *words: str, code: int = 0) -> dict[str, Any]:
    result = invoke("verify", *words, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(invoke: Invoke, *words: str) -> str:
    result = invoke("verify", *words)
    assert result.exit_code == 2, result.output
    return str(result.stderr)


def test_every_strategy_equals_a_tiny_llama(invoke: Invoke) -> None:
    found = report(invoke, "tiny:llama", "--device", "cpu")
    assert found["equal"] is True
    assert [row["name"] for row in found["rows"]] == STRATEGIES.names()
    for row in found["rows"]:
        assert (row["status"], row["way"]) == ("equal", "without logits")
        assert row["loss_off"] < 1e-6
        assert row["gradient_off"] < 1e-5
        assert row["seconds"] > 0
        assert row["peak_bytes"] > 0
    assert found["stock"]["peak_bytes"] > 24 * 160 * 4, "stock makes all logits"
    assert found["parameters"] == 21
    assert "float64" in found["tolerance"]
    assert found["own"][1] < 1e-6
    assert "lm_head" in found["touched"]


def test_table_says_what_was_touched_and_what_came_of_it(invoke: Invoke) -> None:
    result = invoke("verify", "tiny:gpt2", "--strategy", "cce", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for part in (
        "GPT2LMHeadModel",
        "touched: the class of the model and of lm_head",
        "Allowed: 1e-05 (float32)",
        "KiB",
    ):
        assert part in result.stdout
    assert "Equal to stock: cce" in result.stdout
    assert "flce" not in result.stdout


@pytest.mark.parametrize(
    ("words", "dtype", "yardstick"),
    [(("--dtype", "fp64"), "float64", "not measured"), (("--dtype", "bf16"), "bfloat16", "float32")],
)
def test_tolerance_follows_the_type(words: tuple[str, ...], dtype: str, yardstick: str, invoke: Invoke) -> None:
    found = report(invoke, "tiny:llama", "--strategy", "flce", "--device", "cpu", *words)
    assert found["dtype"] == dtype
    assert yardstick in found["tolerance"]
    assert found["rows"][0]["gradient_off"] < (1e-10 if dtype == "float64" else 0.1)


def test_a_class_that_changes_itself_when_it_first_runs(invoke: Invoke) -> None:
    # BigBird leaves sparse attention for good where sequences are short
    assert report(invoke, "tiny:big_bird", "--strategy", "cce", "--device", "cpu")["equal"] is True


def test_a_folder_is_compared_on_text(folder: Path, invoke: Invoke) -> None:
    found = report(invoke, str(folder), "--tokens", "32", "--batch", "3", "--device", "cpu")
    assert found["equal"] is True
    assert "3 x 32 tokens of the built-in text" in found["batch"]
    data = write_jsonl(folder / "data.jsonl", [{"prompt": line[:9], "completion": line[9:]} for line in POEM])
    found = report(invoke, str(folder), "--data", str(data), "--strategy", "cce", "--device", "cpu")
    assert str(data) in found["batch"]
    assert found["rows"][0]["status"] == "equal"


def test_a_folder_without_a_tokenizer_gets_random_ids(folder: Path, tmp_path: Path, invoke: Invoke) -> None:
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    found = report(invoke, str(tmp_path), "--strategy", "cce", "--tokens", "16", "--device", "cpu")
    assert "random ids" in found["batch"]
    assert found["equal"] is True


def test_an_adapter(folder: Path, tmp_path: Path, invoke: Invoke) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(
        LlamaForCausalLM.from_pretrained(folder),
        peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"),
    )
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    found = report(invoke, str(folder), "--adapter", str(tmp_path), "--tokens", "16", "--device", "cpu")
    assert found["parameters"] == 6, "two matrices for each of three layers"
    status = {row["name"]: row["status"] for row in found["rows"]}
    assert status["chunked"] == "equal"
    assert found["equal"] is True
    assert "no folder with an adapter_config.json" in refused(invoke, str(folder), "--adapter", "nowhere")


def wrong_loss(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """cce multiplies its loss."""
    plain = Cce.__call__

    def call(self: Cce, *args: Any) -> Any:
        result = plain(self, *args)
        return result._replace(loss=result.loss * factor)

    monkeypatch.setattr(Cce, "__call__", call)


def test_a_wrong_strategy_is_exit_code_one(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    wrong_loss(monkeypatch, 1.0001)
    found = report(invoke, "tiny:llama", "--device", "cpu", code=1)
    status = {row["name"]: row["status"] for row in found["rows"]}
    assert status == {"cce": "differs", "chunked": "equal", "flce": "equal", "naive": "equal"}
    (row,) = [row for row in found["rows"] if row["name"] == "cce"]
    assert row["loss_off"] == pytest.approx(1e-4, rel=0.01)
    assert found["reason"] == "LlamaForCausalLM differs from stock with cce."
    result = invoke("verify", "tiny:llama", "--device", "cpu")
    assert result.exit_code == 1
    assert "cce: 22 too far" in result.stdout, "the loss and each of 21 parameters"
    assert "lm_head.weight" in result.stdout


def test_a_wrong_gradient_alone_is_seen(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    plain = Cce.__call__

    def call(self: Cce, *args: Any) -> Any:
        result = plain(self, *args)
        return result._replace(loss=result.loss.detach() + 1.001 * (result.loss - result.loss.detach()))

    monkeypatch.setattr(Cce, "__call__", call)
    found = report(invoke, "tiny:llama", "--strategy", "cce", "--device", "cpu", code=1)
    assert found["rows"][0]["loss_off"] < 1e-6
    assert found["rows"][0]["gradient_off"] == pytest.approx(1e-3, rel=0.1)


def test_a_strategy_that_fails_is_exit_code_one(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def call(self: Cce, *args: Any) -> Any:
        raise RuntimeError("no such tile")

    monkeypatch.setattr(Cce, "__call__", call)
    found = report(invoke, "tiny:llama", "--strategy", "cce", "--device", "cpu", code=1)
    assert "no such tile" in found["rows"][0]["reason"]


def test_nan_is_too_far_and_json_has_no_word_for_it(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    wrong_loss(monkeypatch, float("nan"))
    result = invoke("verify", "tiny:llama", "--strategy", "cce", "--device", "cpu", "--json")
    assert result.exit_code == 1
    assert "NaN" not in result.stdout
    beyond = {what: off for what, off, _ in json.loads(result.stdout)["rows"][0]["beyond"]}
    assert beyond["loss"] is None


class LooksAtLogits(LlamaForCausalLM):
    """Takes a sum of its logits, which no stand-in knows."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 0 * self.lm_head(self.model(kwargs["input_ids"])[0]).sum()
        return output


class NoHead(LlamaForCausalLM):
    def get_output_embeddings(self) -> Any:
        return None

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return ((name, module) for name, module in super().named_modules(*args, **kwargs) if name != "lm_head")


def loaded_as(monkeypatch: pytest.MonkeyPatch, cls: type[nn.Module]) -> None:
    """Every model that is loaded becomes one of ``cls``."""
    from loss_plugins.integrations.hf import loading

    plain = loading.load_model

    def load(*args: Any) -> Any:
        model = plain(*args)
        model.__class__ = cls
        return model

    monkeypatch.setattr(loading, "load_model", load)


def test_logits_made_after_all_are_said_and_equal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    loaded_as(monkeypatch, LooksAtLogits)
    found = report(invoke, str(folder), "--tokens", "16", "--device", "cpu")
    assert found["equal"] is True
    assert all(row["way"].startswith("with logits (") for row in found["rows"])


def test_a_model_that_cannot_be_patched_is_exit_code_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    loaded_as(monkeypatch, NoHead)
    result = invoke("verify", str(folder), "--device", "cpu")
    assert result.exit_code == 1
    assert "It cannot be patched: NoHead has no language-model head" in result.stdout
    result = invoke("verify", "tiny:pi0", "--device", "cpu")
    assert result.exit_code == 1
    assert "its forward takes no labels" in result.stdout


def test_a_model_that_fails_by_itself_is_exit_code_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel")

    loaded_as(monkeypatch, type("Failing", (LlamaForCausalLM,), {"forward": fails}))
    result = invoke("verify", str(folder), "--device", "cpu")
    assert result.exit_code == 1
    assert "itself fails on this batch (RuntimeError: no such kernel)" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tiny:lama",), "Did you mean 'llama'?"),
        (("tiny:llama", "--strategy", "ccee"), "Did you mean 'cce'?"),
        (("tiny:llama", "--dtype", "bf17"), "Did you mean 'bf16'?"),
        (("tiny:llama", "--device", "gpu"), "Unknown device 'gpu'"),
        (("tiny:llama", "--data", "a.txt"), "which is random"),
        (("./nowhere",), "does not exist"),
        (("",), "model_name_or_path is empty"),
    ],
)
def test_what_cannot_be_asked(words: tuple[str, ...], said: str, invoke: Invoke) -> None:
    assert said in refused(invoke, *words)


def test_a_job_checks_its_first_batch(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    result = job.run(loss_strategy="cce", loss_self_check=True)
    assert result.exit_code == 0, result.output
    assert "loss_self_check: loss_strategy 'cce' equals stock on 64 tokens" in result.stderr
    wrong_loss(monkeypatch, 1.01)
    result = job.run("--loss_self_check", "true", loss_strategy="cce", output_dir=str(job.folder / "other"))
    assert result.exit_code == 1, "not 2: what was asked for was right"
    assert "Error: loss_self_check: with loss_strategy 'cce', LlamaForCausalLM differs from stock" in result.stderr
    assert not (job.folder / "other" / "summary.json").exists()


def test_data_that_is_not_there(folder: Path, invoke: Invoke) -> None:
    assert "does not exist" in refused(invoke, str(folder), "--data", "nowhere.txt")


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def of_another_size(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": settings["vocab_size"] + 8}))


def of_an_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "acme/base"}')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut_short, "It has to be a folder that save_pretrained wrote, with all its files; it holds config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "with all its files; it holds config.json"),
        (of_another_size, "Its weights have other sizes than its config says"),
        (of_an_adapter, "It holds a PEFT adapter and no model: give the model that it was made for, 'acme/base'"),
    ],
    ids=["cut short", "no weights", "of another size", "of an adapter"],
)
def test_a_folder_that_is_not_whole(change: Any, said: str, folder: Path, tmp_path: Path, invoke: Invoke) -> None:
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    change(tmp_path)
    assert said in refused(invoke, str(tmp_path))


def test_a_file_without_a_tokenizer_to_read_it(folder: Path, tmp_path: Path, invoke: Invoke) -> None:
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": line} for line in POEM])
    assert "is read with the model's tokenizer" in refused(invoke, str(tmp_path), "--data", str(data))
