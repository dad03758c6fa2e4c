"""Whether a patched model is the stock one, on this machine, with this model and this batch.

`conformance` asks it of every class once, on tiny models in float64; this asks it of a model that will be trained.
"""

from __future__ import annotations

from .batches import cut_batch, padded_batch, random_ids
from .distance import Apart, Tolerance, apart
from .first_batch import Checked, check_first_batch
from .moment import Moment
from .real_head import HeadCall, RealHead, yardstick_of
from .report import Report, Row
from .verify import verify_model

__all__ = [
    "Apart", "Checked", "HeadCall", "Moment", "RealHead", "Report", "Row", "Tolerance", "apart", "check_first_batch",
    "cut_batch", "padded_batch", "random_ids", "verify_model", "yardstick_of",
]  # fmt: skip
