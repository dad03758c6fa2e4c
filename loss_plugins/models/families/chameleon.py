"""Chameleon."""

from ._base import ModelFamily

FAMILY = ModelFamily(
    model_types=("chameleon",),
    note="Image tokens are masked in the logits, which the loss takes over as a bias. A label that is an image token "
    "has a loss of 1e37 here as in stock, and a gradient of its own here only: mask such labels with -100.",
)
