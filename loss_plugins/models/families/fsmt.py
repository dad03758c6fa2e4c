"""FSMT."""

from ._base import ModelFamily

FAMILY = ModelFamily(
    model_types=("fsmt",),
    note="Its output embeddings are the decoder's input embeddings, whose weight the head shares.",
    head="model.decoder.output_projection",
)
