"""Logits that are a sum of products, as LoRA and DoRA make them: ``z = sum(scale * (inputs @ weight.T)) + bias``.

Two ways to their loss without logits:

- In chunks: the inputs beside each other, ``N * (H + r)`` numbers, are cut into rows; each term is multiplied by its
  own weight. No copy of a weight, and no gradient of a frozen one.
- Side by side: inputs ``[h, s A h]`` and weight ``[W, B]`` are one plain head, which every strategy takes. Costs a copy
  of the head, ``V * (H + r)``, from the forward to the backward, and as much for its gradient, of which only B's
  columns are kept where W is frozen.

Measured by `tests/models/test_lora_memory.py`, see the README of this folder.

Letters: N rows, H hidden width, V vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Term(NamedTuple):
    """One product, shape ``[N, V]``: ``scale * (inputs @ weight.T)``."""

    inputs: Tensor  # (N, k)
    weight: Tensor  # (V, k)
    scale: Tensor | None = None  # (V,)


@dataclass(frozen=True)
class Terms:
    """The products of a head and its bias."""

    terms: tuple[Term, ...]
    bias: Tensor | None  # (V,)

    @property
    def is_plain(self) -> bool:
        """Whether this is an ordinary linear layer."""
        return len(self.terms) == 1 and self.terms[0].scale is None

    def side_by_side(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias of one linear layer, shapes ``[N, K]``, ``[V, K]``, ``[V]``.

        In the types of the first term: adapters in float32 on a half head are rounded, as the head's result would be.
        """
        first = self.terms[0]
        if self.is_plain:
            return first.inputs, first.weight, self.bias
        hidden = torch.cat([term.inputs.to(first.inputs.dtype) for term in self.terms], 1)
        weight = torch.cat([_scaled(term).to(first.weight.dtype) for term in self.terms], 1)
        return hidden, weight, self.bias

    def in_chunks(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """All inputs beside each other, shape ``[N, K]``, in their widest type, and what makes logits of n rows of it,
        shape ``[n, V]``, in float32 or wider."""
        read = [tensor for term in self.terms for tensor in (term.weight, term.scale)]
        unchanged = written_check((*read, self.bias))

        def logits(rows: Tensor) -> Tensor:
            unchanged()
            return self._logits(rows)

        return torch.cat([term.inputs for term in self.terms], 1), logits

    def _logits(self, rows: Tensor) -> Tensor:
        z = None
        parts = rows.split([term.inputs.shape[1] for term in self.terms], 1)
        for (inputs, weight, scale), part in zip(self.terms, parts, strict=True):
            part = part.to(inputs.dtype)
            if z is None:
                z = F.linear(part, weight, self.bias if scale is None else None)
                z = z.float() if z.dtype.itemsize < 4 else z
                if scale is not None:
                    z = z * scale.to(z.dtype) + (0.0 if self.bias is None else self.bias)
            elif scale is None:
                z = z.addmm_(part.to(z.dtype), weight.to(z.dtype).T)  # in place: a chunk of logits is not copied
            else:
                z = torch.addcmul(z, F.linear(part, weight).to(z.dtype), scale.to(z.dtype))
        assert z is not None
        return z


def _scaled(term: Term) -> Tensor:
    return term.weight if term.scale is None else term.weight * term.scale[:, None].to(term.weight.dtype)


def written_check(weights: Iterable[Tensor | None]) -> Callable[[], None]:
    """What raises a RuntimeError once one of ``weights`` has been written in place. Autograd checks what it saves; a
    chunk, which is computed again in the backward, saves nothing."""
    watched = [tensor for tensor in weights if tensor is not None and not tensor.is_inference()]
    before = None if torch.compiler.is_compiling() else [tensor._version for tensor in watched]

    def check() -> None:
        if before is None or torch.compiler.is_compiling():
            return
        if [tensor._version for tensor in watched] != before:
            raise RuntimeError(
                "The weights of a head that is called on chunks were written in place between the forward of its loss "
                "and the backward, which computes the chunks again. Run the backward first."
            )

    return check
