"""The exceptions of this package.

LossPluginError
 |- ConfigError(ValueError)                 an unknown name or a bad value in what the user asked for
 |- UnsupportedError(RuntimeError)          the strategy or backend asked for cannot run here
 |- PatchError(RuntimeError)                the model cannot be patched, or was already
 |- MissingDependencyError(ImportError)     an optional package is needed; the message has the pip line
 `- VerificationError(RuntimeError)         a loss or a gradient was compared with the stock model's, and differs

Every message says what was asked, why it cannot be done with the values seen, and what to do instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LossPluginError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(LossPluginError, ValueError):
    """An unknown name or a value outside its range.

    Attributes:
        others: What else is wrong, where the check went on to find it.
    """

    others: tuple[str, ...] = ()


class UnsupportedError(LossPluginError, RuntimeError):
    """What was asked for explicitly cannot run on this device or for this problem."""


class PatchError(LossPluginError, RuntimeError):
    """The model cannot be patched, or something else patched it already."""


class MissingDependencyError(LossPluginError, ImportError):
    """An optional package is needed for what was asked."""


class VerificationError(LossPluginError, RuntimeError):
    """A patched model was compared with the stock one and differs, or there was nothing to compare it with."""


def refuse(mistakes: Iterable[str]) -> None:
    """Raises:
    ConfigError: there is a mistake. It says the first, and holds the others.
    """
    said = tuple(mistakes)
    if said:
        error = ConfigError(said[0])
        error.others = said[1:]
        raise error


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence for a name that is not known: what was asked, the nearest known name, all known names."""
    names = sorted(known)
    near = nearest(name, names, cutoff=0.5)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"Unknown {kind} {name!r}.{hint} Known: {', '.join(names)}."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like ``name`` in any case of letters; None if none is."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None
