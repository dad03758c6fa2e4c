"""The backend without Triton: tiles in plain torch, on any device.

Entry functions, the same names in every backend: `linear_ce_forward`, `linear_ce_backward`, `flce_forward`.
`matmul` and `dropped_mass` serve the rooms above.
"""

from ._tiles import matmul
from .flce import flce_forward
from .linear_ce import dropped_mass, linear_ce_backward, linear_ce_forward

__all__ = ["dropped_mass", "flce_forward", "linear_ce_backward", "linear_ce_forward", "matmul"]
