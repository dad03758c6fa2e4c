"""Apple's cut-cross-entropy in the form that runs anywhere, ``torch_compile``; it also needs a C++ compiler."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="cut-cross-entropy imports Triton, which is not installed")
peers = pytest.importorskip("cut_cross_entropy", reason="cut-cross-entropy is not installed (extra: peers)")

pytestmark = [
    pytest.mark.slow,  # each case is compiled
    # Dynamo looks at .grad of every input it traces
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
    ),
]


@pytest.mark.parametrize("case", [{}, {"softcap": 3.0, "reduction": "none"}], ids=["plain", "softcap-none"])
def test_linear_cross_entropy(compare: Callable[..., None], case: dict[str, Any]) -> None:
    def peer(x: Any) -> torch.Tensor:
        return peers.linear_cross_entropy(x.hidden, x.weight, x.labels, impl="torch_compile", **case)

    compare(peer, **case)
