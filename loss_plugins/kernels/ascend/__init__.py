"""The backend for Ascend NPUs: products by torch's library on the cube units, everything else by vector kernels.

Entry functions have the torch backend's names and meanings. Importing needs no triton-ascend, the first launch does.
"""

from .cross_entropy import cross_entropy_backward, cross_entropy_forward
from .flce import flce_forward, scale_, scaled
from .linear_ce import linear_ce_backward, linear_ce_forward, marks_shape

__all__ = [
    "cross_entropy_backward",
    "cross_entropy_forward",
    "flce_forward",
    "linear_ce_backward",
    "linear_ce_forward",
    "marks_shape",
    "scale_",
    "scaled",
]
