"""Cut cross-entropy (Wijmans et al., arXiv 2411.09009): never more than one tile of logits, forward or backward.

Peak memory beside the gradients: a few tiles of ``workspace_mb``, and for half inputs a float32 accumulator for dX.
Presets carry the paper's names. A filter leaves out of the gradients the columns of a tile in which every row's
``|p - onehot|`` is below a value; ``auto`` is exact with the torch kernels, which gain nothing from dropping.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..device import DeviceProfile
from ..errors import ConfigError, unknown_name
from ._base import Problem, RowLoss, Rows
from ._options import backend_for, check_kernels, check_workspace, no_triton, workspace_bytes
from ._recompute import recomputed

# name -> (filter dX, filter dW); every preset sums in float32
PRESETS = {
    "cce": (True, True),
    "cce_kahan": (True, True),
    "cce_kahan_full_c": (True, False),
    "cce_kahan_full_e": (False, True),
    "cce_kahan_full_c_full_e": (False, False),
    "cce_exact": (False, False),
}


@dataclass(frozen=True)
class CceOptions:
    preset: str = field(
        default="cce",
        metadata={"help": f"Which gradients may be filtered, by the paper's names: {', '.join(PRESETS)}."},
    )
    filter: str | float | bool = field(
        default="auto",
        metadata={
            "help": "auto (exact: drops nothing), off, or the probability below which a column of a tile is dropped."
        },
    )
    workspace_mb: float | None = field(
        default=None, metadata={"help": "Mebibytes that a tile may take. Default: a 32nd of all logits, 4 to 128."}
    )
    kernels: str = field(default="auto", metadata={"help": "auto, torch or triton."})

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str) or self.preset not in PRESETS:
            raise ConfigError(unknown_name("cce preset", str(self.preset), PRESETS))
        if self.filter is False:  # YAML reads a bare `off` as false
            object.__setattr__(self, "filter", "off")
        is_number = isinstance(self.filter, int | float) and not isinstance(self.filter, bool)
        if not (self.filter in ("auto", "off") or (is_number and 0 < float(self.filter) < 1)):
            raise ConfigError(
                f"filter must be 'auto', 'off' or a probability between 0 and 1, got {self.filter!r}. "
                "The paper's value for bfloat16 is 2**-12 = 0.000244."
            )
        if is_number and PRESETS[self.preset] == (False, False):
            raise ConfigError(
                f"preset {self.preset!r} filters nothing, but filter={self.filter!r} was asked for. "
                "Leave one of them out."
            )
        check_workspace(self.workspace_mb)
        check_kernels(self.kernels)

    @property
    def thresholds(self) -> tuple[float, float]:
        """(dX, dW): the probability below which columns are left out; 0 is exact."""
        if isinstance(self.filter, str):
            return 0.0, 0.0
        hidden, weight = PRESETS[self.preset]
        return self.filter * hidden, self.filter * weight


class Cce:
    name = "cce"
    summary = "no logits in memory, forward or backward; smallest"
    Options = CceOptions

    def check(self, problem: Problem, profile: DeviceProfile, options: CceOptions) -> str | None:
        if problem.module:
            return "the head is a module that must be called, and cce needs its weight"
        return no_triton(options.kernels, problem, profile)

    def peak_bytes(self, problem: Problem, options: CceOptions) -> int:
        size = problem.accumulator.itemsize
        tile = min(self.tile_bytes(problem, options), problem.logits_bytes)
        peak = problem.gradient_bytes + tile * 3
        if problem.needs_hidden:
            peak += problem.rows * problem.hidden * size
        if problem.needs_weight:
            columns = max(1, min(problem.vocab, tile // size // max(1, min(problem.rows, 4096))))
            peak += columns * problem.hidden * size * 2
        return peak

    def tile_bytes(self, problem: Problem, options: CceOptions) -> int:
        # a tile's products are large long before a chunk's are, which has all columns
        return workspace_bytes(options.workspace_mb, 128, problem.logits_bytes, share=32, least_mb=4)

    def backends(
        self, profile: DeviceProfile, options: CceOptions, dtype: torch.dtype | None = None
    ) -> tuple[str, str]:
        """(forward, backward): the folders of kernels that compute here. Only torch's backward filters yet."""
        backend = backend_for(options.kernels, profile, dtype)
        return backend, "torch" if any(options.thresholds) else backend

    def kernels(self, profile: DeviceProfile, options: CceOptions) -> str:
        forward, backward = self.backends(profile, options)
        return forward if forward == backward else f"{forward} forward, {backward} backward"

    def __call__(self, rows: Rows, options: CceOptions, profile: DeviceProfile) -> RowLoss:
        problem = rows.problem()
        filter_hidden, filter_weight = options.thresholds
        if rows.label_smoothing and (filter_hidden or filter_weight):
            raise ConfigError(
                f"filter={options.filter!r} and label_smoothing={rows.label_smoothing:g} were both asked for, but "
                "smoothing pulls on every column, so none is negligible. Use filter: auto or off, or no smoothing."
            )
        forward, backward = self.backends(profile, options, rows.dtype)
        return recomputed(rows, self.tile_bytes(problem, options), filter_hidden, filter_weight, forward, backward)


STRATEGY = Cce()
