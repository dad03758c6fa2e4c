"""``F.cross_entropy`` on deferred logits: the loss that the model asked for, with what the configuration adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from ..errors import ConfigError
from ..strategies import LossOutput, VocabParallel, linear_cross_entropy_stats, projected_cross_entropy_stats
from .record import Normal, normalise, replay
from .swap import JOB, base_class
from .terms import written_check
from .token_weight import aligned_token_weight

if TYPE_CHECKING:
    from .deferred import DeferredLogits
    from .frame import Frame
    from .head import Head
    from .terms import Terms


@dataclass(frozen=True)
class CrossEntropyCall:
    """The arguments of one call of ``F.cross_entropy`` beside the logits."""

    target: Any
    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


def consume(logits: DeferredLogits, call: CrossEntropyCall) -> Any:
    """The loss, or NotImplemented where only real logits and torch's own function can tell what is meant."""
    frame, target = logits.frame, call.target
    frame.losses += 1
    plain = (
        isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == 1
        and logits.ndim == 2 and target.shape[0] == logits.shape[0]
    )  # fmt: skip
    if not plain:
        _no_extras(frame, f"logits of {logits.ndim} axes or targets that are no indices")
        return NotImplemented
    arguments = _arguments(frame, call, logits.vocab)
    if frame.handle.objective is None:
        return _computed(frame, logits, call, arguments)
    each = {**arguments, "reduction": "none", "token_weight": None}
    losses = _computed(frame, logits, replace(call, reduction="none"), each)
    return _by_objective(frame, losses, call, arguments["token_weight"])


def _computed(frame: Frame, logits: DeferredLogits, call: CrossEntropyCall, arguments: dict[str, Any]) -> Tensor:
    """The cross-entropy of plain targets."""
    if logits.is_real():
        return _from_real_logits(frame, logits.materialise("cross_entropy"), call, arguments)
    logits.check_hidden()
    target = call.target
    target = frame.handle.counts.add_loss(target)
    for listener in frame.handle.before_loss:
        listener()
    return run_job(logits, LossJob(logits, target, arguments))


def _by_objective(frame: Frame, losses: Tensor, call: CrossEntropyCall, token_weight: Tensor | None) -> Tensor:
    """What the objective makes of the negative log-probabilities of single labels, reduced as the model asked."""
    objective, name = frame.handle.objective, frame.handle.config.loss_objective
    assert objective is not None
    counted = (call.target != call.ignore_index).to(losses.device)
    each = objective(-losses)
    if not isinstance(each, Tensor) or each.shape != losses.shape or not each.is_floating_point():
        kind = f"a tensor of shape {tuple(each.shape)} and {each.dtype}" if isinstance(each, Tensor) else ""
        raise ConfigError(
            f"loss_objective {name!r} returned {kind or type(each).__name__} for log-probabilities of shape "
            f"{tuple(losses.shape)} and {losses.dtype}. It must return one loss a label."
        )
    if losses.requires_grad and not each.requires_grad:
        raise ConfigError(
            f"loss_objective {name!r} returned losses without a gradient for log-probabilities that have one, so "
            "nothing would be trained. Compute them from the log-probabilities, of which only a factor may be detached."
        )
    each = each.to(losses.dtype)  # sums of half types overflow
    weight = counted.to(each.dtype)
    if token_weight is not None:
        weight = weight * token_weight.to(each)
    each = torch.where(counted, each, 0.0) * weight
    if call.reduction == "none":
        return each
    return each.sum() if call.reduction == "sum" else each.sum() / weight.sum()


def run_job(logits: DeferredLogits, job: LossJob) -> Tensor:
    """Call the head of ``logits``, shape ``[N, V]``, with ``job`` in place of making them."""
    head = logits.head
    with torch.set_grad_enabled(torch.is_grad_enabled() and not logits.detached), logits.frame.as_it_was():
        if head.way == "call":
            return job.run(logits.hidden)
        returned: Tensor = head.outer(logits.hidden, **{JOB: job})
    # an idle adapter casts what it returns to the type of the hidden states
    return returned if job.loss is None or returned.dtype == job.loss.dtype else job.loss


class LossJob:
    """One loss, computed by the head when it is called with this.

    No dataclass: FSDP1 copies those when they are arguments.

    Args:
        logits: Shape ``[N, V]``.
        target: Shape ``[N]``.
        arguments: Of the strategies' functions.
        records: Whether its tokens go into the statistics.
        tells: Whether memory meters hear of its backward.
    """

    def __init__(
        self,
        logits: DeferredLogits,
        target: Tensor,
        arguments: dict[str, Any],
        records: bool = True,
        tells: bool = True,
    ) -> None:
        self.records, self.tells = records, tells
        self.frame, self.steps, self.vocab = logits.frame, logits.steps, logits.vocab
        self.head, self.core = logits.head, logits.head.core
        self.target, self.arguments = target, arguments
        self.loss: Tensor | None = None
        self.output: LossOutput | None = None

    def run(self, hidden: Tensor) -> Tensor:
        """The loss of ``hidden``, shape ``[N, H]``. Runs inside the head's call, where its weight is whole."""
        given: Any = hidden
        if not hasattr(given, "full_tensor") or not all(placement.is_replicate() for placement in given.placements):
            return self._run(hidden)
        # torch's own tensor parallelism makes a DTensor of what goes in, and expects one to come out
        loss = self._run(given.to_local(grad_placements=given.placements))
        return cast(Tensor, type(given).from_local(loss, given.device_mesh, given.placements, run_check=False))

    def _run(self, hidden: Tensor) -> Tensor:
        frame, head = self.frame, self.head
        if hidden.device != self.target.device:
            self.target = self.target.to(hidden.device)
            for name in ("class_weight", "token_weight"):
                if self.arguments[name] is not None:
                    self.arguments[name] = self.arguments[name].to(hidden.device)
        normal, part = normalise(self.steps), head.own_part(hidden)
        normal = None if normal is None or part is None else normal.of_part(part[2].rows)
        if normal is not None and part is not None:
            weight, bias, parallel = part
            return self._done(self._linear(normal, hidden, weight, bias, parallel), hidden, weight)
        terms = head.terms(hidden)
        if isinstance(terms, str):
            frame.handle.use_module(terms)
            strategy = frame.handle.config.loss_strategy
            return self._done(self._projected(hidden, self._module_call(), strategy), hidden, None)
        return self._done(self._of_terms(terms), hidden, terms.terms[0].weight)

    def _of_terms(self, terms: Terms) -> LossOutput:
        handle = self.frame.handle
        normal = normalise(self.steps)
        takes_chunks = not (terms.is_plain or handle.needs_weight)
        if normal is None or takes_chunks:
            strategy = handle.config.loss_strategy if takes_chunks else handle.replaying(self.steps)
            return self._projected(*terms.in_chunks(), strategy)
        hidden, weight, bias = terms.side_by_side()
        if not terms.is_plain:
            handle.use_side_by_side(weight)
        return self._linear(normal, hidden, weight, bias)

    def _linear(
        self,
        normal: Normal,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        vocab_parallel: VocabParallel | None = None,
    ) -> LossOutput:
        config = self.frame.handle.config
        hidden, weight, bias = normal.layer(hidden, weight, bias)
        return linear_cross_entropy_stats(
            hidden,
            weight,
            self.target,
            strategy=config.loss_strategy,
            options=config.loss_options,
            bias=bias,
            logit_scale=normal.scale,
            softcap=normal.softcap,
            vocab_parallel=vocab_parallel,
            **self.arguments,
        )

    def _projected(self, hidden: Tensor, project: Callable[[Tensor], Tensor], strategy: str) -> LossOutput:
        config = self.frame.handle.config
        options = config.loss_options if strategy == config.loss_strategy else None
        return projected_cross_entropy_stats(
            lambda rows: replay(project(rows), self.steps),
            hidden,
            self.target,
            vocab=self.vocab,
            strategy=strategy,
            options=options,
            **self.arguments,
        )

    def _module_call(self) -> Callable[[Tensor], Tensor]:
        from .frame import calling_for_real

        head = self.head
        # of other classes or types: quantised, and perhaps packed when they are first called
        watched = [p for p in head.outer.parameters() if type(p) is Parameter and p.is_floating_point()]
        unchanged = [written_check(watched)]

        def called(rows: Tensor) -> Tensor:
            # also in the backward, in a thread of autograd's
            with calling_for_real():
                if head.way == "call":
                    return cast(Tensor, head.outer(rows))
                return cast(Tensor, base_class(head.core).forward(head.core, rows))

        def call(rows: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return called(rows)
            unchanged[0]()
            try:
                return called(rows)
            finally:  # some of PEFT's adapters write the weight for the time of the call
                unchanged[0] = written_check(watched)

        return call

    def _done(self, output: LossOutput, hidden: Tensor, weight: Tensor | None) -> Tensor:
        if self.records:
            _record_statistics(self.frame, output, self.target, self.arguments["ignore_index"])
        if self.tells and self.frame.handle.after_loss_backward:
            _tell_when_backward_is_done(self.frame, self.head, output.loss, hidden, weight)
        self.loss, self.output = output.loss, output
        return self.loss


def plain_arguments(fields: tuple[str, ...]) -> dict[str, Any]:
    """What a `LossJob` is given for the loss of each label, with nothing added to it."""
    return {
        "fields": fields,
        "ignore_index": -100,
        "reduction": "none",
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "class_weight": None,
        "token_weight": None,
    }


def _arguments(frame: Frame, call: CrossEntropyCall, vocab: int) -> dict[str, Any]:
    """The model's own arguments with the configuration's; both at once would have no meaning."""
    handle, config, scope = frame.handle, frame.handle.config, frame.scope
    smoothing = config.loss_label_smoothing if scope.label_smoothing is None else scope.label_smoothing
    if smoothing and call.label_smoothing:
        raise ConfigError(
            f"loss_label_smoothing={smoothing:g} was asked for, but the model's own loss smooths by "
            f"{call.label_smoothing:g} already. Leave one of them out."
        )
    class_weight = handle.class_weight(call.target.device)
    if class_weight is not None and call.weight is not None:
        raise ConfigError(
            "loss_class_weight was asked for, but the model's own loss has a weight a class already. Leave one of them "
            "out."
        )
    if class_weight is not None and class_weight.shape[0] != vocab:
        raise ConfigError(
            f"loss_class_weight has {class_weight.shape[0]} entries, and the model's loss is over {vocab} classes. "
            "Give one weight a class."
        )
    if handle.objective is not None and (smoothing or call.label_smoothing or call.weight is not None):
        raise ConfigError(
            f"loss_objective {config.loss_objective!r} was asked for, but the loss is smoothed, or has a weight a "
            "class. An objective is computed from plain log-probabilities. Leave one of them out."
        )
    token_weight = None
    if scope.token_weight is not None:
        token_weight = aligned_token_weight(scope.token_weight, frame.labels, call.target, call.ignore_index)
    return {
        "fields": handle.fields,
        "ignore_index": call.ignore_index,
        "reduction": call.reduction,
        "label_smoothing": smoothing or call.label_smoothing,
        "z_loss": config.loss_z_loss,
        "class_weight": call.weight if class_weight is None else class_weight,
        "token_weight": token_weight,
    }


def _from_real_logits(frame: Frame, logits: Tensor, call: CrossEntropyCall, arguments: dict[str, Any]) -> Tensor:
    """The loss where the logits exist anyway: torch's own, unless something was asked for that it does not have."""
    added = arguments["z_loss"] or arguments["token_weight"] is not None or arguments["fields"]
    if not added:
        frame.handle.statistics.add(call.target != call.ignore_index)
        weight = arguments["class_weight"]
        return F.cross_entropy(
            logits,
            call.target,
            None if weight is None else weight.to(logits.dtype),
            ignore_index=call.ignore_index,
            reduction=call.reduction,
            label_smoothing=arguments["label_smoothing"],
        )
    output = projected_cross_entropy_stats(
        lambda rows: rows, logits, call.target, vocab=logits.shape[1], strategy="naive", **arguments
    )
    _record_statistics(frame, output, call.target, call.ignore_index)
    return output.loss


def _no_extras(frame: Frame, what: str) -> None:
    asked = frame.handle.extras(frame.scope)
    if asked:
        raise ConfigError(
            f"{', '.join(asked)} was asked for, but the model's own loss takes {what}, where it cannot be added. "
            "Leave it out for this model."
        )


def _record_statistics(frame: Frame, output: LossOutput, target: Tensor, ignore_index: int) -> None:
    frame.handle.statistics.add(
        target != ignore_index, accuracy=output.accuracy, entropy=output.entropy, dropped=output.dropped
    )


def _tell_when_backward_is_done(frame: Frame, head: Head, loss: Tensor, hidden: Tensor, weight: Tensor | None) -> None:
    """Call the listeners once the gradient of the head's input is there; of the weight, if only that has one."""
    listeners = list(frame.handle.after_loss_backward)
    trained = [t for t in (weight, *head.core.parameters()) if t is not None and t.requires_grad]
    anchor = hidden if hidden.requires_grad else (trained[0] if trained else None)
    if anchor is None or not loss.requires_grad:
        for listener in listeners:
            listener()
        return

    def tell(gradient: Tensor) -> None:
        hook.remove()
        for listener in listeners:
            listener()

    hook = anchor.register_hook(tell)
