"""A batch for a model of any size: right-padded, with some labels masked, of text or of random tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

IGNORED = -100

TEXT = (
    "The harbour wakes before the town does. Gulls circle over the first boats, and by half past five the fish are "
    "weighed, sold and packed in ice; what is left goes to the cats that wait behind the old customs house. ",
    "To multiply two matrices, take each row of the first and each column of the second, and add up the products of "
    "their entries. For n rows and n columns that makes n * n * n multiplications, unless one is clever. ",
    "def mean(values):\n    if not values:\n        raise ValueError('no values')\n"
    "    return sum(values) / len(values)\n\nassert mean([1, 2, 6]) == 3\n",
    "Als der Regen aufhörte, roch der Garten nach Erde. Sie zählte die Kerzen, es waren einundzwanzig, und öffnete das "
    "Fenster: « Entrez donc », sagte jemand, 日本語でも書けます, und lachte. ",
)
"""Prose, reasoning, code, and other languages: tokens that are sure and tokens that are not."""


def padded_batch(ids: Tensor, rows: int, length: int, pad: int) -> dict[str, Tensor]:
    """A batch of int64 tensors, shape ``[rows, length]``, cut from ``ids``, shape ``[n]``, again and again.

    The first row is full, the others are ever shorter; the first quarter of every other row has no labels, as a prompt
    has none.
    """
    batch = {
        "input_ids": torch.full((rows, length), pad),
        "attention_mask": torch.zeros((rows, length), dtype=torch.int64),
        "labels": torch.full((rows, length), IGNORED),
    }
    for row in range(rows):
        size = max(2, length - row * length // (2 * rows))
        places = (torch.arange(size) + row * ids.numel() // rows) % ids.numel()
        batch["input_ids"][row, :size] = batch["labels"][row, :size] = ids[places]
        batch["attention_mask"][row, :size] = 1
        if row % 2 == 0 and size >= 8:
            batch["labels"][row, : size // 4] = IGNORED
    return batch


def random_ids(vocab: int, count: int) -> Tensor:
    """``count`` token ids, the same every time, without the first few, which often mean something."""
    first = min(10, vocab // 2)
    return torch.randint(first, vocab, (count,), generator=torch.Generator().manual_seed(0))


def fitted(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """``batch`` with what else the forward of ``model`` wants of text, and without what it does not take."""
    accepted = inspect.signature(type(model).forward).parameters
    zeros = {name: torch.zeros_like(batch["input_ids"]) for name in ("token_type_ids", "mm_token_type_ids")}
    wanted = zeros | batch
    if "input_ids" not in accepted:  # a wrapper, which hands everything on
        return batch
    return {key: value for key, value in wanted.items() if key in accepted}


def cut_batch(batch: dict[str, Any], tokens: int) -> dict[str, Any]:
    """``batch`` with at most about ``tokens`` labels: those rows, and those columns, that have the most that count.

    A batch that has more than rows of equal length in it (images, several position axes) stays as it is.
    """
    labels = batch["labels"]
    if labels.dim() != 2 or labels.numel() <= tokens:
        return batch
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    rows, length = labels.shape
    if any(value.shape[0] != rows for value in tensors.values()) or len(tensors) < _containers(batch):
        return batch
    counts = (labels != IGNORED).sum(1)
    best = counts.argsort(descending=True)[: max(1, tokens // length)].sort().values
    tensors = {key: value[best.to(value.device)] for key, value in tensors.items()}
    if length > tokens and all(value.shape[1:2] == (length,) and value.dim() == 2 for value in tensors.values()):
        ends = torch.nn.functional.pad((tensors["labels"] != IGNORED).sum(0).cumsum(0), (1, 0))
        start = int((ends[tokens:] - ends[:-tokens]).argmax())
        tensors = {key: value[:, start : start + tokens] for key, value in tensors.items()}
    return batch | tensors


def _containers(batch: dict[str, Any]) -> int:
    """How many entries are no plain numbers."""
    return sum(
        not (isinstance(value, Tensor) and not value.dim()) and hasattr(value, "__len__") for value in batch.values()
    )
