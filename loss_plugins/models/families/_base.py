"""The shape of an entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelFamily:
    """A note on models whose forward the general way does not fully cover.

    Attributes:
        model_types: The ``model_type`` of their configs.
        note: One sentence for `explain`.
        status: ``fused``: no logits; ``materialised``: exact, but with logits; ``unsupported``: refused when patched.
        reason: Why, where the status is not ``fused``.
        head: Path of the head in the model, where ``get_output_embeddings()`` does not return it.
    """

    model_types: tuple[str, ...]
    note: str
    status: Literal["fused", "materialised", "unsupported"] = "fused"
    reason: str | None = None
    head: str | None = None
