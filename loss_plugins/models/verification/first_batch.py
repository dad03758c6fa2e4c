"""The self-check of a training run: its first batch through the patched model, both ways, before it is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...device import DeviceProfile, free_bytes
from ...errors import UnsupportedError, VerificationError
from ...strategies import Problem, select
from ..frame import in_force
from ..patch import PatchHandle
from ..statistics import Counts, StatisticsBuffer
from ..swap import base_class
from .batches import IGNORED, cut_batch
from .distance import Apart, Taken, Tolerance, apart, bad_gradients, tolerance
from .moment import Moment, taken_gradients
from .real_head import HeadCall, RealHead, yardstick_of
from .verify import FP16_SCALE, FP16_STEP, HOST_LIMIT, filter_allowed, rounds_to_tf32

LOGIT_BYTES = 20
"""What a logit takes in stock's forward and backward: itself, in float32, its softmax, and gradients of both."""
OFF: dict[str, Any] = {
    "loss_label_smoothing": 0.0,
    "loss_z_loss": 0.0,
    "loss_objective": None,
    "loss_class_weight": None,
    "loss_statistics": None,
}
"""What stock's loss does not have."""

Compute = Callable[[dict[str, Any], bool], Tensor]
Reduce = Callable[[Tensor], Tensor]


class Checked(NamedTuple):
    """What a self-check found, of all processes: how far ours is and may be from stock's; tokens of this one."""

    found: Apart
    allowed: Tolerance
    tokens: int
    sentence: str


def check_first_batch(
    model: nn.Module,
    handle: PatchHandle,
    batch: dict[str, Any],
    compute: Compute,
    reduce: Reduce | None = None,
    processes: int = 1,
) -> Checked | None:
    """Compare the loss and the gradients of all parameters that train with stock's, on ``batch``; None if no label of
    it counts.

    Parameters, gradients, buffers, random states and the handle's counts are left as they were. Large batches are cut.

    Args:
        model: The model that is trained, with wrappers, in training mode.
        handle: Of its patch.
        batch: What its forward takes, with labels.
        compute: The loss of a batch by ``model``; with True, without logits.
        reduce: Sum of a tensor over all processes, which must all call this.
        processes: How many there are.

    Raises:
        VerificationError: ours is too far from stock's, past the patch, or stock fails.
        UnsupportedError: a backward would change the parameters.
    """
    refuse_steps_in_backward(model)
    check = _Check(model, handle, cut_batch(batch, _tokens_that_fit(handle, batch)), compute, reduce, processes)
    if not float(check.summed((check.batch["labels"] != IGNORED).sum().double())):
        return None
    rows = batch["labels"].numel()
    with _eager(), _not_synchronised(model), set_aside(handle, rows, batch["labels"].device), Moment(model) as moment:
        return check.run(moment)


def refuse_steps_in_backward(model: nn.Module) -> None:
    """Raises:
    UnsupportedError: hooks would step an optimizer as soon as a gradient is there.
    """
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        home = next((str(getattr(hook, "__module__", "")) for hook in hooks.values()), "torch.")
        if not home.startswith("torch."):
            raise UnsupportedError(
                f"loss_self_check was asked for, but {name} has a hook of {home} that runs in every backward, as "
                "layerwise optimizers step there, and the check's backwards would train. Run loss-plugins verify on "
                "the model instead, or use another optimizer for one run."
            )


@contextlib.contextmanager
def set_aside(handle: PatchHandle, rows: int, device: torch.device) -> Iterator[None]:
    """Inside, the handle computes the model's plain loss, and neither counts nor tells what happens.

    "auto" is replaced by what it would choose for ``rows`` tokens, since a cut batch might have it choose another.
    """
    kept = {name: getattr(handle, name) for name in _KEPT}
    handle.config = replace(handle.config, **OFF)
    if handle.config.loss_strategy == "auto":
        handle.config = replace(handle.config, loss_strategy=_choice(handle, rows, device))
    handle.objective = None
    handle.fields, handle.counts, handle.statistics = (), Counts(), StatisticsBuffer()
    handle.before_loss, handle.after_loss_backward = [], []
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(handle, name, value)


_KEPT = ("config", "objective", "fields", "counts", "statistics", "before_loss", "after_loss_backward")


def _choice(handle: PatchHandle, rows: int, device: torch.device) -> str:
    model = handle.model
    head = handle.heads_now(model)[0]
    weight = getattr(head.core, "weight", None)
    hidden, vocab = getattr(head.core, "in_features", 1024), _vocab(handle)
    dtype = weight.dtype if isinstance(weight, Tensor) and weight.is_floating_point() else torch.float32
    problem = Problem(rows, hidden, vocab, dtype=dtype, module=head.way != "weight")
    options = handle.config.loss_options
    return select("auto", options, problem, DeviceProfile.probe(device), free_bytes(device)).strategy.name


def _vocab(handle: PatchHandle) -> int:
    config: Any = getattr(handle.model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "vocab_size", None) or 32768)


def _tokens_that_fit(handle: PatchHandle, batch: dict[str, Any]) -> int:
    """Tokens whose logits stock can be expected to have memory for."""
    free = free_bytes(batch["labels"].device) or 2 * HOST_LIMIT
    return max(64, free // 4 // (LOGIT_BYTES * _vocab(handle)))


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled models run as they are written: nothing is compiled for the check."""
    stance = getattr(torch.compiler, "set_stance", None)
    with contextlib.nullcontext() if stance is None else stance("force_eager"):
        yield


def _not_synchronised(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """DDP's gradients stay each process's own; sharded ones are only there once they are reduced."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


class _Check:
    """One batch, both ways."""

    def __init__(
        self,
        model: nn.Module,
        handle: PatchHandle,
        batch: dict[str, Any],
        compute: Compute,
        reduce: Reduce | None,
        processes: int,
    ) -> None:
        self.model, self.handle, self.batch, self.compute = model, handle, batch, compute
        self.reduce, self.processes = reduce, processes
        self.device = batch["labels"].device
        self.calls: list[HeadCall] = []
        self.largest_scale = FP16_SCALE
        self.name = base_class(handle.model).__name__

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor if self.reduce is None else self.reduce(tensor)

    def run(self, moment: Moment) -> Checked:
        stock, calls = self._stock(moment)
        own, yardstick = self._own_error(moment, calls, stock)
        ours = self._taken(moment, self._loss(moment, deferred=True))
        self._must_have_gone_through()
        found = apart(ours, stock, moment.parameters, self.reduce)
        dtype = calls[0].dtype if calls else stock.loss.dtype
        allowed = tolerance(dtype, own, yardstick, rounds_to_tf32(self.device))
        allowed = filter_allowed(allowed, self.handle.config, dtype)
        if allowed.exceeded(found):  # some change themselves when they first run: that was stock's
            stock, _ = self._stock(moment)
            found = apart(ours, stock, moment.parameters, self.reduce)
        tokens = self.batch["labels"].numel()
        self._must_be_equal(found, allowed, tokens)
        return Checked(found, allowed, tokens, self._sentence(found, allowed, tokens))

    def _loss(self, moment: Moment, deferred: bool) -> Tensor:
        """After its backward: gradients lie on the parameters."""
        moment.rewind()
        moment.forget_gradients()
        loss = self.compute(dict(self.batch), deferred).as_subclass(Tensor)
        if not loss.requires_grad:
            raise VerificationError(
                f"loss_self_check was asked for, but the loss of {self.name} depends on no parameter that trains. "
                "Unfreeze some of it, or leave it out."
            )
        (loss * self.scale).backward()
        return loss.detach()

    @property
    def scale(self) -> float:
        """Against float16 gradients that vanish; both ways are multiplied by it."""
        return self.largest_scale if any(call.dtype is torch.float16 for call in self.calls) else 1.0

    def _taken(self, moment: Moment, loss: Tensor) -> Taken:
        sizes = sum(p.numel() * p.element_size() for p in moment.parameters.values())
        free = free_bytes(self.device)
        return Taken(loss, taken_gradients(moment.parameters, to_host=free is not None and 2 * sizes > free))

    def _stock(self, moment: Moment) -> tuple[Taken, list[HeadCall]]:
        frame = RealHead(self.handle)
        self.calls = frame.calls
        try:
            with in_force(frame):
                stock = self._taken(moment, self._loss(moment, deferred=False))
                while (bad := float(self.summed(bad_gradients(stock)))) and self.largest_scale > 1:
                    self.largest_scale /= FP16_STEP  # all processes lower it, also those without calls in float16
                    frame.calls.clear()
                    stock = self._taken(moment, self._loss(moment, deferred=False))
        except torch.OutOfMemoryError as error:
            raise VerificationError(
                f"loss_self_check was asked for, but logits of {self.name} for {self.batch['labels'].numel()} tokens "
                "do not fit into memory, so stock's loss cannot be had. Check with a smaller "
                "per_device_train_batch_size once, or with loss-plugins verify, and train without loss_self_check."
            ) from error
        if not stock.loss.isfinite():
            raise VerificationError(
                f"loss_self_check was asked for, but the loss of the unpatched {self.name} on the first batch is "
                f"{stock.loss.item()}: there is nothing to compare with. Look at the batch, or leave it out."
            )
        if bad:
            raise VerificationError(
                f"loss_self_check was asked for, but gradients of the unpatched {self.name} on the first batch are inf "
                "or NaN: there is nothing to compare with. Look at the batch, or leave it out."
            )
        return stock, frame.calls

    def _own_error(self, moment: Moment, calls: list[HeadCall], stock: Taken) -> tuple[Apart | None, str]:
        """Stock's distance from itself with its head in a wider type, if all processes can."""
        wide = yardstick_of(calls, int(0.4 * (free_bytes(self.device) or HOST_LIMIT / 0.4)))
        able = torch.tensor(float(not isinstance(wide, str)), device=self.device)
        if float(self.summed(able)) < self.processes:
            return None, wide if isinstance(wide, str) else "another process cannot"
        assert isinstance(wide, torch.dtype)
        name = str(wide).removeprefix("torch.")
        try:
            with in_force(RealHead(self.handle, wide)):
                loss = self._loss(moment, deferred=False)
        except (RuntimeError, TypeError, ValueError) as error:
            if self.processes > 1:
                raise
            return None, f"it fails with its head in {name} ({' '.join(str(error).split())[:120]})"
        return apart(self._taken(moment, loss), stock, moment.parameters, self.reduce), name

    def _must_have_gone_through(self) -> None:
        counts = self.handle.counts
        if not float(self.summed(torch.tensor(float(counts.fused + counts.materialised), device=self.device))):
            raise VerificationError(
                f"loss_self_check: no loss went through loss_plugins on the first batch, so loss_strategy "
                f"{self.handle.config.loss_strategy!r} has no effect on {self.name}. Something computes the loss past "
                "the model's own, or takes the labels away from it; a trainer of its own loss, for example."
            )

    def _must_be_equal(self, found: Apart, allowed: Tolerance, tokens: int) -> None:
        beyond = allowed.exceeded(found)
        if not beyond:
            return
        listed = ", ".join(f"{what} by {off:.1e} (allowed {limit:.1e})" for what, off, limit in beyond[:3])
        more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
        strategy = self.handle.config.loss_strategy
        other = "naive" if strategy != "naive" else "chunked"
        options = self.handle.config.loss_options or {}
        if not isinstance(options.get("filter", ""), str | bool):  # a probability
            other = f"{strategy}' with filter: off, which leaves nothing out on purpose, or '{other}"
        raise VerificationError(
            f"loss_self_check: with loss_strategy {strategy!r}, {self.name} differs from stock on {tokens} tokens of "
            f"the first batch, relatively: {listed}{more}. Tolerance: {allowed.words}. Nothing was trained. Try "
            f"loss_strategy '{other}', see which parts differ with loss-plugins verify, and report it; or leave "
            "loss_self_check out to train all the same."
        )

    def _sentence(self, found: Apart, allowed: Tolerance, tokens: int) -> str:
        name, off, limit = allowed.worst(found)
        strategy = self.handle.config.loss_strategy
        return (
            f"loss_self_check: loss_strategy {strategy!r} equals stock on {tokens} tokens of the first batch: loss off "
            f"by {found.loss:.1e} (allowed {allowed.for_loss():.1e}), gradients of {len(found.gradients)} parameters "
            f"by {off:.1e} at most (allowed {limit:.1e}; {name})"
        )
