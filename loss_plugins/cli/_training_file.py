"""What `doctor` sees in a training file: whose it is, what it asks of us, and what of that cannot be."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import LossConfig
from ..diagnostics.machine import Finding
from ..errors import ConfigError, LossPluginError, unknown_name
from ..npu import installed
from ._problem import EXAMPLE
from ._settings import read_yaml

if TYPE_CHECKING:
    from ..device import DeviceProfile

OURS, AXOLOTL, LLAMAFACTORY, SWIFT, VERL = "ours", "axolotl", "llamafactory", "swift", "verl"
PLUGIN = "loss_plugins.integrations.axolotl.LossPlugin"
SIGNS = {
    AXOLOTL: {
        "base_model", "sequence_len", "micro_batch_size", "datasets", "num_epochs", "special_tokens", "plugins",
        "sample_packing", "val_set_size", "base_model_config", "chat_template", "dataset_prepared_path",
        "cut_cross_entropy", "liger_fused_linear_cross_entropy", "lora_target_linear", "flash_attention",
    },
    LLAMAFACTORY: {
        "stage", "finetuning_type", "dataset", "template", "cutoff_len", "dataset_dir", "do_train", "lora_target",
        "overwrite_cache", "preprocessing_num_workers", "plot_loss", "enable_liger_kernel", "lora_rank",
    },
    SWIFT: {
        "model", "dataset", "train_type", "tuner_type", "model_type", "external_plugins", "callbacks", "rlhf_type",
        "split_dataset_ratio", "loss_type", "torch_dtype", "target_modules", "system", "tuner_backend",
    },
    VERL: {"actor_rollout_ref", "algorithm", "critic", "trainer", "data", "reward_model"},
    OURS: {
        "model_name_or_path", "model_config", "train_file", "eval_file", "tokenizer_vocab_size", "strategies",
        "packing", "loss_self_check",
    },
}  # fmt: skip
"""Keys by which a file is recognised."""
START = {
    AXOLOTL: "axolotl train {path}",
    LLAMAFACTORY: "loss-plugins llamafactory train {path}",
    SWIFT: "swift sft {path}",
    VERL: "python -m verl.trainer.main_ppo, with these keys",
    OURS: "loss-plugins train {path}",
}


NAMES = {
    AXOLOTL: "of axolotl", LLAMAFACTORY: "of LLaMA-Factory", SWIFT: "of ms-swift", VERL: "of verl",
    OURS: "of loss-plugins",
}  # fmt: skip
"""Whose a file is, in words."""


class _Asked(NamedTuple):
    """What a file asks for: a loss a run, and what is wrong with that. Where it is wrong, as much as could be read."""

    configs: list[LossConfig]
    findings: list[Finding]


def examine(path: Path, framework: str | None, profile: DeviceProfile) -> tuple[dict[str, Any], list[Finding]]:
    """What a file is (for JSON and people), and everything that is wrong with it.

    Raises:
        ConfigError: there is no such file, it is no YAML, or nobody's that is known.
    """
    values = read_yaml(path)
    whose = _whose(values, path) if framework is None else _named(framework)
    reader: dict[str, Callable[[Mapping[str, Any], Path], _Asked]] = {
        AXOLOTL: _axolotl, LLAMAFACTORY: _llamafactory, SWIFT: _swift, VERL: _verl, OURS: _ours,
    }  # fmt: skip
    configs, findings = reader[whose](values, path)
    is_wrong = any(finding.level == "error" for finding in findings)
    package = {AXOLOTL: "axolotl", LLAMAFACTORY: "llamafactory", SWIFT: "ms-swift", VERL: "verl"}.get(whose)
    absent = package if package and not installed(package) else None
    if absent:
        what = f"{absent} is not installed in this Python environment, and starting this file needs it"
        findings.append(Finding("note", what, (f"pip install {absent}",)))
    for config in configs:
        here = _here(config, values, profile)
        findings += [finding for finding in here if finding.level == "error" or not is_wrong]
    asks = f"asks for {' and '.join(map(str, configs))}" if configs else "asks nothing of loss_plugins that can be seen"
    if is_wrong:
        asks = "what it asks for is wrong"
    start = START[whose].format(path=path)
    found = {"path": str(path), "framework": whose, "asks": asks, "start": start, "not_installed": absent}
    return found, list(dict.fromkeys(findings))


def _errors(mistakes: Iterable[str]) -> list[Finding]:
    return [Finding("error", said.rstrip(".")) for said in mistakes]


def _named(framework: str) -> str:
    if framework not in SIGNS:
        raise ConfigError(unknown_name("framework", framework, SIGNS))
    return framework


def _whose(values: Mapping[str, Any], path: Path) -> str:
    """Whose file it is: the one with the most of its own keys in it."""
    counts = {name: len(signs & set(values)) for name, signs in SIGNS.items()}
    if values and set(values) <= set(LossConfig.names()):
        return OURS
    best = max(counts, key=lambda name: counts[name])
    if counts[best] and sorted(counts.values())[-2] < counts[best]:
        return best
    raise ConfigError(
        f"Whose training file {path} is cannot be seen: it has {', '.join(sorted(values)[:6]) or 'no keys'}. Say it "
        f"with --framework: {', '.join(SIGNS)}."
    )


# By whose it is


def _axolotl(values: Mapping[str, Any], path: Path) -> _Asked:
    from ..integrations.axolotl.arguments import LIGER_LAYERS, LOSSES, conflicts, unknown
    from ..integrations.axolotl.plugin import plugins_of, settings_of
    from ..integrations.hf.keys import mistakes

    findings = []
    plugins = [name.replace(":", ".") for name in plugins_of(values)]
    for name in plugins:
        if "loss_plugin" in name.lower() and name != PLUGIN:
            what = f"plugins names {name}, which is not there, so axolotl will stop"
            findings.append(Finding("error", what, ("plugins:", f"  - {PLUGIN}")))
    findings += _errors(unknown(values, {*LossConfig.names(), *SIGNS[AXOLOTL], *LOSSES, *LIGER_LAYERS}))
    ours = settings_of(values)
    if ours is None:
        return _Asked([], findings)
    wrong, config = mistakes(ours)
    findings += _errors([*wrong, *conflicts(values, config)])
    if PLUGIN not in plugins:
        what = (
            "our keys are in the file, and plugins does not name our plugin: axolotl drops keys that nobody declares, "
            "without a word, wherever loss-plugins is not installed beside it"
        )
        findings.append(Finding("warning", what, ("plugins:", f"  - {PLUGIN}")))
    return _Asked([config], findings)


def _llamafactory(values: Mapping[str, Any], path: Path) -> _Asked:
    from ..integrations.hf.keys import misspelled, mistakes, own_keys
    from ..integrations.llamafactory.run import conflicts

    findings = _errors(misspelled(values, {*LossConfig.names(), *SIGNS[LLAMAFACTORY]}))
    ours = own_keys(values)
    if not ours:
        return _Asked([], findings)
    wrong, config = mistakes(ours)
    findings += _errors([*wrong, *conflicts(values, config)])
    what = "llamafactory-cli train refuses our keys, unless its hook is installed"
    do = (f"loss-plugins llamafactory train {path}", "loss-plugins install-hook llamafactory   # instead")
    return _Asked([config], [*findings, Finding("note", what, do)])


def _swift(values: Mapping[str, Any], path: Path) -> _Asked:
    from ..integrations.hf.keys import own_keys
    from ..integrations.hf.log_probs import additions
    from ..integrations.swift import NAME, RLHF, whole_logits

    findings: list[Finding] = []
    ours = own_keys(values)
    if ours:
        what = f"ms-swift's parser refuses {', '.join(ours)}: our settings stand in a file of Python there"
        lines = (
            "# loss.py",
            "from loss_plugins.integrations.swift import register",
            f"register({ours!r})",
            f"# {path.name}",
            "external_plugins: loss.py",
            f"callbacks: {NAME}",
        )
        findings.append(Finding("error", what, lines))
    callbacks, named = (_texts(values, key, findings) for key in ("callbacks", "external_plugins"))
    if NAME not in callbacks:
        return _Asked([], findings)
    configs, wrong, absent = _registered(named, path)
    findings += wrong
    kind = values.get("rlhf_type")
    if kind in list(RLHF):
        findings += _errors(said for config in configs for said in additions(config, f"rlhf_type {kind}"))
    if absent:
        what = f"callbacks names {NAME}, which ms-swift will not know: {absent}"
        findings.append(Finding("error", what, ("external_plugins: loss.py   # with register(...) in it",)))
    for key, value in whole_logits(values).items():
        what = f"{key} {value!r} takes whole logits from the model, and callbacks: {NAME} makes none"
        findings.append(Finding("error", what, (f"delete {key}, or {NAME} from callbacks",)))
    if values.get("use_liger_kernel"):
        what = f"use_liger_kernel and callbacks: {NAME} are both on: two fused losses for one model"
        findings.append(Finding("error", what, ("use_liger_kernel: false   # and liger_ops: true in register(...)",)))
    return _Asked(configs, findings)


def _verl(values: Mapping[str, Any], path: Path) -> _Asked:
    from ..integrations.hf.log_probs import additions

    findings: list[Finding] = []
    actor = _mapping(values, "actor_rollout_ref", findings)
    model = _mapping(actor, "model", findings)
    library = model.get("external_lib")
    if not library:
        return _Asked([], findings)
    configs, wrong, absent = _registered([f"{str(library).replace('.', '/')}.py"], path)
    if absent:
        note = Finding("note", f"external_lib {library} asks nothing of loss_plugins: {absent}")
        return _Asked([], [*findings, note])
    findings += [*wrong, *_errors(said for config in configs for said in additions(config, "verl"))]
    if not model.get("use_fused_kernels"):
        what = "use_fused_kernels is off, so verl takes whole logits and never calls what external_lib registers"
        findings.append(Finding("error", what, ("actor_rollout_ref.model.use_fused_kernels=true",)))
    backend = _mapping(model, "fused_kernel_options", findings).get("impl_backend", "torch")
    if backend != "torch":
        what = f"impl_backend {backend!r} has kernels of its own, past which a loss strategy is never called"
        findings.append(Finding("error", what, ("actor_rollout_ref.model.fused_kernel_options.impl_backend=torch",)))
    if _mapping(actor, "actor", findings).get("entropy_coeff"):
        what = "entropy_coeff is not 0, and no loss strategy computes the gradient of an entropy"
        findings.append(Finding("error", what, ("actor_rollout_ref.actor.entropy_coeff=0",)))
    return _Asked(configs, findings)


def _mapping(values: Mapping[str, Any], key: str, findings: list[Finding]) -> Mapping[str, Any]:
    """The mapping under a key; an empty one, and why, where there is something else."""
    value = values.get(key)
    if value is not None and not isinstance(value, Mapping):
        findings.append(Finding("error", f"{key} must be a mapping of keys, and it is {value!r}"))
    return value if isinstance(value, Mapping) else {}


def _texts(values: Mapping[str, Any], key: str, findings: list[Finding]) -> list[str]:
    """The names under a key, one or a list; none, and why, where there is something else."""
    value = values.get(key)
    if isinstance(value, str):
        return value.split()
    if value is not None and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        findings.append(Finding("error", f"{key} must be a name or a list of names, and it is {value!r}"))
        return []
    return value or []


def _registered(files: list[str], beside: Path) -> tuple[list[LossConfig], list[Finding], str]:
    """What the files' `register(...)` asks for, nothing if only running them could tell; what is wrong with that; and
    why nothing is registered."""
    from ..integrations.hf.keys import mistakes

    if not files:
        return [], [], "no file that registers it is named"
    found = [path for name in files for path in (Path(name), beside.parent / Path(name).name) if path.is_file()]
    if not found:
        return [], [], f"there is no {' nor '.join(files)}"
    try:
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in found]
    except SyntaxError as error:
        return [], [], f"{found[0]} is no Python: {error.msg}"
    except (UnicodeDecodeError, ValueError) as error:
        return [], [], f"{found[0]} is no Python: {error}"
    except OSError as error:
        return [], [], f"{found[0]} cannot be read: {error.strerror}"
    nodes = [node for tree in trees for node in ast.walk(tree)]
    ours = {node.module for node in nodes if isinstance(node, ast.ImportFrom)} & {
        "loss_plugins.integrations.swift", "loss_plugins.integrations.verl",
    }  # fmt: skip
    calls = [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) == "register"]
    if not ours or not calls:
        return [], [], f"{found[0]} does not call register of loss_plugins"
    try:
        words = {word.arg: word.value for word in calls[0].keywords}
        first = calls[0].args[0] if calls[0].args else words.get("loss_config")
        given = {} if first is None and not words else ast.literal_eval(first)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return [], [], ""
    wrong, config = mistakes(given if isinstance(given, Mapping) else {"loss_strategy": given})
    return [config], _errors(wrong), ""


def _name(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def _ours(values: Mapping[str, Any], path: Path) -> _Asked:
    from ._job_file import examine_job

    configs, wrong = examine_job(path)
    findings = _errors(wrong)
    off = values.get("liger_kernel_config")
    if values.get("use_liger_kernel") and (not isinstance(off, Mapping) or off.get("fused_linear_cross_entropy", True)):
        what = "use_liger_kernel turns on Liger's own fused loss for most models: two losses for one model"
        line = "liger_kernel_config: {fused_linear_cross_entropy: false, cross_entropy: false}"
        findings.append(Finding("warning", what, (line, "liger_ops: true   # instead of use_liger_kernel")))
    return _Asked(configs, findings)


# What of it can run here


def _here(config: LossConfig, values: Mapping[str, Any], profile: DeviceProfile) -> list[Finding]:
    import torch

    from ..device import DeviceProfile
    from ..strategies import Problem, select

    rows, hidden, vocab = EXAMPLE
    if values.get("use_cpu"):
        profile = DeviceProfile.probe("cpu")
    findings = []
    problem = Problem(rows, hidden, vocab, getattr(torch, _dtype(values)))
    try:
        plan = select(config.loss_strategy, config.loss_options, problem, profile)
        findings.append(Finding("note", f"on {profile.name or profile.kind} this runs: {plan.describe(profile)}"))
    except LossPluginError as error:
        findings.append(Finding("error", str(error).rstrip(".")))
    if config.liger_ops not in (None, False):
        findings += _liger(profile)
    return findings


def _dtype(values: Mapping[str, Any]) -> str:
    """The type of the products: of autocast where that is on, else of the weights."""
    for key in ("bf16", "fp16"):
        if values.get(key) not in (None, False, "false"):
            return {"bf16": "bfloat16", "fp16": "float16"}[key]
    named = str(values.get("dtype") or values.get("torch_dtype") or "")
    return named if named in ("bfloat16", "float16", "float32") else "float32"


def _liger(profile: DeviceProfile) -> list[Finding]:
    import torch

    from ..models.liger import known_types, refuse_device

    try:
        known_types("liger_ops")
        refuse_device(torch.device("cuda" if profile.kind == "rocm" else profile.kind), profile)
    except LossPluginError as error:
        return [Finding("error", str(error).rstrip("."))]
    return []
