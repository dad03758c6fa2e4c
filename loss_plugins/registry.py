"""Name -> object, for the rooms that third parties can add to.

A name is looked up, in this order, as a file of the room (``flce`` is ``strategies/flce.py``), as an entry point of
the room's group, and as a dotted path ``package.module:attribute``. Files whose name begins with an underscore are not
entries. Nothing is imported before it is asked for, and a built-in name cannot be shadowed.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import ConfigError, unknown_name


class Registry:
    """The entries of one room.

    Args:
        package: The room's package, for example ``loss_plugins.strategies``.
        attribute: The name that an entry's module exports, for example ``STRATEGY``.
        kind: The word for error messages, for example ``loss strategy``.
        members: What every entry has, to refuse what others point at by mistake.
        also: Names that are understood elsewhere, for the list in an error message.
    """

    def __init__(
        self, package: str, attribute: str, kind: str, members: tuple[str, ...] = (), also: tuple[str, ...] = ()
    ) -> None:
        self.package, self.attribute, self.kind = package, attribute, kind
        self.members, self.also = members, also

    def builtin(self) -> list[str]:
        """Names of the room's own files."""
        path = importlib.import_module(self.package).__path__
        return sorted(m.name for m in pkgutil.iter_modules(path) if not m.ispkg and not m.name.startswith("_"))

    def names(self) -> list[str]:
        """All names that are known without a dotted path: own files and installed entry points."""
        return sorted({*self.builtin(), *(e.name for e in entry_points(group=self.package))})

    def get(self, name: str) -> Any:
        """The object behind ``name``.

        Raises:
            ConfigError: the name is unknown, or what it points at does not exist or is no such thing.
        """
        if name in self.builtin():
            return getattr(importlib.import_module(f"{self.package}.{name}"), self.attribute)
        for entry in entry_points(group=self.package):
            if entry.name == name:
                return self._checked(name, self._loaded(entry))
        if ":" in name:
            module, _, attribute = name.partition(":")
            try:
                found = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"{self.kind} {name!r} could not be loaded: {error}. Check the path (package.module:attribute), "
                    f"or use one of: {', '.join(self.names())}."
                ) from error
            return self._checked(name, found)
        raise ConfigError(unknown_name(self.kind, name, [*self.names(), *self.also]))

    def _loaded(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except (ImportError, AttributeError) as error:
            package = "another package" if entry.dist is None else f"the package {entry.dist.name}"
            raise ConfigError(
                f"{self.kind} {entry.name!r} of {package} could not be loaded: {error}. Update or uninstall that "
                "package."
            ) from error

    def _checked(self, name: str, found: Any) -> Any:
        missing = [member for member in self.members if not hasattr(found, member)]
        if self.members and (missing or isinstance(found, type)):
            what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
            lacks = f" without {', '.join(missing)}" if missing else ""
            raise ConfigError(
                f"{self.kind} {name!r} points at {what}{lacks}, and an object with {', '.join(self.members)} is "
                "needed. Point at one: package.module:attribute."
            )
        return found
