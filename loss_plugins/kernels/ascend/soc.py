"""Facts of the Ascend chips that the kernels know, from the compiler's own target descriptions.

An AI core is one cube unit, which multiplies matrices, and two vector units, which do everything else. The kernels of
this folder are vector kernels: as many programs as vector cores, each with a unified buffer (UB) of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

KIB = 1024
ROW_ALIGNMENT = 16
"""Entries that a row of logits is a multiple of. A3 stops with an error at rows that begin off its 32 bytes."""


@dataclass(frozen=True)
class Soc:
    """One chip.

    Attributes:
        name: As ``torch.npu.get_device_name()`` says.
        cube_cores: Units that multiply matrices.
        vector_cores: Units that the kernels of this folder run on.
        ub_bytes: Unified buffer of a vector core.
    """

    name: str
    cube_cores: int
    vector_cores: int
    ub_bytes: int


def _named(names: str, cube_cores: int, ub_kib: int) -> dict[str, Soc]:
    return {name: Soc(name, cube_cores, 2 * cube_cores, ub_kib * KIB) for name in names.split()}


SOCS = {
    **_named("Ascend910B1 Ascend910B2 Ascend910B2C", 24, 192),
    **_named("Ascend910B3 Ascend910B4 Ascend910B4-1", 20, 192),
    **_named("Ascend910_9381 Ascend910_9382 Ascend910_9391 Ascend910_9392", 24, 192),  # A3
    **_named("Ascend910_9362 Ascend910_9372", 20, 192),
    **_named("Ascend950PR_9579", 28, 248),
    **_named("Ascend950PR_9599 Ascend950DT_9591", 36, 248),
}

SMALLEST = min(SOCS.values(), key=lambda soc: (soc.ub_bytes, soc.vector_cores))


def soc_of(name: str) -> Soc:
    """The facts of a chip by its name. Fewer programs and smaller blocks run on any chip, so one that is not in the
    table is treated as the smallest of its family, or of all."""
    if name in SOCS:
        return SOCS[name]
    family = [soc for known, soc in SOCS.items() if name[:9] == known[:9]]  # Ascend910, Ascend950
    least = min(family, key=lambda soc: (soc.ub_bytes, soc.vector_cores)) if family else SMALLEST
    return Soc(name, least.cube_cores, least.vector_cores, least.ub_bytes)


@functools.cache
def soc_at(device: torch.device) -> Soc:
    """The facts of the chip that a device is; the smallest one for a CPU, where the kernels run in tests."""
    npu = getattr(torch, "npu", None)
    if device.type != "npu" or npu is None:
        return SMALLEST
    return soc_of(npu.get_device_name(device.index or 0))
