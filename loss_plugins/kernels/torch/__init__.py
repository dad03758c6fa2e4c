"""The backend without Triton: tiles in plain torch, on any device.

Entry functions, the same names in every backend: `linear_ce_forward`, `linear_ce_backward`, `flce_forward`,
`cross_entropy_forward`, `cross_entropy_backward`, `scaled`; `scale_` saves memory where there is one.
`matmul`, `project`, `project_back` and `dropped_mass` serve the rooms above.
"""

from .._matmul import matmul
from ._tiles import COLUMNS, project, project_back
from .cross_entropy import cross_entropy_backward, cross_entropy_forward
from .flce import flce_forward, scale_, scaled
from .linear_ce import dropped_mass, linear_ce_backward, linear_ce_forward

__all__ = [
    "COLUMNS",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "dropped_mass",
    "flce_forward",
    "linear_ce_backward",
    "linear_ce_forward",
    "matmul",
    "project",
    "project_back",
    "scale_",
    "scaled",
]
