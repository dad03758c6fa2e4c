"""One process of `many_devices.py`, started by torchrun: all contenders with one engine, or a head cut by rows.

Rank 0 adds a line of JSON for each to the file that the settings name, so that what is measured survives the rest."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loss_plugins import LossConfig, VocabParallel, linear_cross_entropy, patch_model
from loss_plugins.bench.contenders import own
from loss_plugins.bench.inputs import SHAPES, Shape, flat
from loss_plugins.bench.measure import WRONG, WRONG_LOSS
from loss_plugins.bench.peers import PEERS
from loss_plugins.diagnostics.memory import PeakMeter
from loss_plugins.testing import leave_group

STOCK = "stock"
LLAMA = {"max_position_embeddings": 131_072, "vocab_size": 128_256, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "1b": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64,
    },
    "3b": LLAMA | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny": LLAMA | {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 997,
    },
}  # fmt: skip
"""The shapes of Llama 3.2, and one for a test. Weights are random, and a training step changes none (its rate is 0)."""
ADAM = {"lr": 0.0, "weight_decay": 0.0}


@dataclass
class Settings:
    """What the starting process wrote down."""

    kind: str  # fsdp2, zero3 or vocab
    device: str
    lines: str
    model: str = "tiny"
    batch: int = 4
    length: int = 2048
    contenders: tuple[str, ...] = (STOCK,)
    shapes: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    steps: int = 5
    warm: int = 2


class Ranks:
    """This process among the others."""

    def __init__(self, settings: Settings) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cpu")
        options: dict[str, Any] = {"timeout": timedelta(seconds=100)}
        if settings.device != "cpu":
            self.device = torch.device(settings.device, int(os.environ["LOCAL_RANK"]))
            torch.accelerator.set_device_index(self.device.index)
            options["device_id"] = self.device
        backend = "gloo" if settings.device == "cpu" else dist.get_default_backend_for_device(self.device)
        dist.init_process_group(backend, **options)
        self.lines = Path(settings.lines)

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    def most(self, *numbers: float) -> list[float]:
        """The largest of all processes'; NaN where one has it."""
        found = torch.tensor(numbers, device=self.device, dtype=torch.float32)
        everyone = [torch.empty_like(found) for _ in range(self.world)]
        dist.all_gather(everyone, found)
        return [float(n) for n in torch.stack(everyone).amax(0)]

    def write(self, row: dict[str, Any]) -> None:
        if self.rank == 0:
            row = {"ranks": self.world} | row
            with self.lines.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(", ".join(f"{key} {value}" for key, value in row.items()), file=sys.stderr, flush=True)


class Fsdp2:
    """The layers and the rest as parts; float32 weights, computed in bfloat16 on a GPU."""

    def __init__(self, model: Any, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        settings: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
        if device.type != "cpu":
            settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, **settings)
        self.model = self.inner = fully_shard(model, **settings)
        self.optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=device.type == "cuda")

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def norm(self) -> float:
        total: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        return float(total.full_tensor() if hasattr(total, "full_tensor") else total)


class Zero3:
    """DeepSpeed's parts; bfloat16 weights with float32 copies on a GPU."""

    def __init__(self, model: Any, device: torch.device) -> None:
        import deepspeed  # type: ignore[import-not-found,unused-ignore]

        # an operator for CPUs that it would compile first, for a minute, and without which it uses gloo
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "overlap_comm": device.type != "cpu"},
            "optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}}, "gradient_clipping": 1e9,
            "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": device.type != "cpu"},
        }  # fmt: skip
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.model, self.inner = self.engine, self.engine.module

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def norm(self) -> float:
        return float(self.engine.get_global_grad_norm())


ENGINES = {"fsdp2": Fsdp2, "zero3": Zero3}


def build(settings: Settings, device: torch.device) -> Any:
    """The same weights in every process, and for any number of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**MODELS[settings.model], use_cache=False))
    return ENGINES[settings.kind](model.to(device).train(), device)


@contextmanager
def installed(model: Any, name: str) -> Iterator[None]:
    """Inside, the model computes its loss as the contender does. A package's loss gets the head's weight in the head's
    own call, where the engine has it whole, and skips the model's own loss, as the packages' own patches do."""
    if name == STOCK:
        yield
    elif name in PEERS:
        from transformers.modeling_outputs import CausalLMOutput  # of which ZeRO-3 knows where its tensors are

        loss = PEERS[name].load()
        head = model.lm_head

        def forward(input_ids: Tensor, labels: Tensor) -> Any:
            hidden = model.model(input_ids=input_ids).last_hidden_state
            return CausalLMOutput(loss=head(hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))

        model.forward, head.forward = forward, lambda hidden, labels: loss(hidden, head.weight, labels)
        try:
            yield
        finally:
            del model.forward, head.forward
    else:
        contender = own(name)
        with patch_model(model, LossConfig(contender.strategy, loss_options=contender.options or None)) as handle:
            yield
            if handle.counts.materialised or not handle.counts.fused:
                raise RuntimeError(f"{name} made logits: {handle.materialised_by}")


def measure(
    engine: Any, name: str, batch: dict[str, Tensor], expected: float, ranks: Ranks, settings: Settings
) -> dict[str, Any]:
    """One contender's row. ``expected`` is this rank's loss."""
    row: dict[str, Any] = {}
    with installed(engine.inner, name):
        begin = time.perf_counter()
        for _ in range(settings.warm):
            loss = engine.step(batch)
            ranks.wait()
            row.setdefault("first_s", time.perf_counter() - begin)
        row["loss"], row["norm"] = float(loss), engine.norm()
        (row["loss_off"],) = ranks.most(abs(row["loss"] - expected) / abs(expected))
        with PeakMeter(ranks.device) if ranks.device.type == "cpu" else _peak(ranks.device) as meter:
            meter.mark()
            engine.step(batch)
            (row["peak_mib"],) = ranks.most(meter.read() / 2**20)
        times = []
        for _ in range(settings.steps):
            dist.barrier()
            ranks.wait()
            begin = time.perf_counter()
            engine.step(batch)
            ranks.wait()
            times.append(*ranks.most(time.perf_counter() - begin))
    times.sort()
    row |= {"ms": 1e3 * times[len(times) // 2], "ms_low": 1e3 * times[0], "ms_high": 1e3 * times[-1]}
    row["tokens_per_s"] = ranks.world * batch["input_ids"].numel() / times[len(times) // 2]
    return row


@contextmanager
def _peak(device: torch.device) -> Iterator[Any]:
    """The most that a step holds on a device, weights and optimizer included."""
    module = torch.get_device_module(device)
    yield SimpleNamespace(
        mark=lambda: module.reset_peak_memory_stats(device), read=lambda: module.max_memory_allocated(device)
    )


def judged(row: dict[str, Any], norm: float | None) -> dict[str, Any]:
    """The row, without its speed where its loss or the norm of its gradients is not stock's."""
    off = None if norm is None else abs(row["norm"] - norm) / norm
    row["norm_off"] = off
    if not row["loss_off"] <= WRONG_LOSS or (off is not None and not off <= WRONG):  # NaN is neither
        row["failed"] = f"wrong: loss off by {row['loss_off']:.1e}"
        row["failed"] += "" if off is None else f", gradients' norm by {off:.1e}"
        for key in ("ms", "ms_low", "ms_high", "tokens_per_s"):
            del row[key]
    return row


def train(settings: Settings, ranks: Ranks) -> None:
    """A row for each contender."""
    engine = build(settings, ranks.device)
    vocab = MODELS[settings.model]["vocab_size"]
    generator = torch.Generator().manual_seed(1 + ranks.rank)
    ids = torch.randint(0, vocab, (settings.batch, settings.length), generator=generator).to(ranks.device)
    # stock, a sequence at a time: what can always be had
    with torch.no_grad():
        expected = float(torch.stack([engine.model(input_ids=row[None], labels=row[None]).loss for row in ids]).mean())
    facts = {"kind": "training", "engine": settings.kind, "model": settings.model, "tokens": ids.numel()}
    norm: float | None = None
    for name in settings.contenders:
        row: dict[str, Any] = {"contender": name}
        broken = False
        try:
            if name in PEERS:
                PEERS[name].load()
        except Exception as error:  # a package that is not here leaves the engine as it is
            ranks.write(facts | row | {"failed": _line(error)})
            continue
        try:
            row |= judged(measure(engine, name, {"input_ids": ids, "labels": ids}, expected, ranks, settings), norm)
            norm = row["norm"] if norm is None and "failed" not in row else norm
        except Exception as error:  # of whatever kind: the others are still to be measured
            broken = True
            row["failed"] = "out of memory" if isinstance(error, torch.OutOfMemoryError) else _line(error)
        ranks.write(facts | row)
        if broken:  # a forward that broke off leaves parts whole
            del engine
            _settle(ranks.device)
            engine = build(settings, ranks.device)
        _settle(ranks.device)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def _settle(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def cut(settings: Settings, ranks: Ranks) -> None:
    """One problem, whole in every process and cut by rows over all of them, in turn."""
    for name in settings.shapes:
        shape = SHAPES.get(name) or Shape(*map(int, name.split("x")))
        dtype = torch.float32 if ranks.device.type == "cpu" else torch.bfloat16
        inputs = flat(shape, dtype, str(ranks.device))
        parallel = VocabParallel.even(shape.vocab)
        for word in settings.strategies:
            row: dict[str, Any] = {"kind": "vocab", "shape": name, "contender": word, "dtype": str(dtype)[6:]}
            try:
                row |= _both(own(word), inputs, parallel, ranks, settings)
            except Exception as error:
                row["failed"] = "out of memory" if isinstance(error, torch.OutOfMemoryError) else _line(error)
            ranks.write(row)
            _settle(ranks.device)


def _both(contender: Any, inputs: Any, parallel: VocabParallel, ranks: Ranks, settings: Settings) -> dict[str, Any]:
    hidden = inputs.hidden.detach().requires_grad_()
    whole = inputs.weight.detach().requires_grad_()
    part = inputs.weight[parallel.rows].clone().requires_grad_()

    def step(weight: Tensor, how: VocabParallel | None) -> Tensor:
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(
            hidden, weight, inputs.labels, strategy=contender.strategy, options=contender.options, vocab_parallel=how
        )
        loss.backward()
        return loss.detach()

    ways: dict[str, Callable[[], Tensor]] = {"one": lambda: step(whole, None), "all": lambda: step(part, parallel)}
    loss = ways["one"]()
    gradient, rows = hidden.grad.double(), whole.grad[parallel.rows].double()  # type: ignore[union-attr,index]
    cut_loss = ways["all"]()
    off = [float((loss - cut_loss).abs() / loss.abs())]
    for mine, truth in ((hidden, gradient), (part, rows)):
        off.append(float((mine.grad.double() - truth).norm() / truth.norm()))  # type: ignore[union-attr]
    del gradient, rows
    row: dict[str, Any] = dict(zip(("loss_off", "hidden_off", "weight_off"), ranks.most(*off), strict=True))
    if not (row["loss_off"] <= WRONG_LOSS and max(row["hidden_off"], row["weight_off"]) <= WRONG):
        return row | {"failed": f"wrong: off by {', '.join(f'{row[key]:.1e}' for key in row)}"}
    times: dict[str, list[float]] = {"one": [], "all": []}
    repeat = 5 if ranks.device.type != "cpu" else 1  # the host runs ahead, as in training
    for _ in range(settings.warm + settings.steps):
        for way, run in ways.items():
            dist.barrier()
            ranks.wait()
            begin = time.perf_counter()
            for _ in range(repeat):
                run()
            ranks.wait()
            times[way] += ranks.most((time.perf_counter() - begin) / repeat)
    medians = {way: sorted(taken[settings.warm :])[settings.steps // 2] for way, taken in times.items()}
    return row | {"ms_one": 1e3 * medians["one"], "ms": 1e3 * medians["all"], "faster": medians["one"] / medians["all"]}


def main(path: str) -> None:
    settings = Settings(**json.loads(Path(path).read_text()))
    ranks = Ranks(settings)
    if ranks.device.type == "cpu":
        torch.set_num_threads(1)
    (cut if settings.kind == "vocab" else train)(settings, ranks)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
