"""One of two processes of tiny patched models under DeepSpeed's ZeRO on a CPU; rank 0 prints one JSON line a case.
`test_deepspeed.py` starts it."""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collectives import Gathers, same_everywhere
from tiny_models import batch, make
from torch import Tensor, nn

from loss_plugins import LossConfig, find_handle, patch_model
from loss_plugins.testing import leave_group

STRATEGIES = ("naive", "chunked", "flce", "cce", "auto")
STAGES = (1, 2, 3)
CHUNKS = {"chunked": {"workspace_mb": 0.004}, "flce": {"workspace_mb": 0.004}}  # 8 rows of 120 float32 logits
KINDS = {
    "plain": ("llama", "plain"),
    "tied": ("gpt2", "plain"),
    "softcap": ("gemma2", "plain"),
    "no token": ("llama", "no token"),
    "tied, no token": ("gpt2", "no token"),
    "unequal": ("llama", "unequal"),
    "saved head": ("saved head", "unequal"),
    "LoRA head": ("LoRA head", "unequal"),
}
"""What is special -> (model, batches)."""
CASES = [
    *((stage, strategy, "plain") for stage in STAGES for strategy in STRATEGIES),
    *((3, strategy, "unequal") for strategy in STRATEGIES),
    *((2, "cce", kind) for kind in KINDS if kind != "plain"),
    *((3, strategy, kind) for strategy in ("chunked", "cce") for kind in KINDS if kind not in ("plain", "unequal")),
    (3, "flce", "LoRA head"),
]
FIFTY = [(1, "cce"), (2, "flce"), (3, "cce"), (3, "flce"), (3, "chunked")]
ONCE = {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
"""Makes ZeRO-3 let go of each weight after its use, as it does with models that do not fit."""


def rows_of(rank: int, kind: str) -> dict[str, Any]:
    """A rank's batch. ``no token``: rank 1 has no label; ``unequal``: it has three times the rows, so more chunks. Both
    divide by one count."""
    rows: dict[str, Any] = batch(rows=3 if kind == "unequal" and rank else 1, seed=rank)
    if kind != "plain":
        rows["num_items_in_batch"] = torch.tensor(20)
    if kind == "no token" and rank:
        rows["labels"][:] = -100
    return rows


def engine_of(model: Any, stage: int, optimizer: str = "SGD", lr: float = 0.0, **zero: Any) -> Any:
    import deepspeed

    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}), **zero}
    settings = {"lr": lr} if optimizer == "SGD" else {"lr": lr, "torch_adam": True}  # its own Adam is compiled first
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": optimizer, "params": settings}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    return engine


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_grad

    return {key: safe_get_full_grad(p) for key, p in model.named_parameters() if p.requires_grad}


def weights_of(model: nn.Module) -> list[Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [p.detach().clone() for p in model.parameters()]


def adapted(name: str) -> Any:
    """A model with LoRA in its layers and a head of its own, or LoRA on its head."""
    import peft

    model = make("llama", torch.float32)
    torch.manual_seed(1)
    targets, saved = (["lm_head"], None) if name == "LoRA head" else (["q_proj"], ["lm_head"])
    config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=targets, modules_to_save=saved)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    return model


def run(stage: int, strategy: str, kind: str) -> dict[str, Any]:
    """Loss and gradients beside one process's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    name, batches = KINDS[kind]
    model = adapted(name) if "head" in name else make(name, torch.float32)
    stock = copy.deepcopy(model)
    losses = [stock(**rows_of(each, batches)).loss for each in range(world)]
    (sum(losses) / world).backward()
    expected = {key: p.grad for key, p in stock.named_parameters() if p.requires_grad}
    handle = patch_model(model, LossConfig(strategy, loss_options=CHUNKS.get(strategy)))
    engine = engine_of(model, stage)
    for _ in range(2):  # ZeRO-3 gathers in the second as it has seen in the first
        loss = engine(**rows_of(rank, batches)).loss
        engine.backward(loss)
        found = gradients_of(model)
        engine.step()
    off = [
        abs(loss.item() - losses[rank].item()),
        *((found[key] - g).abs().max().item() for key, g in expected.items()),
    ]
    errors = torch.tensor([off[0], max(off[1:])])
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return {
        "loss": errors[0].item(), "gradient": errors[1].item(), "fused": handle.counts.fused,
        "size": max(g.abs().max().item() for g in expected.values()), "materialised": handle.counts.materialised,
        "held": sum(p.numel() for p in model.get_output_embeddings().parameters()),
    }  # fmt: skip


def fifty_steps(stage: int, strategy: str) -> dict[str, Any]:
    """On how many of them the processes' weights differ; a rank without a token now and then."""
    model = make("llama", torch.float32)
    patch_model(model, LossConfig(strategy, loss_options=CHUNKS.get(strategy)))
    engine = engine_of(model, stage, "AdamW", 1e-2)
    losses, differing = [], 0
    for step in range(50):
        loss = engine(**rows_of(dist.get_rank(), "no token" if step % 7 == 3 else "unequal")).loss
        engine.backward(loss)
        engine.step()
        differing += not same_everywhere(weights_of(model))
        losses.append(loss.item())
    return {"differing": differing, "first": losses[0], "last": losses[-1]}


def late(stage: int) -> dict[str, Any]:
    """Patched by its engine, after DeepSpeed has taken it, and unpatched again."""
    model = make("llama", torch.float32)
    engine = engine_of(model, stage)
    rows = rows_of(dist.get_rank(), "plain")
    stock = engine(**rows).loss
    engine.backward(stock)
    engine.step()
    handle = patch_model(engine, "cce")
    one_step(engine)
    loss = engine(**rows).loss
    found = {"fused": handle.counts.fused, "found": find_handle(engine) is handle, "off": abs((loss - stock).item())}
    engine.backward(loss)
    handle.undo()
    return found | {"logits": engine(**rows).logits is not None}


def gathers(strategy: str | None) -> dict[str, Any]:
    """What a step of ZeRO-3 gathers once it knows the order."""
    model = make("llama", torch.float32)
    if strategy is not None:
        patch_model(model, LossConfig(strategy, loss_options=CHUNKS.get(strategy)))
    engine, seen = engine_of(model, 3, **ONCE), Gathers()
    for step in range(3):
        with seen if step == 2 else Gathers():
            engine.backward(engine(**rows_of(dist.get_rank(), "unequal")).loss)
            engine.step()
    return {"sizes": seen.sizes, "head": model.lm_head.weight.ds_numel}


def checkpoints(stage: int, folder: str) -> dict[str, Any]:
    """What is saved with us is loaded without, and the other way round; whole weights too."""
    found = {}
    for ours in (True, False):
        path = f"{folder}/{stage}-{ours}"
        saver, loader = make("llama", torch.float32), make("llama", torch.float32, seed=1)
        patch_model(saver if ours else loader, "cce")
        engines = [engine_of(model, stage, "AdamW", 1e-2) for model in (saver, loader)]
        one_step(engines[0])
        engines[0].save_checkpoint(path, tag="saved")
        found[f"loaded, ours={ours}"] = engines[1].load_checkpoint(path, tag="saved")[0] is not None
        for moment in ("at once", "after a step"):  # the optimizer's state is in it too
            pairs = zip(weights_of(saver), weights_of(loader), strict=True)
            error = max((a - b).abs().max().item() for a, b in pairs)
            found[f"{moment}, ours={ours}"] = error
            for engine in engines:
                one_step(engine)
    if dist.get_rank() == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        whole = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{stage}-True", "saved")
        found["whole"] = set(whole) == set(make("llama").state_dict())
    return found


def one_step(engine: Any) -> None:
    engine.backward(engine(**rows_of(dist.get_rank(), "plain")).loss)
    engine.step()


def start(path: str, rank: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2", DS_ACCELERATOR="cpu")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # an operator that it would compile first, for a minute, and without which it uses gloo
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def main(path: str, rank: int) -> None:
    printed = os.dup(1)
    os.dup2(2, 1)  # deepspeed prints too
    start(path, rank)

    def say(case: str, result: dict[str, Any]) -> None:
        if rank == 0:
            os.write(printed, (json.dumps({"case": case, **result}) + "\n").encode())

    for stage, strategy, kind in CASES:
        say(f"zero-{stage} {strategy}, {kind}", run(stage, strategy, kind))
    for stage, strategy in FIFTY:
        say(f"fifty zero-{stage} {strategy}", fifty_steps(stage, strategy))
    for stage in STAGES:
        say(f"late {stage}", late(stage))
    for strategy in (None, *STRATEGIES):
        say(f"gathers {strategy}", gathers(strategy))
    for stage in STAGES:
        say(f"checkpoints {stage}", checkpoints(stage, str(Path(path).parent)))
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
