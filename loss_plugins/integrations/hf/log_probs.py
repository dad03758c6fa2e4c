"""TRL's trainers (SFT, DPO, KTO, ORPO, CPO, GRPO, RLOO): their objective is theirs, the log-probabilities in it come
from a loss strategy, of the policy and of the reference.

Until TRL 1.14, and in trainers that others derive from these, they take logits from the model and one entry of their
softmax a token. Those logits stay deferred here until that entry is asked for. From TRL 1.15 on they call a fused head
that TRL puts on the model; see `fused_head`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from ...config import LossConfig
from ...errors import ConfigError, PatchError, UnsupportedError, refuse
from ...models.leaving import LeavingLogits
from ...models.patch import PatchHandle, find_handle, patch_model, unwrapped
from .callback import LossPluginCallback
from .fused_head import fused_forward, put_on, refuse_fused_extras, take_off
from .trainer import LossPluginMixin

SERVED = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer", "GRPOTrainer", "RLOOTrainer")
CALLS = ("compute_loss", "compute_ref_log_probs", "compute_reference_log_probs", "_get_per_token_logps_and_entropies")
"""Methods of theirs inside which the model's logits are wanted for log-probabilities only."""
OTHER_FUSED = ("use_liger_loss", "use_liger_kernel")


def serve_trainer(trainer: Any, loss_config: LossConfig | Mapping[str, Any] | str | None = None) -> ServedTrainer:
    """Let a built trainer of TRL take log-probabilities from a loss strategy; `undo()` takes it back.

    ```python
    trainer = DPOTrainer(model, args=args, train_dataset=dataset)
    serve_trainer(trainer, "cce")
    trainer.train()
    ```

    Args:
        trainer: One of `SERVED`, or of a class derived from one.
        loss_config: A strategy's name, a `LossConfig` or a mapping of its fields. Default: `auto`.

    Raises:
        ConfigError: no trainer was given, or a setting that only means something for the model's own loss.
        UnsupportedError: the trainer needs whole logits, computes its loss elsewhere, or shards its model.
    """
    config = LossConfig.of(loss_config)
    refuse_class(trainer, config)
    if config.loss_objective == "dft" and _is_a(trainer, "SFTTrainer"):
        raise ConfigError(
            f"loss_objective 'dft' was asked for with {type(trainer).__name__}, which computes dynamic fine-tuning "
            'itself, from the strategy\'s log-probabilities. Build it with SFTConfig(loss_type="dft"), and leave '
            "loss_objective out."
        )
    refuse_additions(config, type(trainer).__name__)
    refuse_trainer(trainer, config)
    return ServedTrainer(trainer, config)


def serve_loss_func(trainer: Any, config: LossConfig) -> ServedTrainer:
    """The same for a plain Trainer whose `compute_loss_func` takes nothing from logits but their cross-entropy with, or
    the log-probability of, the labels, as dynamic fine-tuning (DFT) does.

    Raises:
        ConfigError: a setting that only means something for the model's own loss.
        UnsupportedError: the model is sharded or compiled.
    """
    refuse_additions(config, "this loss")
    refuse_wrappers(trainer.args, trainer.model, config, sharded=_is_sharded(trainer))
    return ServedTrainer(trainer, config)


class ServedTrainer:
    """What `serve_trainer` has put in place.

    Attributes:
        handles: Patches of the policy and, if there is one, of the reference.
    """

    def __init__(self, trainer: Any, config: LossConfig) -> None:
        self.trainer, self.config = trainer, config
        self.handles: list[PatchHandle] = []
        self._patched: list[PatchHandle] = []
        self._real = False
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                self.handles.append(self._patch(unwrapped(model)))
        for name in (*CALLS, "prediction_step"):
            if hasattr(trainer, name):
                self._wrap(name)
        self._modules = [sys.modules[cls.__module__] for cls in type(trainer).__mro__ if cls.__module__ in sys.modules]
        _replace(self._modules)
        self._callback: LossPluginCallback | None = None
        if not any(isinstance(each, LossPluginCallback) for each in trainer.callback_handler.callbacks):
            self._callback = LossPluginCallback(config)
            trainer.add_callback(self._callback)

    def undo(self) -> None:
        """Take everything back. Doing it again does nothing."""
        for name in (*CALLS, "prediction_step"):
            self.trainer.__dict__.pop(name, None)
        for handle in self.handles:
            if handle in self._patched:
                handle.undo()
            take_off(handle)
        self.handles, self._patched = [], []
        if self._callback is not None:  # it would patch the model again when training begins
            self.trainer.remove_callback(self._callback)
            self._callback = None
        _restore(self._modules)
        self._modules = []

    def _patch(self, model: torch.nn.Module) -> PatchHandle:
        theirs = model.__dict__.pop("forward", None)  # the patch would not know TRL's fused head for ours to be
        try:
            handle = find_handle(model)
            if handle is None:
                handle = patch_model(model, self.config)
                self._patched.append(handle)
        finally:
            if theirs is not None:
                model.__dict__["forward"] = theirs
        if handle.config != self.config:
            raise PatchError(
                f"The model is patched with {handle.config}, and {self.config} was asked for. Undo the patch first "
                "(loss_plugins.find_handle(model).undo()), or give both the same."
            )
        if fused_forward(model) is not None:
            put_on(model, handle)
        return handle

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if not self._real:
                for handle in self.handles:
                    stack.enter_context(handle.scope(leaving=True))
            yield

    def _wrap(self, name: str) -> None:
        call = getattr(self.trainer, name)

        @functools.wraps(call)
        def served(*args: Any, **kwargs: Any) -> Any:
            before = self._real
            # what returns outputs returns logits, which somebody will look at
            self._real = before or (name == "compute_loss" and _argument("return_outputs", 2, args, kwargs))
            if name == "prediction_step":
                self._real = not _argument("prediction_loss_only", 2, args, kwargs)
            try:
                with self._leaving():
                    return call(*args, **kwargs)
            finally:
                self._real = before

        self.trainer.__dict__[name] = served


def refuse_additions(config: LossConfig, what: str) -> None:
    """Raises:
    ConfigError: see `additions`.
    """
    refuse(additions(config, what))


def additions(config: LossConfig, what: str) -> Iterator[str]:
    """What is wrong with each setting that adds something to the model's own loss, which that trainer does not ask
    for."""
    default = LossConfig()
    for name in ("loss_label_smoothing", "loss_z_loss", "loss_objective", "loss_class_weight", "loss_statistics"):
        if getattr(config, name) not in (getattr(default, name), [], 0):
            yield (
                f"{name} is {getattr(config, name)!r}, but {what} computes its own objective, and its own statistics, "
                f"from log-probabilities of single tokens, to which nothing can be added. Leave {name} out."
            )


def refuse_class(trainer: Any, config: LossConfig) -> None:
    """Raises:
    ConfigError: it is no trainer.
    UnsupportedError: it is none whose objective is made of log-probabilities.
    """
    name, asked = type(trainer).__name__, f"loss_strategy {config.loss_strategy!r} was asked for with"
    if isinstance(trainer, torch.nn.Module):
        raise ConfigError(
            f"serve_trainer takes a trainer of TRL that is built already, and was given a model, {name}. Write "
            f"loss_plugins.patch_model(model, {config.loss_strategy!r}) for a model, or serve_trainer(trainer, ...)."
        )
    if isinstance(trainer, type) or not (hasattr(trainer, "model") and hasattr(trainer, "callback_handler")):
        given = f"the class {trainer.__name__}" if isinstance(trainer, type) else f"{name} without model and callbacks"
        raise ConfigError(
            f"serve_trainer takes a trainer of TRL that is built already, and was given {given}. Build the trainer, "
            "then write serve_trainer(trainer, ...)."
        )
    if _is_a(trainer, *SERVED):
        return
    if isinstance(trainer, LossPluginMixin):
        raise UnsupportedError(
            f"{asked} {name}, whose loss comes from loss_plugins already. Leave serve_trainer out and say what is "
            f"wanted when it is built: LossPluginTrainer(..., loss_config={config.loss_strategy!r})."
        )
    if _takes_the_models_loss(trainer):
        raise UnsupportedError(
            f"{asked} {name}, which takes the loss from the model, and serve_trainer is for trainers of TRL, whose "
            f"loss is made of log-probabilities. Use LossPluginTrainer(..., loss_config={config.loss_strategy!r}) in "
            f"its place, or {name}(..., callbacks=[LossPluginCallback({config.loss_strategy!r})])."
        )
    raise UnsupportedError(
        f"{asked} {name}, which takes more from the model than log-probabilities of single tokens. Trainers that can "
        f"be served: {', '.join(SERVED)}. Leave loss_plugins out of this run."
    )


def _is_a(trainer: Any, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(trainer).__mro__)


def _takes_the_models_loss(trainer: Any) -> bool:
    """Whether transformers' own Trainer computes the loss, by the model's forward."""
    cls = type(trainer)
    own = cls.compute_loss is Trainer.compute_loss and cls.training_step is Trainer.training_step
    return own and not any(base.__module__.split(".")[0] == "trl" for base in cls.__mro__)


def refuse_trainer(trainer: Any, config: LossConfig) -> None:
    """Raises:
    UnsupportedError: log-probabilities are not all that this trainer takes, or not from this model.
    """
    name, args = type(trainer).__name__, trainer.args
    for switch in OTHER_FUSED:
        if getattr(args, switch, False):
            raise UnsupportedError(
                f"{switch} is on, with which {name} computes its log-probabilities past the model's logits, and "
                f"loss_strategy {config.loss_strategy!r} was asked for: two losses for one model. Leave {switch} out."
            )
    if any(_is_trl_s_own(model) for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None):
        raise UnsupportedError(
            f"{name} has put a forward of its own on the model, which computes the loss in chunks past the model's "
            f"head (loss_type chunked_nll), and loss_strategy {config.loss_strategy!r} was asked for. Set loss_type: "
            "nll, or leave loss_plugins out."
        )
    refuse_fused_extras(trainer)
    refuse_wrappers(args, trainer.model, config, sharded=_is_sharded(trainer))


def refuse_wrappers(args: Any, model: Any, config: LossConfig, sharded: str | None = None) -> None:
    """Log-probabilities are taken after the forward, so what must happen to a weight inside it is over.

    Raises:
        UnsupportedError: something shards or compiles the model, or looks for its gradients in its outputs.
    """
    asked = f"loss_strategy {config.loss_strategy!r} was asked for with a trainer that takes log-probabilities"
    if sharded is not None:
        raise UnsupportedError(
            f"{asked}, and the model is sharded by {sharded}, whose weights are whole only inside the forward. Train "
            "on one device or with DDP, or leave loss_plugins out."
        )
    if getattr(args, "torch_compile", False):
        raise UnsupportedError(
            f"{asked}, and torch_compile is on, which was never run with it. Leave torch_compile out."
        )
    if getattr(args, "n_gpu", 1) > 1:
        raise UnsupportedError(
            f"{asked}, and nn.DataParallel, which gathers logits, would split the batch over {args.n_gpu} GPUs. Launch "
            "with `accelerate launch` or `torchrun`, or make one GPU visible."
        )
    wish = getattr(args, "ddp_find_unused_parameters", None)
    finds = wish if wish is not None else not getattr(unwrapped(model), "is_gradient_checkpointing", False)
    inside = fused_forward(unwrapped(model)) is not None  # then the head is used before the forward is over
    if getattr(args, "world_size", 1) > 1 and finds and not inside:
        raise UnsupportedError(
            f"{asked}, and DDP looks for unused parameters in the forward's outputs, before the head has been used. "
            "Set ddp_find_unused_parameters: false."
        )


def _is_trl_s_own(model: Any) -> bool:
    """Whether TRL <= 1.14 has put a forward on the model that computes a loss without logits."""
    inner = unwrapped(model)
    forward = inner.__dict__.get("forward")
    home = getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__", "")
    return home.startswith("trl.") and fused_forward(inner) is None


def _is_sharded(trainer: Any) -> str | None:
    kind = str(getattr(getattr(trainer, "accelerator", None), "distributed_type", ""))
    for name in ("FSDP", "DEEPSPEED", "MEGATRON"):
        if kind.upper().endswith(name) or f".{name}" in kind.upper():
            return name
    size = getattr(unwrapped(trainer.model), "tp_size", None)
    return "tensor parallelism" if isinstance(size, int) and size > 1 else None


def _argument(name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get(name, args[place] if len(args) > place else False))


# TRL's functions of logits, in the modules of its trainers and of those derived from them

_installed: dict[tuple[str, str], list[Any]] = {}
"""By module and name: the original, and how many trainers are served."""


def _replace(modules: list[Any]) -> None:
    for module in modules:
        for name, around in _AROUND.items():
            original = vars(module).get(name)
            if original is None:
                continue
            entry = _installed.get((module.__name__, name))
            if entry is None:
                entry = _installed[module.__name__, name] = [original, 0]
                setattr(module, name, around(original))
            entry[1] += 1


def _restore(modules: list[Any]) -> None:
    for module in modules:
        for name in _AROUND:
            entry = _installed.get((module.__name__, name))
            if entry is not None:
                entry[1] -= 1
                if not entry[1]:
                    setattr(module, name, entry[0])
                    del _installed[module.__name__, name]


def _deferred(logits: Any) -> bool:
    return isinstance(logits, LeavingLogits) and not logits.is_real()


def _at(logits: Any, temperature: float) -> Any:
    return logits if temperature == 1.0 else logits / temperature


def _around_log_probs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def selective_log_softmax(logits: Any, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _deferred(logits) or index.shape != logits.shape[:-1] or args or kwargs.keys() - _OPTIONS:
            return original(logits, index, *args, **kwargs)
        found = _at(logits, kwargs.get("temperature", 1.0)).label_log_probs(index, kwargs.get("row_mask"))
        return found.log_probs.to(logits.dtype)

    return selective_log_softmax


def _around_both(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def selective_log_softmax_and_entropy(logits: Any, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        with_gradient = kwargs.get("entropy_requires_grad", True) and torch.is_grad_enabled()
        known = not args and not kwargs.keys() - {*_OPTIONS, "entropy_requires_grad"}
        if not _deferred(logits) or with_gradient or not known:
            return original(logits, index, *args, **kwargs)
        scaled = _at(logits, kwargs.get("temperature", 1.0))
        found = scaled.label_log_probs(index, kwargs.get("row_mask"), ("entropy",))
        return found.log_probs.to(logits.dtype), found.entropy.to(logits.dtype)

    return selective_log_softmax_and_entropy


def _around_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def entropy_from_logits(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not _deferred(logits) or logits.requires_grad:
            return original(logits, *args, **kwargs)
        any_label = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        return logits.label_log_probs(any_label, None, ("entropy",)).entropy.to(logits.dtype)

    return entropy_from_logits


_OPTIONS = {"temperature", "row_mask"}
_AROUND = {
    "selective_log_softmax": _around_log_probs,
    "selective_log_softmax_and_entropy": _around_both,
    "entropy_from_logits": _around_entropy,
}
