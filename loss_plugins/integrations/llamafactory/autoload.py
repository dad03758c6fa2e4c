"""Imported when Python starts, where the hook is installed: waits for LLaMA-Factory's training module.

Nothing is loaded until that module is, so that every other program starts as before.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TARGET = "llamafactory.train.tuner"


class Finder(MetaPathFinder):
    """Finds the one module as Python would, and wraps its `run_exp` once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def load_and_wrap(module: Any) -> None:
                load(module)
                from .run import wrapped

                module.run_exp = wrapped(module.run_exp, module.read_args)

            loader.exec_module = load_and_wrap
        return spec


def install() -> None:
    """Once a process."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path) and TARGET not in sys.modules:
        sys.meta_path.insert(0, Finder())
