"""One of two processes of ``accelerate launch`` with DeepSpeed: ``loss-plugins`` with the words given, and a line of what
DeepSpeed was told to make and holds. `test_launch.py` reads it."""

from __future__ import annotations

from typing import Any

import deepspeed  # type: ignore[import-not-found,unused-ignore]

from loss_plugins.cli.main import app

# an operator that it would compile first, for a minute, and without which it uses gloo
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
initialize = deepspeed.initialize


def telling(*args: Any, **kwargs: Any) -> Any:
    engine, *others = initialize(*args, **kwargs)
    held = sum(p.numel() for p in engine.module.parameters())
    print(f"ENGINE stage {engine.zero_optimization_stage()}, {held} numbers held whole", flush=True)
    return engine, *others


if __name__ == "__main__":
    deepspeed.initialize = telling
    app()
