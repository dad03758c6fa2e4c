"""Tiny models and data, and one short training run of any Trainer on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from loss_plugins import LossPluginArguments

VOCAB = 160
STOCK_SMOOTHS_BY_COUNT = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
"""Older Trainers take means of micro-batches when they smooth, so their curves depend on the accumulation."""

STRATEGIES = ("naive", "chunked", "flce", "cce")


def llama(**settings: Any) -> PreTrainedModel:
    """Two layers, hidden width 32, the same weights every time."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_implementation": "eager",
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | settings)))


def rows(count: int = 32, length: int = 12, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    """Sequences whose first 0 to 7 labels are ignored, so that batches differ in their number of tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(5, VOCAB - 1, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, 8, (), generator=generator))] = -100
        made.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones(length, dtype=torch.long)})
    return made


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    if any(name.startswith("loss_") or name == "liger_ops" for name in settings):
        kind = LossPluginArguments
    return kind(**(defaults | settings))


def run(
    make: type[Trainer],
    folder: Path,
    model: Callable[[], Any] = llama,
    data: list[Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer after its training."""
    made = make(
        model=model(),
        args=arguments(folder, **settings),
        train_dataset=rows() if data is None else data,
        **(trainer or {}),
    )
    made.train()
    return made


def count(trainer: Trainer, batch: dict[str, torch.Tensor]) -> Any:
    """What this version's Trainer hands to the model as the number of tokens: with or without the first of each row."""
    return trainer._get_num_items_in_batch([batch], torch.device("cpu"))


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: Trainer) -> list[float]:
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_curve(ours: Trainer, theirs: Trainer, tolerance: float = 1e-5) -> None:
    assert len(losses(ours)) == len(losses(theirs)) > 0
    torch.testing.assert_close(torch.tensor(losses(ours)), torch.tensor(losses(theirs)), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        torch.tensor(norms(ours)), torch.tensor(norms(theirs)), rtol=10 * tolerance, atol=tolerance
    )
