"""Compile the Triton kernels for a GPU that need not be here; run by test_compiles.py without the interpreter:

    compile_all.py TARGET         every kernel, with every tile that it may take
    compile_all.py TARGET rows    a few, for one number of rows and then for others

The losses are computed on the CPU with kernels that are compiled for the target and then not launched, so what is
compiled is what a launch there would compile: its types, alignments, tiles, warps and stages. The numbers are noise.
Prints a line a kernel: target, name, tile, flags, bytes of shared memory.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from loss_plugins import cross_entropy_stats, linear_cross_entropy_stats
from loss_plugins.device import DeviceProfile
from loss_plugins.kernels.ops import backend, linear_ce
from loss_plugins.kernels.triton import _common
from loss_plugins.kernels.triton.tuning import device_keys

KIB = 1024


class Target(NamedTuple):
    compiler: GPUTarget
    profile: DeviceProfile

    @property
    def keys(self) -> tuple[str, ...]:
        architecture = self.profile.architecture or "sm{}{}".format(*self.profile.capability)
        return device_keys(self.profile.kind, "", architecture)


def nvidia(major: int, minor: int, shared: int) -> Target:
    profile = DeviceProfile("cuda", "", (major, minor), has_triton=True, shared_bytes=shared)
    return Target(GPUTarget("cuda", 10 * major + minor, 32), profile)


def amd(name: str) -> Target:
    profile = DeviceProfile("rocm", "", has_triton=True, architecture=name, shared_bytes=64 * KIB)
    return Target(GPUTarget("hip", name, 64), profile)


TARGETS = {
    "sm_80": nvidia(8, 0, 163 * KIB),
    "sm_86": nvidia(8, 6, 99 * KIB),
    "sm_89": nvidia(8, 9, 99 * KIB),
    "sm_90": nvidia(9, 0, 227 * KIB),
    "sm_100": nvidia(10, 0, 227 * KIB),
    "sm_120": nvidia(12, 0, 99 * KIB),
    "gfx90a": amd("gfx90a"),
    "gfx942": amd("gfx942"),
}
TENSOR_MEMORY = 512  # columns, Blackwell's
FEW = 1 << 16  # a workspace that leaves no room for float32 sums of dX

WIDTH, VOCAB = 512, 1000  # deep enough that every stage is in use
EVERYTHING = {
    "softcap": 30.0, "logit_scale": 0.5, "z_loss": 1e-3, "fields": ("entropy", "predicted", "lse"), "bias": True,
    "class_weight": True,
}  # fmt: skip
SMOOTH = {**EVERYTHING, "label_smoothing": 0.1}
# rows, type, strategy, its options, the loss's options, width
LOSSES: list[tuple[int, torch.dtype, str, dict[str, Any], dict[str, Any], int]] = [
    *((rows, torch.bfloat16, "cce", {"filter": "off"}, SMOOTH, WIDTH) for rows in (16, 32, 64, 128, 300)),
    *((rows, torch.float32, "cce", {"filter": "off"}, SMOOTH, WIDTH) for rows in (16, 32, 300)),
    (300, torch.bfloat16, "cce", {"filter": "off"}, {}, WIDTH),
    (300, torch.bfloat16, "cce", {"filter": "off"}, SMOOTH, WIDTH - 4),  # rows that no bulk copy reads
    (300, torch.float16, "cce", {"filter": "off"}, {}, WIDTH),
    # dX's sums in few bits, of slices that a product adds to them
    *(
        (300, dtype, "cce", {"filter": "off", "workspace_mb": 0.25}, {}, WIDTH)
        for dtype in (torch.bfloat16, torch.float16)
    ),
    (300, torch.bfloat16, "flce", {"workspace_mb": 1}, EVERYTHING, WIDTH),
    (300, torch.bfloat16, "flce", {}, {}, WIDTH),
    (300, torch.bfloat16, "flce", {"workspace_mb": 0.3}, {"fields": (), "softcap": 30.0, "bias": True}, WIDTH),
    (300, torch.bfloat16, "flce", {"workspace_mb": 0.3}, {"fields": ()}, 384),
]


def pretend(name: str) -> None:
    """Make Triton and the kernels' host code believe that the CPU's tensors lie on this GPU."""
    target = TARGETS[name]
    backend("triton")
    assert not _common.INTERPRETED
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target.compiler,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    DeviceProfile.probe = classmethod(lambda cls, device: target.profile)
    _common._keys = lambda device: target.keys
    replace("processors", lambda device: 128)
    _common.REUSED = False  # what is not launched cannot be launched again
    replace("has_bulk_copies", lambda device: has_bulk(target))
    replace("has_warpgroups", lambda device: has_bulk(target) and target.profile.capability[0] == 9)

    seen: set[int] = set()
    run = triton.JITFunction.run

    def compiled_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            check(name, target, self, kernel, options)
        return kernel

    triton.JITFunction.run = compiled_only


def has_bulk(target: Target) -> bool:
    return target.profile.kind == "cuda" and target.profile.capability >= (9, 0)


def replace(function: str, by: Any) -> None:
    """Replace a function of `_common` wherever it was imported."""
    for key, module in list(sys.modules.items()):
        if key.startswith("loss_plugins.kernels.triton.") and hasattr(module, function):
            setattr(module, function, by)


def check(name: str, target: Target, function: Any, kernel: Any, options: dict[str, Any]) -> None:
    """Print what a kernel takes, and refuse what its target has not."""
    tile = "x".join(str(value) for key, value in options.items() if re.fullmatch(r"BLOCK_[NVHMK]", key))
    on = " ".join(key for key, value in options.items() if value is True)
    what = f"{name}: {function.__name__} {tile} {on}"
    metadata = kernel.metadata
    print(f"{what} shared {metadata.shared}", flush=True)
    most = target.profile.shared_bytes
    assert metadata.shared <= most, f"{what} takes {metadata.shared} of {most} bytes of shared memory"
    columns = getattr(metadata, "tmem_size", None) or 0
    assert columns <= TENSOR_MEMORY, f"{what} takes {columns} columns of tensor memory"


def main(name: str) -> None:
    pretend(name)
    for loss in LOSSES:
        compute(*loss)
    for dtype in (torch.bfloat16, torch.float32):
        for vocab in (VOCAB, 1024, 8192):  # 1000 is no multiple of 16, so nothing is loaded by vectors
            compute_given(vocab, dtype, {})
            compute_given(vocab, dtype, SMOOTH)
    with torch.autocast("cpu", torch.bfloat16):  # a head that is cast by slices, and a float32 dW
        compute(300, torch.bfloat16, "cce", {"filter": "off"}, {}, WIDTH, head=torch.float32)
    compute_filtered()
    if has_bulk(TARGETS[name]):  # a Triton before 3.4 makes none
        replace("has_bulk_copies", lambda device: False)
        compute(300, torch.bfloat16, "cce", {"filter": "off"}, SMOOTH, WIDTH)
        compute_filtered()


def other_rows(name: str) -> None:
    """Compile for one number of rows, then for others, of 16 or not: a batch may hold any, and a compiler takes seconds."""
    pretend(name)
    losses = [("cce", {"filter": "off"}), ("flce", {"workspace_mb": 0.25})]  # chunks of 128 rows, the last one of any
    for strategy, choice in losses:
        compute(512, torch.bfloat16, strategy, choice, {}, WIDTH)
    for workspace in (1 << 23, FEW):
        filtered_step(512, WIDTH, torch.bfloat16, workspace=workspace)
    print("other rows", flush=True)
    for rows in (300, 513, 777, 1000):
        for strategy, choice in losses:
            compute(rows, torch.bfloat16, strategy, choice, {}, WIDTH)
        for workspace in (1 << 23, FEW):
            filtered_step(rows, WIDTH, torch.bfloat16, workspace=workspace)


def compute_filtered() -> None:
    """The filtered backward, also where no strategy takes it."""
    filtered_step(300, WIDTH, torch.bfloat16)
    filtered_step(300, WIDTH, torch.bfloat16, full=True)
    filtered_step(300, WIDTH - 4, torch.bfloat16, full=True)
    filtered_step(300, WIDTH, torch.float16)
    filtered_step(300, WIDTH, torch.bfloat16, head=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        filtered_step(300, WIDTH, dtype, workspace=FEW)
    filtered_step(300, WIDTH, torch.bfloat16, head=torch.float32, workspace=FEW)


def filtered_step(
    rows: int,
    width: int,
    dtype: torch.dtype,
    full: bool = False,
    head: torch.dtype | None = None,
    workspace: int = 1 << 23,
) -> None:
    hidden, weight = torch.randn(rows, width).to(dtype), torch.randn(VOCAB, width).to(head or dtype)
    outputs = linear_ce(
        hidden.requires_grad_(), weight.requires_grad_(), torch.randn(VOCAB).to(dtype) if full else None,
        torch.arange(rows), torch.rand(VOCAB) if full else None, -100, 0.5 if full else 1.0, 30.0 if full else 0.0, 0.0,
        1e-3 if full else 0.0, dtype, full, full, 2**-12, 2**-12, True, workspace, "triton", "triton", 0.5,
    )  # fmt: skip
    torch.stack([each.sum() for each in outputs[: 3 if full else 1]]).sum().backward()


def compute_given(vocab: int, dtype: torch.dtype, given: dict[str, Any]) -> None:
    """A loss of logits that exist: with the gradient over them, and where columns lie too far apart for 32 bits."""
    options = {name: value for name, value in given.items() if name != "bias"}
    if "class_weight" in options:
        options["class_weight"] = torch.rand(vocab)
    over = torch.randn(12, vocab).to(dtype).requires_grad_() * 1
    apart = torch.empty(vocab, 1 << 18, dtype=dtype)[:, :12].T.requires_grad_()  # of memory that nobody touches
    for logits in (over, apart):
        out = cross_entropy_stats(
            logits, torch.zeros(12, dtype=torch.int64), kernels="triton", inplace=logits is over, **options
        )
        out.loss.backward()


def compute(
    rows: int,
    dtype: torch.dtype,
    strategy: str,
    choice: dict[str, Any],
    given: dict[str, Any],
    width: int,
    head: torch.dtype | None = None,
) -> None:
    options = dict(given)
    hidden, weight = torch.randn(rows, width).to(dtype), torch.randn(VOCAB, width).to(head or dtype)
    if "bias" in options:
        options["bias"] = torch.randn(VOCAB).to(dtype).requires_grad_()
        options["class_weight"] = torch.rand(VOCAB)
    out = linear_cross_entropy_stats(
        hidden.requires_grad_(), weight.requires_grad_(), torch.arange(rows), strategy=strategy,
        options={"kernels": "triton", **choice}, **options,
    )  # fmt: skip
    out.loss.backward()


if __name__ == "__main__":
    (other_rows if "rows" in sys.argv[2:] else main)(sys.argv[1])
