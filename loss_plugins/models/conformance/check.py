"""All that is compared for one class, and what came of it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ...errors import LossPluginError, UnsupportedError
from ...strategies import STRATEGIES
from ..patch import PatchHandle, patch_model
from ..tiny import (
    VOCAB,
    has_images,
    model_class,
    model_classes,
    seed_everything,
    tiny_image_batches,
    tiny_inputs,
    tiny_model,
)
from ..tiny.inputs import floating
from ..verification.moment import loss_of
from .double import all_double
from .measure import GRADIENT_BOUND, LOSS_BOUND, distance, same, step

KEEP = 5
BATCHES = ("text", "images", "mixed")
OPTIONS = ("shift_labels", "router losses", "decoder_input_ids")
"""What some classes take and do not use."""


@dataclass
class Evidence:
    """What was found for one class.

    Attributes:
        name: The class.
        status: ``fused``: no logits, and equal; ``materialised``: equal, with logits; ``unsupported``: it is refused;
            ``not run``: the class itself did not run here; ``wrong``: it differs from stock.
        reason: Why, where the status is not ``fused``; how its head is called, where that is not by its weight.
        precision: What it was compared in.
        strategies: What each strategy did: ``fused``, ``materialised``, or why it was refused.
        loss_error: The largest absolute difference in the loss.
        gradient_error: The largest relative difference in the gradient of any parameter.
        checks: What was compared.
        batches: For a class that sees images, which batches were among that: ``text``, ``images`` (one a row),
            ``mixed`` (a row of text alone beside one with an image).
        skipped: What the class itself does not do, and why.
        problems: What differs.
        seconds: How long that took.
    """

    name: str
    status: str = "not run"
    reason: str = ""
    precision: str = ""
    strategies: dict[str, str] = field(default_factory=dict)
    loss_error: float = 0.0
    gradient_error: float = 0.0
    checks: list[str] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is empty is left out."""
        return {key: value for key, value in asdict(self).items() if value not in ("", [], {})}


def check_class(name: str, strategies: tuple[str, ...] = ()) -> Evidence:
    """Compare the class ``name``, patched with each of ``strategies`` (default: all), with itself unpatched."""
    started = time.perf_counter()
    evidence = Evidence(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of theirs, about configs that nobody would train
        _compare(evidence, strategies)
    evidence.seconds = round(time.perf_counter() - started, 1)
    return evidence


def _compare(evidence: Evidence, strategies: tuple[str, ...]) -> None:
    name = evidence.name
    try:
        if "labels" not in inspect.signature(model_class(name).forward).parameters:
            evidence.status, evidence.reason = "unsupported", "its forward takes no labels"
        else:
            subject = Subject(name)
            with subject.precision_in_force():
                Comparison(subject, evidence).run(strategies or tuple(STRATEGIES.builtin()))
    except Exception as error:
        evidence.reason = evidence.reason or f"stock fails here: {_said(error)}"


class Subject:
    """Two equal tiny models of a class and a batch, in float64 if the class runs in it."""

    def __init__(self, name: str) -> None:
        self.dtype = torch.float64
        try:
            self._make(name)
        except Exception:
            self.dtype = torch.float32
            self._make(name)

    def _make(self, name: str) -> None:
        self.stock = tiny_model(name)
        config = self.stock.config
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            for key in ("router_aux_loss_coef", "aux_loss_coef"):
                if getattr(part, key, None) is not None:
                    setattr(part, key, 0.5)  # so that it can be seen
        self.batches = tiny_image_batches(self.stock)
        if self.dtype is torch.float64:
            with contextlib.suppress(Exception):
                self.stock.set_experts_implementation("eager")  # grouped products know no float64
        if self.dtype is torch.float64:
            self.stock.double()
        self.ours = copy.deepcopy(self.stock)
        self.inputs = floating(tiny_inputs(self.stock), self.dtype)
        with self.precision_in_force():
            for model in (self.stock, self.ours):
                step(model, self.inputs)  # some change themselves when they first run
            loss = step(self.stock, self.inputs).loss
        if not loss.isfinite():
            raise ValueError(f"the loss is {loss.item()}")

    def precision_in_force(self) -> contextlib.AbstractContextManager[None]:
        return all_double() if self.dtype is torch.float64 else contextlib.nullcontext()

    def variants(self) -> dict[str, dict[str, Any]]:
        """Batches whose loss and gradients are compared with every strategy."""
        accepted = inspect.signature(type(self.stock).forward).parameters
        inputs, labels = self.inputs, self.inputs["labels"]
        found = {"labels": inputs, "num_items_in_batch": inputs | {"num_items_in_batch": torch.tensor(40)}}
        found["shift_labels"] = inputs | {"shift_labels": labels.flip(1).contiguous()}
        if "logits_to_keep" in accepted:
            found["logits_to_keep"] = inputs | {"logits_to_keep": KEEP, "labels": labels[:, -KEEP:].contiguous()}
        configs = (self.stock.config, self.stock.config.get_text_config())
        if any(hasattr(config, "output_router_logits") for config in configs):
            found["router losses"] = inputs | {"output_router_logits": True}
            if self.dtype is torch.float64:
                found["router losses"].pop("attention_mask", None)  # theirs mix float32 masks with float64
        if "decoder_input_ids" in accepted:
            found["decoder_input_ids"] = inputs | {"decoder_input_ids": labels.flip(0).clamp(min=0)}
        return found | {name: floating(batch, self.dtype) for name, batch in self.batches.items()}


class Comparison:
    """One subject, all strategies."""

    def __init__(self, subject: Subject, evidence: Evidence) -> None:
        self.subject, self.evidence = subject, evidence
        self.materialises = False

    def run(self, strategies: tuple[str, ...]) -> None:
        evidence, subject = self.evidence, self.subject
        evidence.precision = str(subject.dtype).removeprefix("torch.")
        stock = self._stock_steps()
        evidence.checks += list(stock)
        self._say_which_batches(stock)
        for strategy in strategies:
            try:
                with patch_model(subject.ours, strategy) as handle:
                    evidence.strategies[strategy] = self._steps(strategy, handle, stock)
            except UnsupportedError as error:
                evidence.strategies[strategy] = str(error)
            except LossPluginError as error:
                evidence.status, evidence.reason = "unsupported", str(error)
                return
        used = [s for s in strategies if evidence.strategies[s] in ("fused", "materialised")]
        if not used:
            evidence.status, evidence.reason = "unsupported", next(iter(evidence.strategies.values()))
            return
        self.materialises = evidence.strategies[used[-1]] == "materialised"
        for name, check in CHECKS.items():
            self._checked(name, lambda check=check: check(self, used[-1]))  # type: ignore[misc]
        evidence.status = "wrong" if evidence.problems else evidence.strategies[used[-1]]
        if len(used) < len(strategies):
            evidence.reason = evidence.reason or next(v for v in evidence.strategies.values() if " " in v)

    def _stock_steps(self) -> dict[str, tuple[dict[str, Any], Any]]:
        """Variant to its inputs and the stock step; those that the class does not do are left out."""
        found: dict[str, tuple[dict[str, Any], Any]] = {}
        for name, inputs in self.subject.variants().items():
            try:
                done = step(self.subject.stock, inputs)
            except Exception as error:
                self.evidence.skipped[name] = f"stock: {_said(error)}"
                continue
            if name in OPTIONS and torch.equal(done.loss, found["labels"][1].loss):
                self.evidence.skipped[name] = "makes no difference to stock"
                continue
            found[name] = inputs, done
        return found

    def _say_which_batches(self, stock: dict[str, Any]) -> None:
        evidence, inputs = self.evidence, self.subject.inputs
        if evidence.name not in model_classes("image-text"):
            return
        own = "images" if has_images(inputs) else "text"
        evidence.batches = [kind for kind in BATCHES if kind in stock or kind == own]
        for kind in BATCHES:
            if kind not in evidence.batches:
                reason = "every row has an image" if own == "images" else "it takes no images, or none that were found"
                evidence.skipped.setdefault(kind, reason)

    def _steps(self, strategy: str, handle: PatchHandle, stock: dict[str, tuple[dict[str, Any], Any]]) -> str:
        """Compare every variant; whether the strategy made the loss without logits."""
        dtype = self.subject.dtype
        for name, (inputs, theirs) in stock.items():
            try:
                apart = distance(step(self.subject.ours, inputs), theirs)
            except UnsupportedError:
                raise
            except Exception as error:
                self.evidence.problems.append(f"{strategy}, {name}: {_said(error)}")
                continue
            self.evidence.loss_error = max(self.evidence.loss_error, apart.loss)
            self.evidence.gradient_error = max(self.evidence.gradient_error, apart.gradient)
            if not (apart.loss <= LOSS_BOUND[dtype] and apart.gradient <= GRADIENT_BOUND[dtype]):
                self.evidence.problems.append(
                    f"{strategy}, {name}: loss {apart.loss:.1e}, gradient {apart.gradient:.1e}"
                )
        counts = handle.counts
        if counts.fused and not counts.materialised and counts.deferred >= len(stock):
            return "fused"
        if not handle.materialised_by:
            self.evidence.problems.append(f"{strategy}: no loss was fused, and nothing says why ({counts})")
        self.evidence.reason = "; ".join(handle.materialised_by)
        return "materialised"

    def _checked(self, name: str, check: Callable[[], str | None]) -> None:
        try:
            skipped = check()
        except AssertionError as error:
            self.evidence.problems.append(f"{name}: {error}")
        except StockError as error:
            self.evidence.skipped[name] = f"stock: {error}"
        except Exception as error:
            self.evidence.problems.append(f"{name}: {_said(error)}")
        else:
            if skipped:
                self.evidence.skipped[name] = skipped
            else:
                self.evidence.checks.append(name)

    def both(self, call: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        """``call`` on our model and on stock's, from the same random state."""
        try:
            seed_everything(3)
            theirs = call(self.subject.stock)
        except Exception as error:
            raise StockError(_said(error)) from error
        seed_everything(3)
        return call(self.subject.ours), theirs

    def near(self, ours: Any, theirs: Any) -> None:
        off = float((loss_of(ours).detach().double() - loss_of(theirs).detach().double()).abs())
        assert off <= LOSS_BOUND[self.subject.dtype], f"the loss is off by {off:.1e}"

    def alike(self, ours: Any, theirs: Any) -> None:
        """Everything but the loss is the same to the bit, and what is missing is logits."""
        assert type(ours) is type(theirs) and len(ours) == len(theirs), f"a {type(ours).__name__} of {len(ours)}"
        if isinstance(theirs, dict):
            assert list(ours) == list(theirs), f"it has {list(ours)} for {list(theirs)}"
            ours, theirs = ({k: v for k, v in output.items() if k != "loss"} for output in (ours, theirs))
        missing: list[tuple[int, ...]] = []
        assert same(ours, theirs, missing, LOSS_BOUND[self.subject.dtype]), "another field differs"
        assert bool(missing) != self.materialises, f"the logits are {'missing' if missing else 'there'}"
        assert all(shape[-1] >= VOCAB - 16 for shape in missing), f"missing: {missing}"

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        for model in (self.subject.ours, self.subject.stock):
            model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for model in (self.subject.ours, self.subject.stock):
                model.train()


class StockError(Exception):
    """The unpatched model cannot do it."""


def _tuple(comparison: Comparison, strategy: str) -> str | None:
    inputs = comparison.subject.inputs | {"return_dict": False}
    with patch_model(comparison.subject.ours, strategy):
        ours, theirs = comparison.both(lambda model: step(model, inputs))
    if not isinstance(theirs.output, tuple):
        return "stock returns no tuple"
    comparison.near(ours.output, theirs.output)
    apart = distance(ours, theirs).gradient
    assert apart <= GRADIENT_BOUND[comparison.subject.dtype], f"the gradient is off by {apart:.1e}"
    comparison.alike(ours.output[1:], theirs.output[1:])
    return None


def _outputs(comparison: Comparison, strategy: str) -> str | None:
    inputs = comparison.subject.inputs | {"output_hidden_states": True}
    further: list[dict[str, Any]] = []
    if "use_cache" in inspect.signature(type(comparison.subject.stock).forward).parameters:
        further.append(inputs | {"use_cache": True})
    if "router losses" in comparison.subject.variants():
        further.append(comparison.subject.variants()["router losses"] | {"output_hidden_states": True})
    with patch_model(comparison.subject.ours, strategy):
        for batch in further:
            with contextlib.suppress(StockError):
                ours, theirs = comparison.both(lambda model, batch=batch: model(**batch))  # type: ignore[misc]
                comparison.near(ours, theirs)
                comparison.alike(ours, theirs)
        ours, theirs = comparison.both(lambda model: model(**inputs))
    if not isinstance(theirs, dict):
        return "stock returns no dictionary"
    comparison.near(ours, theirs)
    comparison.alike(ours, theirs)
    return None


def _evaluation(comparison: Comparison, strategy: str) -> str | None:
    inputs = comparison.subject.inputs
    with patch_model(comparison.subject.ours, strategy) as handle, comparison.evaluating():
        ours, theirs = comparison.both(lambda model: model(**inputs))
        assert same(ours, theirs), "with logits it differs from stock's"
        assert not handle.counts.deferred, "logits were deferred though nobody said that only the loss matters"
        with handle.scope(loss_only=True):
            ours, theirs = comparison.both(lambda model: model(**inputs))
        comparison.near(ours, theirs)
        assert comparison.materialises or handle.counts.fused == handle.counts.deferred >= 1, f"{handle.counts}"
    return None


def _no_labels(comparison: Comparison, strategy: str) -> str | None:
    inputs = dict(comparison.subject.inputs)
    labels = inputs.pop("labels")
    if "decoder_input_ids" in inspect.signature(type(comparison.subject.stock).forward).parameters:
        inputs["decoder_input_ids"] = labels.clamp(min=0)
    with patch_model(comparison.subject.ours, strategy) as handle:
        ours, theirs = comparison.both(lambda model: model(**inputs))
        assert same(ours, theirs), "it differs"
        assert not handle.counts.deferred, "logits were deferred"
    return None


def _generation(comparison: Comparison, strategy: str) -> str | None:
    inputs = {key: value for key, value in comparison.subject.inputs.items() if key not in ("labels", "return_dict")}
    wanted = {"max_new_tokens": 3, "do_sample": False}
    if not hasattr(comparison.subject.stock, "generate"):
        return "it cannot generate"
    with patch_model(comparison.subject.ours, strategy), comparison.evaluating():
        ours, theirs = comparison.both(lambda model: model.generate(**inputs, **wanted))  # type: ignore[operator]
        assert same(ours, theirs), "other tokens"
    return None


def _undo(comparison: Comparison, strategy: str) -> str | None:
    ours = comparison.subject.ours
    modules, keys = list(ours.modules()), list(ours.state_dict())
    handle = patch_model(ours, strategy)
    assert list(ours.state_dict()) == keys, "other keys in the state_dict while patched"
    step(ours, comparison.subject.inputs)
    handle.undo()
    classes = [type(module) for module in comparison.subject.stock.modules()]
    assert [type(module) for module in ours.modules()] == classes, "a class stays"
    assert list(ours.modules()) == modules, "another module"
    left = [key for module in modules for key in module.__dict__ if key.startswith("_loss_plugin_handle")]
    assert not left, f"{left} stays"
    ours_, theirs = comparison.both(lambda model: model(**comparison.subject.inputs))
    assert same(ours_, theirs), "it differs from stock afterwards"
    return None


CHECKS: dict[str, Callable[[Comparison, str], str | None]] = {
    "return_dict=False": _tuple,
    "other outputs": _outputs,
    "evaluation": _evaluation,
    "no labels": _no_labels,
    "generation": _generation,
    "undo": _undo,
}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
