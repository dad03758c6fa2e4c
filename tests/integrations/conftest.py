"""Quiet transformers."""

from __future__ import annotations

import pytest
import transformers


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.disable_progress_bar()
