from __future__ import annotations

import pytest


@pytest.fixture
def one_strip(monkeypatch):
    """One strip of the vocabulary a block of rows, as under the interpreter. A GPU cuts a small vocabulary into strips of a
    tile, each begins with the reference alone, and what is marked beyond what counts would be too much to be listed."""
    from loss_plugins.kernels.triton import linear_ce

    monkeypatch.setattr(linear_ce, "programs_for", lambda rows, row_bytes, tiles, blocks, device: -(-rows // blocks.n))
