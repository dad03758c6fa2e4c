"""The ways to compute the loss that are compared: our strategies, with the options that matter, and other packages'.

One of ours is named as it would be asked for, ``cce filter=off``: a strategy and its options. Any such name can be
measured, whether or not it is in the list.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import ConfigError, unknown_name
from ..strategies import STRATEGIES, Problem, linear_cross_entropy
from ..strategies._options import parse_options
from ..strategies.cce import PRESETS
from .peers import PEERS

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of (hidden, weight, labels); labels of -100 are ignored."""

EXACT_PRESETS = ("cce_exact", "cce_kahan_full_c_full_e")
MEASURED: dict[str, tuple[dict[str, Any], ...]] = {
    "cce": ({"filter": "off"}, *({"preset": name} for name in PRESETS if name != "cce")),
    "naive": ({"compile": True},),
}
"""Options that get a row of their own, beside each strategy's defaults."""


@dataclass(frozen=True)
class Contender:
    """One way to compute the loss.

    Attributes:
        promise: What it says of its gradients: ``exact`` (no worse than the naive way's, or than one rounding makes),
            ``filtered`` (small parts are left out on purpose) or nothing.
        strategy: One of ours, or "".
    """

    name: str
    loss: Loss
    promise: str = ""
    strategy: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def peak_bytes(self, problem: Problem) -> int:
        """What it says it takes; 0 where it says nothing."""
        if self.strategy in ("", "auto"):
            return 0
        strategy = STRATEGIES.get(self.strategy)
        return strategy.peak_bytes(problem, parse_options(self.strategy, strategy.Options, self.options))


def named(strategy: str, options: dict[str, Any]) -> str:
    """``cce filter=off``."""
    words = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items())
    return " ".join((strategy, *words))


def own_names() -> list[str]:
    """Our strategies, each with its defaults and with the options that get a row of their own, and ``auto``."""
    names = []
    for strategy in STRATEGIES.names():
        names += [named(strategy, options) for options in ({}, *MEASURED.get(strategy, ()))]
    return [*names, "auto"]


def all_names() -> list[str]:
    return [*own_names(), *PEERS]


def choose(only: Sequence[str] = (), skip: Sequence[str] = ()) -> tuple[dict[str, Contender], dict[str, str]]:
    """(name -> contender, name -> why it is not here), in the order of the list. Only what is chosen is imported.

    Args:
        only: Names or patterns such as ``cce*``; all where empty. A strategy with any options is a name too.
        skip: Names or patterns to leave out.

    Raises:
        ConfigError: an unknown name, a pattern that fits nothing, or a name in full that cannot be imported here.
    """
    names = all_names()
    chosen = names if not only else list(dict.fromkeys(n for word in only for n in _matching(word, names)))
    left_out = {name for word in skip for name in _matching(word, chosen)}
    found: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for name in chosen:
        if name in left_out:
            continue
        if name not in PEERS:
            found[name] = own(name)
            continue
        try:
            found[name] = Contender(name, PEERS[name].load())
        except Exception as error:  # a peer that cannot be imported is reported, whatever it raises
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            if name in only:
                raise ConfigError(
                    f"Contender {name!r} was asked for and is not here: {missing[name]}. Install "
                    f"{PEERS[name].package}, or ask with a pattern, which takes what can be imported."
                ) from error
    return found, missing


def _matching(word: str, names: Iterable[str]) -> list[str]:
    if any(c in word for c in "*?["):
        fit = [name for name in names if fnmatch.fnmatchcase(name.lower(), word.lower())]
        if not fit:
            raise ConfigError(f"No contender fits {word!r}. Known: {', '.join(names)}.")
        return fit
    if word in names:
        return [word]
    head = word.split(" ")[0]
    if head in (*STRATEGIES.names(), "auto") and " " in word:
        return [own(word).name]
    raise ConfigError(unknown_name("contender", word, names))


def own(name: str) -> Contender:
    """The contender of a name such as ``cce filter=off workspace_mb=64``.

    Raises:
        ConfigError: no such strategy or option.
    """
    strategy, *words = name.split()
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"Contender {name!r}: {word!r} is no option. Write it as option=value.")
        options[key] = _value(value)
    promise = "exact"
    if strategy != "auto":
        parsed = parse_options(strategy, STRATEGIES.get(strategy).Options, options)
        if getattr(parsed, "filter", "off") != "off" and getattr(parsed, "preset", "") not in EXACT_PRESETS:
            promise = "filtered"
    elif "filter" in options or "preset" in options:
        promise = "filtered"

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, strategy=strategy, options=options)

    return Contender(named(strategy, options), loss, promise, strategy, options)


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
