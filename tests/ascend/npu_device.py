"""Makes this process have one NPU: a device of the host's memory that counts every byte, and a module `torch_npu`.

    import npu_device   # before transformers and accelerate are

The C++ half (npu_device.cpp) is compiled once, in about a minute, and kept in LP_ASCEND_CACHE.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch
from torch.utils.cpp_extension import load

CHIP = "Ascend910B3"
TOTAL_BYTES = 64 << 30
HERE = Path(__file__).parent


class Stream:
    """The one stream, and every event."""

    npu_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class Properties:
    name = CHIP
    total_memory = TOTAL_BYTES
    cube_core_num, vector_core_num = 20, 40


class Device:
    """`with torch.npu.device(0):`"""

    def __init__(self, device: Any = None) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: Any) -> None: ...


def _module(memory: Any) -> types.ModuleType:
    """What `torch.npu` has to have for transformers, accelerate and us."""
    npu: Any = types.ModuleType("torch.npu")
    npu.is_available = npu.is_initialized = npu.is_bf16_supported = lambda: True
    npu.device_count = lambda: 1
    npu.current_device = lambda: 0
    npu.set_device = npu.synchronize = lambda device=None: None
    npu.init = npu.empty_cache = lambda: None
    npu._is_in_bad_fork = lambda: False
    npu.get_device_name = lambda device=0: CHIP
    npu.get_device_properties = lambda device=0: Properties()
    npu.memory_allocated = npu.memory_reserved = lambda device=0: memory.allocated()
    npu.max_memory_allocated = lambda device=0: memory.peak()
    npu.reset_peak_memory_stats = lambda device=0: memory.reset_peak()
    npu.mem_get_info = lambda device=0: (TOTAL_BYTES - memory.allocated(), TOTAL_BYTES)
    # random numbers are the CPU's; calling torch.manual_seed from here would call this again
    npu.manual_seed = npu.manual_seed_all = lambda seed: None
    npu.get_rng_state = lambda device=0: torch.get_rng_state()
    npu.set_rng_state = lambda state, device=0: torch.set_rng_state(state)
    npu.get_rng_state_all = lambda: [torch.get_rng_state()]
    npu.set_rng_state_all = lambda states: None
    npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    npu.device, npu.Stream, npu.Event = Device, Stream, Stream
    npu.current_stream = npu.default_stream = lambda device=None: Stream()
    npu.stream = lambda stream: Stream()
    npu.amp = types.ModuleType("torch.npu.amp")
    npu.amp.custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="npu")
    npu.amp.custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="npu")
    return npu


def _not_emulated(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch_npu.{name} is not emulated")

    return refuse


def _package(npu: types.ModuleType) -> types.ModuleType:
    """`torch_npu`, from which transformers imports functions by name that nobody calls here."""
    package: Any = types.ModuleType("torch_npu")
    package.__version__ = "2.7.1.post2"
    package.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    package.__path__ = []
    package.npu = npu

    def missing(name: str) -> Any:
        if name.startswith("npu_"):
            return _not_emulated(name)
        raise AttributeError(name)

    package.__getattr__ = missing
    return package


def _compiled() -> Any:
    """The C++ half. torch's own lock outlives a process that was killed, and the next one would wait for it forever; this
    one does not."""
    source = HERE / "npu_device.cpp"
    key = hashlib.sha256(f"{torch.__version__} {sys.version_info[:2]} {source.read_text()}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("LP_ASCEND_CACHE", tempfile.gettempdir())) / f"npu-device-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        return load("loss_plugins_npu_device", [str(source)], extra_cflags=["-O1"], build_directory=str(folder))


def _install() -> Any:
    memory = _compiled()
    npu = _module(memory)
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
    torch.utils.generate_methods_for_privateuse1_backend()
    memory.init()
    sys.modules["torch_npu"], sys.modules["torch_npu.npu"] = _package(npu), npu
    return memory


memory = _install()
