"""What is to be measured, said once, and the loop over shapes, inputs and modes that measures it."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ConfigError, unknown_name
from .contenders import Contender
from .inputs import KINDS, SHAPES, Shape, Trained, each_kind
from .measure import DeviceLostError, Row, Say, run
from .truth import truth

MODE_WORDS = {"both": "both", "frozen": "frozen head", "forward": "forward only"}
GRID_ROWS = (256, 1024, 4096, 16_384, 65_536)
GRID_VOCAB = (8192, 32_768, 131_072, 262_144)
GRID_HIDDEN = 2048


@dataclass(frozen=True)
class Session:
    """Everything that decides what is measured.

    Attributes:
        kinds: Of `KINDS`.
        modes: Of `MODE_WORDS`.
        seconds: Limit of a table's timing.
    """

    shapes: Sequence[Shape]
    contenders: Mapping[str, Contender]
    dtype: torch.dtype
    device: str
    kinds: Sequence[str]
    modes: Sequence[str] = ("both",)
    trained: Trained | None = None
    iterations: int = 7
    seconds: float | None = None

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise ConfigError(unknown_name("kind of inputs", kind, KINDS))
            if kind == "real" and self.trained is None:
                raise ConfigError("Real inputs were asked for without files. Give --real-hidden and --real-head.")
        for mode in self.modes:
            if mode not in MODE_WORDS:
                raise ConfigError(unknown_name("mode", mode, MODE_WORDS))

    def measure(self, say: Say) -> Iterator[list[dict[str, Any]]]:
        """The rows of one table after another.

        Raises:
            DeviceLostError: after the rows of the table in which it happened were given.
        """
        for shape in self.shapes:
            begin = time.perf_counter()
            for inputs in each_kind(self.kinds, shape, self.trained, self.dtype, self.device):
                expected = truth(inputs)
                _settle(inputs.hidden.device)
                say(
                    f"{shape}, {inputs.kind}: inputs and truth {time.perf_counter() - begin:.1f} s, loss "
                    f"{expected.loss:.3f}, naive's errors {expected.naive.hidden:.1e} and {expected.naive.weight:.1e}"
                )
                for mode in self.modes:
                    try:
                        rows = run(
                            self.contenders, inputs, expected, MODE_WORDS[mode], iterations=self.iterations,
                            seconds=self.seconds, say=say,
                        )  # fmt: skip
                    except DeviceLostError as lost:
                        yield [self._facts(shape, row) for row in lost.rows]
                        raise
                    yield [self._facts(shape, row) for row in rows]
                begin = time.perf_counter()
                del inputs, expected
                gc.collect()

    def _facts(self, shape: Shape, row: Row) -> dict[str, Any]:
        """A row as data, with what the session knows of it."""
        own = self.contenders[row.name].strategy != ""
        return {"shape": shape.name, "dtype": str(self.dtype).removeprefix("torch."), "own": own, **row.as_dict()}


def shapes_of(
    names: Sequence[str], rows: Sequence[int] = (), hidden: int | None = None, vocab: Sequence[int] = ()
) -> list[Shape]:
    """The shapes of these names, or one of given sizes; each with every number of rows where any is given.

    Raises:
        ConfigError: an unknown name, or sizes that do not make a shape.
    """
    for name in names:
        if name not in SHAPES:
            raise ConfigError(unknown_name("shape", name, SHAPES))
    if hidden is not None or vocab:
        if names or hidden is None or not vocab:
            raise ConfigError(
                "--hidden and --vocab together are a shape of your own, in place of --shape. Give both without it."
            )
        own = (Shape(n, hidden, v) for v in vocab for n in rows or (8192,))
        return list(own)
    chosen = [SHAPES[name] for name in names or ("tiny",)]
    return [replace(shape, rows=n) for shape in chosen for n in rows or (shape.rows,)]


def grid_of(rows: Sequence[int] = (), hidden: int | None = None, vocab: Sequence[int] = ()) -> list[Shape]:
    """Shapes of every number of rows with every vocabulary, small ones first."""
    sizes = itertools.product(vocab or GRID_VOCAB, rows or GRID_ROWS)
    made = (Shape(n, hidden or GRID_HIDDEN, v) for v, n in sizes)
    return sorted(made, key=lambda shape: shape.rows * shape.vocab)


def _settle(device: torch.device) -> None:
    """Give back what making inputs and truth has cached, so that what is free is known to be free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
