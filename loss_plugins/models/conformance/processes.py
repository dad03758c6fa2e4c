"""Comparing many classes in several processes."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from .check import Evidence, check_class

TOGETHER = 100
"""Classes for which one set of processes is kept, so that what they leave in memory goes."""


def check_classes(names: Sequence[str], processes: int) -> Iterator[Evidence]:
    """The evidence for each of these classes, in the order in which it comes."""
    context = multiprocessing.get_context("spawn")
    for start in range(0, len(names), TOGETHER):
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            for future in as_completed([pool.submit(_check, name) for name in names[start : start + TOGETHER]]):
                yield future.result()


def _check(name: str) -> Evidence:
    import torch

    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    logging.getLogger("loss_plugins").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):  # some models print while they generate
        return check_class(name)
