"""`loss-plugins doctor`: what will run, what is missing, and what a training file asks for in vain."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from loss_plugins import npu
from loss_plugins.cli._training_file import NAMES, PLUGIN
from loss_plugins.device import DeviceProfile
from loss_plugins.diagnostics import machine
from loss_plugins.npu import FUSED, Npu, installed

ROOT = Path(__file__).parents[2]
CPU = DeviceProfile("cpu", "cpu")
README = ROOT / "loss_plugins" / "integrations" / "README.md"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The machine has this device, and all packages are in order."""

    def put(profile: DeviceProfile) -> None:
        monkeypatch.setattr(machine, "_profile", lambda: (profile, []))
        monkeypatch.setattr(machine, "_requirements", list)
        monkeypatch.setattr(machine, "_frameworks", list)
        monkeypatch.setattr(machine, "_unused_gpus", list)
        monkeypatch.setattr(npu, "is_meant", lambda: False)

    return put


@pytest.fixture
def doctor(
    invoke: Callable[..., Any], on: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """The command's JSON and exit code, for a device and a file's keys."""
    monkeypatch.chdir(tmp_path)
    for data in ("d.jsonl", "train.jsonl"):  # which files name
        Path(data).touch()
    for framework in ("swift", "verl"):
        lines = f"from loss_plugins.integrations.{framework} import register\nregister({{'loss_strategy': 'cce'}})\n"
        Path(f"{framework}_loss.py").write_text(lines)
    Path("wrong_loss.py").write_text("from loss_plugins.integrations.swift import register\nregister('ccee')\n")
    Path("idle_loss.py").write_text("from loss_plugins.integrations.swift import register\n")

    def run(values: dict[str, Any] | None = None, profile: DeviceProfile = CPU, **words: str) -> dict[str, Any]:
        on(profile)
        arguments = []
        if values is not None:
            path = tmp_path / "file.yaml"
            path.write_text(yaml.safe_dump(values))
            arguments.append(str(path))
        for key, value in words.items():
            arguments += [f"--{key}", value]
        result = invoke("doctor", *arguments, "--json")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        found = json.loads(result.stdout)
        assert result.exit_code == (0 if found["ok"] else 1)
        table = invoke("doctor", *arguments)
        if found["file"] is None and values is not None:  # what is no file is said on stderr
            assert table.exit_code == 2
            return {"code": result.exit_code, **found}
        assert table.exit_code == result.exit_code
        for finding in found["findings"]:
            assert finding["what"] in table.stdout
            assert all(line in table.stdout for line in finding["do"])
        return {"code": result.exit_code, **found}

    return run


def said(found: dict[str, Any], level: str) -> str:
    """What was found of a level, and what is to be done about it."""
    return "\n".join(
        "\n".join((finding["what"], *finding["do"])) for finding in found["findings"] if finding["level"] == level
    )


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


# Training files

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


WELL = {
    "axolotl": ("axolotl", AXOLOTL | CCE | NAMED),
    "axolotl with a colon": ("axolotl", AXOLOTL | CCE | {"plugins": [PLUGIN.replace(".LossPlugin", ":LossPlugin")]}),
    "axolotl without us": ("axolotl", AXOLOTL | {"cut_cross_entropy": True}),
    "llamafactory": ("llamafactory", LLAMAFACTORY | CCE | {"loss_options": {"workspace_mb": 64}}),
    "llamafactory without us": ("llamafactory", LLAMAFACTORY | {"enable_liger_kernel": True}),
    "swift": ("swift", SWIFT | REGISTERED),
    "verl": ("verl", verl()),
    "verl without us": ("verl", {"actor_rollout_ref": {"model": {"path": "m"}}, "data": {}}),
    "swift without us": ("swift", SWIFT | {"loss_type": "focal"}),
    "ours": ("ours", OURS | CCE),
}


@pytest.mark.parametrize(("framework", "values"), WELL.values(), ids=WELL)
def test_files_that_are_well(
    doctor: Callable[..., dict[str, Any]], invoke: Callable[..., Any], tmp_path: Path, framework: str,
    values: dict[str, Any],
) -> None:  # fmt: skip
    found = doctor(values)
    assert found["file"]["framework"] == framework
    assert (found["code"], said(found, "error"), said(found, "warning")) == (0, "", "")
    table = invoke("doctor", str(tmp_path / "file.yaml")).stdout
    package = {"swift": "ms-swift"}.get(framework, framework)
    if framework == "ours" or installed(package):
        assert found["file"]["not_installed"] is None and table.endswith("All is well.\n")
    else:
        assert found["file"]["not_installed"] == package and "All is well" not in table
        assert table.endswith(f"The file is well, but {package} is not installed here: pip install {package}\n")
    if "cce" in values.values() or values in (verl(), SWIFT | REGISTERED):
        assert "asks for 'cce'" in found["file"]["asks"]
        assert "this runs: cce (torch kernels): asked for" in said(found, "note")


WRONG = {
    "axolotl: another loss": (AXOLOTL | CCE | NAMED | {"cut_cross_entropy": True}, "line `cut_cross_entropy: true`"),
    "axolotl: Liger's loss": (
        AXOLOTL | CCE | NAMED | {"liger_fused_linear_cross_entropy": True}, "asks for another loss: two for one model",
    ),
    "axolotl: Liger twice": (AXOLOTL | CCE | NAMED | {"liger_ops": True, "liger_rope": True}, "both put Liger's kernels"),
    "axolotl: a misspelt key": (AXOLOTL | NAMED | {"loss_stratgy": "cce"}, "Did you mean 'loss_strategy'"),
    "axolotl: a misspelt plugin": (AXOLOTL | CCE | {"plugins": ["loss_plugins.LossPlugin"]}, f"axolotl will stop\nplugins:\n  - {PLUGIN}"),
    "axolotl: a misspelt strategy": (AXOLOTL | NAMED | {"loss_strategy": "ccee"}, "Did you mean 'cce'"),
    "llamafactory: Liger": (LLAMAFACTORY | CCE | {"enable_liger_kernel": True}, "by `liger_ops: true`"),
    "llamafactory: another model": (LLAMAFACTORY | CCE | {"use_unsloth": True}, "use_unsloth is on"),
    "llamafactory: a misspelt option": (LLAMAFACTORY | CCE | {"loss_options": {"filer": "off"}}, "Did you mean 'filter'"),
    "swift: our keys": (SWIFT | CCE, "register({'loss_strategy': 'cce'})"),
    "swift: nobody registers": (SWIFT | {"callbacks": "loss_plugins"}, "no file that registers it is named"),
    "swift: no such file": (SWIFT | REGISTERED | {"external_plugins": "absent.py"}, "there is no absent.py"),
    "swift: an idle file": (SWIFT | REGISTERED | {"external_plugins": "idle_loss.py"}, "does not call register of"),
    "swift: a misspelt strategy": (SWIFT | REGISTERED | {"external_plugins": "wrong_loss.py"}, "Did you mean 'cce'"),
    "verl: whole logits": (verl(use_fused_kernels=False), "never calls what external_lib registers"),
    "verl: other kernels": (verl(fused_kernel_options={"impl_backend": "triton"}), "impl_backend 'triton' has kernels"),
    "swift: whole logits": (SWIFT | REGISTERED | {"loss_type": "focal"}, "loss_type 'focal' takes whole logits"),
    "swift: Liger": (SWIFT | REGISTERED | {"use_liger_kernel": True}, "two fused losses for one model"),
    "ours: a misspelt key": (OURS | {"loss_strateg": "cce"}, "Did you mean 'loss_strategy'"),
    "ours: a value": (OURS | {"loss_z_loss": -1}, "loss_z_loss must be a number"),
    "ours: an NPU's kernels": (OURS | CCE | {"loss_options": {"kernels": "ascend"}}, "they run on an Ascend NPU, and this is a cpu"),
    "ours: torch_npu's operators": (
        OURS | CCE | {"bf16": True, "use_cpu": True, "loss_options": {"kernels": "native"}}, "they are torch_npu's, and this is a cpu device",
    ),
    "ours: Liger's kernels": (OURS | CCE | {"liger_ops": True}, "where Liger's kernels cannot run"),
    "ours: no model": ({"train_file": "d.jsonl", "output_dir": "out"} | CCE, "neither model_name_or_path nor model_config"),
    "ours: no such folder": (OURS | CCE | {"model_name_or_path": "./absent"}, "model_name_or_path './absent' does not exist"),
    "ours: no such GGUF": (OURS | CCE | {"model_name_or_path": "absent.gguf"}, "model_name_or_path 'absent.gguf' does not exist"),
    "ours: a file that is no model": (OURS | CCE | {"model_name_or_path": "d.jsonl"}, "is a file that is no .gguf"),
    "ours: no such tokenizer": (OURS | CCE | {"tokenizer_name_or_path": "./absent"}, "tokenizer_name_or_path './absent' does not"),
    "ours: a new model of no type": (
        {"model_config": {"model_type": "lama"}, "train_file": "d.jsonl", "output_dir": "out"} | CCE, "Did you mean 'llama'",
    ),
    "the loss alone": (CCE | {"loss_label_smoothing": 0.1}, "neither model_name_or_path nor model_config"),
    "the loss alone, an option": (CCE | {"loss_options": {"backend": "native"}}, "which is called kernels here"),
}  # fmt: skip


@pytest.mark.parametrize(("values", "words"), WRONG.values(), ids=WRONG)
def test_files_that_ask_in_vain(
    doctor: Callable[..., dict[str, Any]],
    invoke: Callable[..., Any],
    tmp_path: Path,
    values: dict[str, Any],
    words: str,
) -> None:
    found = doctor(values)
    assert found["code"] == 1, found
    assert words in said(found, "error")
    table = invoke("doctor", str(tmp_path / "file.yaml")).stdout
    assert "All is well" not in table and "file is well" not in table
    assert "?." not in table and "s's" not in table and "swift's;" not in table
    assert f": a file {NAMES[found['file']['framework']]}; " in table


def test_axolotl_drops_our_keys_without_our_plugin(doctor: Callable[..., dict[str, Any]]) -> None:
    found = doctor(AXOLOTL | CCE)
    assert found["code"] == 0, "axolotl finds it by itself where both are installed"
    assert "axolotl drops keys that nobody declares" in said(found, "warning")
    assert f"plugins:\n  - {PLUGIN}" in said(found, "warning")


def test_ligers_loss_in_a_job_of_ours(doctor: Callable[..., dict[str, Any]]) -> None:
    found = doctor(OURS | CCE | {"use_liger_kernel": True})
    assert "two losses for one model\nliger_kernel_config: {fused_linear" in said(found, "warning")
    off = {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}
    assert said(doctor(OURS | CCE | off), "warning") == ""


def test_what_runs_on_an_npu_is_said_for_the_files_type(
    doctor: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = npu_machine(monkeypatch, NPU)
    native = LLAMAFACTORY | CCE | {"loss_options": {"kernels": "native"}}
    assert "this runs: cce (native kernels)" in said(doctor(native | {"bf16": True}, profile), "note")
    assert "takes bfloat16 and float16 only, and the products are in float32" in said(doctor(native, profile), "error")
    assert "this runs: cce (ascend kernels)" in said(doctor(AXOLOTL | CCE | NAMED, profile), "note")


def test_whose_a_file_is_may_have_to_be_said(doctor: Callable[..., dict[str, Any]]) -> None:
    some = {"learning_rate": 1e-4, "dataset": "d"}
    unclear = doctor(some)
    assert (unclear["code"], unclear["file"]) == (1, None)
    assert "Whose training file" in said(unclear, "error")
    assert doctor(some | CCE, framework="llamafactory")["file"]["framework"] == "llamafactory"
    assert "Did you mean 'axolotl'" in said(doctor(some, framework="Axolotl2"), "error")


NONE: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "does not exist"),
    "broken": (b"max_steps: [1", "is not valid YAML"),
    "binary": (b"\x00\x01GGUF", "is not valid YAML"),
    "not text": (b"\xff\xfe\xfd", "is not UTF-8 text"),
    "empty": (b"", "holds nothing"),
    "a list": (b"- 1\n", "holds list"),
}


@pytest.mark.parametrize(("content", "words"), NONE.values(), ids=NONE)
def test_files_that_are_none(
    invoke: Callable[..., Any], on: Callable[..., None], tmp_path: Path, content: bytes | None, words: str
) -> None:
    """A sentence on stderr and 2; in JSON a finding like others, and 1."""
    on(CPU)
    path = tmp_path / "nothing.yaml"
    if content is not None:
        path.write_bytes(content)
    result = invoke("doctor", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    result = invoke("doctor", str(path), "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"], found["file"]) == (1, False, None)
    assert words in said(found, "error")


def test_the_help_says_the_exit_codes(invoke: Callable[..., Any]) -> None:
    text = " ".join(invoke("doctor", "--help").stdout.split())
    assert "Exit codes: 0 if" in text and "with --json 1" in text


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "frameworks").glob("*.yaml")), ids=lambda path: path.name)
def test_files_to_start_from(invoke: Callable[..., Any], on: Callable[..., None], path: Path) -> None:
    on(CPU)
    result = invoke("doctor", str(path), "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, said(found, "error"), said(found, "warning")) == (0, "", "")
    assert found["file"]["framework"] == re.split("[_.]", path.name)[0]
    assert "asks for 'cce'" in found["file"]["asks"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_files_of_this_repository(doctor: Callable[..., dict[str, Any]], path: Path) -> None:
    found = doctor(yaml.safe_load(path.read_text()))
    assert found["code"] == 0, said(found, "error")
    assert found["file"]["framework"] == "ours"


@pytest.mark.parametrize("framework", ["axolotl", "llamafactory", "swift"])
def test_what_the_readme_shows(doctor: Callable[..., dict[str, Any]], framework: str) -> None:
    (text,) = re.findall(rf"^```yaml {framework}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    usual = {"axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY, "swift": SWIFT}[framework]
    if framework == "swift":
        Path("swift_loss.py").rename("loss.py")
    found = doctor(usual | yaml.safe_load(text))
    assert (found["code"], found["file"]["framework"], said(found, "warning")) == (0, framework, "")
