"""The results of a run over all classes, kept beside the code."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from .check import Evidence

RESULTS = Path(__file__).parent / "results.json"


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """``date``, ``transformers``, ``torch``, and ``classes``: name to what was found."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"classes": {}}
    return found


def results_of(found: list[Evidence]) -> dict[str, Any]:
    """Results as `read_results` returns them, of today."""
    import torch
    import transformers

    from ..tiny import model_classes

    types = model_classes()
    classes = {
        e.name: {"model_types": list(types.get(e.name, ())), **_entry(e)} for e in sorted(found, key=lambda e: e.name)
    }
    return {
        "date": datetime.date.today().isoformat(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "classes": classes,
    }


def write_results(found: list[Evidence], path: Path = RESULTS) -> None:
    """One line a class, so that a change shows as what it is."""
    results = results_of(found)
    lines = [f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in results.pop("classes").items()]
    text = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in results.items())
    path.write_text("{\n" + text + '  "classes": {\n' + ",\n".join(lines) + "\n  }\n}\n")


def _entry(evidence: Evidence) -> dict[str, Any]:
    entry = evidence.as_dict()
    del entry["name"], entry["seconds"]
    for key in ("loss_error", "gradient_error"):
        entry[key] = float(f"{entry.get(key, 0.0):.1e}")
    return entry
