"""Cut cross-entropy (Wijmans et al., arXiv 2411.09009): never more than one tile of logits, forward or backward.

Peak memory beside the gradients: a few tiles of ``workspace_mb``, and for half inputs a float32 accumulator for dX
(Triton's kernels keep it within the workspace, in fewer bits where it is large). Presets carry the paper's names. A
filter leaves out of the gradients the columns of a block of rows in which every row's ``|p - onehot|`` is below a
value. ``auto`` does so where it is many times faster: with Triton on GPUs that have bulk copies (Hopper and later),
half types, and only as long as no row would lose more than `AUTO_BOUND` of its probability, and all rows together an
eighth of what is not their labels'; an untrained model is computed exactly. Triton's kernels put an unbiased estimate
in place of what is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..config import check_filter
from ..device import DeviceProfile
from ..errors import ConfigError, unknown_name
from . import _native
from ._base import FEWEST_ROWS, Problem, RowLoss, Rows
from ._options import (
    KERNELS,
    backend_for,
    cannot_run,
    check_kernels,
    check_workspace,
    on_ascend,
    on_triton,
    workspace_bytes,
)
from ._recompute import recomputed, triton_bytes

AUTO_FILTER = 2.0**-12
AUTO_BOUND = 0.5
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
            "help": "auto (leaves out what is small, where that is faster, else nothing), off, or the probability "
            "below which a column is dropped for a block of rows."
        },
    )
    workspace_mb: float | None = field(
        default=None, metadata={"help": "Mebibytes that a tile may take. Default: a 32nd of all logits, 4 to 128."}
    )
    kernels: str = field(
        default="auto",
        metadata={
            "help": "auto, torch, triton, ascend (triton-ascend's, on an NPU), or native (torch_npu's own fused "
            "operator: half types, and nothing but the plain loss)."
        },
    )

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
        check_kernels(self.kernels, (*KERNELS, "native"))
        if self.kernels == "native" and self.is_filter_asked:
            raise ConfigError(
                f"kernels='native' and filter={self.filter!r} were both asked for, and torch_npu's operator leaves "
                "nothing out. Leave one of them out."
            )

    @property
    def thresholds(self) -> tuple[float, float]:
        """(dX, dW): the probability below which columns may be left out; 0 is exact."""
        below = {"auto": AUTO_FILTER, "off": 0.0}[self.filter] if isinstance(self.filter, str) else self.filter
        hidden, weight = PRESETS[self.preset]
        return below * hidden, below * weight

    @property
    def is_filter_asked(self) -> bool:
        """Whether a probability was given, below which columns are left out wherever this runs."""
        return not isinstance(self.filter, str)


class Cce:
    name = "cce"
    summary = "no logits in memory, forward or backward; smallest"
    Options = CceOptions

    def check(self, problem: Problem, profile: DeviceProfile, options: CceOptions) -> str | None:
        if problem.module:
            return "the head is a module that must be called, and cce needs its weight"
        if options.kernels == "native":
            return _native.cannot_run(problem, profile)
        return cannot_run(options.kernels, problem, profile)

    def peak_bytes(self, problem: Problem, options: CceOptions) -> int:
        if on_triton(options.kernels, problem):
            asked = options.is_filter_asked and problem.bulk_copies and problem.dtype.itemsize == 2
            marks = (problem.is_filterable or asked) and any(options.thresholds) and problem.rows >= FEWEST_ROWS
            return triton_bytes(problem, self.tile_bytes(problem, options), marks)
        if on_ascend(options.kernels, problem):
            from ..kernels.ascend.memory import cce_bytes

            return cce_bytes(
                problem.rows, problem.hidden, problem.vocab, problem.dtype.itemsize,
                (problem.weight_dtype or problem.dtype).itemsize, self.tile_bytes(problem, options),
                problem.needs_hidden, problem.needs_weight, options.is_filter_asked,
            )  # fmt: skip
        if options.kernels == "native":
            return _native.peak_bytes(problem)
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
        """(forward, backward): the folders of kernels that compute here."""
        backend = backend_for(options.kernels, profile, dtype)
        # what was asked for by number is left out, by torch's kernels where Triton's cannot
        marks = backend == "ascend" or _marks(backend, profile, dtype)
        return backend, "torch" if options.is_filter_asked and not marks else backend

    def kernels(self, profile: DeviceProfile, options: CceOptions) -> str:
        forward, backward = self.backends(profile, options)
        return forward if forward == backward else f"{forward} forward, {backward} backward"

    def __call__(self, rows: Rows, options: CceOptions, profile: DeviceProfile) -> RowLoss:
        problem = rows.problem()
        if options.kernels == "native":
            return _native.row_loss(rows)
        forward, backward = self.backends(profile, options, rows.dtype)
        filter_hidden, filter_weight = self._filters(rows, problem, options, _marks(backward, profile, rows.dtype))
        bound = 1.0 if options.is_filter_asked else AUTO_BOUND
        return recomputed(
            rows, self.tile_bytes(problem, options), filter_hidden, filter_weight, forward, backward, bound
        )

    def _filters(self, rows: Rows, problem: Problem, options: CceOptions, marks: bool) -> tuple[float, float]:
        """The thresholds of the options, 0 where nothing will be left out, so that nothing is marked for it either."""
        filter_hidden, filter_weight = options.thresholds
        check_filter(options.filter, rows.label_smoothing)
        if not marks:  # torch's and Ascend's kernels look for themselves
            return (filter_hidden, filter_weight) if options.is_filter_asked else (0.0, 0.0)
        if problem.dense or problem.rows < FEWEST_ROWS or not (options.is_filter_asked or problem.filter_pays):
            return 0.0, 0.0
        return filter_hidden * problem.needs_hidden, filter_weight * problem.needs_weight


def _marks(backend: str, profile: DeviceProfile, dtype: torch.dtype | None) -> bool:
    """Whether the forward marks columns for a filtered backward."""
    bulk_copies = profile.interpreted or profile.capability >= (9, 0)
    return backend == "triton" and bulk_copies and (dtype is None or dtype.itemsize == 2)


STRATEGY = Cce()
