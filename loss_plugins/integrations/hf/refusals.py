"""What would compute the loss past the patch without a word, refused in words."""

from __future__ import annotations

from typing import Any

from ...config import LossConfig
from ...errors import ConfigError, PatchError, UnsupportedError
from ...models.liger import own_losses
from ...models.patch import unwrapped


def refuse_liger(args: Any, model: Any, config: LossConfig) -> None:
    """Liger's own fused loss is applied late, in `train()`, over the model's forward.

    Raises:
        ConfigError: `use_liger_kernel` is on and would replace the loss, or do what `liger_ops` does once more.
    """
    if not getattr(args, "use_liger_kernel", False):
        return
    if config.liger_ops not in (None, False):
        raise ConfigError(
            f"use_liger_kernel is on and liger_ops is {config.liger_ops!r}: both put Liger's kernels into the model. "
            "Leave use_liger_kernel out; liger_ops does the same, for this model only."
        )
    settings = getattr(args, "liger_kernel_config", None) or {}
    replaced = own_losses(unwrapped(model), settings)
    if replaced:
        raise ConfigError(
            f"use_liger_kernel is on with {' and '.join(replaced)} (liger_kernel_config={settings or None!r}), and a "
            "loss strategy of loss_plugins was asked for: two fused losses for one model, and Liger's would win when "
            "train() begins. Keep Liger's layers and turn its loss off with liger_kernel_config="
            '{"fused_linear_cross_entropy": false, "cross_entropy": false}, or use liger_ops: true in place of '
            "use_liger_kernel; or remove loss_plugins from this run."
        )


def refuse_compute_loss_func(function: Any) -> None:
    """The Trainer takes the labels out of the batch for it, so the model computes no loss at all.

    Raises:
        ConfigError: there is one.
    """
    if function is not None:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ConfigError(
            f"compute_loss_func={name} was given, but the Trainer takes the labels away from the model for it and it "
            "needs whole logits, which no loss strategy makes. Say what it computes with loss_label_smoothing, "
            "loss_z_loss, loss_class_weight or a column of token weights, or use a plain Trainer."
        )


def refuse_token_weight(config: LossConfig) -> None:
    """Raises:
    ConfigError: a column of token weights is named, of which only LossPluginTrainer makes something.
    """
    if config.loss_token_weight_key != LossConfig().loss_token_weight_key:
        raise ConfigError(
            f"loss_token_weight_key {config.loss_token_weight_key!r} was given, but here such a column of a batch is "
            "not made, or is dropped, or is handed to the model, which takes no weights. Leave it out, or train with "
            "LossPluginTrainer in a script of your own."
        )


def refuse_label_smoother(args: Any) -> None:
    """Raises:
    ConfigError: `label_smoothing_factor` is set, for which a plain Trainer takes the labels away from the model.
    """
    factor = getattr(args, "label_smoothing_factor", 0)
    if factor:
        raise ConfigError(
            f"label_smoothing_factor={factor:g} was given with LossPluginCallback, but the Trainer takes the labels "
            "away from the model for it and a callback cannot change that. Leave it at 0 and give the callback "
            f"LossConfig(..., loss_label_smoothing={factor:g}), or use LossPluginTrainer, which takes both."
        )


def refuse_foreign_forward(model: Any, what: str) -> None:
    """Another library may have set a forward on the instance, past which ours is never called.

    Raises:
        UnsupportedError: TRL did, for a trainer that computes its own fused loss.
        PatchError: something else did.
    """
    forward = vars(model).get("forward")
    if forward is None:
        return
    function = getattr(forward, "__func__", forward)
    home = getattr(function, "__globals__", {}).get("__name__", "") or getattr(function, "__module__", "")
    root = home.split(".")[0]
    if root == "trl":
        raise UnsupportedError(
            f"{what} was used with a trainer of TRL, which has set its own fused head on {type(model).__name__} "
            f"({home}): TRL computes the loss from hidden states itself, without logits, and never calls the model's "
            f"own loss, so loss_plugins has no effect there. In place of {what} call "
            "loss_plugins.integrations.hf.serve_trainer(trainer, ...) once the trainer is built, or train with a plain "
            "LossPluginTrainer."
        )
    if root in ("liger_kernel", "cut_cross_entropy"):
        raise PatchError(
            f"{home} has set its own forward, with its own fused loss, on {type(model).__name__}, past which "
            "loss_plugins is never called: two fused losses for one model. Turn one of them off: for Liger "
            'liger_kernel_config={"fused_linear_cross_entropy": false}, or do not use loss_plugins here.'
        )
