"""One of two processes of tiny patched models under FSDP2's and FSDP1's own settings; rank 0 prints one JSON line a case.
`test_fsdp_policies.py` starts it."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collectives import Gathers, same_everywhere
from tiny_models import batch, make
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from loss_plugins import LossConfig, patch_model
from loss_plugins.models.conformance.double import all_double
from loss_plugins.models.patch import find_handle
from loss_plugins.testing import leave_group

STRATEGIES = ("naive", "chunked", "flce", "cce", "auto")
CHUNKS = {"chunked": {"workspace_mb": 0.004}, "flce": {"workspace_mb": 0.004}}
CPU = torch.device("cpu")
HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
PLACES = ("root", "own", "with norm", "tied", "tied, with embedding")
FSDP2 = {
    **{place: {} for place in PLACES},
    **{f"{place}, offload": OFFLOAD for place in ("root", "own", "tied")},
    "own, kept": {"reshard_after_forward": False},
    "own, checkpointed": {},
    "own, output float64": {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float64, cast_forward_inputs=False)},
}
"""Where the head is, and the settings of each part."""
RUNS = [
    (case, name) for case in FSDP2 for name in (STRATEGIES if case in ("root", "own", "tied") else ("chunked", "cce"))
]
GATHERED = [case for case in FSDP2 if "float64" not in case]
SEEN = ("chunked", "flce", "cce")
"""Whose gathers are counted."""
HALVES = ("root", "own", "with norm", "tied")
WRAPPED = [
    (policy, orig, extra)
    for policy in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP") for orig in (True, False)
    for extra in ("", "offload", "SHARD_GRAD_OP", "NO_SHARD")
    if not (orig and extra == "offload")  # on a CPU torch itself then trains nothing
]  # fmt: skip
"""FSDP1: accelerate's wrapping policy, use_orig_params, and what else."""
FIFTY = [
    ("ddp", "flce"), ("ddp", "chunked"), ("fsdp2", "cce"), ("fsdp2", "chunked"), ("hsdp", "cce"), ("hsdp", "flce"),
    ("fsdp1", "cce"),
]  # fmt: skip


def patched(model: Any, strategy: str | None) -> Any:
    if strategy is not None:
        patch_model(model, LossConfig(strategy, loss_options=CHUNKS.get(strategy)))
    return model


def rows_of(rank: int, items: bool = False) -> dict[str, Any]:
    """A rank's batch; the second's is longer, so it has more chunks."""
    rows: dict[str, Any] = batch(rows=1 + 2 * rank, seed=rank)
    if items:
        rows["num_items_in_batch"] = torch.tensor(20)
    return rows


def name_of(case: str) -> str:
    return "gpt2" if "tied" in case else "llama"


def fsdp2(model: Any, case: str, mesh: Any = None, **settings: Any) -> Any:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    settings["mesh"] = mesh
    if "checkpointed" in case:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trunk = model.transformer if hasattr(model, "transformer") else model.model
    for block in trunk.h if hasattr(trunk, "h") else trunk.layers:
        fully_shard(block, **settings)
    if "own" in case:
        fully_shard(model.lm_head, **settings)
    if "with norm" in case:
        fully_shard([trunk.norm, model.lm_head], **settings)
    if "with embedding" in case:
        fully_shard([trunk.wte, model.lm_head], **settings)
    return fully_shard(model, **settings)


def fsdp1(model: Any, policy: str, orig: bool, extra: str = "", **settings: Any) -> Any:
    """Wrapped by the policy that accelerate makes of its config file's words."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, auto_wrap_policy=policy, min_num_params=2000,
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"] if policy == "TRANSFORMER_BASED_WRAP" else None,
    )  # fmt: skip
    plugin.set_auto_wrap_policy(model)
    if extra == "offload":
        settings["cpu_offload"] = CPUOffload(offload_params=True)
    elif extra:
        settings["sharding_strategy"] = ShardingStrategy[extra]
    return FullyShardedDataParallel(
        model, auto_wrap_policy=plugin.auto_wrap_policy, use_orig_params=orig, device_id=CPU, **settings
    )


def whole_weights(model: Any) -> dict[str, Tensor]:
    """Every parameter with all its numbers, in whatever way it is sharded."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {k.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for k, p in model.named_parameters()}
    found = {key.removeprefix("module."): p.detach() for key, p in model.named_parameters()}
    return {k: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for k, p in found.items()}


def train(model: Any, wrap: Callable[[Any], Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and what one step of SGD takes from each parameter: its gradient."""
    model = wrap(model.train())
    before = whole_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):  # the second finds what the first left
        optimizer.zero_grad()
        loss = model(**rows_of(dist.get_rank())).loss
        loss.backward()
    optimizer.step()
    after = whole_weights(model)
    return loss.detach(), {key: before[key] - after[key] for key in before}


def errors(name: str, strategy: str | None, dtype: torch.dtype, wrap: Callable[[Any], Any]) -> dict[str, Any]:
    """Of loss and gradients, beside one process's in float64; the worst of the ranks."""
    truth = make(name)
    with all_double():
        losses = [truth(**rows_of(rank)).loss for rank in range(dist.get_world_size())]
        (sum(losses) / len(losses)).backward()
    model = patched(make(name, dtype), strategy)
    with all_double() if dtype == torch.float64 else torch.enable_grad():
        loss, found = train(model, wrap)
    expected = {key: p.grad for key, p in truth.named_parameters()}
    off = (loss - losses[dist.get_rank()]).abs().item(), max((found[k] - g).abs().max() for k, g in expected.items())
    worst = torch.tensor(off)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    counts = getattr(find_handle(model), "counts", None)
    difference = torch.cat([(found[key] - g).flatten().double() for key, g in expected.items()])
    return {
        "loss": worst[0].item(), "gradient": worst[1].item(), "norm": difference.norm().item(), "fused": getattr(counts, "fused", 0),
        "materialised": getattr(counts, "materialised", 0), "keys": found.keys() == expected.keys(),
        "size": max(g.abs().max().item() for g in expected.values()),
    }  # fmt: skip


def gathers(name: str, strategy: str | None, wrap: Callable[[Any], Any]) -> list[int]:
    """What the second step gathers."""
    model = wrap(patched(make(name, torch.float32), strategy))
    for _ in range(2):
        with Gathers() as seen:
            model(**rows_of(dist.get_rank())).loss.backward()
    return seen.sizes


def fifty_steps(kind: str, strategy: str) -> dict[str, Any]:
    """On how many of them the processes' weights differ; a rank without a token now and then."""
    model: Any = patched(make("llama", torch.float32), strategy)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp1":
        model = fsdp1(model, "TRANSFORMER_BASED_WRAP", True)
    else:
        replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = fsdp2(model, "own", replicas if kind == "hsdp" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, differing = [], 0
    for step in range(50):
        rows = rows_of(dist.get_rank(), items=True)
        if step % 7 == 3 and dist.get_rank():
            rows["labels"][:] = -100
        optimizer.zero_grad()
        loss = model(**rows).loss
        loss.backward()
        optimizer.step()
        differing += not same_everywhere(whole_weights(model).values())
        losses.append(loss.item())
    return {"differing": differing, "first": losses[0], "last": losses[-1]}


def checkpoints(kind: str, folder: str) -> dict[str, Any]:
    """What is saved with us is loaded without, and the other way round: parts, and whole."""
    found: dict[str, Any] = {}
    for ours in (True, False):
        saver = _with_optimizer(kind, "cce" if ours else None, 0)
        loader = _with_optimizer(kind, None if ours else "cce", 1)
        for whole in (True, False):
            options = StateDictOptions(full_state_dict=whole)
            model, optimizer = copy.deepcopy(get_state_dict(*saver, options=options))
            if not whole:
                path = f"{folder}/{kind}-{ours}"
                checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
                model, optimizer = get_state_dict(*loader, options=options)
                checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
            set_state_dict(*loader, model_state_dict=model, optim_state_dict=optimizer, options=options)
            found[f"at once, ours={ours}, whole={whole}"] = _difference(saver[0], loader[0])
            for each in (saver, loader):
                _one_step(*each)
            found[f"after a step, ours={ours}, whole={whole}"] = _difference(saver[0], loader[0])
            _one_step(*saver)
    return found


def _with_optimizer(kind: str, strategy: str | None, seed: int) -> tuple[Any, Any]:
    """A wrapped model that has made a step, so that its optimizer has a state."""
    model = patched(make("llama", seed=seed), strategy)
    model = fsdp2(model, "own") if kind == "fsdp2" else fsdp1(model, "TRANSFORMER_BASED_WRAP", True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _one_step(model, optimizer)
    return model, optimizer


def _one_step(model: Any, optimizer: Any) -> None:
    with all_double():
        optimizer.zero_grad()
        model(**rows_of(dist.get_rank())).loss.backward()
        optimizer.step()


def _difference(first: Any, second: Any) -> float:
    pairs = zip(whole_weights(first).values(), whole_weights(second).values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def main(path: str, rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # what FSDP1's offload asks of a device, and torch's stand-ins on a CPU lack
    Tensor.pin_memory = lambda self, *_: self
    torch.cpu.Stream.synchronize = lambda self: None
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)

    def say(case: str, result: Any) -> None:
        if rank == 0:
            print(json.dumps({"case": case, **result}), flush=True)

    for case, strategy in RUNS:
        wrap = partial(fsdp2, case=case, **FSDP2[case])
        say(f"fsdp2 {case}, {strategy}", errors(name_of(case), strategy, torch.float64, wrap))
    for case in HALVES:
        for strategy in (None, *SEEN):
            wrap = partial(fsdp2, case=case, **HALF)
            say(f"fsdp2 half {case}, {strategy}", errors(name_of(case), strategy, torch.float32, wrap))
    for policy, orig, extra in WRAPPED:
        for strategy in ("cce", "chunked"):
            wrap = partial(fsdp1, policy=policy, orig=orig, extra=extra)
            say(f"fsdp1 {policy} {orig} {extra}, {strategy}", errors("llama", strategy, torch.float64, wrap))
    for strategy in (None, *SEEN):
        half = MixedPrecision(torch.bfloat16, torch.float32)
        wrap = partial(fsdp1, policy="TRANSFORMER_BASED_WRAP", orig=True, mixed_precision=half)
        say(f"fsdp1 half, {strategy}", errors("llama", strategy, torch.float32, wrap))
        for case in GATHERED:
            wrap = partial(fsdp2, case=case, **FSDP2[case])
            say(f"gathers fsdp2 {case}, {strategy}", {"sizes": gathers(name_of(case), strategy, wrap)})
        for policy in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"):
            wrap = partial(fsdp1, policy=policy, orig=True)
            say(f"gathers fsdp1 {policy}, {strategy}", {"sizes": gathers("llama", strategy, wrap)})
    for kind, strategy in FIFTY:
        say(f"fifty {kind} {strategy}", fifty_steps(kind, strategy))
    for kind in ("fsdp2", "fsdp1"):
        say(f"checkpoints {kind}", checkpoints(kind, str(Path(path).parent)))
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
