"""Bamba."""

from ._base import ModelFamily

FAMILY = ModelFamily(
    model_types=("bamba",),
    note="Fused unless config.z_loss_coefficient is above 0: that term takes a logsumexp of real logits. Set it to 0 "
    "and use loss_z_loss for a z-loss over the labelled tokens without logits.",
)
