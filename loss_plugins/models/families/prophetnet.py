"""ProphetNet."""

from ._base import ModelFamily

FAMILY = ModelFamily(
    model_types=("prophetnet",),
    note="The n-gram loss is the model's own and takes real logits.",
    status="materialised",
    reason="its loss transposes the logits and smooths them itself",
)
