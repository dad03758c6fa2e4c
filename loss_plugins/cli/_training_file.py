"""What `doctor` sees in a training file: whose it is, what it asks of us, and what of that cannot be."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
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
    from ..integrations.hf.loading import ModelArguments

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
    """What a file asks for: its loss, and what decides whether that can run."""

    config: LossConfig | None
    findings: list[Finding]


def examine(path: Path, framework: str | None, profile: DeviceProfile | None) -> tuple[dict[str, Any], list[Finding]]:
    """What a file is (for JSON and people), and what is wrong with it.

    Raises:
        ConfigError: there is no such file, it is no YAML, or nobody's that is known.
    """
    values = read_yaml(path)
    whose = _whose(values, path) if framework is None else _named(framework)
    reader: dict[str, Callable[[Mapping[str, Any], Path], _Asked]] = {
        AXOLOTL: _axolotl, LLAMAFACTORY: _llamafactory, SWIFT: _swift, VERL: _verl, OURS: _ours,
    }  # fmt: skip
    config: LossConfig | None = None
    findings: list[Finding] = []
    try:
        config, findings = reader[whose](values, path)
    except LossPluginError as error:
        findings = [Finding("error", str(error).rstrip("."))]
    package = {AXOLOTL: "axolotl", LLAMAFACTORY: "llamafactory", SWIFT: "ms-swift", VERL: "verl"}.get(whose)
    absent = package if package and not installed(package) else None
    if absent:
        what = f"{absent} is not installed in this Python environment, and starting this file needs it"
        findings.append(Finding("note", what, (f"pip install {absent}",)))
    if config is not None and profile is not None:
        findings += _here(config, values, profile)
    asks = "asks nothing of loss_plugins that can be seen" if config is None else f"asks for {config}"
    if config is None and any(finding.level == "error" for finding in findings):
        asks = "what it asks for is wrong"
    start = START[whose].format(path=path)
    found = {"path": str(path), "framework": whose, "asks": asks, "start": start, "not_installed": absent}
    return found, findings


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
    from ..integrations.axolotl.arguments import LIGER_LAYERS, LOSSES, check

    findings = []
    plugins = [str(name).replace(":", ".") for name in values.get("plugins") or ()]
    for name in plugins:
        if "loss_plugin" in name.lower() and name != PLUGIN:
            what = f"plugins names {name}, which is not there, so axolotl will stop"
            findings.append(Finding("error", what, ("plugins:", f"  - {PLUGIN}")))
    config = check(values, {*LossConfig.names(), *SIGNS[AXOLOTL], *LOSSES, *LIGER_LAYERS})
    if config is not None and PLUGIN not in plugins:
        what = (
            "our keys are in the file, and plugins does not name our plugin: axolotl drops keys that nobody declares, "
            "without a word, wherever loss-plugins is not installed beside it"
        )
        findings.append(Finding("warning", what, ("plugins:", f"  - {PLUGIN}")))
    return _Asked(config, findings)


def _llamafactory(values: Mapping[str, Any], path: Path) -> _Asked:
    from ..errors import refuse
    from ..integrations.hf.keys import checked_config, misspelled, own_keys
    from ..integrations.llamafactory.run import conflicts

    refuse(misspelled(values, {*LossConfig.names(), *SIGNS[LLAMAFACTORY]}))
    ours = own_keys(values)
    if not ours:
        return _Asked(None, [])
    config = checked_config(ours)
    refuse(conflicts(values, config))
    what = "llamafactory-cli train refuses our keys, unless its hook is installed"
    do = (f"loss-plugins llamafactory train {path}", "loss-plugins install-hook llamafactory   # instead")
    return _Asked(config, [Finding("note", what, do)])


def _swift(values: Mapping[str, Any], path: Path) -> _Asked:
    from ..integrations.hf.keys import own_keys
    from ..integrations.swift import NAME, whole_logits

    findings = []
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
    callbacks = values.get("callbacks") or ()
    is_named = NAME in (callbacks.split() if isinstance(callbacks, str) else callbacks)
    if not is_named:
        return _Asked(None, findings)
    named = values.get("external_plugins") or ()
    config, wrong = _registered([named] if isinstance(named, str) else list(named), path)
    if wrong:
        what = f"callbacks names {NAME}, which ms-swift will not know: {wrong}"
        findings.append(Finding("error", what, ("external_plugins: loss.py   # with register(...) in it",)))
    for key, value in whole_logits(values).items():
        what = f"{key} {value!r} takes whole logits from the model, and callbacks: {NAME} makes none"
        findings.append(Finding("error", what, (f"delete {key}, or {NAME} from callbacks",)))
    if values.get("use_liger_kernel"):
        what = f"use_liger_kernel and callbacks: {NAME} are both on: two fused losses for one model"
        findings.append(Finding("error", what, ("use_liger_kernel: false   # and liger_ops: true in register(...)",)))
    return _Asked(config, findings)


def _verl(values: Mapping[str, Any], path: Path) -> _Asked:
    actor = values.get("actor_rollout_ref") or {}
    model = actor.get("model") or {}
    library = model.get("external_lib")
    if not library:
        return _Asked(None, [])
    config, wrong = _registered([f"{str(library).replace('.', '/')}.py"], path)
    if wrong:
        return _Asked(None, [Finding("note", f"external_lib {library} asks nothing of loss_plugins: {wrong}")])
    findings = []
    if not model.get("use_fused_kernels"):
        what = "use_fused_kernels is off, so verl takes whole logits and never calls what external_lib registers"
        findings.append(Finding("error", what, ("actor_rollout_ref.model.use_fused_kernels=true",)))
    backend = (model.get("fused_kernel_options") or {}).get("impl_backend", "torch")
    if backend != "torch":
        what = f"impl_backend {backend!r} has kernels of its own, past which a loss strategy is never called"
        findings.append(Finding("error", what, ("actor_rollout_ref.model.fused_kernel_options.impl_backend=torch",)))
    if (actor.get("actor") or {}).get("entropy_coeff"):
        what = "entropy_coeff is not 0, and no loss strategy computes the gradient of an entropy"
        findings.append(Finding("error", what, ("actor_rollout_ref.actor.entropy_coeff=0",)))
    return _Asked(config, findings)


def _registered(files: list[str], beside: Path) -> tuple[LossConfig | None, str]:
    """What the files' `register(...)` asks for, None if only running them could tell; or why nothing is registered.

    Raises:
        ConfigError: it asks for something wrong.
    """
    from ..integrations.hf.keys import checked_config

    if not files:
        return None, "no file that registers it is named"
    found = [path for name in files for path in (Path(name), beside.parent / Path(name).name) if path.is_file()]
    if not found:
        return None, f"there is no {' nor '.join(files)}"
    try:
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in found]
    except SyntaxError as error:
        return None, f"{found[0]} is no Python: {error.msg}"
    nodes = [node for tree in trees for node in ast.walk(tree)]
    ours = {node.module for node in nodes if isinstance(node, ast.ImportFrom)} & {
        "loss_plugins.integrations.swift", "loss_plugins.integrations.verl",
    }  # fmt: skip
    calls = [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) == "register"]
    if not ours or not calls:
        return None, f"{found[0]} does not call register of loss_plugins"
    try:
        given = ast.literal_eval(calls[0].args[0]) if calls[0].args else None
    except ValueError:
        return None, ""
    config = LossConfig.of(given)
    checked_config({name: getattr(config, name) for name in config.names()})
    return config, ""


def _name(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def _ours(values: Mapping[str, Any], path: Path) -> _Asked:
    from ..integrations.hf.job import SETTINGS
    from ..integrations.hf.loading import ModelArguments
    from ._settings import read_job

    if set(values) <= set(LossConfig.names()):
        from ..integrations.hf.keys import checked_config, own_keys

        return _Asked(checked_config(own_keys(values)), _refused(ModelArguments))
    args, model, *_ = read_job(path, [], SETTINGS)
    findings = _refused(lambda: _check_model(model))
    if args.use_liger_kernel:
        off = args.liger_kernel_config or {}
        if off.get("fused_linear_cross_entropy", True):
            what = "use_liger_kernel turns on Liger's own fused loss for most models: two losses for one model"
            line = "liger_kernel_config: {fused_linear_cross_entropy: false, cross_entropy: false}"
            findings.append(Finding("warning", what, (line, "liger_ops: true   # instead of use_liger_kernel")))
    return _Asked(args.loss_config(), findings)


def _check_model(model: ModelArguments) -> None:
    """What `train` refuses of a model before it asks the Hub.

    Raises:
        ConfigError: see `check_place`; or ``model_config`` is no model's.
    """
    from ..integrations.hf.loading import check_place, load_config

    for key in ("model_name_or_path", "tokenizer_name_or_path"):
        if (name := getattr(model, key)) is not None:
            check_place(key, name)
    if model.model_config is not None:
        load_config(model)


def _refused(check: Callable[[], Any]) -> list[Finding]:
    try:
        check()
    except LossPluginError as error:
        return [Finding("error", str(error).rstrip("."))]
    return []


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
