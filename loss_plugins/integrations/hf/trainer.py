"""A Trainer whose language-model loss makes no logits, and the mixin that gives the same to any Trainer's subclass."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from ...config import LossConfig
from ...errors import ConfigError, PatchError, UnsupportedError
from ...models.patch import PatchHandle, find_handle, patch_model, unwrapped
from ...models.statistics import StatisticsBuffer
from .arguments import LossPluginArguments, check_switch, with_smoothing
from .hints import memory_hint
from .monitor import PREFIX, LossMonitor, apart, read_statistics, renewed
from .refusals import refuse_compute_loss_func, refuse_foreign_forward, refuse_liger
from .self_check import refuse_self_check, self_check

_Base: Any = Trainer if TYPE_CHECKING else object

CAUSES = (
    "(1) a subclass's compute_loss, or compute_loss_func, takes the labels out of the batch before the model is "
    "called; (2) the trainer computes its own loss from hidden states, as those of TRL >= 1.15 do; (3) the batches "
    "have no labels; (4) the model that is trained was built or wrapped after it was patched, for example in "
    "model_init, or another library has replaced its forward. `trainer.loss_handle.explain()` tells what was patched."
)


class LossPluginMixin(_Base):
    """Put before any [`~transformers.Trainer`] class: `class MyTrainer(LossPluginMixin, Seq2SeqTrainer)`.

    The model is patched, and its own forward computes the loss; this class adds what a patch of the model cannot reach:
    label smoothing, token weights, evaluation without logits, the log, and refusals of what would bypass the patch.

    Args:
        loss_config (`LossConfig`, `dict` or `str`, *optional*):
            How the loss is computed. Without it, the settings of a [`LossPluginArguments`]; without these, what the
            model is patched with already; else `"auto"`.
        loss_self_check (`bool`, *optional*):
            Whether the first training batch's loss and gradients are compared with stock's, and training stops if they
            differ. Without it, that of a [`LossPluginArguments`].

    Attributes:
        loss_handle (`PatchHandle`): The patch of the model that is trained.
        measure_loss_memory (`bool`, defaults to `True`):
            Whether the loss's peak memory is measured: of every step where the device's allocator counts it for
            nothing, elsewhere of the first training step, which is slower for it. The Trainer's own
            `skip_memory_metrics=False` reads the same counter, and then this is left out.

    Raises:
        ConfigError: `compute_loss_func` or a Liger loss is asked for too, or settings contradict each other.
        PatchError: the model is patched with another config.
        VerificationError: with `loss_self_check`, when training begins.
    """

    measure_loss_memory = True
    loss_handle: PatchHandle | None = None
    _loss_wish: Any = None
    _loss_patched_here: PatchHandle | None = None
    _loss_monitor: LossMonitor | None = None
    _loss_prediction: tuple[bool, Tensor | None] | None = None
    _loss_smoothing = 0.0
    _loss_positions = 0
    _loss_eval_statistics: StatisticsBuffer | None = None
    _loss_check_wish: bool | None = None
    _loss_to_check = False

    def __init__(
        self,
        *args: Any,
        loss_config: LossConfig | Mapping[str, Any] | str | None = None,
        loss_self_check: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if loss_self_check is not None:
            check_switch("loss_self_check", loss_self_check)
        self._loss_check_wish = loss_self_check
        if loss_config is not None:
            self._loss_wish = LossConfig.of(loss_config)
        super().__init__(*args, **kwargs)
        self._loss_prepare()
        self.add_callback(_Follow(self))

    # Patching

    def _loss_prepare(self) -> None:
        """Check the trainer's settings, and see to it that its model is patched."""
        refuse_compute_loss_func(self.compute_loss_func)
        self.label_smoother: Any = None  # its labels would be taken from the model, which smooths by itself
        self.loss_handle = self._loss_patch(self.model)

    def _loss_patch(self, model: torch.nn.Module) -> PatchHandle:
        wish = self._loss_config_asked_for()
        handle = find_handle(model)
        refuse_liger(self.args, model, wish or (LossConfig() if handle is None else handle.config))
        refuse_foreign_forward(unwrapped(model), type(self).__name__)
        if handle is not None and wish is not None and not _agree(handle.config, wish):
            if handle is not self._loss_patched_here:
                raise PatchError(
                    f"The model is patched with {handle.config}, and this trainer was asked for {wish}. Undo the patch "
                    "first (loss_plugins.find_handle(model).undo()), or leave the trainer's loss settings out to use "
                    "the patch as it is."
                )
            handle.undo()
            handle = None
        if handle is None:
            handle = self._loss_patched_here = patch_model(model, LossConfig() if wish is None else wish)
            self._loss_eval_statistics = None
        factor = self.args.label_smoothing_factor if wish is None else wish.loss_label_smoothing
        self._loss_smoothing = with_smoothing(handle.config, factor).loss_label_smoothing
        return handle

    def _loss_config_asked_for(self) -> LossConfig | None:
        """The trainer's argument, else its arguments' settings; None if the user said nothing."""
        if self._loss_wish is not None:
            return with_smoothing(self._loss_wish, self.args.label_smoothing_factor)
        if isinstance(self.args, LossPluginArguments) and self.args.loss_config() != LossConfig():
            return self.args.loss_config()
        return None

    def call_model_init(self, trial: Any = None) -> torch.nn.Module:
        model: torch.nn.Module = super().call_model_init(trial)
        if self.loss_handle is not None:  # else `__init__` is not over yet
            self.loss_handle = self._loss_patch(model)
        return model

    # The loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The model's loss, without logits unless they are asked for: `return_outputs` outside training."""
        columns = list(inputs)
        inputs, weight = self._loss_take_weight(inputs)
        only = model.training or not return_outputs
        if self._loss_prediction is not None:
            only, weight = self._loss_prediction
        elif model.training and weight is None:
            self._loss_refuse_without_weight(columns)
        self._loss_count(inputs)
        if only or not self._loss_is_special(weight):
            with self._loss_scope(weight, only):
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        # the model's own loss on real logits knows no smoothing and no weights, so the two come from two forwards
        with self._loss_scope(weight, True):
            loss = super().compute_loss(model, dict(inputs), False, num_items_in_batch=num_items_in_batch)
        with self._loss_scope(None, False):
            _, outputs = super().compute_loss(model, inputs, True, num_items_in_batch=num_items_in_batch)
        return loss, outputs

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        inputs, weight = self._loss_take_weight(inputs)
        # with predict_with_generate the forward is for the loss, and the predictions come from generate()
        only = prediction_loss_only or bool(getattr(self.args, "predict_with_generate", False))
        self._loss_prediction = only, weight
        try:
            with self._loss_scope(weight, only):  # for classes that call the model here, past compute_loss
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._loss_prediction = None

    def _loss_scope(self, weight: Tensor | None, only: bool) -> contextlib.AbstractContextManager[Any]:
        assert self.loss_handle is not None
        return self.loss_handle.scope(token_weight=weight, loss_only=only, label_smoothing=self._loss_smoothing)

    def _loss_is_special(self, weight: Tensor | None) -> bool:
        """Whether the loss is more than the model's plain one on its logits."""
        assert self.loss_handle is not None
        config = self.loss_handle.config
        return weight is not None or bool(
            self._loss_smoothing
            or config.loss_z_loss
            or config.loss_objective
            or config.loss_class_weight
            or config.loss_statistics
        )

    def _loss_take_weight(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """The batch without its column of token weights, which no model takes, and the column."""
        assert self.loss_handle is not None
        key = self.loss_handle.config.loss_token_weight_key
        if key not in inputs:
            return inputs, None
        if self.args.n_gpu > 1:
            raise UnsupportedError(
                f"The batch has token weights ({key!r}) and nn.DataParallel splits it over {self.args.n_gpu} GPUs, "
                "which cannot split them. Launch with `accelerate launch` or `torchrun`, or make one GPU visible."
            )
        if "shift_labels" in inputs:
            raise UnsupportedError(
                f"The batch has token weights ({key!r}), which are aligned with labels, and shift_labels, which are "
                "not. Leave sequence and context parallelism off, or the weights out."
            )
        return {name: value for name, value in inputs.items() if name != key}, self._prepare_input(inputs[key])

    def _loss_refuse_without_weight(self, columns: list[str]) -> None:
        assert self.loss_handle is not None
        key = self.loss_handle.config.loss_token_weight_key
        if key != LossConfig().loss_token_weight_key:
            raise ConfigError(
                f"loss_token_weight_key {key!r} was given, and a training batch has no such column: it has "
                f"{', '.join(columns)}. Let the dataset and the data collator make one, or leave the key out."
            )

    def _loss_count(self, inputs: Mapping[str, Any]) -> None:
        labels = inputs.get("labels")
        if isinstance(labels, Tensor):
            self._loss_positions += labels.numel()
            if self._loss_monitor is not None:
                self._loss_monitor.count(labels.numel())

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.loss_handle is not None:
            config = self.loss_handle.config
        else:  # a subclass prepares its data in `__init__`
            config = self._loss_config_asked_for() or LossConfig()
        key = config.loss_token_weight_key
        if key not in self._signature_columns:
            self._signature_columns.append(key)

    # Measuring and logging

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._loss_monitor is not None:  # an interrupted training tells no callback that it is over
                self._loss_monitor.end()

    def _loss_wants_check(self) -> bool:
        wish = self._loss_check_wish
        wish = getattr(self.args, "loss_self_check", False) if wish is None else wish
        if wish:
            refuse_self_check(self.args, self.accelerator)
        return bool(wish)

    def _loss_check(self, model: torch.nn.Module, inputs: dict[str, Any], count: Tensor | int | None) -> None:
        """Compare a batch with stock; the next one, if no label of this one counts."""
        assert self.loss_handle is not None
        model.train()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        batch, _ = self._loss_take_weight(self._prepare_inputs(inputs))

        def compute(inputs: dict[str, Any], deferred: bool) -> Tensor:
            self._loss_prediction = deferred, None
            with self.compute_loss_context_manager():
                loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=count)
            return loss

        positions, smoothing, self._loss_smoothing = self._loss_positions, self._loss_smoothing, 0.0
        monitor = self._loss_monitor
        interrupted = contextlib.nullcontext() if monitor is None else monitor.interrupted()
        try:
            with interrupted:
                checked = self_check(model, self.loss_handle, batch, compute)
        finally:
            self._loss_prediction, self._loss_positions, self._loss_smoothing = None, positions, smoothing
        self._loss_to_check = checked is None
        if monitor is not None:
            monitor.resume()

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        if self._loss_to_check:
            self._loss_check(model, inputs, args[0] if args else kwargs.get("num_items_in_batch"))
        watched = contextlib.nullcontext() if self._loss_monitor is None else self._loss_monitor.watched()
        try:
            with watched:
                loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
                return loss
        except torch.OutOfMemoryError as error:
            error.add_note(memory_hint(self.model, inputs, self.loss_report["strategy"]))
            raise

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Adds `{metric_key_prefix}_loss_plugins/token_accuracy` and the like for each of `loss_statistics`."""
        assert self.loss_handle is not None
        monitor = self._loss_monitor
        positions, self._loss_positions = self._loss_positions, 0
        if self._loss_eval_statistics is None:  # kept, since a compiled graph would be made anew for another
            self._loss_eval_statistics = renewed(self.loss_handle.statistics)
        interrupted = contextlib.nullcontext() if monitor is None else monitor.interrupted()
        with interrupted, apart(self.loss_handle, self._loss_eval_statistics):
            self._loss_eval_statistics.pop()
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            if self.loss_handle.config.loss_statistics:
                for name, value in self._loss_statistics().items():
                    if name in ("token_accuracy", "entropy"):
                        output.metrics[f"{metric_key_prefix}_{PREFIX}{name}"] = value
        self._loss_positions = positions
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the loss's numbers to the training log; every `report_to` gets them."""
        if "loss" in logs and "learning_rate" in logs and self._loss_monitor is not None:
            numbers = self._loss_monitor.take(self.args.world_size) | self._loss_statistics()
            logs.update({PREFIX + name: value for name, value in numbers.items()})
        super().log(logs, *args, **kwargs)

    def _loss_statistics(self) -> dict[str, float]:
        """Means over the tokens of all processes since the last time. All processes must be here."""
        assert self.loss_handle is not None
        positions, self._loss_positions = self._loss_positions, 0
        return read_statistics(self.loss_handle.statistics, positions, self.accelerator)

    @property
    def loss_report(self) -> dict[str, Any]:
        """The last training's `strategy`, `chosen` (what ran, where that is `"auto"`), `kernels`, `loss_peak_bytes`,
        `tokens_per_s`, `hits` and `materialised`."""
        if self._loss_monitor is not None:
            return self._loss_monitor.report(self.args.world_size)
        strategy = self.loss_handle.config.loss_strategy if self.loss_handle is not None else None
        return {
            "strategy": strategy,
            "chosen": [],
            "kernels": [],
            "loss_peak_bytes": 0,
            "tokens_per_s": 0.0,
            "hits": 0,
            "materialised": 0,
        }


class LossPluginTrainer(LossPluginMixin, Trainer):
    """[`~transformers.Trainer`] whose language-model loss is computed by a strategy; see [`LossPluginMixin`].

    ```python
    trainer = LossPluginTrainer(model, args, loss_config="cce", train_dataset=dataset)
    ```
    """


class _Follow(TrainerCallback):
    """Tells a `LossPluginMixin` where its training is."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        if trainer._loss_monitor is not None:
            trainer._loss_monitor.end()
        trainer._loss_prepare()  # a search may have changed the settings, anyone the model
        handle = trainer.loss_handle
        measure = trainer.measure_loss_memory and args.skip_memory_metrics and not args.torch_compile
        trainer._loss_monitor = LossMonitor(handle, args.device, measure)
        handle.statistics.pop()
        trainer._loss_positions = 0
        trainer._loss_to_check = trainer._loss_wants_check()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._loss_monitor.resume()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._loss_monitor.check(CAUSES)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._loss_monitor.end()


def _agree(one: LossConfig, other: LossConfig) -> bool:
    """Whether two configs are the same but for smoothing, which is handed over a call at a time."""
    return replace(one, loss_label_smoothing=0.0) == replace(other, loss_label_smoothing=0.0)
