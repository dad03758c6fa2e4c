"""Chameleon."""

from ._base import ModelFamily

FAMILY = ModelFamily(
    model_types=("chameleon",),
    note="Image tokens are masked in the logits, which the loss takes over as a bias; no label may be an image token.",
)
