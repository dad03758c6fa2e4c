"""MusicGen."""

from ._base import ModelFamily

FAMILY = ModelFamily(
    model_types=("musicgen", "musicgen_melody", "musicgen_decoder", "musicgen_melody_decoder"),
    note="One head and one loss a codebook.",
)
