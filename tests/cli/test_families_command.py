"""``loss-plugins families``: the results in the repository, or a run of now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loss_plugins.cli.main import app
from loss_plugins.models.conformance import Evidence, read_results
from loss_plugins.models.conformance.releases import read_records


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["families", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def test_json_is_the_results() -> None:
    found = json.loads(run("--json"))
    assert found.pop("summary")["wrong"] == 0
    assert found.pop("releases").keys() == read_records().keys()
    for entry in found["classes"].values():
        del entry["releases"]
    assert found == read_results()


def test_other_releases_are_told_by_class() -> None:
    found = json.loads(run("llama", "--json"))
    assert found["classes"]["LlamaForCausalLM"]["releases"] == dict.fromkeys(read_records(), "fused")
    assert all(release["statuses"]["wrong"] == 0 and release["tests"] for release in found["releases"].values())
    assert "5.6, 5.20" in run("llama")


def test_names_and_model_types_choose() -> None:
    found = json.loads(run("llama", "GPT2LMHeadModel", "--json"))
    assert list(found["classes"]) == ["GPT2LMHeadModel", "LlamaForCausalLM"]
    assert found["summary"]["fused"] == 2


def test_table_says_how_many_and_when() -> None:
    text = run("llama", "pi0")
    assert "1 fused, 1 unsupported" in text
    assert read_results()["date"] in text
    assert "takes no labels" in text


def test_unknown_name_is_an_error() -> None:
    result = CliRunner().invoke(app, ["families", "lama"])
    assert result.exit_code == 2
    assert "lama" in result.stderr


def test_run_compares_now_and_writes(tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    found = json.loads(run("gpt2", "--run", "--json", "--write", str(written)))
    assert found["classes"]["GPT2LMHeadModel"]["status"] == "fused"
    assert read_results(written)["classes"] == found["classes"]


def test_a_class_that_differs_is_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Evidence("GPT2LMHeadModel", status="wrong", problems=["cce, labels: loss 1.0e+00, gradient 0.0e+00"])
    monkeypatch.setattr("loss_plugins.models.conformance.check_class", lambda name: wrong)
    assert "loss 1.0e+00" in run("gpt2", "--run", code=1)
