"""`loss-plugins doctor`: what will run, and what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_files import CPU, NPU, npu_machine, said

from loss_plugins import npu
from loss_plugins.device import DeviceProfile
from loss_plugins.diagnostics import machine
from loss_plugins.npu import FUSED, Npu

ROOT = Path(__file__).parents[2]


def test_a_cpu_is_well(doctor: Callable[..., dict[str, Any]]) -> None:
    found = doctor()
    assert (found["code"], found["device"]) == (0, {"kind": "cpu", "name": "cpu"})
    assert {entry["strategy"]: entry["kernels"] for entry in found["strategies"]} == dict.fromkeys(
        ("cce", "chunked", "flce", "naive"), "torch"
    )
    assert found["auto"].startswith("flce (torch kernels)")
    assert said(found, "error") == said(found, "warning") == ""


def test_this_machine_as_it_is(invoke: Callable[..., Any]) -> None:
    """No stand-ins: the versions that are installed here satisfy what the package asks for."""
    result = invoke("doctor", "--json")
    found = json.loads(result.stdout)
    assert [finding for finding in found["findings"] if finding["level"] == "error"] == []
    assert result.exit_code == 0
    import torch

    assert found["versions"]["torch"] == torch.__version__


# What is missing


def test_too_old_and_absent_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["transformers>=5.6", "torch>=2.6", "peft>=0.18; extra == 'peft'", "gguf>=0.10; extra == 'gguf'"]
    monkeypatch.setattr(machine.metadata, "requires", lambda name: asked)
    versions = {"transformers": "5.5.4", "torch": "", "peft": "0.17.1", "gguf": ""}
    monkeypatch.setattr(machine, "installed", versions.get)
    found = machine.by_gravity(list(machine._requirements()))
    assert [(each.level, each.do) for each in found] == [
        ("error", ("pip install --upgrade 'transformers>=5.6'",)),
        ("error", ("pip install 'torch>=2.6'",)),
        ("warning", ("pip install --upgrade 'peft>=0.18'",)),
    ]
    assert "transformers 5.5.4 is installed, and loss_plugins needs >=5.6" in found[0].what


def test_a_gpu_without_triton(doctor: Callable[..., dict[str, Any]]) -> None:
    found = doctor(profile=DeviceProfile("cuda", "NVIDIA H200", (9, 0)))
    assert found["code"] == 0
    assert "torch's kernels run in place of Triton's: Triton is not installed\npip install triton" in said(
        found, "warning"
    )


def test_an_npu_with_everything(doctor: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor(profile=npu_machine(monkeypatch, NPU))
    assert (found["code"], found["findings"]) == (0, [])
    kernels = {entry["strategy"]: entry["kernels"] for entry in found["strategies"]}
    assert kernels == {"cce": "ascend", "flce": "ascend", "chunked": "torch", "naive": "torch"}
    assert (found["device"]["vector_cores"], found["device"]["cann"]) == (40, "8.5.0")


def test_an_npu_with_upstream_triton(doctor: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains with torch's kernels, so this is a warning; what is typed for more comes in its order."""
    facts = Npu(
        chip="Ascend910B3", cann="8.5.0", torch_npu="2.7.1.post2", operators=FUSED[:1],
        obstacle="triton-ascend is not installed (Triton 3.7.1 is, which has no code for an NPU)",
    )  # fmt: skip
    found = doctor(profile=npu_machine(monkeypatch, facts))
    assert found["code"] == 0
    assert {entry["kernels"] for entry in found["strategies"]} == {"torch"}
    (warning,) = [finding for finding in found["findings"] if finding["level"] == "warning"]
    assert "torch's kernels run in place of triton-ascend's: triton-ascend is not installed" in warning["what"]
    assert warning["do"] == npu.install_commands(facts)
    assert not any("set_env.sh" in line for line in warning["do"]), "CANN is set up already"
    assert "no Ascend kernels: triton-ascend is not installed" in found["auto"]
    assert "2.7.1.post11, 2.9.0.post9" in said(found, "note"), "which torch_npu has the operators that this one lacks"


def test_an_npu_of_other_versions(doctor: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor(profile=npu_machine(monkeypatch, NPU, torch="2.13.0", python=(3, 12)))
    text = said(found, "warning")
    assert "torch_npu 2.7.1.post2 is built for torch 2.7.1, and torch 2.13.0 is installed" in text
    assert "triton-ascend 3.2.0 is made for Python 3.9 to 3.11, and this is 3.12" in text
    assert text.count("pip uninstall -y triton triton-ascend") == 1


@pytest.mark.parametrize(
    ("torch_npu", "level", "words"),
    [
        ("", "error", "An Ascend NPU is here, and torch_npu is not installed"),
        ("2.7.1", "error", "torch finds no device"),
    ],
)
def test_hardware_that_torch_does_not_see(
    doctor: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, torch_npu: str, level: str, words: str
) -> None:
    monkeypatch.setattr(npu, "has_hardware", lambda: True)
    monkeypatch.setattr(machine, "installed", lambda name: torch_npu if name == "torch_npu" else "")
    monkeypatch.setattr(machine, "_transformers_check", list)
    monkeypatch.setattr(machine.npu, "is_meant", lambda: True)
    found = list(machine._npu(CPU))
    assert found[0].level == level
    assert words in found[0].what
    assert any("pip uninstall -y triton" in line for line in found[0].do)


def command(site: Path, *words: str, autoload: str = "1") -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    environment.pop("ASCEND_HOME_PATH", None)
    done = subprocess.run(
        [sys.executable, "-m", "loss_plugins", "doctor", *words], capture_output=True, text=True, env=environment
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.fixture
def torch_npu_without_cann(tmp_path: Path) -> Path:
    package, info = tmp_path / "torch_npu", tmp_path / "torch_npu-2.7.1.post2.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("libhccl.so: cannot open shared object file")\n')
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.7.1.post2\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path


def test_import_torch_raises(torch_npu_without_cann: Path) -> None:
    code, text = command(torch_npu_without_cann)
    assert code == 1
    assert "Error: import torch fails: RuntimeError: Failed to load the backend extension" in text
    assert "libhccl.so" in text and "source /usr/local/Ascend/cann/set_env.sh" in text
    assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in text
    assert "torch_npu 2.7.1.post2" in text
    file = torch_npu_without_cann / "job.yaml"
    file.write_text("base_model: m\nsequence_len: 8\nloss_strategy: cce\n")
    code, text = command(torch_npu_without_cann, str(file), "--json")
    assert (code, json.loads(text)["device"]) == (1, None)
    assert "job.yaml was not examined, since torch cannot be imported" in said(json.loads(text), "error")


def test_transformers_own_look_raises(torch_npu_without_cann: Path) -> None:
    code, text = command(torch_npu_without_cann, "--json", autoload="0")
    found = json.loads(text)
    assert (code, found["device"]["kind"]) == (1, "cpu")
    assert "transformers cannot look for an NPU (ImportError: libhccl.so" in said(found, "error")
    assert "pip uninstall -y torch_npu" in said(found, "error")
