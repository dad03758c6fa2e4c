"""The Triton backend: CUDA, ROCm and XPU, and any CPU under ``TRITON_INTERPRET=1``.

Entry functions have the torch backend's names and meanings; what is missing here runs there.
"""

from .backward import linear_ce_backward
from .cross_entropy import cross_entropy_backward, cross_entropy_forward
from .flce import flce_forward
from .linear_ce import linear_ce_forward
from .rows import scale_, scaled

__all__ = [
    "cross_entropy_backward",
    "cross_entropy_forward",
    "flce_forward",
    "linear_ce_backward",
    "linear_ce_forward",
    "scale_",
    "scaled",
]
