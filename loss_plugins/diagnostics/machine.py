"""What stands in the way on this machine: packages that are missing, too old or unfit for each other, and what to type.

Works where `import torch` raises, since that is one of the findings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from .. import npu
from ..npu import Npu, installed

if TYPE_CHECKING:
    from ..device import DeviceProfile

OPTIONAL = {
    "peft": ("LoRA and other adapters", "peft"),
    "trl": ("TRL's trainers", "trl"),
    "datasets": ("data sets of the hub, parquet files", "data"),
    "gguf": ("GGUF files as models", "gguf"),
    "matplotlib": ("plots of `train` and `bench`", "quickstart"),
    "liger-kernel": ("liger_ops", "liger"),
}
"""Package -> what it is for, and the extra that brings it."""
RUN_WITH = {"axolotl": "0.21.0", "llamafactory": "0.9.5", "ms-swift": "4.6.0", "lightning": "2.6.6"}
"""Frameworks, and the release whose own command was run with ours."""
HAVE_FUSED = "2.7.1.post11, 2.9.0.post9, 2.13.0 and 2.14.0"
"""Releases of torch_npu with the operators of `cce` with `kernels: native`."""


@dataclass(frozen=True)
class Finding:
    """Something to know.

    Attributes:
        level: ``error`` (what was asked for cannot run), ``warning`` (it runs, but not as it could) or ``note``.
        what: One sentence.
        do: Commands to type, or lines to write, in this order.
    """

    level: str
    what: str
    do: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What is here.

    Attributes:
        profile: The device that a Trainer would use; None where torch cannot be imported.
        findings: The gravest first.
        missing: Optional packages that are not installed: name, what it is for, what to type.
    """

    profile: DeviceProfile | None
    findings: tuple[Finding, ...]
    missing: tuple[tuple[str, str, str], ...]


def look() -> Machine:
    """Everything that can be said without a training file."""
    findings = [*_requirements(), *_frameworks()]
    profile, broken = _profile()
    findings += broken
    if profile is not None:
        findings += [*_unused_gpus(), *_no_triton(profile)]
    if npu.is_meant() or (profile is not None and profile.kind == "npu"):
        findings += _npu(profile)
    missing = tuple(
        (name, what, f"pip install 'loss-plugins[{extra}]'")
        for name, (what, extra) in OPTIONAL.items()
        if not installed(name)
    )
    return Machine(profile, by_gravity(findings), missing)


def by_gravity(findings: list[Finding]) -> tuple[Finding, ...]:
    """Errors, warnings, notes."""
    return tuple(sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.level)))


def _requirements() -> Iterator[Finding]:
    """What this package asks for of others. An extra's packages need not be there, but not too old either."""
    try:
        lines = metadata.requires("loss-plugins") or []
    except metadata.PackageNotFoundError:  # used from its folder
        return
    for requirement in map(Requirement, lines):
        is_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        version = installed(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if not version and not is_extra:
            yield Finding("error", f"{requirement.name} is not installed", (f"pip install '{wanted}'",))
        elif version and not requirement.specifier.contains(version, prereleases=True):
            level = "warning" if is_extra else "error"
            what = f"{requirement.name} {version} is installed, and loss_plugins needs {requirement.specifier}"
            yield Finding(level, what, (f"pip install --upgrade '{wanted}'",))


def _frameworks() -> Iterator[Finding]:
    for name, checked in RUN_WITH.items():
        version = installed(name)
        if version and version != checked:
            yield Finding("note", f"{name} {version} is installed; loss_plugins was run with {name} {checked}")


def _profile() -> tuple[DeviceProfile | None, list[Finding]]:
    """The device that a Trainer would use, or why there is none."""
    try:
        import torch  # noqa: F401 - what is found out is whether it can be imported

        from ..device import DeviceProfile
        from .environment import best_device
    except Exception as error:
        if not installed("torch"):
            return None, []  # said already
        return None, [_broken_torch(error)]
    device = "cpu"
    try:
        device = best_device()
        return DeviceProfile.probe(device), []
    except Exception as error:
        what = f"torch finds a device {device!r} that does not answer: {_said(error)}"
        return DeviceProfile.probe("cpu"), [Finding("error", what)]


def _broken_torch(error: Exception) -> Finding:
    cause = error.__cause__ or error
    what = f"import torch fails: {_said(error)}" + (f" ({_said(cause)})" if cause is not error else "")
    if not installed("torch_npu"):
        return Finding("error", what, ("pip install --force-reinstall torch",))
    unset = npu.unset_cann()
    return Finding(
        "error",
        f"{what}. torch loads torch_npu {installed('torch_npu')}, which needs CANN: {npu.cann_advice()}",
        (
            f"source {unset}" if unset else f"{npu.SET_ENV}   # once CANN is installed",
            "export TORCH_DEVICE_BACKEND_AUTOLOAD=0   # instead, to leave the NPU alone",
        ),
    )


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _unused_gpus() -> Iterator[Finding]:
    import torch

    version: Any = torch.version
    if torch.cuda.is_available():
        return
    for path, name, build in (("/dev/nvidia0", "an NVIDIA GPU", "cuda"), ("/dev/kfd", "an AMD GPU", "hip")):
        if not Path(path).exists():
            continue
        if getattr(version, build, None):
            what = f"{name} is here, and torch {torch.__version__} cannot use it: its driver is missing or too old"
            yield Finding("warning", what, ("nvidia-smi" if build == "cuda" else "rocm-smi",))
        else:
            what = f"{name} is here, and torch {torch.__version__} is a build for CPUs"
            index = "" if build == "cuda" else " --index-url https://download.pytorch.org/whl/rocm6.4"
            yield Finding("warning", what, (f"pip install --force-reinstall torch{index}",))


def _no_triton(profile: DeviceProfile) -> Iterator[Finding]:
    from ..device import GPUS

    if profile.kind in GPUS and profile.triton_obstacle:
        do = () if profile.has_triton else ("pip install triton",)
        yield Finding("warning", f"torch's kernels run in place of Triton's: {profile.triton_obstacle}", do)


# An NPU's machine


def _npu(profile: DeviceProfile | None) -> Iterator[Finding]:
    found = profile.npu if profile is not None else None
    here = found is not None
    if found is None:
        found = Npu(
            cann=npu.cann_version(),
            torch_npu=installed("torch_npu"),
            triton_ascend=installed("triton-ascend"),
            obstacle=npu.triton_obstacle() if profile is not None else "torch cannot be imported",
        )
    commands = tuple(npu.install_commands(found))  # said once
    if not here:
        reason = _no_device(found, profile)
        yield Finding("error" if found.torch_npu or npu.has_hardware() else "note", reason, commands)
    elif found.obstacle:
        yield Finding("warning", f"torch's kernels run in place of triton-ascend's: {found.obstacle}", commands)
    outside = npu.mismatches(found, installed("torch"), sys.version_info[:2])
    for place, said in enumerate(outside):
        yield Finding("warning", said, commands if here and not found.obstacle and place == len(outside) - 1 else ())
    if here and not found.has_fused_linear:
        what = f"loss_options {{kernels: native}} of cce cannot run: only torch_npu {HAVE_FUSED} have its operators"
        yield Finding("note", what)
    if found.torch_npu and profile is not None:
        yield from _transformers_check()


def _no_device(found: Npu, profile: DeviceProfile | None) -> str:
    what = "Software for an Ascend NPU is here" if not npu.has_hardware() else "An Ascend NPU is here"
    if not found.torch_npu:
        return f"{what}, and torch_npu is not installed"
    if profile is None:
        return f"{what}, and torch cannot be imported with it"
    return f"{what}, and torch finds no device: {npu.cann_advice()}"


def _transformers_check() -> Iterator[Finding]:
    """Its look for an NPU raises where torch_npu cannot be imported, and every Trainer looks."""
    try:
        from transformers.utils.import_utils import is_torch_npu_available

        is_torch_npu_available()
    except Exception as error:
        what = f"transformers cannot look for an NPU ({_said(error)}), so no Trainer can be made, not on a CPU either"
        do = (f"source {npu.unset_cann() or '/usr/local/Ascend/cann/set_env.sh'}", "pip uninstall -y torch_npu")
        yield Finding("error", what, (do[0], f"{do[1]}   # instead, to leave the NPU alone"))
