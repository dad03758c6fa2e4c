"""Chameleon."""

from ._base import ModelFamily

FAMILY = ModelFamily(
    model_types=("chameleon",),
    note="Image tokens are masked in the logits, so the loss is computed from real logits.",
    status="materialised",
    reason="its forward writes into the logits in place",
)
