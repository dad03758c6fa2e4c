"""``loss_options``: a mapping in the user's words, read into a strategy's own frozen dataclass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..device import DeviceProfile
from ..errors import ConfigError, unknown_name
from ..kernels import ops
from ..npu import Npu, install_commands
from ..registry import Registry
from ._base import Problem

T = TypeVar("T")

MIB = 1 << 20


def parse_options(strategy: str, schema: type[T], given: Mapping[str, Any] | None) -> T:
    """The options dataclass of ``strategy`` with what the user gave.

    Raises:
        ConfigError: an option the strategy does not know, or a value that its dataclass refuses.
    """
    given = dict(given or {})
    known = list(schema.__dataclass_fields__)  # type: ignore[attr-defined]  # torch.compile cannot trace fields()
    for name in given:
        if name not in known:
            if not known:
                raise ConfigError(
                    f"loss_options has {name!r}, but strategy {strategy!r} takes no options. Remove it, or choose "
                    "another strategy."
                )
            said = unknown_name(f"option of strategy {strategy!r}:", str(name), known)
            if name == "backend" and "kernels" in known:
                said = f"loss_options has 'backend', which is called kernels here. Write kernels: {given[name]}."
            raise ConfigError(said)
    return schema(**given)


def check_workspace(value: Any) -> None:
    """``workspace_mb`` as every strategy understands it: mebibytes above 0, or None for the strategy's own rule."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
    ):
        raise ConfigError(
            f"workspace_mb must be a number of mebibytes above 0, got {value!r}. Leave it out for the default."
        )


KERNELS = ("auto", "torch", "triton", "ascend")


class _Backends(Registry):
    """Folders of kernels/, and what other packages add to them."""

    def builtin(self) -> list[str]:
        return ops.backends()


BACKENDS = _Backends(
    package="loss_plugins.kernels",
    attribute="",
    kind="kernel backend",
    members=(
        "obstacle", "linear_ce_forward", "linear_ce_backward", "flce_forward", "cross_entropy_forward",
        "cross_entropy_backward", "scaled",
    ),
)  # fmt: skip
"""Another package's backend has the entry functions of `kernels/torch`, with its results (marks of shape ``[0, 0]``),
and ``obstacle(profile)``: why it cannot run on that device, or None."""


def check_kernels(value: Any, known: Sequence[str] = KERNELS) -> None:
    """``kernels`` as a strategy with a choice of them understands it."""
    if value in known:
        return
    belongs = {"native": "naive and cce", "triton": "flce and cce", "ascend": "flce and cce", "auto": "flce and cce"}
    if isinstance(value, str) and value in belongs:
        raise ConfigError(
            f"kernels: {value} was asked for, which only strategies {belongs[value]} have. Here it can be "
            f"{', '.join(known)}; or name one of those strategies."
        )
    if "triton" not in known or not isinstance(value, str) or not _add_backend(value):
        raise ConfigError(unknown_name("value of kernels:", str(value), known))


@torch.compiler.assume_constant_result
def _add_backend(name: str) -> bool:
    """Whether another package has a backend of that name, which can be launched from then on."""
    if name in BACKENDS.builtin() or (":" not in name and name not in BACKENDS.names()):
        return False
    ops.add_backend(name, BACKENDS.get(name))
    return True


def cannot_run(kernels: str, problem: Problem, profile: DeviceProfile) -> str | None:
    """Why the kernels that were asked for cannot run, or None."""
    if kernels in ("auto", "torch"):
        return None
    if kernels not in ("triton", "ascend"):
        obstacle = ops.backend(kernels).obstacle(profile)
        return f"kernels={kernels!r} was asked for, but {obstacle}" if obstacle else None
    obstacle = profile.triton_obstacle if kernels == "triton" else profile.ascend_obstacle
    if obstacle and profile.kind == "npu":
        how = "kernels='ascend' are those for it, and "
        if kernels == "ascend":
            npu = profile.npu or Npu()
            # in what order the two share a folder matters
            how = "" if npu.triton_ascend else f"type {' && '.join(install_commands(npu)[-3:-1])}, and "
        return f"kernels={kernels!r} was asked for, but {obstacle}; {how}`loss-plugins doctor` says what to install"
    if obstacle:
        return f"kernels={kernels!r} was asked for, but {obstacle}"
    if problem.dtype == torch.float64:
        return f"kernels={kernels!r} was asked for, but the {kernels.title()} kernels have no float64"
    return None


def on_triton(kernels: str, problem: Problem) -> bool:
    """Whether Triton's kernels are those whose memory counts."""
    return (kernels == "triton" or (kernels == "auto" and problem.triton)) and problem.dtype != torch.float64


def on_ascend(kernels: str, problem: Problem) -> bool:
    """Whether triton-ascend's kernels are those whose memory counts."""
    return (kernels == "ascend" or (kernels == "auto" and problem.ascend)) and problem.dtype != torch.float64


def backend_for(kernels: str, profile: DeviceProfile, dtype: torch.dtype | None = None) -> str:
    """The folder of kernels that computes: what was asked for, or Triton or triton-ascend where one can really launch.

    Raises:
        ConfigError: Triton computes, and the user's file of tiles cannot be read.
    """
    chosen = kernels
    if kernels == "auto":
        chosen = "torch"
        if dtype != torch.float64 and profile.can_triton and not profile.interpreted:
            chosen = "triton"
        elif dtype != torch.float64 and profile.ascend_obstacle is None:
            chosen = "ascend"
    if chosen == "triton" and profile.can_triton:
        kind = "interpreter" if profile.interpreted else profile.kind
        wrong = _tiles_problem(kind, profile.name, profile.capability, profile.architecture)
        if wrong is not None:
            raise ConfigError(wrong)
    return chosen


@torch.compiler.assume_constant_result
def _tiles_problem(kind: str, name: str, capability: tuple[int, int], architecture: str) -> str | None:
    """What is wrong with the user's own files of tiles, or None."""
    try:
        from ..kernels.triton import tuning

        tuning.user_tables(tuning.device_keys(kind, name, architecture or tuning.sm(capability)))
    except ImportError:  # only a profile said that Triton is here
        return None
    except ValueError as error:
        return str(error)
    return None


def workspace_bytes(
    workspace_mb: float | None, most_mb: int, logits_bytes: int, share: int = 8, least_mb: int = 16
) -> int:
    """Bytes of logits that may exist at a time: what was asked for, or one ``share`` of the whole matrix within
    [``least_mb``, ``most_mb``], so that a small problem saves memory too and a large one keeps its products large."""
    if workspace_mb is not None:
        return max(1, int(workspace_mb * MIB))
    return max(least_mb * MIB, min(most_mb * MIB, logits_bytes // share))
