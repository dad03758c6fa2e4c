"""What processes of a group can be asked: which weights they gather, and whether they hold the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Gathers(TorchDispatchMode):
    """Inside, ``sizes`` has how many numbers each all-gather put together, in order; of the backward too, which runs in
    the caller's thread on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")) and "gather" in name:
            self.sizes.append(_numbers(args[0]))
        return func(*args, **(kwargs or {}))


def _numbers(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return sum(_numbers(each) for each in value) if isinstance(value, list | tuple) else 0


def same_everywhere(tensors: Iterable[Tensor]) -> bool:
    """Whether all processes hold the same bits."""
    digest = hashlib.sha256(b"".join(t.detach().contiguous().cpu().numpy().tobytes() for t in tensors)).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    return len(set(digests)) == 1
