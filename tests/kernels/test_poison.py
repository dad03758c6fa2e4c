"""The tests of this folder would notice an output that was never written."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory is poisoned where there is no GPU (tests/conftest.py)")
def test_memory_that_nobody_has_written_is_nan() -> None:
    assert torch.empty(1000).isnan().all()
    assert torch.zeros(3).new_empty(1000).isnan().all()
    assert torch.empty_like(torch.zeros(1000, dtype=torch.float16)).isnan().all()
