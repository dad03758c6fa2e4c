"""``loss_options``: a mapping in the user's words, read into a strategy's own frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import ConfigError, unknown_name

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
            raise ConfigError(f"{unknown_name(f'option of strategy {strategy!r}:', str(name), known)}")
    return schema(**given)


def check_workspace(value: Any) -> None:
    """``workspace_mb`` as every strategy understands it: mebibytes above 0, or None for the strategy's own rule."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ConfigError(
            f"workspace_mb must be a number of mebibytes above 0, got {value!r}. Leave it out for the default."
        )


def check_kernels(value: Any) -> None:
    """``kernels`` as every strategy with a choice of them understands it."""
    if value not in ("auto", "torch", "triton"):
        raise ConfigError(unknown_name("value of kernels:", str(value), ("auto", "torch", "triton")))


def workspace_bytes(workspace_mb: float | None, most_mb: int, logits_bytes: int) -> int:
    """Bytes of logits that may exist at a time: what was asked for, or an eighth of the whole matrix within
    [16 MiB, ``most_mb``], so that a small problem saves memory too and a large one keeps its products large."""
    if workspace_mb is not None:
        return max(1, int(workspace_mb * MIB))
    return max(16 * MIB, min(most_mb * MIB, logits_bytes // 8))
