"""How much memory a piece of work takes at its worst.

On an accelerator with a caching allocator its own counters are read: exact, free, no synchronisation. Elsewhere (CPU,
MPS) every operation that PyTorch dispatches is watched and the bytes of live storages are counted: exact for tensors,
slow (microseconds an operation), and blind to what a kernel allocates and frees inside one operation.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MIB = 1024 * 1024
_COUNTERS = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
_highest: dict[torch.device, int] = {}


def has_counters(device: torch.device | str) -> bool:
    """Whether the device's allocator counts its peak itself, so that measuring costs nothing."""
    device = torch.device(device)
    if device.type == "cpu":
        return False
    module = torch.get_device_module(device)
    return all(hasattr(module, name) for name in _COUNTERS)


def peak_allocated(device: torch.device | str) -> int:
    """Bytes allocated at the worst so far. Unlike the allocator's own counter it survives the resets of `PeakMeter`."""
    device = _indexed(torch.device(device))
    if not has_counters(device):
        return _highest.get(device, 0)
    return max(_highest.get(device, 0), int(torch.get_device_module(device).max_memory_allocated(device)))


class PeakMeter:
    """Bytes above a mark, at the worst since::

        with PeakMeter("cuda") as meter:
            meter.mark()
            work()
            print(meter.read())

    On an accelerator, `mark` resets the allocator's peak, which is one number for the whole process; what it was is
    kept, and `peak_allocated` still tells it.

    Args:
        device: The device whose memory is meant.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = _indexed(torch.device(device))
        self._counters = torch.get_device_module(self.device) if has_counters(self.device) else None
        self._watch = None if self._counters else StorageWatch(self.device)
        self._base = 0

    def __enter__(self) -> PeakMeter:
        if self._watch is not None:
            self._watch.__enter__()
        self.mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.__exit__(kind, error, trace)
            self._watch.forget()

    def mark(self) -> None:
        """Count from what is allocated now."""
        if self._counters is None:
            assert self._watch is not None
            self._watch.mark()
            return
        _highest[self.device] = peak_allocated(self.device)
        self._base = self._counters.memory_allocated(self.device)
        self._counters.reset_peak_memory_stats(self.device)

    def read(self) -> int:
        """Bytes above the mark at the worst since."""
        if self._counters is None:
            assert self._watch is not None
            return self._watch.above_mark()
        return int(self._counters.max_memory_allocated(self.device)) - self._base


class StorageWatch(TorchDispatchMode):
    """Counts the bytes of the storages that operations create, until they die; views are seen to be views.

    A storage that was there before is counted when an operation first uses it, as if it had been there at the mark, so
    that its end is noticed too.

    Args:
        device: Where storages are counted.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._ends: dict[int, weakref.finalize[Any, Any]] = {}
        self._live = self._mark = self._peak = 0

    def mark(self) -> None:
        self._mark = self._peak = self._live

    def above_mark(self) -> int:
        return self._peak - self._mark

    def forget(self) -> None:
        """Stop waiting for the ends of storages."""
        for end in self._ends.values():
            end.detach()
        self._ends.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in self._tensors((args, kwargs)):
            self._see(tensor, born=False)
        out = self._inside(func, args, kwargs) if _is_composed(func) else func(*args, **kwargs)
        for tensor in self._tensors(out):
            self._see(tensor, born=True)
        return out

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that is written in Python with its own operations watched.

        A mode is off while it handles a call. Turning it on again would only bring the same call back here, hence the
        dispatch straight to the operator's kernel.
        """
        with self:
            return func.redispatch(torch._C.DispatchKeySet(_kernel_key(self.device)), *args, **kwargs)

    def _tensors(self, tree: Any) -> list[Tensor]:
        return [t for t in tree_iter(tree) if isinstance(t, Tensor) and _same_place(t.device, self.device)]

    def _see(self, tensor: Tensor, born: bool) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without one storage
            return
        key = storage._cdata
        if key in self._ends:
            return
        size = storage.nbytes()
        self._ends[key] = weakref.finalize(storage, self._end, key, size)
        self._live += size
        if born:
            self._peak = max(self._peak, self._live)
        else:
            self._mark += size
            self._peak += size

    def _end(self, key: int, size: int) -> None:
        self._ends.pop(key, None)
        self._live -= size


def _is_composed(func: Any) -> bool:
    """Whether an operator comes from a Python library, so that its kernel calls further operators."""
    return func.namespace not in ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "inductor")


def _kernel_key(device: torch.device) -> Any:
    return getattr(torch._C.DispatchKey, {"cpu": "CPU", "mps": "MPS"}.get(device.type, device.type.upper()))


def _indexed(device: torch.device) -> torch.device:
    if ":" not in str(device) and has_counters(device):  # "cuda" means the current one
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device


def _same_place(one: torch.device, other: torch.device) -> bool:
    known = {device.index for device in (one, other)} - {None}
    return one.type == other.type and len(known) < 2
