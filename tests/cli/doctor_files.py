"""Training files of each framework, machines that are not here, and what `doctor` said of them."""

from __future__ import annotations

from typing import Any

import pytest

from loss_plugins import npu
from loss_plugins.cli._training_file import PLUGIN
from loss_plugins.device import DeviceProfile
from loss_plugins.diagnostics import machine
from loss_plugins.npu import FUSED, Npu

CPU = DeviceProfile("cpu", "cpu")
AXOLOTL = {"base_model": "m", "datasets": [{"path": "d", "type": "alpaca"}], "sequence_len": 64, "micro_batch_size": 1}
LLAMAFACTORY = {
    "model_name_or_path": "m",
    "stage": "sft",
    "finetuning_type": "lora",
    "dataset": "d",
    "template": "qwen",
}
SWIFT = {"model": "m", "dataset": "d", "train_type": "lora", "torch_dtype": "bfloat16"}
OURS = {"model_name_or_path": "m", "train_file": "d.jsonl", "output_dir": "out", "max_steps": 1, "report_to": "none"}
CCE = {"loss_strategy": "cce"}
NAMED = {"plugins": [PLUGIN]}
REGISTERED = {"callbacks": "loss_plugins", "external_plugins": "swift_loss.py"}
FUSED_HEAD = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}, "external_lib": "verl_loss"}


def verl(**model: Any) -> dict[str, Any]:
    return {"actor_rollout_ref": {"model": FUSED_HEAD | model, "actor": {"entropy_coeff": 0}}, "data": {}}


def said(found: dict[str, Any], level: str) -> str:
    """What was found of a level, and what is to be done about it."""
    return "\n".join(
        "\n".join((finding["what"], *finding["do"])) for finding in found["findings"] if finding["level"] == level
    )


NPU = Npu(
    chip="Ascend910B3", cube_cores=20, vector_cores=40, ub_bytes=192 << 10, cann="8.5.0", torch_npu="2.7.1.post2",
    triton_ascend="3.2.0", operators=FUSED,
)  # fmt: skip


def npu_machine(
    monkeypatch: pytest.MonkeyPatch, facts: Npu, torch: str = "2.7.1", python: tuple[int, int] = (3, 11)
) -> DeviceProfile:
    real = npu.installed
    monkeypatch.setattr(machine, "installed", lambda name: torch if name == "torch" else real(name))
    monkeypatch.setattr(machine, "_transformers_check", list)
    monkeypatch.setattr(machine.sys, "version_info", (*python, 0))
    return DeviceProfile("npu", facts.chip, npu=facts)
