"""`loss-plugins doctor` with a training file: what it asks for in vain, everything of that."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from doctor_files import (
    AXOLOTL,
    CCE,
    CPU,
    FUSED_HEAD,
    LLAMAFACTORY,
    NAMED,
    NPU,
    OURS,
    REGISTERED,
    SWIFT,
    npu_machine,
    said,
    verl,
)  # fmt: skip

from loss_plugins.cli._training_file import NAMES, PLUGIN
from loss_plugins.npu import installed

ROOT = Path(__file__).parents[2]
README = ROOT / "loss_plugins" / "integrations" / "README.md"

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
    "swift: a name that is none": (SWIFT | REGISTERED | {"external_plugins": [3]}, "external_plugins must be a name or a list"),
    "swift: callbacks that are none": (SWIFT | {"callbacks": 5}, "callbacks must be a name or a list of names, and it is 5"),
    "verl: no mapping": ({"actor_rollout_ref": [1], "data": {}}, "actor_rollout_ref must be a mapping of keys, and it is [1]"),
    "verl: a model that is none": ({"actor_rollout_ref": {"model": 3}, "data": {}}, "model must be a mapping of keys"),
    "verl: options that are none": (verl(fused_kernel_options=3), "fused_kernel_options must be a mapping of keys"),
    "llamafactory: a list of stages": (LLAMAFACTORY | CCE | {"stage": ["sft"]}, "stage: ['sft'] and loss_strategy 'cce'"),
    "axolotl: a list of kinds": (AXOLOTL | CCE | NAMED | {"rl": ["dpo"], "trl": 1}, "rl: ['dpo'] and loss_strategy 'cce'"),
    "ours: token weights": (OURS | CCE | {"loss_token_weight_key": "w"}, "loss_token_weight_key 'w' was given"),
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


MANY = {
    "axolotl": (
        AXOLOTL | {
            "plugins": ["loss_plugins.LossPlugin"], "LOSS-STRATEGY": "cce", "loss_optoins": {}, "loss_strategy": "ccee",
            "loss_z_loss": -1, "loss_label_smoothing": 2, "cut_cross_entropy": True, "chunked_cross_entropy": True,
            "reward_model": True,
        },
        [
            "which is not there, so axolotl will stop", "Unknown loss setting 'LOSS-STRATEGY'", "'loss_optoins'",
            "Unknown loss strategy 'ccee'. Did you mean 'cce'", "loss_z_loss must be", "loss_label_smoothing must be",
            "`cut_cross_entropy: true`", "`chunked_cross_entropy: true`", "reward_model: true and loss_strategy 'ccee'",
        ],
    ),
    "axolotl: an objective": (
        AXOLOTL | CCE | NAMED | {
            "rl": "dpo", "dpo_padding_free": True, "trl": {"async_prefetch": True}, "loss_z_loss": 0.1,
            "loss_statistics": ["entropy"],
        },
        ["`dpo_padding_free: true`", "`async_prefetch: true`", "loss_z_loss is 0.1, but rl: dpo", "Leave loss_statistics out"],
    ),
    "llamafactory": (
        LLAMAFACTORY | CCE | {
            "use_unsloth": True, "enable_liger_kernel": True, "loss-z-loss": 1,
            "loss_options": {"filer": "off", "kernels": "ascend", "workspace_mb": -3},
        },
        [
            "use_unsloth is on", "by `liger_ops: true`", "Unknown loss setting 'loss-z-loss'", "Did you mean 'filter'",
            "workspace_mb must be", "they run on an Ascend NPU",
        ],
    ),
    "swift": (
        SWIFT | REGISTERED | CCE | {"external_plugins": "wrong_loss.py", "loss_type": "focal", "use_liger_kernel": True},
        ["register({'loss_strategy': 'cce'})", "Unknown loss strategy 'ccee'", "loss_type 'focal'", "two fused losses"],
    ),
    "verl": (
        {"actor_rollout_ref": {
            "model": FUSED_HEAD | {"external_lib": "wrong_loss", "use_fused_kernels": False}, "actor": {"entropy_coeff": 1},
        }},
        ["Unknown loss strategy 'ccee'", "use_fused_kernels is off", "entropy_coeff is not 0"],
    ),
    "ours": (
        OURS | CCE | {
            "model_name_or_path": "./absent", "tokenizer_name_or_path": "./absent2", "train_file": "none.jsonl",
            "max_length": 1, "dtype": "bf17", "lora_alpha": 3, "learning_rate": "fast", "max_stepz": 3,
            "loss_statistics": ["acuracy"], "loss_options": {"filer": "off", "workspace_mb": -3}, "loss_objective": "dft",
            "loss_z_loss": 0.1, "loss_label_smoothing": 0.2,
        },
        [
            "'./absent' does not exist", "'./absent2' does not", "'none.jsonl' does not exist", "max_length must be",
            "Unknown dtype 'bf17'", "lora_alpha is set", "learning_rate in", "Did you mean 'max_steps'", "'acuracy'",
            "Did you mean 'filter'", "workspace_mb must be", "'dft' and loss_z_loss=0.1", "'dft' and loss_label_smoothing=0.2",
        ],
    ),
    "ours: a comparison": (
        {key: value for key, value in OURS.items() if key != "train_file"} | {
            "strategies": ["naive", "ccee", "chunkd"], "loss_strategy": "cce", "loss_options": {"workspace_mb": 4},
            "loss_statistics": ["dropped"], "trainfile": "d.jsonl", "model_config": {"model_type": "llama", "hiden_size": 3, "vocab": 9},
        },
        [
            "Unknown loss strategy 'ccee'. Did you mean 'cce'", "Unknown loss strategy 'chunkd'. Did you mean 'chunked'",
            "and loss_strategy 'cce' are set. Remove one", "Did you mean 'train_file'", "'hiden_size'", "'vocab'",
            "Both model_name_or_path and model_config are set",
        ],
    ),
    "the loss alone": (
        {"loss_strategy": "naive", "loss_options": {"kernels": "natve"}, "loss_statistics": ["dropped"]},
        ["value of kernels: 'natve'", "'naive' has no filter", "There is no model", "There is nothing to train on"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "words"), MANY.values(), ids=MANY)
def test_every_mistake_is_said(doctor: Callable[..., dict[str, Any]], values: dict[str, Any], words: list[str]) -> None:
    """Each once and in a line, and nothing that is wrong only because something else is."""
    found = doctor(values)
    errors = [finding for finding in found["findings"] if finding["level"] == "error"]
    assert found["code"] == 1
    for each in words:
        assert len([finding for finding in errors if each in "\n".join((finding["what"], *finding["do"]))]) == 1, each
    assert len(errors) == len(words), [finding["what"] for finding in errors]
    assert not any("\n" in finding["what"] for finding in errors)


def test_each_run_of_a_comparison_is_said(doctor: Callable[..., dict[str, Any]]) -> None:
    found = doctor(OURS | {"strategies": ["naive", "cce"], "loss_options": {"workspace_mb": 64}})
    assert (found["code"], said(found, "error")) == (0, "")
    assert (
        found["file"]["asks"].startswith("asks for 'naive'") and " and 'cce' with loss_options" in found["file"]["asks"]
    )
    assert [note["what"].split(" (")[0] for note in found["findings"] if note["level"] == "note"] == [
        "on cpu this runs: naive", "on cpu this runs: cce",
    ]  # fmt: skip


ADDING = "register({'loss_strategy': 'cce', 'loss_z_loss': 0.1})"


def test_what_an_objective_cannot_add(doctor: Callable[..., dict[str, Any]]) -> None:
    for framework, values in (("swift", SWIFT | REGISTERED | {"rlhf_type": "dpo"}), ("verl", verl())):
        Path(f"{framework}_loss.py").write_text(
            f"from loss_plugins.integrations.{framework} import register\n{ADDING}\n"
        )
        assert "Leave loss_z_loss out" in said(doctor(values), "error")


REGISTERS = {
    "by keyword": ("register(loss_config='ccee')", "Did you mean 'cce'"),
    "by keyword, an option": ("register(loss_config={'loss_options': {'filtre': 'off'}})", "has all of loss_options"),
    "no config": ("register(3)", "loss_strategy must be a name"),
    "no name": ("register({4: 5})", "Unknown loss setting '4'"),
}


@pytest.mark.parametrize(("call", "words"), REGISTERS.values(), ids=REGISTERS)
def test_what_a_file_of_python_registers(doctor: Callable[..., dict[str, Any]], call: str, words: str) -> None:
    for framework, values in (("swift", SWIFT | REGISTERED), ("verl", verl())):
        Path(f"{framework}_loss.py").write_text(f"from loss_plugins.integrations.{framework} import register\n{call}\n")
        found = doctor(values)
        assert (found["code"], found["file"]["framework"]) == (1, framework)
        assert words in said(found, "error")


def test_what_only_running_a_file_of_python_could_tell(doctor: Callable[..., dict[str, Any]]) -> None:
    for call in ("register(config)", "register(*given)", "register(**given)", "register(loss_config=config)"):
        Path("swift_loss.py").write_text(f"from loss_plugins.integrations.swift import register\n{call}\n")
        found = doctor(SWIFT | REGISTERED)
        assert (found["code"], found["file"]["asks"]) == (0, "asks nothing of loss_plugins that can be seen"), call


def test_a_file_that_is_no_python(doctor: Callable[..., dict[str, Any]]) -> None:
    for content in (b"\xff\xfe", b"register(\0)", b"register("):
        Path("swift_loss.py").write_bytes(content)
        assert "swift_loss.py is no Python" in said(doctor(SWIFT | REGISTERED), "error")


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
