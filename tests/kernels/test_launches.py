"""A kernel is launched again without Triton's look at its arguments only where Triton would find the same code."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from loss_plugins.kernels.triton import _common


def arguments():
    """Of every kind that tells launches apart, and some that do not."""
    matrix = torch.zeros(64, 64)
    tensors = [matrix, matrix[1:], matrix.view(-1)[1:], matrix.view(-1)[2:], matrix.bfloat16(), matrix.long()]
    numbers = [0, 1, 2, 3, 16, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**32 + 1, 2**63]
    others = [1.0, 2.5, True, False, None]
    if _common.TensorDescriptor is not None:
        blocks = [(matrix, [64, 32]), (matrix, [32, 64]), (matrix[:8], [64, 32]), (matrix.bfloat16(), [64, 32])]
        others += [_common.descriptor(*each) for each in blocks]
    return [*tensors, *numbers, *others]


def test_the_key_has_whatever_triton_specialises_for():
    jit = pytest.importorskip("triton.runtime.jit")
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    if not hasattr(jit, "native_specialize_impl"):
        pytest.skip("this Triton looks at arguments by other means")
    backend, same = compiler.CUDABackend(target), 0
    for one, other in itertools.combinations(arguments(), 2):
        if _common._kind(one) == _common._kind(other):
            same += 1
            for specialised, aligned in itertools.product((True, False), repeat=2):
                looks = [
                    jit.native_specialize_impl(backend, each, False, specialised, aligned) for each in (one, other)
                ]
                assert looks[0] == looks[1], (one, other)
    assert same >= 10


class Compiled:
    def __init__(self, seen):
        self.seen = seen

    def __getitem__(self, grid):
        return lambda *args: self.seen.append(("again", grid, args))


class Kernel:
    __name__ = "kernel"
    arg_names = ("tensor", "number", "SIZE", "FLAG")

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.seen.append(("looked at", grid, args, options)) or Compiled(self.seen)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(_common, "REUSED", True)
    return Kernel()


def test_arguments_stand_in_their_order_again(kernel):
    launch, options = _common.Reused(kernel), {"FLAG": True, "SIZE": 8, "num_warps": 4}
    first, second = torch.zeros(4), torch.ones(4)
    launch[(5,)](first, 32, **options)
    launch[(6, 7)](second, 48, **options)
    assert kernel.seen == [("looked at", (5,), (first, 32), options), ("again", (6, 7, 1), (second, 48, 8, True))]


def test_other_arguments_are_looked_at(kernel):
    launch = _common.Reused(kernel)
    launches = 0
    for tensor, number in itertools.product((torch.zeros(4), torch.zeros(5)[1:], torch.zeros(4).half()), (1, 2, 16)):
        for options in ({"SIZE": 8, "FLAG": True}, {"SIZE": 8, "FLAG": False}, {"SIZE": 4, "FLAG": True}):
            for warps in (4, 8):
                launch[(5,)](tensor, number, **options, num_warps=warps)
                launches += 1
    assert [what for what, *_ in kernel.seen] == ["looked at"] * launches


def test_nothing_is_reused_by_an_older_triton(kernel, monkeypatch):
    monkeypatch.setattr(_common, "REUSED", False)
    launch = _common.Reused(kernel)
    for _ in range(2):
        launch[(5,)](torch.zeros(4), 2, SIZE=8, FLAG=True)
    assert [what for what, *_ in kernel.seen] == ["looked at"] * 2


def test_few_are_kept(kernel):
    launch = _common.Reused(kernel)
    for size in range(3000):
        launch[(5,)](torch.zeros(4), 2, SIZE=size, FLAG=True)
    assert len(launch._compiled) <= 1024
