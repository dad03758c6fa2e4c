"""``loss-plugins train --keys``: every key of a job, from the dataclasses that read it."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from ._settings import DEFAULTS
from ._show import shortened, show_table

COLUMNS = ("key", "default", "what")


def show_keys() -> None:
    """Tables on stdout, this package's keys first."""
    from transformers import TrainingArguments

    from ..integrations.hf.arguments import LossPluginArguments
    from ..integrations.hf.data import DataArguments
    from ..integrations.hf.job import JobArguments
    from ..integrations.hf.loading import ModelArguments

    theirs = {entry.name for entry in fields(TrainingArguments)}
    settings = [entry for entry in fields(LossPluginArguments) if entry.init]
    show_table("The loss", COLUMNS, [_row(entry) for entry in settings if entry.name not in theirs])
    for title, cls in (
        ("The comparison", JobArguments),
        ("The model", ModelArguments),
        ("The data", DataArguments),
    ):
        show_table(title, COLUMNS, [_row(entry) for entry in fields(cls) if entry.init])
    note = "Those of transformers' TrainingArguments; help in full in its documentation."
    show_table("The training", COLUMNS, [_row(entry, 120) for entry in settings if entry.name in theirs], note=note)


def _row(entry: Field[Any], limit: int | None = None) -> tuple[str, str, str]:
    text = " ".join(str(entry.metadata.get("help", "")).split())
    return entry.name, _default(entry), text if limit is None else shortened(text, limit)


def _default(entry: Field[Any]) -> str:
    """As YAML would have it; empty where there is none."""
    value: Any = entry.default
    if entry.name in DEFAULTS:
        value = DEFAULTS[entry.name]
    elif value is MISSING:
        value = entry.default_factory() if callable(entry.default_factory) else ""
    value = getattr(value, "value", value)  # of an enum
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
