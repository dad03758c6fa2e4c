"""What was found under each release of Transformers, dated, in small files beside the code, and a page about them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "results"
STATUSES = ("fused", "materialised", "unsupported", "not run", "wrong")
BATCHES = ("text", "images", "mixed")


def record_of(results: dict[str, Any], tests: str = "") -> dict[str, Any]:
    """The results of a run over all classes, shortened to what a release is judged by.

    Args:
        results: As `results_of` makes them.
        tests: What the tests of models and integrations said.
    """
    classes = results["classes"]
    statuses = Counter(entry["status"] for entry in classes.values())
    batches = Counter(kind for entry in classes.values() for kind in entry.get("batches", ()))
    return {
        **{key: results[key] for key in ("date", "transformers", "torch")},
        "statuses": {status: statuses[status] for status in STATUSES},
        "batches": {kind: batches[kind] for kind in BATCHES},
        "loss_error": max((entry["loss_error"] for entry in classes.values()), default=0.0),
        "gradient_error": max((entry["gradient_error"] for entry in classes.values()), default=0.0),
        "tests": tests.strip(" ="),
        "classes": {name: _short(entry) for name, entry in classes.items()},
    }


def _short(entry: dict[str, Any]) -> str | dict[str, Any]:
    """The status, and why it is that where it is not ``fused``."""
    if entry["status"] == "fused":
        return "fused"
    return {key: entry[key] for key in ("status", "reason", "problems") if key in entry}


def write_record(record: dict[str, Any], folder: Path = RECORDS) -> Path:
    """Put a record in the place of an older one of the same release, and write the page anew."""
    folder.mkdir(exist_ok=True)
    for older in folder.glob(f"*-transformers-{record['transformers']}.json"):
        older.unlink()
    path = folder / f"{record['date']}-transformers-{record['transformers']}.json"
    lines = [f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in record["classes"].items()]
    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in record.items() if key != "classes")
    path.write_text("{\n" + head + '  "classes": {\n' + ",\n".join(lines) + "\n  }\n}\n")
    (folder / "README.md").write_text(page(read_records(folder)))
    return path


def read_records(folder: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """Release of Transformers to its record, the oldest release first."""
    from packaging.version import Version

    found = [json.loads(path.read_text()) for path in folder.glob("*-transformers-*.json")]
    return {record["transformers"]: record for record in sorted(found, key=lambda r: Version(r["transformers"]))}


def statuses_of(name: str, records: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Release to the status of a class, where the release has it."""
    found = {release: record["classes"].get(name) for release, record in records.items()}
    return {release: entry if isinstance(entry, str) else entry["status"] for release, entry in found.items() if entry}


def page(records: dict[str, dict[str, Any]]) -> str:
    """The records as Markdown."""
    text = (
        "# Releases of Transformers\n\n"
        "Every language model class of each release, patched with every strategy, compared with itself unpatched: the\n"
        "largest difference in the loss, and relative in the gradient of any parameter. Written by\n"
        "`bash scripts/conformance.sh`.\n\n"
    )
    head = (
        "Transformers",
        "date",
        "torch",
        "classes",
        *STATUSES,
        *(f"with {kind}" for kind in BATCHES),
        "loss",
        "gradient",
    )
    text += _row(head) + _row(["---"] * len(head))
    for release, record in records.items():
        text += _row(
            [
                *(release, record["date"], record["torch"], len(record["classes"])),
                *(record["statuses"][status] for status in STATUSES),
                *(record["batches"][kind] for kind in BATCHES),
                *(f"{record[key]:.0e}" for key in ("loss_error", "gradient_error")),
            ]
        )
    text += "\nTests of models and integrations, in the same environments:\n\n"
    text += "".join(f"- {release}: {record['tests'] or 'not run'}\n" for release, record in records.items())
    text += "\n## Classes that are not fused\n\n"
    rows = sorted(
        (name, entry["status"], " ".join([entry.get("reason", ""), *entry.get("problems", ())]), release)
        for release, record in records.items()
        for name, entry in record["classes"].items()
        if not isinstance(entry, str)
    )
    return (
        text
        + _row(("class", "Transformers", "status", "why"))
        + _row(["---"] * 4)
        + "".join(_row((name, release, status, why.replace("|", "\\|"))) for name, status, why, release in rows)
    )


def _row(cells: Any) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |\n"
