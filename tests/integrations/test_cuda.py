"""The Trainer on a GPU: same numbers, memory read at every step, and no waiting for the device on the step path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import STOCK_SMOOTHS_BY_COUNT, STRATEGIES, arguments, llama, logged, losses, rows, run
from transformers import PreTrainedModel, Trainer

from loss_plugins import LossConfig, LossPluginTrainer
from loss_plugins.diagnostics.memory import peak_allocated
from loss_plugins.integrations.hf.monitor import LossMonitor
from loss_plugins.models.patch import patch_model

pytestmark = pytest.mark.gpu


def wide() -> PreTrainedModel:
    return llama(vocab_size=16384)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_curve_equals_stock(strategy: str, tmp_path: Path) -> None:
    settings = {"use_cpu": False, "label_smoothing_factor": 0.1 if STOCK_SMOOTHS_BY_COUNT else 0.0}
    stock = run(Trainer, tmp_path, model=wide, trainer={"eval_dataset": rows(6)}, **settings)
    ours = run(LossPluginTrainer, tmp_path, model=wide, trainer={"eval_dataset": rows(6)}, loss_strategy=strategy,
               loss_statistics=["accuracy", "entropy"], **settings)  # fmt: skip
    assert losses(ours) == pytest.approx(losses(stock), abs=1e-3)
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], abs=1e-3)
    assert ours.loss_report["hits"] == 8
    assert len(logged(ours, "loss_plugins/peak_loss_mib")) == 4, "measured in every step"
    assert len(logged(ours, "loss_plugins/entropy")) == 4


def test_peak_is_the_losss_own_and_the_global_one_is_kept(tmp_path: Path) -> None:
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del big
    data, tokens = rows(16, length=256), 4 * 256
    peaks = {}
    for strategy in STRATEGIES:
        options = None if strategy == "naive" else {"workspace_mb": 1}
        made = run(LossPluginTrainer, tmp_path, model=wide, data=data, max_steps=2, loss_strategy=strategy,
                   loss_options=options, use_cpu=False)  # fmt: skip
        peaks[strategy] = made.loss_report["loss_peak_bytes"]
    logits = tokens * 16384 * 4
    assert peaks["naive"] > 2 * logits
    for strategy in ("chunked", "flce", "cce"):
        assert 0 < peaks[strategy] < logits / 3, peaks
    assert peak_allocated("cuda") >= 1 << 30


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_waiting_on_the_step_path(strategy: str) -> None:
    # transformers' eager attention copies a scalar to the device for its mask, and so waits
    model = llama(vocab_size=16384, attn_implementation="sdpa").cuda()
    config = LossConfig(strategy, loss_statistics=["accuracy", "entropy"], loss_z_loss=1e-4)
    handle = patch_model(model, config)
    monitor = LossMonitor(handle, torch.device("cuda", 0))
    batch: dict[str, Any] = {key: torch.stack([row[key] for row in rows(4)]).cuda() for key in ("input_ids", "labels")}
    weight, items = torch.rand(4, 12, device="cuda"), torch.tensor(40, device="cuda")

    def step() -> None:
        with handle.scope(token_weight=weight, loss_only=True, label_smoothing=0.1):
            model(**batch, num_items_in_batch=items).loss.backward()

    model.train()
    step()  # compiles kernels, copies what is copied once
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    monitor.end()
    assert monitor.hits == 2
    assert monitor.loss_peak_bytes > 0
    assert 0 < handle.statistics.pop()["valid_fraction"] < 1


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_autocast_and_the_scaling_of_gradients(half: str, tmp_path: Path) -> None:
    settings = {"use_cpu": False, half: True}
    stock = run(Trainer, tmp_path, model=wide, **settings)
    for strategy in STRATEGIES:
        ours = run(LossPluginTrainer, tmp_path, model=wide, loss_strategy=strategy, **settings)
        assert losses(ours)[0] == pytest.approx(losses(stock)[0], abs=2e-3)
        assert losses(ours) == pytest.approx(losses(stock), abs=3e-2)
        assert ours.loss_report["hits"] == 8


def test_settings_keep_the_trainers_own_memory_metrics(tmp_path: Path) -> None:
    made = LossPluginTrainer(
        llama(), arguments(tmp_path, use_cpu=False, skip_memory_metrics=False), train_dataset=rows(), loss_config="cce"
    )
    made.train()
    assert made.loss_report["loss_peak_bytes"] == 0
