"""What is known about single model families beyond what their own forward says. Data only: one small file a family."""

from __future__ import annotations

from ...registry import Registry
from ._base import ModelFamily

FAMILIES = Registry(
    "loss_plugins.models.families",
    "FAMILY",
    "model family",
    members=("model_types", "note", "status", "reason", "head"),
)

__all__ = ["FAMILIES", "ModelFamily", "family_of"]


def family_of(model_type: str) -> ModelFamily | None:
    """The entry for a config's ``model_type``, or None, which means that nothing special is known."""
    for name in FAMILIES.names():
        family: ModelFamily = FAMILIES.get(name)
        if model_type in family.model_types:
            return family
    return None
