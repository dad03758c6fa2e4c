"""One of two processes of ``accelerate launch``: a patched model, cut as the launcher's file says, equals the whole one.

accelerate cuts no model on a CPU by itself, so its own functions are called for it. `test_launch.py` reads the line that
the first process prints."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from loss_plugins import patch_model
from loss_plugins.integrations.hf.loading import ModelArguments, load_config, load_model
from loss_plugins.testing import leave_group


def sharded(model: Any) -> Any:
    """By accelerate's FSDP2, with what the launcher put into the environment."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    rank = dist.get_rank()
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", device=torch.device("cpu"),
        is_main_process=rank == 0, process_index=rank, torch_device_mesh=None, parallelism_config=None,
    )  # fmt: skip
    return fsdp2_prepare_model(accelerator, model)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    arguments = ModelArguments(model_name_or_path=folder)
    model = load_model(arguments, load_config(arguments)).train()
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"
    whole = load_model(arguments, load_config(arguments)).train()
    handle = patch_model(model, "cce")
    if fsdp:
        model = sharded(model)
    batches = [
        torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(seed if fsdp else 0))
        for seed in range(world)
    ]
    losses = [whole(input_ids=batch, labels=batch).loss for batch in batches]
    (sum(losses) / world).backward()
    loss = model(input_ids=batches[rank], labels=batches[rank]).loss
    loss.backward()
    expected = {key: p.grad for key, p in whole.named_parameters()}
    parts = {key: p.grad for key, p in model.named_parameters()}
    gradients = {key: g.full_tensor() if isinstance(g, DTensor) else g for key, g in parts.items()}
    found = {
        "loss": abs(loss.item() - losses[rank].item()),
        "gradient": max((gradients[key] - g).abs().max().item() for key, g in expected.items()),
        "size": max(g.abs().max().item() for g in expected.values()),
        "rows": parts["lm_head.weight"].to_local().shape[0],
        "fused": handle.counts.fused, "materialised": handle.counts.materialised,
    }  # fmt: skip
    if rank == 0:
        print("FOUND " + json.dumps(found), flush=True)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
