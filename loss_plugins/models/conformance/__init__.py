"""Whether a patched model is the stock one, for any class that transformers has, measured on tiny models."""

from __future__ import annotations

from .check import CHECKS, Evidence, check_class
from .results import read_results, results_of, write_results

__all__ = ["CHECKS", "Evidence", "check_class", "read_results", "results_of", "write_results"]
