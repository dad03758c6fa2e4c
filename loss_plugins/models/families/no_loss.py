"""Classes that a text mapping lists and that have no language-model loss."""

from ._base import ModelFamily

FAMILY = ModelFamily(
    model_types=("diffusion_gemma", "gemma4_assistant", "gemma4_unified_assistant", "pi0"),
    note="Nothing to do here: the loss, if any, is none over a vocabulary.",
    status="unsupported",
    reason="its forward takes no labels",
)
