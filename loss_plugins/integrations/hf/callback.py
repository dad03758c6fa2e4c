"""A callback that gives the loss of `loss_plugins` to a Trainer that cannot be replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from ...config import LossConfig
from ...errors import PatchError
from ...models.patch import PatchHandle, find_handle, patch_model, unwrapped
from .arguments import LossPluginArguments
from .monitor import PREFIX, LossMonitor, read_statistics, renewed
from .refusals import refuse_foreign_forward, refuse_label_smoother, refuse_liger, refuse_token_weight
from .self_check import check_from_dataset

CAUSES = (
    "(1) the Trainer was given a compute_loss_func, or its class overrides compute_loss, and takes the labels out of "
    "the batch before the model is called; (2) the trainer computes its own loss from hidden states, as those of TRL "
    ">= 1.15 do, or from log-probabilities (see `serve_trainer`); (3) the batches have no labels; (4) the model that "
    "is trained was built or wrapped after it was patched, or another library has replaced its forward. "
    "LossPluginTrainer has no such gap."
)


class LossPluginCallback(TrainerCallback):
    """Patches the model of any [`~transformers.Trainer`]: `Trainer(..., callbacks=[LossPluginCallback("cce")])`.

    The model stays patched after training; generation is what it was, and `callback.loss_handle.undo()` takes the patch
    away. In evaluation, logits are made unless `args.prediction_loss_only` is set, since a callback cannot see whether
    `compute_metrics` wants them.

    The numbers (peak loss memory on devices whose allocator counts it, valid fraction, `loss_statistics`) go to the
    Trainer's console output and to `state.log_history`. Reporting integrations run before a user's callbacks and do not
    see them: use [`LossPluginTrainer`] for these, as for token weights, tokens per second and `label_smoothing_factor`.

    With [`LossPluginArguments`], `loss_self_check` compares the first rows of the training data with stock, before
    training.

    Args:
        loss_config (`LossConfig`, `dict` or `str`, *optional*):
            How the loss is computed. Without it, the settings of a [`LossPluginArguments`]; without these, `"auto"`.

    Raises:
        ConfigError: the Trainer's arguments ask for another loss too.
        PatchError: the model is patched with another config, or by another library.
        UnsupportedError: the trainer computes its own fused loss (TRL >= 1.15), so a patched model has no effect.
    """

    def __init__(self, loss_config: LossConfig | Mapping[str, Any] | str | None = None) -> None:
        self.loss_config = LossConfig.of(loss_config)
        refuse_token_weight(self.loss_config)
        self._asks_arguments = loss_config is None
        self.loss_handle: PatchHandle | None = None
        self._monitor: LossMonitor | None = None
        self._in_force = contextlib.ExitStack()
        self._aside: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None:
            self._patch(args, model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if self._monitor is not None:
            self._monitor.end()
        handle = self._patch(args, model)  # model_init has made another model since
        if getattr(args, "loss_self_check", False):
            check_from_dataset(args, model, handle, train_dataloader)
        measure = bool(args.skip_memory_metrics) and args.device.type != "cpu"
        self._monitor = LossMonitor(handle, args.device, measure)
        handle.statistics.pop()

    def _patch(self, args: Any, model: Any) -> PatchHandle:
        refuse_label_smoother(args)
        if self._asks_arguments and isinstance(args, LossPluginArguments):
            self.loss_config = args.loss_config()
            refuse_token_weight(self.loss_config)
        refuse_liger(args, model, self.loss_config)
        refuse_foreign_forward(unwrapped(model), type(self).__name__)
        handle = find_handle(model)
        if handle is not None and handle.config != self.loss_config:
            raise PatchError(
                f"The model is patched with {handle.config}, and the callback was given {self.loss_config}. Undo the "
                "patch first (loss_plugins.find_handle(model).undo()), or give both the same."
            )
        if handle is None:
            handle = patch_model(model, self.loss_config)
        if handle is not self.loss_handle:
            self.loss_handle = handle
            self._in_force.close()
            if args.prediction_loss_only:
                self._in_force.enter_context(handle.scope(loss_only=True))
        return handle

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._monitor is not None
        self._monitor.check(CAUSES)
        self._set_aside(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._set_aside(control)

    def _set_aside(self, control: Any) -> None:
        """Keep an evaluation's tokens out of training's statistics."""
        if control.should_evaluate and self._aside is None and self.loss_handle is not None:
            self._aside = self.loss_handle.statistics
            self.loss_handle.statistics = renewed(self._aside)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._aside is not None and self.loss_handle is not None:
            self.loss_handle.statistics, self._aside = self._aside, None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs or self._monitor is None or self.loss_handle is None:
            return
        statistics = self.loss_handle.statistics if self._aside is None else self._aside
        numbers = self._monitor.take() | read_statistics(statistics)
        numbers = {PREFIX + name: value for name, value in numbers.items()}
        logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._monitor is not None:
            self._monitor.end()
