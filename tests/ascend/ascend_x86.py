"""Run the linalg that triton-ascend makes of a kernel on this machine's CPU, program after program.

mlir-opt, mlir-translate and llc of LLVM 19 (BiShengIR's own base) and gcc make a shared library of it. It computes what
the kernel says, not how the chip would: no vector units, no concurrency, so no races either. LLVM19 names its folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(os.environ.get("LLVM19", "/usr/lib/llvm-19"))
CACHE = Path(os.environ.get("LP_ASCEND_CACHE", tempfile.gettempdir())) / "ascend-x86"

_RUNTIME = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

static uint16_t to_bfloat16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (u >> 16) | 0x40;
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
float __truncsfbf2(float f) {
  uint32_t bits = to_bfloat16(f);
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
float __truncdfbf2(double d) { return __truncsfbf2((float)d); }
float __hmf_tanhf(float x) { return tanhf(x); }
float __hmf_log1pf(float x) { return log1pf(x); }

typedef struct { int64_t rank; void *descriptor; } Unranked;
typedef struct { char *allocated; char *aligned; int64_t offset; int64_t sizes_strides[]; } Memref;
void memrefCopy(int64_t size, Unranked *from, Unranked *to) {
  int64_t rank = from->rank, index[16] = {0};
  Memref *source = (Memref *)from->descriptor, *target = (Memref *)to->descriptor;
  for (int i = 0; i < rank; i++)
    if (source->sizes_strides[i] == 0) return;
  for (;;) {
    int64_t s = source->offset, t = target->offset;
    for (int i = 0; i < rank; i++) {
      s += index[i] * source->sizes_strides[rank + i];
      t += index[i] * target->sizes_strides[rank + i];
    }
    memcpy(target->aligned + t * size, source->aligned + s * size, size);
    int i = rank - 1;
    for (; i >= 0; i--) {
      if (++index[i] < source->sizes_strides[i]) break;
      index[i] = 0;
    }
    if (i < 0) return;
  }
}
"""
_PASSES = [
    "--allow-unregistered-dialect",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--convert-bufferization-to-memref",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-vector-to-llvm",
    "--convert-index-to-llvm",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
]


class Native(NamedTuple):
    """A kernel as a C function, and its arguments' types."""

    function: Any
    types: list[str]


def load(linalg: str) -> Native:
    """Compile a module, once for each text."""
    name = re.search(r"func\.func\s+@(\w+)\(%arg0: memref<\?xi8>", linalg)[1]
    signature = re.search(rf"func\.func\s+@{name}\((.*?)\) attributes", linalg, re.S)[1]
    types = re.findall(r"%arg\d+: (memref<[^>]*>|\w+)", signature)
    library = CACHE / f"{hashlib.sha256((linalg + _RUNTIME + str(_PASSES)).encode()).hexdigest()[:24]}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _build(linalg, Path(folder)).rename(library)
    return Native(getattr(ctypes.CDLL(str(library)), name), types)


def _build(linalg: str, folder: Path) -> Path:
    linalg = re.sub(r"annotation\.mark[^\n]*\n", "\n", linalg.replace("gpu.barrier", ""))
    (folder / "kernel.mlir").write_text(linalg)
    (folder / "runtime.c").write_text(_RUNTIME)
    for command in (
        [ROOT / "bin/mlir-opt", "kernel.mlir", *_PASSES, "-o", "lowered.mlir"],
        [ROOT / "bin/mlir-translate", "--mlir-to-llvmir", "lowered.mlir", "-o", "kernel.ll"],
        [ROOT / "bin/llc", "-O2", "-relocation-model=pic", "-filetype=obj", "kernel.ll", "-o", "kernel.o"],
        ["gcc", "-O2", "-shared", "-fPIC", "kernel.o", "runtime.c", "-lm", "-o", "kernel.so"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{command[0]}: {done.stderr[:2500]}"
    return folder / "kernel.so"


def call(native: Native, args: Sequence[Any], grid: tuple[int, int, int]) -> None:
    """Run every program of a grid. Tensors may lie on any device whose memory is the host's."""
    spare = torch.zeros(4096, dtype=torch.int8)
    given = _memory(spare) + _memory(spare)  # the chip's lock and workspace
    for value, kind in zip(args, native.types[2:], strict=False):
        if kind.startswith("memref"):
            given += _memory(value)
        else:
            given.append({"f32": ctypes.c_float, "i64": ctypes.c_int64}.get(kind, ctypes.c_int32)(value))
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                native.function(*given, *(ctypes.c_int32(number) for number in (*grid, x, y, z)))


def _memory(tensor: torch.Tensor) -> list[Any]:
    pointer = ctypes.c_void_p(tensor.data_ptr())
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(tensor.numel()), ctypes.c_int64(1)]
