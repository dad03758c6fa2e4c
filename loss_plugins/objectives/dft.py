"""Dynamic fine-tuning (Wu et al., arXiv 2508.05629): each token's loss is weighted by its own probability, which is no
part of the gradient, so that unlikely tokens do not rule it."""

from __future__ import annotations

from torch import Tensor


class Dft:
    name = "dft"
    summary = "dynamic fine-tuning: each token's loss times its probability"

    def __call__(self, log_probs: Tensor) -> Tensor:
        return -log_probs.detach().exp() * log_probs


OBJECTIVE = Dft()
