"""What is wrong with a job is said in one sentence, with exit code 2, before anything is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_job import MODEL, Job, write_jsonl

KEYS: list[tuple[dict[str, Any], list[str]]] = [
    ({"max_step": 3}, ["Unknown key 'max_step'", "Did you mean 'max_steps'?"]),
    ({"loss_stratgy": "cce"}, ["Unknown key 'loss_stratgy'", "Did you mean 'loss_strategy'?"]),
    ({"evaluation_strategy": "no"}, ["Unknown key 'evaluation_strategy'", "Did you mean 'eval_strategy'?"]),
    ({"strategy": "cce"}, ["Unknown key 'strategy'", "Did you mean 'loss_strategy'?"]),
    ({"options": {"filter": "off"}}, ["Unknown key 'options'", "Did you mean 'loss_options'?"]),
    ({"statistics": ["accuracy"]}, ["Unknown key 'statistics'", "Did you mean 'loss_statistics'?"]),
    ({"MAX_STEPS": 3}, ["Unknown key 'MAX_STEPS'", "Did you mean 'max_steps'?"]),
    ({"lr_scheduler_type": "Cosine"}, ["one of linear, cosine", "Did you mean 'cosine'?"]),
    ({"loss_strategy": "CCE"}, ["'CCE'", "Did you mean 'cce'?"]),
    ({"train_file": "Text.JSONL"}, ["does not exist", "Did you mean 'text.jsonl'?"]),
    ({"loss_statistics": ["dropped"]}, ["loss_strategy 'naive' has no filter", "Leave dropped out"]),
    ({"zzz": 1}, ["Unknown key 'zzz'", "loss-plugins train --keys"]),
    ({"workspace_mb": 64}, ["Unknown key 'workspace_mb'", "chunked", "write loss_options: {workspace_mb: 64}"]),
    ({"max_steps": "many"}, ["max_steps in", "a whole number", "'many'"]),
    ({"max_steps": 2.5}, ["max_steps in", "a whole number", "2.5"]),
    ({"max_steps": True}, ["max_steps in", "a whole number", "True"]),
    ({"learning_rate": [1]}, ["learning_rate in", "a number", "[1]"]),
    ({"packing": "maybe"}, ["packing in", "true or false", "'maybe'"]),
    ({"train_file": 5}, ["train_file in", "text or null", "5"]),
    ({"model_config": "llama"}, ["model_config in", "a mapping or null", "'llama'"]),
    ({"strategies": 5}, ["strategies in", "a list of names or null", "5"]),
    ({"loss_statistics": "accuracy, entropy"}, ["loss_statistics", "'accuracy, entropy'"]),
    ({"lr_scheduler_type": "cosin"}, ["lr_scheduler_type in", "one of linear, cosine", "Did you mean 'cosine'?"]),
    ({"save_strategy": True}, ["save_strategy in", "True"]),
    ({"loss_strategy": "cse"}, ["'cse'", "Did you mean 'cce'?"]),
    ({"loss_strategy": "no.such:THING"}, ["no.such:THING", "package.module:attribute"]),
    ({"loss_options": {"workspace": 4}}, ["'workspace'", "naive"]),
    ({"loss_strategy": "cce", "loss_options": {"presett": "cce"}}, ["'presett'", "Did you mean 'preset'?"]),
    ({"loss_strategy": "cce", "loss_options": {"preset": "ccee"}}, ["'ccee'", "Did you mean 'cce'?"]),
    ({"loss_label_smoothing": 1.5}, ["loss_label_smoothing", "[0, 1]", "1.5"]),
    ({"loss_label_smoothing": -0.1}, ["loss_label_smoothing", "[0, 1]", "-0.1"]),
    ({"strategies": ["naive", "cce"]}, ["Both strategies", "loss_strategy 'naive'", "Remove one"]),
    ({"train_file": "nowhere.jsonl"}, ["train_file 'nowhere.jsonl' does not exist"]),
    ({"train_file": "texts.jsonl"}, ["does not exist", "Did you mean 'text.jsonl'?"]),
    ({"train_file": "."}, ["train_file '.' is a folder"]),
    ({"train_file": "job.yaml"}, ["'.yaml'", ".jsonl, .parquet, .txt"]),
    ({"eval_file": "nowhere.txt"}, ["eval_file 'nowhere.txt' does not exist"]),
    ({"embedded_corpus": "python_stdlib"}, ["train_file is", "embedded_corpus is", "Remove one"]),
    ({"max_length": 1}, ["max_length", "at least 2", "1"]),
    ({"dtype": "float99"}, ["'float99'", "bfloat16"]),
    ({"model_name_or_path": "./model"}, ["Both model_name_or_path and model_config"]),
    ({"tokenizer_name_or_path": "./nowhere"}, ["tokenizer_name_or_path './nowhere' does not exist"]),
    ({"tokenizer_name_or_path": "text.jsonl"}, ["tokenizer_name_or_path 'text.jsonl'", "no .gguf"]),
    ({"tokenizer_vocab_size": 100}, ["tokenizer_vocab_size", "at least 257", "100"]),
    ({"model_config": {"hidden_size": 32}}, ["model_config needs a model_type"]),
    ({"model_config": MODEL | {"model_type": "lama"}}, ["model_type 'lama'", "Did you mean 'llama'?"]),
    ({"model_config": MODEL | {"hiden_size": 32}}, ["'hiden_size'", "Did you mean 'hidden_size'?"]),
    ({"model_config": MODEL | {"hidden_size": "big"}}, ["model_config", "hidden_size"]),
    ({"model_config": MODEL | {"vocab_size": 100}}, ["model_config.vocab_size is 100", "entries"]),
    ({"lora_alpha": 16}, ["lora_alpha is set to 16", "lora_r is not"]),
    ({"lora_r": 0}, ["lora_r must be at least 1", "0"]),
    ({"lora_r": 4, "lora_target_modules": ["no_such"]}, ["lora_target_modules ['no_such']", "PEFT"]),
    ({"eval_strategy": "steps", "load_best_model_at_end": True}, ["TrainingArguments", "load_best_model_at_end"]),
]


@pytest.mark.parametrize(("keys", "words"), KEYS, ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else "")
def test_a_bad_key_of_the_file(job: Job, keys: dict[str, Any], words: list[str]) -> None:
    if "lora_r" in keys:
        pytest.importorskip("peft")
    sentence = job.refused(**keys)
    for word in words:
        assert word in sentence


def test_no_model_and_no_data(job: Job) -> None:
    assert "neither model_name_or_path nor model_config" in job.refused(without=("model_config",))
    assert "neither train_file nor embedded_corpus" in job.refused(without=("train_file",))


@pytest.mark.parametrize("path", ["./no/model", "/no/model", "a/b/c", "nothing.gguf"])
def test_a_model_that_is_not_there(job: Job, path: str) -> None:
    sentence = job.refused(without=("model_config",), model_name_or_path=path)
    assert sentence == f"model_name_or_path '{path}' does not exist. Check the path."


def test_a_hub_id_without_a_network(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    sentence = job.refused(without=("model_config",), model_name_or_path="nobody/nothing-at-all")
    assert sentence == (
        "model_name_or_path 'nobody/nothing-at-all' is no folder here and could not be had from the Hugging Face Hub, "
        "which cannot be reached. Check the name and the network, or give the path of a local folder."
    )
    (job.folder / "nomodels").mkdir()
    sentence = job.refused(without=("model_config",), model_name_or_path="nomodel")
    assert sentence == (
        "model_name_or_path 'nomodel' is no folder here and could not be had from the Hugging Face Hub, which cannot "
        "be reached. Did you mean 'nomodels'?"
    )
    sentence = job.refused(without=("model_config",), model_name_or_path="./nomodel")
    assert sentence == "model_name_or_path './nomodel' does not exist. Did you mean 'nomodels'?"
    (job.folder / "nomodels" / "final").mkdir()
    sentence = job.refused(without=("model_config",), model_name_or_path="nomodels/finall")
    assert sentence == "model_name_or_path 'nomodels/finall' does not exist. Did you mean 'nomodels/final'?"


def test_the_hub_is_asked_once_and_without_patience(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def unplugged(url: str, timeout: float) -> None:
        asked.append((url.rsplit("/resolve/")[0], timeout))
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unplugged)
    assert "which cannot be reached" in job.refused(without=("model_config",), model_name_or_path="nobody/nothing")
    ((url, timeout),) = asked
    assert url.endswith("nobody/nothing")
    assert timeout <= 5


@pytest.mark.parametrize(
    ("kind", "what"),
    [("RepositoryNotFoundError", "there is no such model, or it needs a login"), ("GatedRepoError", "grants access")],
)
def test_what_the_hub_answers_is_one_sentence(job: Job, monkeypatch: pytest.MonkeyPatch, kind: str, what: str) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    error = getattr(errors, kind).__new__(getattr(errors, kind))  # made from responses, which differ by release

    def answer(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    assert what in job.refused(without=("model_config",), model_name_or_path="nobody/nothing")


def test_long_errors_end_at_a_word() -> None:
    from loss_plugins.integrations.hf.loading import one_line

    assert one_line(ValueError("see   https://example.org/a/long/path for more."), 20) == "see ..."
    assert one_line(ValueError("short.")) == "short"


def test_what_is_cached_is_loaded_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from loss_plugins.integrations.hf.loading import _asked_of_hub

    def unplugged(*args: Any, **kwargs: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unplugged)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{name}/{file}")
    assert _asked_of_hub("model_name_or_path", "somebody/something") == {"local_files_only": True}


WORDS: list[tuple[list[str], list[str]]] = [
    (["--max_stepz", "3"], ["Unknown option '--max_stepz'", "Did you mean 'max_steps'?"]),
    (["--strategy", "cce"], ["Unknown option '--strategy'", "Did you mean 'loss_strategy'?"]),
    (["--options", "{}"], ["Unknown option '--options'", "Did you mean 'loss_options'?"]),
    (["--workspace_mb", "64"], ["Unknown option '--workspace_mb'", "write --loss_options.workspace_mb 64"]),
    (["--strategies", "naive", "cce", "--loss_strategy", "cce"], ["Both strategies", "Remove one"]),
    (["--max_steps", "few"], ["--max_steps must be a whole number", "'few'"]),
    (["--max_steps"], ["--max_steps needs a value", "a whole number"]),
    (["--max_steps", "3", "4"], ["--max_steps", "a whole number"]),
    (["--max_steps", "3", "--max-steps", "4"], ["--max_steps was given twice"]),
    (["stray"], ["'stray' belongs to no key"]),
    (["--loss_options", "{workspace_mb"], ["--loss_options", "a mapping"]),
    (["--loss_options", "[1]"], ["--loss_options", "a mapping"]),
    (["--max_steps.x", "3"], ["max_steps is 2, not a mapping"]),
    (["--model_config.hiden_size", "3"], ["'hiden_size'", "Did you mean 'hidden_size'?"]),
    (["--packing", "perhaps"], ["--packing must be true or false", "'perhaps'"]),
]


@pytest.mark.parametrize(("given", "words"), WORDS, ids=lambda v: " ".join(v)[:40])
def test_a_bad_word_of_the_command_line(job: Job, given: list[str], words: list[str]) -> None:
    sentence = job.refused(*given)
    for word in words:
        assert word in sentence


FILES = [
    ("max_steps: [1", "line 1", "not valid YAML"),
    ("a: b: c", "line 1, column 5", "not valid YAML"),
    ("max_steps: 1\nmax_steps: 2\n", "line 2", "the key 'max_steps' stands twice"),
    ("", "holds nothing", "key: value"),
    ("- 1\n", "holds list", "key: value"),
    ("5: 1\n", "must hold", "key: value"),
    ("max_steps: 2026-13-45\n", "month must be in", "not valid YAML"),
    ("max_steps: \0\n", "#x0000", "not valid YAML"),
]


@pytest.mark.parametrize(("text", "where", "what"), FILES)
def test_a_bad_job_file(job: Job, invoke: Any, text: str, where: str, what: str) -> None:
    job.yaml.write_text(text)
    result = invoke("train", str(job.yaml))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1
    assert where in result.stderr
    assert what in result.stderr


def test_a_job_file_that_is_not_there(job: Job, invoke: Any) -> None:
    job.yaml.write_text("{}")
    near = invoke("train", str(job.folder / "jobb.yaml"))
    assert near.exit_code == 2
    assert f"does not exist. Did you mean '{job.yaml}'?" in near.stderr
    assert invoke("train", str(job.folder)).exit_code == 2
    assert "comes first" in invoke("train", "--max_steps", "3", str(job.yaml)).stderr


def test_a_job_file_that_may_not_be_read(job: Job, invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job.yaml.write_text("{}")

    def refuse(*args: Any, **kwargs: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert "could not be read: Permission denied. Check its permissions." in invoke("train", str(job.yaml)).stderr


ROWS: list[tuple[Any, list[str]]] = [
    ([{"texts": "a"}], ["line 1 has 'texts'", "'text', 'messages'"]),
    ([{"text": "a"}, {"text": 5}], ["line 2", "'text' must be text, got int"]),
    ([{"prompt": "a"}], ["line 1 has 'prompt'"]),
    ([{"prompt": "a", "completion": None}], ["line 1", "'completion' must be text, got NoneType"]),
    ([{"messages": "hello"}], ["line 1", "'messages' must be a list"]),
    ([{"messages": [{"content": "x"}]}], ["line 1", "'messages' must be a list"]),
    ([["a"]], ["line 1 is a JSON list"]),
    ([], ["None of the 0 documents"]),
    ([{"prompt": "p" * 80, "completion": "late"}], ["None of the 1 documents has a token to train on"]),
]


@pytest.mark.parametrize(("rows", "words"), ROWS)
def test_a_bad_row(job: Job, tokenizer_folder: Path, rows: list[Any], words: list[str]) -> None:
    file = write_jsonl(job.folder / "rows.jsonl", rows)
    keys = {"train_file": str(file), "packing": False, "tokenizer_name_or_path": str(tokenizer_folder)}
    sentence = job.refused(**keys)
    for word in words:
        assert word in sentence


def test_files_that_are_not_what_their_name_says(job: Job) -> None:
    broken = job.folder / "broken.jsonl"
    broken.write_text('{"text": "a"}\n\n{"text": \n')
    assert "broken.jsonl line 3 is not JSON" in job.refused(train_file=str(broken))
    broken.write_bytes(b'{"text": "\xff"}\n')
    assert "is not UTF-8 text" in job.refused(train_file=str(broken))
    pytest.importorskip("pyarrow")
    (job.folder / "broken.parquet").write_text("text")
    assert "is not a parquet file" in job.refused(train_file=str(job.folder / "broken.parquet"))


def test_messages_need_a_chat_template(job: Job) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    sentence = job.refused(train_file=str(write_jsonl(job.folder / "rows.jsonl", rows)))
    assert "line 1 has messages, but the tokenizer has no chat template" in sentence


@pytest.mark.parametrize(
    ("package", "extra", "keys"),
    [("peft", "peft", {"lora_r": 4}), ("pyarrow", "data", {"train_file": "rows.parquet"})],
)
def test_a_package_that_is_not_installed(
    job: Job, monkeypatch: pytest.MonkeyPatch, package: str, extra: str, keys: dict[str, Any]
) -> None:
    (job.folder / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    sentence = job.refused(**keys)
    assert f"{package} is not installed" in sentence
    assert f"pip install 'loss-plugins[{extra}]'" in sentence


def test_gguf_that_is_not_installed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.folder / "model.gguf").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "gguf", None)
    sentence = job.refused(without=("model_config",), model_name_or_path="model.gguf")
    assert "pip install 'loss-plugins[gguf]'" in sentence


def test_a_gguf_that_is_none(job: Job) -> None:
    pytest.importorskip("gguf")
    (job.folder / "model.gguf").write_bytes(b"nonsense")
    sentence = job.refused(without=("model_config",), model_name_or_path="model.gguf")
    assert sentence.startswith("model_name_or_path 'model.gguf' could not be loaded")
    assert "Check that the whole file was downloaded" in sentence


def test_one_checkpoint_cannot_start_several_runs(job: Job) -> None:
    keys = {"strategies": ["naive", "cce"], "resume_from_checkpoint": "out/checkpoint-1"}
    assert "a checkpoint belongs to one run" in job.refused(without=("loss_strategy",), **keys)


def test_packing_needs_positions(job: Job) -> None:
    mamba = {"model_type": "mamba", "vocab_size": 320, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
    sentence = job.refused(model_config=mamba)
    assert "MambaForCausalLM takes no position_ids" in sentence
    assert "packing: false" in sentence
