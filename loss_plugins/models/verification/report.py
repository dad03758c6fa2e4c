"""What came of a comparison."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass
class Row:
    """One strategy, or stock.

    Attributes:
        name: The strategy's.
        status: ``stock``; ``equal``; ``differs``; ``refused``: it cannot compute the loss of this model here;
            ``bypassed``: the model computes its loss without its head's logits, so there is nothing to replace.
        way: ``without logits`` or ``with logits``, and why.
        reason: Why it was refused, or what failed.
        loss: Its loss.
        loss_off: Relative distance of it from stock's.
        loss_allowed: What was allowed.
        gradient_off: Distance of the gradient that is nearest to what is allowed, or furthest beyond.
        gradient_allowed: What was allowed for it.
        gradient: Whose gradient that is.
        beyond: (what, distance, allowed) of all that is too far, the worst first.
        seconds: From the call of the head to the gradient of its input.
        peak_bytes: Memory above what was there before, in between.
    """

    name: str
    status: Literal["stock", "equal", "differs", "refused", "bypassed"]
    way: str = ""
    reason: str = ""
    loss: float | None = None
    loss_off: float | None = None
    loss_allowed: float | None = None
    gradient_off: float | None = None
    gradient_allowed: float | None = None
    gradient: str = ""
    beyond: list[tuple[str, float, float]] = field(default_factory=list)
    seconds: float | None = None
    peak_bytes: int | None = None


@dataclass
class Report:
    """One model, all strategies.

    Attributes:
        model: Its class.
        equal: Whether at least one strategy ran, and all that ran equal stock.
        reason: Why not, in a sentence; empty if so.
        dtype: What its logits are computed in.
        tolerance: How far ours may be from stock's, and where that comes from.
        own: Stock's own relative distance from itself with its head in a wider type, for the loss and for all
            gradients together; None where it was not measured.
        touched: What a patch touches, of the last strategy that ran.
        parameters: How many parameters' gradients were compared.
        stock: The unpatched model.
        rows: The strategies.
    """

    model: str
    equal: bool = False
    reason: str = ""
    dtype: str = ""
    tolerance: str = ""
    own: tuple[float, float] | None = None
    touched: str = ""
    parameters: int = 0
    stock: Row = field(default_factory=lambda: Row("stock", "stock"))
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is empty is left out of the rows, and what is no number is null."""
        found: dict[str, Any] = _finite(asdict(self))
        for row in (found["stock"], *found["rows"]):
            for key in [key for key, value in row.items() if value in (None, "", [])]:
                del row[key]
        return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
