"""Compile every Triton kernel for GPUs that need not be here; run by test_compiles.py without the interpreter.

Prints a line a kernel: target, name, flags, bytes of shared memory.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loss_plugins.kernels.triton import backward, flce, linear_ce, product

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), False),
    "sm_90": (GPUTarget("cuda", 90, 32), False),
    "sm_90 bulk copies": (GPUTarget("cuda", 90, 32), True),
    "gfx942": (GPUTarget("hip", "gfx942", 64), False),
}
SHARED = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_90 bulk copies": 227 * 1024, "gfx942": 64 * 1024}
FLAGS = [name for name in linear_ce._linear_ce_kernel.arg_names if name.startswith(("HAS_", "WANT_"))]
POINTERS = {
    "bias": "*bf16", "labels": "*i64", "class_weight": "*fp32", "count": "*i64", "parts": "*fp32", "best": "*i32",
    "best_value": "*fp32", "lse": "*fp32", "coef_p": "*fp32", "coef_label": "*fp32", "coef_weight": "*fp32",
    "out_bias": "*fp32", "offset": "*fp32", "tile_offset": "*fp32", "out_best": "*i32", "factor": "*fp32",
    "scale": "fp32", "softcap": "fp32", "limit": "fp32",
}  # fmt: skip


def compile_for(target: str, kernel: Any, constants: dict[str, Any], **types: str) -> None:
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in constants else types.get(name, POINTERS.get(name, "i32")) for name in names
    }
    source = ASTSource(kernel, signature, constexprs={(names.index(name),): v for name, v in constants.items()})
    built = triton.compile(source, target=TARGETS[target][0], options={"num_warps": 8, "num_stages": 3})
    on = [name for name, value in constants.items() if value is True]
    print(f"{target}: {kernel.__name__} {' '.join(on)} shared {built.metadata.shared}")
    assert built.metadata.shared <= SHARED[target], (
        f"{kernel.__name__} takes {built.metadata.shared} bytes of shared memory"
    )


def main(target: str) -> None:
    bulk = TARGETS[target][1]

    def matrix(rows: int, columns: int, kind: str = "bf16") -> str:
        return f"tensordesc<{kind}[{rows}, {columns}]>" if bulk else f"*{kind}"

    for everything in (False, True):
        flags = dict.fromkeys([*FLAGS, "NEED_BIAS"], everything)
        shared = {"H": 2304, "BLOCK_H": 64, "DTYPE": tl.bfloat16, "PRECISION": "ieee", "TMA": bulk, **flags}
        n, v = (256, 128) if bulk else (128, 128)
        compile_for(
            target, linear_ce._linear_ce_kernel, {**shared, "BLOCK_N": n, "BLOCK_V": v}, hidden=matrix(n, 64),
            weight=matrix(v, 64),
        )  # fmt: skip
        compile_for(target, linear_ce._merge_kernel, {**shared, "BLOCK_N": n}, out="*fp32")
        n, v = (128, 256) if bulk else (128, 128)
        tiles = {"hidden": matrix(n, 64), "weight": matrix(v, 64), "out": matrix(n, v)}
        compile_for(target, backward._dz_kernel, {**shared, "BLOCK_N": n, "BLOCK_V": v}, **tiles)
        if bulk:
            compile_for(target, flce._exp_kernel, {**shared, "BLOCK_N": n, "BLOCK_V": v}, **tiles)
            compile_for(target, flce._rescale_kernel, {"BLOCK_N": n, "BLOCK_V": v}, out="*bf16")
    for transposed in (False, True) if bulk else ():
        for add in (False, True):
            compile_for(
                target, product._product_kernel,
                {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "DTYPE": tl.bfloat16, "TRANSPOSED": transposed, "ADD": add},
                left=matrix(64, 128) if transposed else matrix(128, 64), right=matrix(64, 256),
                out=matrix(128, 128, "fp32") if add else matrix(128, 256),
            )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
