"""The Triton backend: CUDA, ROCm and XPU, and any CPU under ``TRITON_INTERPRET=1``.

Entry functions have the torch backend's names and meanings; what is missing here runs there.
"""

from .backward import linear_ce_backward
from .flce import flce_forward
from .linear_ce import linear_ce_forward

__all__ = ["flce_forward", "linear_ce_backward", "linear_ce_forward"]
