"""A driver for Triton that compiles every launch for Ascend, notes it, and runs it on this machine's CPU.

`install` once; from then on an ordinary ``kernel[grid](...)`` goes through all of triton-ascend's own launch code, its
limit on grids included. Tensors may be a CPU's, or an emulated device's whose memory is the host's.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import ascend_lowering
import ascend_x86
import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


@dataclass
class Launch:
    """One launch: the kernel, its grid, its constants, and the linalg that it was compiled to."""

    name: str
    grid: tuple[int, int, int]
    mix_mode: str
    constants: dict[str, Any]
    options: dict[str, Any]
    linalg: str = field(repr=False)

    @property
    def programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


LAUNCHES: list[Launch] = []
_LINALG: dict[str, str] = {}
_NATIVE: dict[str, ascend_x86.Native] = {}


def forget() -> None:
    """Empty the list of launches."""
    LAUNCHES.clear()


def install(arch: str = "Ascend910B3", vector_cores: int = 40, execute: bool = True, bishengir: bool = False) -> None:
    """Make this driver Triton's.

    Args:
        arch: The chip that is compiled for.
        vector_cores: How many of them Triton is told there are.
        execute: Run the kernels; otherwise they are compiled and noted only.
        bishengir: Compile by BiShengIR too, which refuses blocks that do not fit; takes a second for each kernel.
    """
    facts = _Facts(arch, vector_cores)
    _COMPILER["NPUUtils"] = lambda: facts
    parse = _COMPILER["_parse_linalg_metadata"]

    def last_stage(linalg: str, metadata: dict[str, Any], options: Any) -> bytes:
        _LINALG[metadata["hash"]] = linalg
        if bishengir:
            return _LAST_STAGE(linalg, metadata, options)
        parse(linalg, metadata)
        return linalg.encode()

    _COMPILER["linalg_to_bin_enable_npu_compile_A2_A3"] = last_stage
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # what is found in Triton's cache has not passed the last stage
    if bishengir:
        home = f"{ascend_lowering.last_step()}{os.pathsep}{ascend_lowering.compiler().parent}{os.pathsep}"
        if not os.environ["PATH"].startswith(home):
            os.environ["PATH"] = home + os.environ["PATH"]
    triton.runtime.driver.set_active(_Driver(arch, facts, execute))


# Triton loads its backends' files itself, so what `import triton.backends.ascend.compiler` gives is another copy.
_COMPILER = backends["ascend"].compiler.add_stages.__globals__
_LAST_STAGE = _COMPILER["linalg_to_bin_enable_npu_compile_A2_A3"]


class _Facts:
    def __init__(self, arch: str, vector_cores: int) -> None:
        self.arch, self.vector_cores = arch, vector_cores

    def get_arch(self) -> str:
        return self.arch

    def get_aicore_num(self) -> int:
        return self.vector_cores // 2

    def get_aivector_core_num(self) -> int:
        return self.vector_cores

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1, "num_aicore": self.vector_cores // 2, "num_vectorcore": self.vector_cores}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int, *rest: Any) -> tuple[Any, ...]:
        return None, (name, kernel), 0, 0


class _Launcher:
    execute = True

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source, self.metadata = source, metadata

    def __call__(
        self, grid_0: int, grid_1: int, grid_2: int, stream: int, function: Any, packed: dict[str, Any], launch_metadata: Any,
        enter: Any, leave: Any, *args: Any,
    ) -> None:  # fmt: skip
        key, grid = self.metadata.hash, (grid_0, grid_1, grid_2)
        constants = {k: v for k, v in self.source.constants.items() if isinstance(k, str)}
        LAUNCHES.append(
            Launch(packed["kernel_name"], grid, self.metadata.mix_mode, constants, dict(self.metadata._asdict()), _LINALG[key])
        )  # fmt: skip
        if self.execute:
            if key not in _NATIVE:
                _NATIVE[key] = ascend_x86.load(_LINALG[key])
            live = [value for name, value in zip(self.source.signature, args, strict=False) if name not in constants]
            ascend_x86.call(_NATIVE[key], live, grid)


class _NotExecuting(_Launcher):
    execute = False


class _Driver(DriverBase):
    def __init__(self, arch: str, facts: _Facts, execute: bool) -> None:
        self.arch, self.utils, self.launcher_cls = arch, facts, _Launcher if execute else _NotExecuting

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("npu", self.arch, 0)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        def benchmark(function: Any, **options: Any) -> list[float]:
            start = time.perf_counter()
            function()
            return [1e3 * (time.perf_counter() - start)] * 3

        return benchmark

    def get_device_interface(self) -> Any:
        return torch.npu

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)
