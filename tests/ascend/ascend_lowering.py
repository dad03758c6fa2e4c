"""Lower a kernel for Ascend where there is none: Triton's IR, then linalg (triton-ascend), then HIVM (BiShengIR).

The published compiler lacks only its last step, which turns HIVM into machine code; a script that copies its input stands
in for it. So what is learnt here is whether a kernel compiles until then, and whether its blocks fit the unified buffer,
whose planning is part of HIVM. All reading of the compilers' texts is in this file.

LP_ASCEND_IR names the folder with one folder for each release of ascendnpu-ir, LP_ASCEND_CACHE one for what is kept.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton.backends.ascend.compiler as ascend_compiler

VERSIONS = {"1.0.0": "CANN 8.5", "1.1.0": "CANN 9.0", "1.2.0": "CANN 9.1"}
"""Releases of ascendnpu-ir, and the CANN whose compiler each is by its date."""
LATEST = "1.2.0"
CACHE = Path(os.environ.get("LP_ASCEND_CACHE", tempfile.gettempdir())) / "ascend-hivm"

_LAST_STEP = """#!/bin/sh
[ "$1" = "--version" ] && { echo "hivmc 1.2.0"; exit 0; }
in=""; out=""; before=""
for word in "$@"; do
  [ "$before" = "-o" ] && out="$word"
  case "$word" in -*) ;; *) [ "$before" != "-o" ] && in="$word" ;; esac
  before="$word"
done
cp "$in" "$out.o"; cp "$in" "$out"
"""
_BITS = {"f32": 32, "i32": 32, "bf16": 16, "f16": 16, "i64": 64, "i1": 8, "i8": 8, "i16": 16}


class LoweringError(Exception):
    """A kernel that a compiler refuses. ``overflow`` are the bytes of unified buffer that it wanted, if that is why."""

    def __init__(self, message: str, overflow: int | None = None) -> None:
        super().__init__(message)
        self.overflow = overflow


class Hivm(NamedTuple):
    """What BiShengIR made of a kernel."""

    text: str
    ub_bytes: int  # at the worst
    mix_mode: str  # aiv: vector cores only


def compiler(version: str = LATEST) -> Path:
    """BiShengIR's compiler of a release."""
    folder = Path(os.environ["LP_ASCEND_IR"]) / version / "ascendnpuir" / "bin"
    for path in folder.glob("bishengir-compile*"):  # the one for 950 is a program of its own
        if not os.access(path, os.X_OK):
            path.chmod(0o755)
    return folder / "bishengir-compile"


@functools.cache
def last_step() -> str:
    """A folder with the stand-in for the compiler's last step."""
    folder = Path(tempfile.mkdtemp(prefix="ascend-last-step-"))
    for name in ("hivmc", "hivmc-a5"):
        (folder / name).write_text(_LAST_STEP)
        (folder / name).chmod(0o755)
    return str(folder)


def to_hivm(linalg: str, version: str = LATEST, arch: str = "Ascend910B3") -> Hivm:
    """Compile one module of linalg for a chip, by one release; each once, since the releases are pinned.

    Raises:
        LoweringError: it does not compile, or its blocks do not fit.
    """
    key = hashlib.sha256(f"{version} {arch} {options_for(arch)}\n{linalg}".encode()).hexdigest()[:24]
    known = CACHE / f"{key}.mlir"
    text, metadata = ascend_compiler._parse_linalg_metadata(linalg, {})
    if not known.exists():
        hivm = _compile(text, version, arch)
        CACHE.mkdir(parents=True, exist_ok=True)
        part = CACHE / f"{key}.{os.getpid()}"
        part.write_text(hivm)
        part.rename(known)
    hivm = known.read_text()
    return Hivm(hivm, ub_peak_bytes(hivm), metadata["mix_mode"])


def options_for(arch: str) -> list[str]:
    """What triton-ascend asks the compiler for, by default."""
    if arch.startswith("Ascend950"):
        return ["--enable-auto-multi-buffer=False", "--enable-auto-bind-sub-block=False"]
    return ["--enable-auto-multi-buffer=True", "--enable-auto-bind-sub-block=True", "--enable-hivm-compile=true"]


def _compile(text: str, version: str, arch: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ttadapter.mlir"
        source.write_text(text)
        program = compiler(version)
        done = subprocess.run(
            [
                program, source, f"--target={arch}", *options_for(arch), "--enable-hfusion-compile=true",
                "--enable-triton-kernel-compile=true", "-o", Path(folder) / "kernel",
            ],
            capture_output=True, text=True, cwd=folder,
            env={**os.environ, "PATH": os.pathsep.join((last_step(), str(program.parent), os.environ["PATH"]))},
        )  # fmt: skip
        if done.returncode:
            wanted = re.findall(r"ub overflow, requires (\d+) bits while (\d+)", done.stderr)
            if wanted:
                wants, has = (int(bits) // 8 for bits in wanted[-1])
                raise LoweringError(f"{version} {arch}: {wants} bytes of unified buffer wanted, {has} there", wants)
            raise LoweringError(f"{version} {arch}: " + re.sub(r'loc\("[^"]*"(:\d+:\d+)?\):?', "", done.stderr)[-2000:])
        return (Path(folder) / "kernel.o").read_text()


def ub_peak_bytes(hivm: str) -> int:
    """The end of the last buffer that was placed in the unified buffer."""
    peak = 0
    for function in hivm.split("func.func ")[1:]:  # a name is one function's
        constants = re.findall(r"%(\S+) = (?:arith\.constant |llvm\.mlir\.constant\()(\d+) : i64", function)
        starts = {name: int(value) for name, value in constants}
        for start, shape, kind in re.findall(
            r"hivm\.hir\.pointer_cast\(%(\S+?)\) : memref<((?:\d+x)*)(\w+), #hivm\.address_space<ub>>", function
        ):
            entries = math.prod(int(size) for size in filter(None, shape.split("x")))
            if start in starts:
                peak = max(peak, starts[start] + entries * _BITS.get(kind, 32) // 8)
    return peak


def tensor_kinds(linalg: str) -> list[int]:
    """Of each pointer of a kernel: 0 it is only read, 1 only written, 2 both."""
    return ascend_compiler._parse_linalg_metadata(linalg, {})[1]["tensor_kinds"]


def lint(linalg: str) -> list[str]:
    """What compiles without a word and then does something else."""
    found = []
    if 2 in tensor_kinds(linalg):
        found.append("a pointer is both read and written: a mask that is no prefix, or a reading of what was stored")
    if 'GenericAtomicRMW = "cas"' in linalg:
        found.append("atomic_cas returns the new value, so a lock is never taken")
    if "atomic" in linalg.lower().replace("genericatomicrmw", "") or "GenericAtomicRMW" in linalg:
        found.append("an atomic operation: results would depend on the order of programs")
    count = linalg.count("ExtractedLoadOrStore")
    if count:
        found.append(f"{count} gathers by a scalar loop, which reads masked addresses too")
    if re.search(r'"tt[.]', linalg):
        found.append("an operation of Triton's is left over")
    if "llvm.inline_asm" in linalg:
        found.append("inline assembly of another chip")
    return found
