"""MusicGen."""

from ._base import ModelFamily

FAMILY = ModelFamily(
    model_types=("musicgen", "musicgen_melody", "musicgen_decoder", "musicgen_melody_decoder"),
    note="One head a codebook.",
    status="unsupported",
    reason="its output embeddings are a list of heads whose logits are stacked before the loss",
)
