"""Facts about the device that a loss will run on. Frozen and made of plain values, so tests can fake any device."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceProfile:
    """What is known about one device.

    Attributes:
        kind: ``cuda``, ``rocm``, ``xpu``, ``npu``, ``mps`` or ``cpu``.
        name: The vendor's name of the device, or ``cpu``.
        capability: CUDA's (major, minor), ``(0, 0)`` elsewhere.
        total_bytes: Memory of the device; 0 where it is not known.
        has_triton: A Triton that can be imported (not whether it can launch here; see `can_triton`).
        interpreted: Triton runs under its interpreter (``TRITON_INTERPRET=1``), as it does in tests on a CPU.
    """

    kind: str
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    has_triton: bool = False
    interpreted: bool = False

    @classmethod
    def probe(cls, device: torch.device | str) -> DeviceProfile:
        """The profile of a device that tensors lie on. Reads facts only: nothing is allocated or synchronised."""
        device = torch.device(device)
        triton = importlib.util.find_spec("triton") is not None
        interpreted = triton and _interpreting()
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            rocm = torch.version.hip is not None
            return cls(
                kind="rocm" if rocm else "cuda",
                name=properties.name,
                capability=(0, 0) if rocm else (properties.major, properties.minor),
                total_bytes=properties.total_memory,
                has_triton=triton,
                interpreted=interpreted,
            )
        if device.type == "xpu":
            xpu = torch.xpu.get_device_properties(device)
            return cls("xpu", xpu.name, total_bytes=xpu.total_memory, has_triton=triton, interpreted=interpreted)
        return cls(device.type, device.type, has_triton=triton, interpreted=interpreted)

    @property
    def can_triton(self) -> bool:
        """Whether a Triton kernel can be launched on tensors of this device."""
        if not self.has_triton:
            return False
        if self.interpreted:
            return True
        if self.kind == "cuda":
            return self.capability >= (7, 0)
        return self.kind in ("rocm", "xpu")


def _interpreting() -> bool:
    """Whether Triton would interpret. It reads the same variable at each kernel's definition."""
    import os

    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def free_bytes(device: torch.device | str) -> int | None:
    """Memory that could still be allocated on ``device`` in bytes, or None where it cannot be asked without a sync.

    On CUDA this counts what the caching allocator holds but does not use.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
