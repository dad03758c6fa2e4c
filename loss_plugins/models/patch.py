"""Put a loss strategy into a model, and take it out again."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import LossConfig, is_number
from ..device import DeviceProfile
from ..errors import ConfigError, PatchError, UnsupportedError
from ..objectives import OBJECTIVES
from ..strategies import STRATEGIES, Problem, check_options
from .families import family_of
from .foreign import ADVICE, OFF, foreign_forward, refuse_foreign_cross_entropy
from .forwarding import HANDLE
from .frame import Scope, scopes, set_scopes
from .head import WIDTH, Head, each_head, find_head, head_of
from .liger import LigerOps, apply_liger_ops
from .record import Step
from .statistics import Counts, StatisticsBuffer
from .swap import base_class, swap, unswap

logger = logging.getLogger(__name__)

MODULE_STRATEGIES = ("chunked", "naive", "auto")
"""What can call a head that is no plain weight."""


def patch_model(model: nn.Module, config: LossConfig | str | Mapping[str, Any] | None = None) -> PatchHandle:
    """Compute the loss of ``model`` with a strategy, whenever labels are given in training.

    The model's own forward stays as it is. Only this instance changes: its class and its head's become subclasses of
    the same names, and ``handle.undo()`` gives both their classes back. Parameters, buffers and state_dict keys stay.
    With ``liger_ops`` that is so of the layers that get Liger's kernels too.

    Args:
        model: A transformers model for causal or conditional generation. Wrappers of PEFT, DistributedDataParallel,
            FSDP and torch.compile are looked through.
        config: A strategy's name, a `LossConfig` or a mapping of its fields. Default: ``auto``.

    Raises:
        ConfigError: an unknown strategy or option.
        PatchError: the model has no head, or was patched already, by us or by Liger, cut-cross-entropy or TRL.
        UnsupportedError: the strategy needs the head's weight, and the head is more than that; or Liger cannot do what
            ``liger_ops`` asks.
        MissingDependencyError: ``liger_ops`` was asked for, and liger-kernel is not installed.
    """
    config = LossConfig.of(config)
    _refuse_no_model(model)
    model = unwrapped(model)
    name = base_class(model).__name__
    existing = find_handle(model)
    if existing is not None:
        raise PatchError(
            f"{name} is patched already, with loss_strategy {existing.config.loss_strategy!r}. Call undo() on that "
            "handle first (find_handle(model) returns it), or go on using it."
        )
    for place, forward in (("this model", model.__dict__.get("forward")), ("its class", base_class(model).forward)):
        package = foreign_forward(forward)
        if package is not None:
            raise PatchError(
                f"{OFF[package]} has replaced the forward of {place} ({name}), so a patch would never see a loss. "
                f"{ADVICE[package]}"
            )
    refuse_foreign_cross_entropy(name)
    family = family_of(str(getattr(getattr(model, "config", None), "model_type", "")))
    if family is not None and family.status == "unsupported":
        raise PatchError(
            f"{name} cannot be patched: {family.reason}. Call loss_plugins.linear_cross_entropy in your own loss "
            "instead."
        )
    path, outer = find_head(model)
    heads = [Head.of(each) for each in each_head(outer)]
    handle = PatchHandle(model, config, path)
    for head in heads:
        handle.check(head)
    if config.liger_ops not in (None, False):
        handle.liger = apply_liger_ops(model, config.liger_ops)
    handle.put_in_place(heads)
    logger.info("%s", handle.explain())
    return handle


def _refuse_no_model(given: object) -> None:
    if not isinstance(given, nn.Module):
        what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise ConfigError(
            f"patch_model takes a model that is built, a torch.nn.Module, and was given {what}. Load it first: "
            "AutoModelForCausalLM.from_pretrained(...)."
        )


def find_handle(model: nn.Module) -> PatchHandle | None:
    """The handle of a patched model, through the wrappers that `patch_model` looks through; None if it is not
    patched."""
    handle = unwrapped(model).__dict__.get(HANDLE) if isinstance(model, nn.Module) else None
    return handle if isinstance(handle, PatchHandle) and handle.active else None


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers of torch.compile, DataParallel, DDP, FSDP, DeepSpeed and PEFT."""
    while True:
        inner: Any = model.__dict__.get("_modules", {}).get("_orig_mod")
        if inner is None and hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            inner = model.get_base_model()  # type: ignore[operator]
        if inner is None and not hasattr(type(model), "get_output_embeddings"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


class PatchHandle:
    """A patch that is in place. A context manager, at whose end the patch is undone.

    Attributes:
        model: The patched model, without wrappers.
        config: What was asked for.
        active: False after `undo`.
        counts: What happened so far: deferred head calls, fused losses, materialised logits.
        materialised_by: Why logits became real, each reason once.
        statistics: Sums over tokens since they were last read.
        before_loss: Called when the head's loss is about to be computed.
        needs_weight: Whether the strategy cannot call a head on chunks.
        after_loss_backward: Called when the gradient of the head's input is there, or after the loss if there is none.
        liger: Liger's kernels in other layers, if any were asked for.
    """

    def __init__(self, model: nn.Module, config: LossConfig, head_path: str = "") -> None:
        # weakly: the model holds the handle, and a model that is dropped must go at once, with its memory
        self._model = weakref.ref(model)
        self._name = base_class(model).__name__
        self.config, self.head_path = config, head_path
        self.active = False
        self.counts = Counts()
        self.materialised_by: list[str] = []
        self.before_loss: list[Callable[[], None]] = []
        self.after_loss_backward: list[Callable[[], None]] = []
        self.liger: LigerOps | None = None
        self.shared_scopes: list[Scope] = []
        self.objective = None if config.loss_objective is None else OBJECTIVES.get(config.loss_objective)
        self.fields = self._fields()
        self.needs_weight = self._needs_weight()
        self.statistics = StatisticsBuffer(self.fields)
        self._swapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._said: set[str] = set()
        self._class_weights: dict[torch.device, Tensor] = {}
        self._noticed: object = None

    # for people

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise PatchError(f"The {self._name} of this handle is gone: nothing refers to it any more. Patch another.")
        return model

    def undo(self) -> None:
        """Give the model and its head their own classes back. Doing it again does nothing."""
        model = self._model()
        if not self.active or model is None:
            self.active = False
            return
        self.active = False
        heads = self._heads(model)
        for head in heads:
            head.__dict__.pop(WIDTH, None)
        left = [module for module in (model, *heads) if not unswap(module)]
        if self.liger is not None:
            left += self.liger.undo()
        if left:
            logger.warning(
                "The patch of %s is off, but %s keeps a class that passes everything on: something (FSDP2) has put its "
                "own class on top since. Undo before wrapping to get the classes back.",
                self._name,
                " and ".join(dict.fromkeys(type(module).__name__ for module in left)),
            )
        self._swapped.clear()
        if model.__dict__.get(HANDLE) is self:
            del model.__dict__[HANDLE]

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def explain(self) -> str:
        """What was touched, how the loss is computed, and what happened so far, in a few lines."""
        model, config = self._model(), self.config
        state = " (gone)" if model is None else "" if self.active else " (undone)"
        options = f" with {dict(config.loss_options)}" if config.loss_options else ""
        lines = [f"{self._name}: loss_strategy {config.loss_strategy!r}{options}{state}"]
        outer = None if model is None else self._outer(model)
        if model is not None and outer is not None:
            path = next((p for p, m in model.named_modules(remove_duplicate=False) if m is outer), self.head_path)
            several = len(each_head(outer))
            lines.append(
                f"  head {path}{f' ({several} of them)' if several > 1 else ''}: "
                f"{Head.of(each_head(outer)[0]).describe(self.needs_weight)}"
            )
            if self.active:
                layers = "nothing else" if self.liger is None else "with Liger's kernels, those of layers"
                lines.append(f"  touched: the class of the model and of {path}; {layers}")
        if self.liger is not None and self.active:
            lines.append(f"  {self.liger.describe()}")
        family = family_of(str(getattr(getattr(model, "config", None), "model_type", "")))
        if family is not None:
            lines.append(f"  {family.model_types[0]} ({family.status}): {family.note}")
        counts = self.counts
        lines.append(
            f"  so far: {counts.deferred} deferred, {counts.fused} losses without logits, {counts.materialised} "
            "materialised" + (f" ({'; '.join(self.materialised_by)})" if self.materialised_by else "")
        )
        return "\n".join(lines)

    @contextmanager
    def scope(
        self,
        *,
        token_weight: Tensor | None = None,
        loss_only: bool | None = None,
        label_smoothing: float | None = None,
        leaving: bool | None = None,
    ) -> Iterator[None]:
        """For the forwards inside; what is None stays as an outer scope has it.

        Args:
            token_weight: One weight a label, shape of the batch's labels, multiplied into each token's loss.
            loss_only: True: no logits in evaluation either. False: always logits. None: no logits while training.
            label_smoothing: In place of the configuration's.
            leaving: True: deferred logits are returned, with and without labels, for whoever takes log-probabilities
                of them, see `leaving`.
        """
        if token_weight is not None and not isinstance(token_weight, Tensor):
            raise ConfigError(
                f"token_weight must be a tensor with one weight a label, got {type(token_weight).__name__}. Leave it "
                "out for none."
            )
        if loss_only is not None and not isinstance(loss_only, bool):
            raise ConfigError(f"loss_only must be True, False or None, got {loss_only!r}. Leave it out for None.")
        if label_smoothing is not None and not (is_number(label_smoothing) and 0 <= label_smoothing <= 1):
            raise ConfigError(
                f"label_smoothing must be a number in [0, 1], got {label_smoothing!r}. Leave it out for none."
            )
        before = scopes()
        outer = next((scope for owner, scope in reversed(before) if owner is self), Scope())
        given: dict[str, Any] = {
            "token_weight": token_weight,
            "loss_only": loss_only,
            "label_smoothing": label_smoothing,
            "leaving": leaving,
        }
        scope = outer._replace(**{key: value for key, value in given.items() if value is not None})
        set_scopes((*before, (self, scope)))
        self.shared_scopes.append(scope)
        try:
            yield
        finally:
            # by identity: scopes hold tensors, whose comparison is no truth value
            self.shared_scopes[:] = [other for other in self.shared_scopes if other is not scope]
            set_scopes(before)

    # for the forward

    def heads_now(self, model: nn.Module) -> tuple[Head, ...]:
        """The heads of ``model``, which is `model` or a replica of it, ready to be called with a loss."""
        outer = self._outer(model)
        if outer is None:
            raise PatchError(
                f"{base_class(model).__name__} had a head when it was patched and has none now. Undo the patch, or "
                "patch again."
            )
        heads = tuple(Head.of(each) for each in each_head(outer))
        for head in heads:
            changed = head.put_in_place()
            if changed:
                self._remember(changed)
        return heads

    @torch.compiler.disable
    def materialised(self, why: str) -> None:
        """Count real logits, and say why, each reason once."""
        self.counts.materialised += 1
        if why not in self.materialised_by:
            self.materialised_by.append(why)
            logger.warning(
                "%s needs its real logits for %r: they were computed, and the result is exact, but their memory is not "
                "saved.",
                self._name,
                why,
            )

    def use_module(self, why: str) -> None:
        """The head is called on chunks: refuse a strategy that needs a weight, and say so once."""
        self._refuse_without_weight(why)
        self._once(logging.INFO, f"The loss of {self._name} calls its head on chunks: {why}.")

    def use_side_by_side(self, weight: Tensor) -> None:
        """Say once that an adapted head is copied for a strategy that needs one weight."""
        if torch.compiler.is_compiling():
            return
        size = weight.numel() * weight.element_size() / 2**20
        self._once(
            logging.INFO,
            f"loss_strategy {self.config.loss_strategy!r} takes the adapted head of {self._name} as one weight, [W, B] "
            f"side by side: a copy of {size:.1f} MiB a step. 'chunked' makes none.",
        )

    def replaying(self, steps: tuple[Step, ...]) -> str:
        """The strategy for logits that are transformed in a way that none takes over."""
        asked = self.config.loss_strategy
        if asked in MODULE_STRATEGIES:
            return asked
        names = ", ".join(step.name for step in steps)
        self._once(
            logging.WARNING,
            f"loss_strategy {asked!r} was asked for, but {self._name} transforms its logits by "
            f"[{names}], which only chunks of real logits can follow: 'chunked' runs instead. The result is exact.",
        )
        return "chunked"

    def notice_forward(self, model: nn.Module) -> None:
        """Say so, once, where someone who computes the loss himself has put a forward on the model since."""
        forward = model.__dict__.get("forward")
        if forward is self._noticed:
            return
        self._noticed = forward
        package = foreign_forward(forward)
        if package is not None and self.active:
            logger.warning(
                "%s has replaced the forward of %s after it was patched, so loss_strategy %r is not in force. %s",
                OFF[package],
                base_class(model).__name__,
                self.config.loss_strategy,
                ADVICE[package],
            )

    def class_weight(self, device: torch.device) -> Tensor | None:
        """The configuration's class weights there, copied once."""
        if self.config.loss_class_weight is None:
            return None
        if device not in self._class_weights:
            given = self.config.loss_class_weight
            self._class_weights[device] = torch.tensor(given, dtype=torch.float32, device=device)
        return self._class_weights[device]

    def extras(self, scope: Scope) -> list[str]:
        """Names of what is asked for beyond the model's own loss."""
        smoothing = self.config.loss_label_smoothing if scope.label_smoothing is None else scope.label_smoothing
        asked = {
            "loss_label_smoothing": smoothing,
            "loss_z_loss": self.config.loss_z_loss,
            "loss_objective": self.config.loss_objective is not None,
            "loss_class_weight": self.config.loss_class_weight is not None,
            "token_weight": scope.token_weight is not None,
            "loss_statistics": self.config.loss_statistics,
        }
        return [name for name, value in asked.items() if value]

    # for patch_model

    def check(self, head: Head) -> None:
        """What can be refused before anything is touched."""
        config = self.config
        features = getattr(head.core, "out_features", None)
        if config.loss_strategy == "auto":
            check_options("auto", config.loss_options)
        weights = config.loss_class_weight
        if weights is not None and isinstance(features, int) and len(weights) != features and head.way == "weight":
            raise ConfigError(
                f"loss_class_weight has {len(weights)} entries, and the head of {self._name} has "
                f"{features} rows. Give one weight a row."
            )
        if head.why and head.way != "real":
            self._refuse_without_weight(head.why)

    def put_in_place(self, heads: list[Head]) -> None:
        for head in heads:
            self._remember(head.put_in_place())
        swap(self.model, "model")
        self.model.__dict__[HANDLE] = self
        self.active = True

    def _needs_weight(self) -> bool:
        """Whether the strategy cannot call a head on chunks."""
        name = self.config.loss_strategy
        if name in ("auto", "chunked"):
            return False
        strategy, parsed = STRATEGIES.get(name), _parsed(name, self.config.loss_options)
        problem, profile = Problem(rows=1, hidden=1, vocab=1), DeviceProfile("cpu")
        why = strategy.check(replace(problem, module=True), profile, parsed)
        return why is not None and why != strategy.check(problem, profile, parsed)

    def _refuse_without_weight(self, why: str) -> None:
        if not self.needs_weight:
            return
        name = self.config.loss_strategy
        plain = "leave lm_head out of the adapter's target_modules" if "PEFT" in why else "give the model a plain head"
        raise UnsupportedError(
            f"loss_strategy {name!r} needs the head's weight, but on {self._name} {why}. "
            f"Use loss_strategy 'chunked', which calls the head as it is and is exact; or {plain}."
        )

    def _fields(self) -> tuple[str, ...]:
        """Per-token fields that every loss must bring. Also reads the options, before anything is touched."""
        fields = tuple(self.config.loss_statistics or ())
        name, options = self.config.loss_strategy, self.config.loss_options
        parsed = None if name == "auto" else _parsed(name, options)
        is_asked = getattr(parsed, "is_filter_asked", False) and "dropped" not in fields
        return (*fields, "dropped") if is_asked else fields

    def _outer(self, model: nn.Module) -> nn.Module | None:
        owner = model.get_submodule(self.head_path) if self.head_path else model
        return head_of(owner)

    def _heads(self, model: nn.Module) -> list[nn.Module]:
        """Every module that became a patched head: those remembered, and copies that PEFT made of them."""
        found = {id(module): module for module in self._swapped}
        outer = self._outer(model)
        for module in outer.modules() if outer is not None else ():
            found[id(module)] = module
        return list(found.values())

    def _remember(self, changed: list[tuple[nn.Module, type]]) -> None:
        self._swapped.update(module for module, _ in changed)

    def _once(self, level: int, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.log(level, sentence)

    # a copy of a patched model is patched, on its own and with nothing counted yet

    def __getstate__(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "config": self.config,
            "head_path": self.head_path,
            "active": self.active,
            "swapped": list(self._swapped),
            "liger": self.liger,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], state["config"], state["head_path"])  # type: ignore[misc]
        self.active = state["active"]
        self._swapped.update(state["swapped"])
        self.liger = state["liger"]


def _parsed(name: str, options: Mapping[str, Any] | None) -> Any:
    from ..strategies._options import parse_options

    return parse_options(name, STRATEGIES.get(name).Options, options)
