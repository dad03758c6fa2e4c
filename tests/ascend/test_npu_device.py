"""Training on an emulated NPU: with torch's kernels, and with triton-ascend's compiled and run on this machine's CPU.

The device is made in processes of its own, since a process can have only one of that kind, and keeps it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
STRATEGIES = ("naive", "chunked", "flce", "cce")
Cases = dict[str, dict[str, Any]]


def run(kernels: str, folder: Path, *cases: str) -> Cases:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "npu_run.py", kernels, str(folder), *cases],
        cwd=HERE, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line for line in map(json.loads, lines)}


def said_by(kernels: str, temporary: pytest.TempPathFactory, wait: bool) -> Cases | None:
    """What a process on the device said, which is started once for all test processes; None if another is waiting for it,
    and this one shall not."""
    base = temporary.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    said = shared / f"npu-{kernels}.json"
    with (shared / f"npu-{kernels}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return None
        if not said.exists():
            said.write_text(json.dumps(run(kernels, temporary.mktemp("npu"))))
    return json.loads(said.read_text())


@pytest.fixture(scope="module", params=["torch", "ascend"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    kernels = request.param
    said = said_by(kernels, tmp_path_factory, wait=False)
    if said is None:  # in the meantime, the other process
        said_by("ascend" if kernels == "torch" else "torch", tmp_path_factory, wait=False)
        said = said_by(kernels, tmp_path_factory, wait=True)
    assert said is not None
    return {**said, "kernels": kernels}


def test_what_is_known_of_the_device(found: Cases) -> None:
    facts = found["facts"]
    profile, npu = facts["profile"], facts["profile"]["npu"]
    assert (profile["kind"], profile["name"], npu["chip"]) == ("npu", "Ascend910B3", "Ascend910B3")
    assert (npu["cube_cores"], npu["vector_cores"], npu["ub_bytes"]) == (20, 40, 192 << 10)
    assert (npu["torch_npu"], npu["triton_ascend"]) == ("2.7.1.post2", "3.2.0")
    assert len(npu["operators"]) == 3
    assert facts["free"] == profile["total_bytes"] == 64 << 30
    assert facts["best"] == "npu" and facts["trainer"] == "npu:0" and facts["torch_npu"]
    if found["kernels"] == "ascend":
        assert npu["obstacle"] == ""
    else:  # the compiler is installed, and nothing gives it a driver
        assert "triton-ascend 3.2.0 has no driver here" in npu["obstacle"]
    assert not profile["has_triton"], "triton-ascend's files are no Triton of ours"


@pytest.mark.parametrize("name", ["stock", *STRATEGIES, "callback"])
def test_trains_as_the_cpu_does(found: Cases, name: str) -> None:
    ours, stock = found[name], found["stock on the CPU"]
    assert (ours["device"], stock["device"]) == ("npu:0", "cpu")
    assert len(set(stock["losses"])) == 4
    assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-5)
    assert ours["norms"] == pytest.approx(stock["norms"], abs=1e-5)
    assert ours["materialised"] == 0


def test_whose_kernels_computed(found: Cases) -> None:
    kernels = found["kernels"]
    both = [f"{kernels}.linear_ce_backward", f"{kernels}.linear_ce_forward"]
    assert found["flce"]["launched"] == [f"{kernels}.flce_forward"]
    assert found["cce"]["launched"] == found["callback"]["launched"] == both
    assert found["naive"]["launched"] == found["chunked"]["launched"] == []
    assert all(found[name]["peak"] > 0 for name in STRATEGIES), "the Trainer was told the peak"


@pytest.mark.parametrize("name", ["checked and evaluated", "autocast", "half", "native"])
def test_settings_beside_a_strategy(found: Cases, name: str) -> None:
    case = found[f"settings, {name}"]
    exact = name == "checked and evaluated"
    assert len(case["npu"]) == (6 if exact else 4)
    # in bfloat16 as far as rounding takes two strategies from each other on the CPU
    rounding = 0.0 if exact else max(abs(a - b) for a, b in zip(case["cpu"], case["stock"], strict=True))
    assert rounding < 5e-3
    assert case["npu"] == pytest.approx(case["cpu"], abs=1e-5 + 3 * rounding)
    kernels = "native" if name == "native" else found["kernels"]
    assert all(entry.startswith(f"{kernels}.") for entry in case["kernels"]) and case["kernels"]


def test_a_yaml_runs_unchanged(found: Cases) -> None:
    cpu, npu = found["job, use_cpu: True"], found["job, use_cpu: False"]
    assert (cpu["device"], npu["device"]) == ("cpu", "Ascend910B3")
    assert npu["losses"] == pytest.approx(cpu["losses"], abs=1e-5)
    assert npu["kernels"] == [f"{found['kernels']}.flce_forward"]


@pytest.mark.parametrize("strategy", [*STRATEGIES, "native"])
def test_labels_on_the_device(found: Cases, strategy: str) -> None:
    """Ignored rows stay among the others there, where the host cannot look, and get no gradient."""
    case = found[f"labels, {strategy}"]
    assert max(case["off"]) < 1e-5
    assert case["ignored"] == 0
    assert case["out_of_range"] == "nan"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_what_is_promised(found: Cases, strategy: str, dtype: str) -> None:
    case = found.get(f"memory of {strategy} in torch.{dtype}")
    if found["kernels"] == "ascend" and (strategy in ("naive", "chunked") or dtype == "float32"):
        assert case is None
        return
    assert case is not None
    assert case["kernels"] == (found["kernels"] if strategy in ("flce", "cce") else "torch")
    assert 0.6 * case["promised"] <= case["peak"] <= 1.15 * case["promised"]
    limit = {"flce": 0.15, "cce": 0.05}.get(strategy)
    if limit is not None:
        assert case["peak"] < limit * case["logits"], f"{case['peak'] / case['logits']:.1%} of all logits"


def test_nothing_is_computed_in_float64(found: Cases) -> None:
    """The chip's own units have none."""
    assert found["wide"]["doubles"] == []
    entropies = [found[f"wide, {name}"]["entropy"] for name in STRATEGIES]
    assert entropies == pytest.approx([entropies[0]] * 4, rel=1e-5)
    assert entropies[0] > 4, "of 160 classes that are about as likely"


def test_commands_on_the_device(found: Cases) -> None:
    kernels = found["kernels"]
    doctor, plan, verify = found["doctor"], found["plan"], found["verify"]
    assert (doctor["code"], doctor["device"]["kind"], doctor["device"]["vector_cores"]) == (0, "npu", 40)
    ran = {entry["strategy"]: entry["kernels"] for entry in doctor["strategies"]}
    assert ran == {"cce": kernels, "flce": kernels, "chunked": "torch", "naive": "torch"}
    advised = [
        line for finding in doctor["findings"] for line in finding["do"] if "pip install triton-ascend==" in line
    ]
    assert len(advised) == 1, "said once: what is here does not fit together, or cannot be launched"
    assert (plan["code"], plan["chosen"], plan["device"]) == (0, "flce", "npu")
    assert verify["equal"] and [row["status"] for row in verify["rows"]] == ["equal", "equal"]


def test_ligers_kernels_are_refused_in_words(found: Cases) -> None:
    """liger-kernel 0.8.5 needs a name that triton-ascend has from 3.2.1 on, and takes its kernels for a GPU without it."""
    refused = found["liger"]["refused"]
    if "No module named 'liger_kernel'" in refused:
        pytest.skip("liger-kernel is not installed")
    assert refused.startswith("liger_ops was asked for")
    if found["kernels"] == "torch":
        assert "has no driver here" in refused
    else:
        assert "cannot be imported" in refused
