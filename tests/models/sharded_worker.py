"""Two processes train a tiny patched model, sharded or replicated; rank 0 prints one JSON line a case. Run by torchrun."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import batch, make
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from loss_plugins import patch_model
from loss_plugins.models.conformance.double import all_double
from loss_plugins.models.patch import find_handle
from loss_plugins.testing import leave_group

SAVED = ("fsdp2 root cce", "fsdp2 own late cce", "fsdp1 root cce", "fsdp1 own cce", "ddp cce", "fsdp2 tied")


def rows_of(rank: int, empty: bool) -> dict[str, Any]:
    """A rank's batch; with ``empty`` rank 1 has no label, and all divide by one count."""
    rows: dict[str, Any] = batch(seed=rank)
    if empty:
        rows["num_items_in_batch"] = torch.tensor(20)
        if rank:
            rows["labels"][:] = -100
    return rows


def reference(model: nn.Module, world: int, empty: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each rank's loss, and the gradients of their mean."""
    losses = [model(**rows_of(rank, empty)).loss for rank in range(world)]
    (sum(losses) / world).backward()
    return losses, {key: p.grad for key, p in model.named_parameters()}


def fsdp2(model: Any, strategy: str, *, own: bool, late: bool, half: bool = False) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if half else {}
    if not late:
        patch_model(model, strategy)
    for layer in (model.model if hasattr(model, "model") else model.transformer).children():
        if isinstance(layer, nn.ModuleList):
            for block in layer:
                fully_shard(block, mesh=mesh, **policy)
    if own:
        fully_shard(model.lm_head, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    if late:
        patch_model(model, strategy)
    return model


def fsdp1(model: Any, strategy: str, *, own: bool, late: bool) -> Any:
    if not late:
        patch_model(model, strategy)
    classes = {type(model.model.layers[0])} | ({type(model.lm_head)} if own else set())
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(classes), use_orig_params=True, device_id=torch.device("cpu")
    )
    if late:
        patch_model(model, strategy)
    return model


def ddp(model: Any, strategy: str) -> Any:
    patch_model(model, strategy)
    return DistributedDataParallel(model)


def tensor_parallel(model: Any, strategy: str, folder: str) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    how: dict[str, Any] = {"tp_plan": "auto"}
    if "tp_size" in inspect.signature(DistributedConfig).parameters:  # not in transformers 5.6
        how = {"distributed_config": DistributedConfig(tp_size=2)}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, **how)
    patch_model(model, strategy)
    return model


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {k.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for k, p in model.named_parameters()}
    found = {key.removeprefix("module."): p.grad for key, p in model.named_parameters()}
    return {key: g.full_tensor() if hasattr(g, "full_tensor") else g for key, g in found.items()}


def joined(part: Tensor, like: Tensor) -> Tensor:
    """The whole of a gradient of which each rank has a part, as plain tensors: transformers 5.6 shards so."""
    if part.shape == like.shape:
        return part
    dim = next(i for i, (own, whole) in enumerate(zip(part.shape, like.shape, strict=True)) if own != whole)
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)


def adapted() -> Any:
    """A model with LoRA on its head, everything trained."""
    import peft

    model = make("llama")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["lm_head"], init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model).double().requires_grad_(True)


def fsdp2_parts(model: Any, strategy: str) -> Any:
    """Each part of the adapter a unit of its own, whole only while it is called."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.lm_head.base_layer, model.lm_head.lora_A["default"], model.lm_head.lora_B["default"]):
        fully_shard(part, mesh=mesh)
    return fsdp2(model, strategy, own=False, late=True)


def checkpointed(model: Any) -> Any:
    """Its layers computed again in the backward."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def saved_as(model: Any, stock: nn.Module) -> bool:
    """Whether what is saved of it loads into a model that knows nothing of us, and is the very weights."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    fresh = copy.deepcopy(stock)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    if dist.get_rank() == 0:
        fresh.load_state_dict(whole)
        return all(torch.equal(a, b) for a, b in zip(fresh.parameters(), stock.parameters(), strict=True))
    return True


def run(case: str, wrap: Any, name: str = "llama", same_rows: bool = False, empty: bool = False) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = adapted() if name == "lora" else make(name)
    stock = copy.deepcopy(model)
    rows = rows_of(0 if same_rows else rank, empty)
    result: dict[str, Any] = {"case": case}
    try:
        model = wrap(model).train()
        with all_double():
            losses, expected = reference(stock, 1 if same_rows else world, empty)
            for _ in range(2):  # the second finds what the first left
                model.zero_grad()
                loss = model(**rows).loss
                loss.backward()
        gradients = {key: joined(g, expected[key]) for key, g in whole_gradients(model).items()}
        handle = find_handle(model)
        result |= {
            "loss": abs(loss.item() - losses[0 if same_rows else rank].item()),
            "gradient": max((gradients[key] - g).abs().max().item() for key, g in expected.items()),
            "size": max(g.abs().max().item() for g in expected.values()),
            "keys": gradients.keys() == expected.keys(),
            "fused": handle.counts.fused,
            "materialised": handle.counts.materialised,
        }
        if case in SAVED:
            result["saved"] = saved_as(model, stock)
    except Exception as error:  # the other cases still run
        result["error"] = f"{type(error).__name__}: {error}"
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make("llama").save_pretrained(folder)
    dist.barrier()
    for strategy in ("cce", "flce", "chunked"):
        run(f"fsdp2 root {strategy}", lambda m, s=strategy: fsdp2(m, s, own=False, late=False))
        run(f"fsdp2 own {strategy}", lambda m, s=strategy: fsdp2(m, s, own=True, late=False))
        run(f"fsdp2 own late {strategy}", lambda m, s=strategy: fsdp2(m, s, own=True, late=True))
        run(f"fsdp1 root {strategy}", lambda m, s=strategy: fsdp1(m, s, own=False, late=False))
        run(f"fsdp1 own {strategy}", lambda m, s=strategy: fsdp1(m, s, own=True, late=False))
        run(f"fsdp1 own late {strategy}", lambda m, s=strategy: fsdp1(m, s, own=True, late=True))
        run(f"ddp {strategy}", lambda m, s=strategy: ddp(m, s))
        run(f"tp {strategy}", lambda m, s=strategy: tensor_parallel(m, s, folder), same_rows=True)
        run(f"lora fsdp2 root {strategy}", lambda m, s=strategy: fsdp2(m, s, own=False, late=True), "lora")
        run(f"lora fsdp2 own {strategy}", lambda m, s=strategy: fsdp2(m, s, own=True, late=True), "lora")
        run(f"lora fsdp2 parts {strategy}", lambda m, s=strategy: fsdp2_parts(m, s), "lora")
        run(f"lora fsdp1 root {strategy}", lambda m, s=strategy: fsdp1(m, s, own=False, late=True), "lora")
        run(f"lora fsdp1 own {strategy}", lambda m, s=strategy: fsdp1(m, s, own=True, late=True), "lora")
        run(f"lora ddp {strategy}", lambda m, s=strategy: ddp(m, s), "lora")
    run("ddp empty", lambda m: ddp(m, "cce"), empty=True)
    run("fsdp2 tied", lambda m: fsdp2(m, "cce", own=False, late=False), "gpt2")
    run("fsdp2 checkpointed", lambda m: fsdp2(checkpointed(m), "cce", own=True, late=False))
    run("fsdp1 checkpointed", lambda m: fsdp1(checkpointed(m), "cce", own=True, late=False))
    run("fsdp2 empty", lambda m: fsdp2(m, "cce", own=True, late=False), empty=True)
    run("fsdp1 empty", lambda m: fsdp1(m, "cce", own=False, late=False), empty=True)
    run("fsdp2 bf16", lambda m: fsdp2(m.float(), "cce", own=False, late=False, half=True))
    leave_group()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    main(sys.argv[1])
