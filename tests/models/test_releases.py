"""The records of conformance under several releases of Transformers."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from loss_plugins.models.conformance import check_class, read_results, results_of
from loss_plugins.models.conformance.releases import RECORDS, page, read_records, record_of, statuses_of, write_record


def made(transformers: str, date: str = "2026-01-02") -> dict[str, Any]:
    entries = {
        "A": {"status": "fused", "loss_error": 1e-16, "gradient_error": 2e-16, "batches": ["text", "mixed"]},
        "B": {"status": "not run", "reason": "stock | fails", "loss_error": 0.0, "gradient_error": 0.0},
    }
    return record_of(
        {"date": date, "transformers": transformers, "torch": "2.13.0", "classes": entries}, "== 9 passed =="
    )


def test_record_keeps_what_a_release_is_judged_by() -> None:
    record = made("5.9.0")
    assert (record["statuses"]["fused"], record["statuses"]["not run"], record["batches"]["mixed"]) == (1, 1, 1)
    assert (record["gradient_error"], record["tests"]) == (2e-16, "9 passed")
    assert record["classes"] == {"A": "fused", "B": {"status": "not run", "reason": "stock | fails"}}


def test_newer_record_of_a_release_takes_the_older_ones_place(tmp_path: Path) -> None:
    for release, date in (("5.20.1", "2026-01-02"), ("5.9.0", "2026-01-02"), ("5.9.0", "2026-03-04")):
        write_record(made(release, date), tmp_path)
    records = read_records(tmp_path)
    assert list(records) == ["5.9.0", "5.20.1"]
    assert records["5.9.0"] == made("5.9.0", "2026-03-04")
    assert statuses_of("B", records) == {"5.9.0": "not run", "5.20.1": "not run"}
    assert statuses_of("C", records) == {}
    text = (tmp_path / "README.md").read_text()
    assert text == page(records)
    assert "| B | 5.9.0 | not run | stock \\| fails |" in text


def test_record_is_made_of_a_run() -> None:
    record = record_of(results_of([check_class("GPT2LMHeadModel", ("cce",))]))
    assert record["classes"] == {"GPT2LMHeadModel": "fused"}
    assert record["gradient_error"] < 1e-10


@pytest.mark.parametrize("release", list(read_records()))
def test_records_in_the_repository_are_good(release: str) -> None:
    record = read_records()[release]
    assert datetime.date.fromisoformat(record["date"]) <= datetime.date.today()
    assert record["statuses"]["wrong"] == 0
    assert " failed" not in record["tests"]
    assert " passed" in record["tests"]
    assert record["statuses"]["fused"] >= 0.95 * len(record["classes"])
    assert record["batches"]["mixed"] >= 50  # 5.6 has fewer classes that see images


def test_records_are_of_the_oldest_release_supported_to_the_one_of_the_results() -> None:
    releases = list(read_records())
    assert [Version(release).release[:2] for release in releases[:2]] == [(5, 6), (5, 20)]
    assert releases[-1] == read_results()["transformers"]
    assert (RECORDS / "README.md").read_text() == page(read_records())
