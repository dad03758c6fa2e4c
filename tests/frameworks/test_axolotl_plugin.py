"""What can be said about the axolotl plugin without axolotl: its schema, its refusals, and when it acts.

Its real command is run by test_axolotl_run.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from loss_plugins import LossConfig
from loss_plugins.errors import ConfigError
from loss_plugins.integrations.axolotl import LossPlugin, arguments
from loss_plugins.integrations.axolotl.plugin import config_of

NAME = "loss_plugins.integrations.axolotl.LossPlugin"
CCE = {"loss_strategy": "cce"}


def test_schema_is_the_dataclass() -> None:
    pytest.importorskip("pydantic", reason="pydantic is not installed: pip install pydantic")
    module, _, name = LossPlugin().get_input_args().rpartition(".")
    assert module == arguments.__name__
    schema = getattr(arguments, name)
    assert tuple(schema.model_fields) == LossConfig.names()
    assert schema().model_dump(exclude_none=True) == {}
    values = {"loss_strategy": "cce", "loss_options": {"filter": "off"}, "liger_ops": {"rope": False}}
    assert schema(**values).model_dump(exclude_none=True) == values


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss_strategy": "ccee"}, "Did you mean 'cce'"),
        ({"loss_z_loss": -1.0}, "loss_z_loss must be a number in"),
        ({"loss_strategi": "cce"}, "Unknown loss setting 'loss_strategi'"),
        ({"Loss_Strategy": "cce"}, "Unknown loss setting 'Loss_Strategy'. Did you mean 'loss_strategy'?"),
        ({"LOSS-STRATEGY": "cce"}, "Unknown loss setting 'LOSS-STRATEGY'. Did you mean 'loss_strategy'?"),
        ({"Loss-Z-Loss": 0.1}, "Did you mean 'loss_z_loss'?"),
        ({"loss_strategy": ["cce"]}, "loss_strategy"),
    ],
)
def test_bad_values_are_pydantic_errors(values: dict[str, Any], words: str) -> None:
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed: pip install pydantic")

    class Theirs(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        loss_watchdog_threshold: float | None = None

    class Merged(Theirs, arguments.LossPluginArgs):  # type: ignore[misc]
        """As axolotl merges it."""

    assert Merged(loss_watchdog_threshold=2.0, **CCE).loss_strategy == "cce"
    assert Merged(liger_rope=True, **CCE).loss_strategy == "cce", "a key of Liger's plugin is none of ours misspelled"
    with pytest.raises(pydantic.ValidationError, match=words):
        Merged(**values)


class Config(dict[str, Any]):
    """As axolotl's: what is not there is None, also as an attribute."""

    __getattr__ = dict.get
    __missing__: ClassVar[Any] = lambda self, key: None


@pytest.mark.parametrize(
    ("values", "config"),
    [
        ({}, None),
        ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, None),
        ({"loss_strategy": None}, None),
        ({"plugins": [NAME]}, LossConfig()),
        ({"plugins": [NAME.replace(".LossPlugin", ":LossPlugin")]}, LossConfig()),
        (CCE, LossConfig("cce")),
        ({"loss_z_loss": "1e-4"}, LossConfig(loss_z_loss=1e-4)),  # as YAML reads 1e-4
        (
            {"loss_strategy": "chunked", "loss_options": Config(workspace_mb=2)},
            LossConfig("chunked", {"workspace_mb": 2}),
        ),
    ],
)
def test_it_acts_when_asked(values: dict[str, Any], config: LossConfig | None) -> None:
    values = Config(values)
    assert config_of(values) == config
    callbacks = LossPlugin().add_callbacks_pre_trainer(values, None)
    assert [callback.loss_config for callback in callbacks] == ([] if config is None else [config])


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"cut_cross_entropy": True}, "`cut_cross_entropy: true`"),
        ({"chunked_cross_entropy": True}, "`chunked_cross_entropy: true`"),
        ({"liger_cross_entropy": True}, "`liger_cross_entropy: true`"),
        ({"liger_fused_linear_cross_entropy": True}, "`liger_fused_linear_cross_entropy: true`"),
        ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}, "`- axolotl.integrations.cut"),
        ({"use_eaft": True}, "`use_eaft: true`"),
        ({"rl": "ebft"}, "rl: ebft and loss_strategy 'cce' were both given"),
        ({"rl": "dpo", "dpo_use_weighting": True}, "`dpo_use_weighting: true`"),
        ({"rl": "dpo", "dpo_padding_free": True}, "`dpo_padding_free: true`"),
        ({"rl": "grpo", "trl": {"async_prefetch": True}}, "`async_prefetch: true`"),
        ({"rl": "dpo", "loss_z_loss": 0.1}, "loss_z_loss is 0.1, but rl: dpo computes its own objective"),
        ({"use_dft": True, "loss_statistics": ["accuracy"]}, "Leave loss_statistics out"),
        ({"reward_model": True}, "reward_model: true and loss_strategy"),
        ({"liger_ops": True, "liger_rms_norm": True}, "`liger_rms_norm: true`"),
        ({"loss_token_weight_key": "weights"}, "loss_token_weight_key 'weights'"),
    ],
)
def test_what_it_cannot_be_combined_with(values: dict[str, Any], line: str) -> None:
    known = {*values, *LossConfig.names()}
    if not any(key.startswith("loss_") for key in values):
        assert arguments.check({key: value for key, value in values.items() if key != "liger_ops"}, known) is None
    with pytest.raises(ConfigError, match=r"Delete|Leave") as caught:
        arguments.check({**CCE, **values}, known)
    assert line in str(caught.value)


def test_cut_cross_entropy_that_is_off_is_no_clash() -> None:
    plugin = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
    values = {**CCE, "plugins": [plugin], "cut_cross_entropy": False}
    assert arguments.check(values, values) == LossConfig("cce")
