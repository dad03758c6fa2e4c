"""The only home of "auto": a wish, the facts and a problem become a plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..device import GPUS, DeviceProfile, free_bytes
from ..errors import ConfigError, UnsupportedError
from ..npu import installed, mismatches
from ..registry import Registry
from ._base import Problem, Strategy
from ._options import MIB, parse_options

logger = logging.getLogger(__name__)

STRATEGIES = Registry(
    "loss_plugins.strategies",
    "STRATEGY",
    "loss strategy",
    members=("name", "Options", "check", "peak_bytes", "kernels", "__call__"),
    also=("auto",),
)

SMALL = 64 * MIB
"""Up to this many bytes of logits the plain way is the fastest, or nearly, and its memory does not matter; see the grid
in `bench/results`."""

FEW_ROWS = 512
"""From this many rows on a filter is faster than `flce`."""


@dataclass(frozen=True)
class Plan:
    """A decision, printable: what runs, why, and what was passed over."""

    strategy: Strategy
    options: Any
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()

    def describe(self, profile: DeviceProfile) -> str:
        words = f"{self.strategy.name} ({self.strategy.kernels(profile, self.options)} kernels): {self.reason}"
        # on a CPU nobody expects them
        if getattr(self.options, "kernels", None) == "auto":
            if profile.kind in GPUS and profile.triton_obstacle:
                words += f"; no Triton kernels: {profile.triton_obstacle}"
            elif profile.kind == "npu" and profile.ascend_obstacle:
                words += f"; no Ascend kernels: {profile.ascend_obstacle}"
        for name, why in self.passed_over:
            words += f"; not {name}: {why}"
        return words


_said: set[str] = set()
_chosen: dict[str, None] = {}


def chosen_by_auto() -> tuple[str, ...]:
    """Strategies that "auto" has run in this process since `forget_choices`, in the order of their first use."""
    return tuple(_chosen)


def forget_choices() -> None:
    """Start `chosen_by_auto` anew."""
    _chosen.clear()


def select(
    strategy: str,
    options: Mapping[str, Any] | None,
    problem: Problem,
    profile: DeviceProfile,
    free: int | None = None,
) -> Plan:
    """The plan for one loss.

    Raises:
        ConfigError: an unknown strategy or option.
        UnsupportedError: a strategy that was asked for by name cannot run here.
    """
    if not isinstance(strategy, str):
        raise ConfigError(f"strategy must be a name such as 'cce', got {strategy!r}. Leave it out for 'auto'.")
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            f"options must be a mapping such as {{'workspace_mb': 256}}, got {options!r}. Leave it out for the "
            "defaults."
        )
    if strategy != "auto":
        chosen, parsed = _prepared(strategy, options)
        reason = chosen.check(problem, profile, parsed)
        if reason is not None:
            raise UnsupportedError(
                f"Strategy {strategy!r} was asked for but cannot run here: {reason}. "
                + _way_out(chosen, options or {}, problem, profile)
            )
        return Plan(chosen, parsed, "asked for")
    return _auto(options, problem, profile, free)


def _way_out(chosen: Strategy, options: Mapping[str, Any], problem: Problem, profile: DeviceProfile) -> str:
    rest = {name: value for name, value in options.items() if name != "kernels"}
    if len(rest) < len(options) and chosen.check(problem, profile, _prepared(chosen.name, rest)[1]) is None:
        return "Leave kernels out of loss_options: those that can run here are taken then."
    return "Use loss_strategy 'chunked', which takes any head on any device, or 'auto', and leave loss_options out."


def check_options(strategy: str, options: Mapping[str, Any] | None) -> None:
    """Names and values of options, where the problem and its device are not known yet.

    Raises:
        ConfigError: the strategy, or with "auto" every strategy that it chooses among, refuses them.
    """
    if strategy != "auto":
        _prepared(strategy, options)
        return
    wrong: ConfigError | None = None
    for name in ("cce", "flce", "chunked", "naive"):
        if _unknown_option(name, tuple(options or ())) is None:
            try:
                _prepared(name, options)
            except ConfigError as error:
                wrong = wrong or error
            else:
                return
    if wrong is not None:
        raise wrong
    raise ConfigError(
        f"No strategy that loss_strategy 'auto' chooses among has all of loss_options {dict(options or {})!r}. Remove "
        "an option, or name the strategy that they belong to; `loss-plugins strategies` lists them."
    )


def select_on(strategy: str, options: Mapping[str, Any] | None, problem: Problem, device: torch.device) -> Plan:
    """`select` for a loss that is about to be computed. What "auto" chooses is said once for each strategy, at a level
    that is seen without asking: the choice decides the memory of a whole run."""
    profile = profile_of(device)
    if strategy != "auto" or torch.compiler.is_compiling():
        return select(strategy, options, problem, profile)
    plan = select(strategy, options, problem, profile, free_bytes(device))
    name = plan.strategy.name
    _chosen[name] = None
    if name not in _said:
        _said.add(name)
        logger.warning("loss_strategy auto chose %s", plan.describe(profile))
    return plan


# torch.compile runs the functions below that are marked so while it traces, and keeps what they return. That must be a
# plain constant, so they file their objects under a key in these tables, where a traced function can look them up.
_LOADED: dict[str, Strategy] = {}
_PROFILES: dict[str, DeviceProfile] = {}


def profile_of(device: torch.device) -> DeviceProfile:
    """The facts of a device, probed once."""
    return _PROFILES[_file_profile(device)]


@torch.compiler.assume_constant_result
def _file_profile(device: torch.device) -> str:
    key = str(device)
    if key not in _PROFILES:
        _PROFILES[key] = profile = DeviceProfile.probe(device)
        for said in [] if profile.npu is None else mismatches(profile.npu, installed("torch")):
            logger.warning("Outside what is released to fit together, see loss-plugins doctor: %s", said)
    return key


def _prepared(name: str, options: Mapping[str, Any] | None) -> tuple[Strategy, Any]:
    """A strategy and its parsed options."""
    strategy = _LOADED[_file_strategy(name)]
    return strategy, parse_options(name, strategy.Options, options)


@torch.compiler.assume_constant_result
def _file_strategy(name: str) -> str:
    if name not in _LOADED:
        _LOADED[name] = STRATEGIES.get(name)
    return name


@torch.compiler.assume_constant_result
def _unknown_option(name: str, options: tuple[str, ...]) -> str | None:
    """The first of these options that a strategy does not have, or None."""
    known = {f.name for f in fields(STRATEGIES.get(name).Options)}
    return next((option for option in options if option not in known), None)


def _readable(count: int) -> str:
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"


def _auto(options: Mapping[str, Any] | None, problem: Problem, profile: DeviceProfile, free: int | None) -> Plan:
    passed_over: list[tuple[str, str]] = []
    there = problem.on(profile)
    # a traced size is a symbol, which cannot be printed
    size = "logits" if torch.compiler.is_compiling() else f"{_readable(problem.logits_bytes)} of logits"
    if problem.module:
        order = [("chunked", "the head is a module that must be called")]
    elif problem.logits_bytes <= SMALL:
        with_options = f"{size}, and it has the options asked for"
        order = [("naive", f"{size} is little"), *((name, with_options) for name in ("flce", "cce", "chunked"))]
    elif there.is_filterable and problem.reduced and problem.rows >= FEW_ROWS:
        least = f"{size}, least memory, and fastest on a model that is no longer untrained"
        order = [("cce", least), ("flce", f"{size}, fewest operations"), ("chunked", "what is left")]
    elif problem.differentiable and problem.reduced:
        order = [("flce", f"{size}, fewest operations"), ("cce", f"{size}, least memory"), ("chunked", "what is left")]
    else:
        why = "no gradient is needed" if not problem.differentiable else "per-token gradients"
        order = [("cce", f"{size}, {why}"), ("chunked", "what is left")]
    for name, reason in order:
        unknown = _unknown_option(name, tuple(options or ()))
        if unknown:
            passed_over.append((name, f"it has no option {unknown!r}"))
            continue
        try:
            candidate, parsed = _prepared(name, options)
        except ConfigError as error:  # another strategy may have that value
            passed_over.append((name, str(error).rstrip(".")))
            continue
        why_not = candidate.check(problem, profile, parsed)
        if why_not is None and free is not None:
            peak = candidate.peak_bytes(there, parsed)
            if peak > 0.9 * free and name != order[-1][0]:
                why_not = f"it needs {peak / MIB:.0f} MiB and {free / MIB:.0f} MiB are free"
        if why_not is None:
            return Plan(candidate, parsed, reason, tuple(passed_over))
        passed_over.append((name, why_not))
    check_options("auto", options)
    raise ConfigError(
        f"loss_strategy 'auto' found nothing that can run with loss_options {dict(options or {})!r}: "
        + "; ".join(f"{name}: {why}" for name, why in passed_over)
        + ". Remove the option, or name the strategy that it belongs to."
    )
