"""Facts about the device that a loss will run on. Frozen and made of plain values, so tests can fake any device."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from .npu import Npu, has_ascend_triton

GPUS = ("cuda", "rocm", "xpu")
"""Kinds of device that Triton knows. For an NPU there is another Triton, triton-ascend, with kernels of its own."""
WITHOUT_FLOAT64 = ("mps", "npu")
"""Kinds of device whose own units do not compute in float64."""
TRITON_CAPABILITY = (8, 0)
"""The oldest CUDA GPU that Triton compiles for and its authors test."""
TILE_BYTES = 64 << 10
"""Shared memory that the tiles of kernels/triton/configs/default.json are made for."""


@dataclass(frozen=True)
class DeviceProfile:
    """What is known about one device.

    Attributes:
        kind: ``cuda``, ``rocm``, ``xpu``, ``npu``, ``mps`` or ``cpu``.
        name: The vendor's name of the device, or ``cpu``.
        capability: CUDA's (major, minor), ``(0, 0)`` elsewhere.
        total_bytes: Memory of the device; 0 where it is not known.
        has_triton: A Triton that can be imported (not whether it can launch here; see `can_triton`), triton-ascend
            excepted.
        interpreted: Triton runs under its interpreter (``TRITON_INTERPRET=1``), as it does in tests on a CPU.
        architecture: ROCm's name of it, such as ``gfx942``; empty elsewhere.
        shared_bytes: Shared memory that one program may take; 0 where it is not known.
        npu: What else is known of an NPU; None elsewhere.
    """

    kind: str
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    has_triton: bool = False
    interpreted: bool = False
    architecture: str = ""
    shared_bytes: int = 0
    npu: Npu | None = None

    @classmethod
    def probe(cls, device: torch.device | str) -> DeviceProfile:
        """The profile of a device that tensors lie on. Reads facts only: nothing is allocated or synchronised."""
        device = torch.device(device)
        triton = importlib.util.find_spec("triton") is not None and not has_ascend_triton()
        interpreted = triton and _interpreting()
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            rocm = torch.version.hip is not None
            return cls(
                kind="rocm" if rocm else "cuda",
                name=properties.name,
                capability=(0, 0) if rocm else (properties.major, properties.minor),
                architecture=properties.gcnArchName.split(":")[0] if rocm else "",
                total_bytes=properties.total_memory,
                # CUDA lends more than the plain attribute says
                shared_bytes=getattr(properties, f"shared_memory_per_block{'' if rocm else '_optin'}", 0),
                has_triton=triton,
                interpreted=interpreted,
            )
        if device.type == "xpu":
            xpu = torch.xpu.get_device_properties(device)
            return cls("xpu", xpu.name, total_bytes=xpu.total_memory, has_triton=triton, interpreted=interpreted)
        if device.type == "npu":
            return _npu_profile(device, triton, interpreted)
        return cls(device.type, device.type, has_triton=triton, interpreted=interpreted)

    @property
    def ascend_obstacle(self) -> str | None:
        """Why no kernel of triton-ascend can be launched on tensors of this device, or None."""
        if self.kind != "npu":
            return f"they run on an Ascend NPU, and this is a {self.kind} device"
        if self.npu is None:
            return "nothing is known about this NPU"
        return self.npu.obstacle or None

    def native_obstacle(self, *operators: str) -> str | None:
        """Why torch_npu's own operators cannot be called on tensors of this device, or None."""
        if self.kind != "npu":
            return f"they are torch_npu's, and this is a {self.kind} device"
        known = self.npu.operators if self.npu is not None else ()
        missing = [name for name in operators if name not in known]
        if not missing:
            return None
        version = (self.npu.torch_npu if self.npu is not None else "") or "of unknown version"
        return f"torch_npu {version} has no {' and no '.join(missing)}"

    @property
    def can_triton(self) -> bool:
        """Whether a Triton kernel can be launched on tensors of this device."""
        return self.triton_obstacle is None

    @property
    def triton_obstacle(self) -> str | None:
        """Why no Triton kernel can be launched on tensors of this device, or None."""
        if not self.has_triton:
            return "Triton is not installed"
        if self.interpreted:
            return None
        if self.kind not in GPUS:
            return f"Triton cannot launch on a {self.kind} device"
        if self.kind == "cuda" and self.capability < TRITON_CAPABILITY:
            (major, minor), (least, _) = self.capability, TRITON_CAPABILITY
            return (
                f"Triton needs compute capability {least}.0 (Ampere), and {self.name or 'this GPU'} has {major}.{minor}"
            )
        if 0 < self.shared_bytes < TILE_BYTES:
            return (
                f"the smallest tiles want {TILE_BYTES >> 10} KiB of shared memory, and {self.name or 'this device'} "
                f"has {self.shared_bytes >> 10} for a program"
            )
        return None


def _npu_profile(device: torch.device, triton: bool, interpreted: bool) -> DeviceProfile:
    module, index = torch.get_device_module(device), device.index or 0
    npu = Npu.probe(module, getattr(torch.ops, "npu", None), index)
    try:
        total = int(module.get_device_properties(index).total_memory)
    except Exception:  # it is a number for tables only
        total = 0
    return DeviceProfile(
        "npu", npu.chip or "npu", total_bytes=total, has_triton=triton, interpreted=interpreted, npu=npu
    )


def _interpreting() -> bool:
    """Whether Triton would interpret. It reads the same variable at each kernel's definition."""
    import os

    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def free_bytes(device: torch.device | str) -> int | None:
    """Memory that could still be allocated on ``device`` in bytes, or None where it cannot be asked without a sync.

    This counts what the caching allocator holds but does not use.
    """
    device = torch.device(device)
    if device.type not in ("cuda", "npu"):
        return None
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))
