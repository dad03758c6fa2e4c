"""What can be said about the LLaMA-Factory integration without it: keys, refusals, and the hook on a stand-in that has
the two functions that the hook touches. Its real command is run by test_llamafactory_run.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from small_job import command
from typer.testing import CliRunner

from loss_plugins import LossConfig
from loss_plugins.cli.main import app
from loss_plugins.errors import ConfigError, UnsupportedError
from loss_plugins.integrations.llamafactory import hook, run

STAND_IN = """
import sys
def read_args(args=None):
    return sys.argv[1:] if args is None else args
def run_exp(args=None, callbacks=None):
    print(read_args(args), [str(callback.loss_config) for callback in callbacks or ()])
"""
WORDS = ["--stage", "sft", "--loss_strategy", "cce", "--loss_options", '{"workspace_mb": 2}', "--bf16"]


def test_keys_of_a_file() -> None:
    arguments = {"stage": "pt", "loss_strategy": "cce", "loss_z_loss": 0.1, "cutoff_len": 64}
    rest, callback = run.with_callback(arguments)
    assert rest == {"stage": "pt", "cutoff_len": 64}
    assert callback is not None
    assert callback.loss_config == LossConfig("cce", loss_z_loss=0.1)
    assert len(arguments) == 4, "the caller's own mapping stays"


def test_words_of_a_command_line() -> None:
    rest, callback = run.with_callback(
        [*WORDS, "--loss_statistics", "accuracy", "entropy", "--loss_z_loss=1e-1", "--lr", "-1"]
    )
    assert rest == ["--stage", "sft", "--bf16", "--lr", "-1"]
    assert callback is not None
    assert callback.loss_config == LossConfig(
        "cce", {"workspace_mb": 2}, loss_statistics=["accuracy", "entropy"], loss_z_loss=0.1
    )


@pytest.mark.parametrize("arguments", [{"stage": "dpo", "use_dft_loss": True}, ["--stage", "dpo"], {}])
def test_without_our_keys_nothing_is_touched(arguments: Any) -> None:
    rest, callback = run.with_callback(arguments)
    assert rest is arguments
    assert callback is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_dft_loss": True, "loss_z_loss": 0.1}, "loss_z_loss is 0.1, but use_dft_loss computes"),
        ({"stage": "kto", "loss_statistics": ["accuracy"]}, "Leave loss_statistics out"),
        ({"use_eaft_loss": True}, "Delete the line `use_eaft_loss: true`"),
        ({"use_asft_loss": True}, "Delete the line `use_asft_loss: true`"),
        ({"use_unsloth": True}, "Delete the line `use_unsloth: true`"),
        ({"use_mca": True}, "Delete the line `use_mca: true`"),
        ({"stage": "rm"}, "stage: rm and loss_strategy 'cce' were both given"),
        ({"stage": "ppo"}, "The stages that do not are pt, sft, dpo, kto"),
        ({"enable_liger_kernel": True}, "by `liger_ops: true`"),
        ({"loss_strategy": "ccee"}, "Did you mean 'cce'"),
        ({"loss_options": {"filtr": "off"}}, "Did you mean 'filter'"),
        ({"loss_token_weight_key": "w"}, "loss_token_weight_key 'w'"),
    ],
)
def test_refusals(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run.with_callback({"loss_strategy": "cce", **values})
    assert words in str(caught.value)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages that Python reads when it starts, with the stand-in in it."""
    package = tmp_path / "site" / "llamafactory" / "train"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "tuner.py").write_text(STAND_IN)
    start = "import site; site.addsitedir({!r})\n".format(str(tmp_path / "site"))
    (tmp_path / "sitecustomize.py").write_text(start)
    return tmp_path / "site"


def test_the_hook(site: Path) -> None:
    call = ("-c", "from llamafactory.train.tuner import run_exp; run_exp(); run_exp(['--stage', 'dpo'])", *WORDS)
    stock = command(site, *call, paths=(site.parent,))
    assert stock == (0, f"{WORDS} []\n['--stage', 'dpo'] []\n")
    assert hook.install_hook(site) == hook.install_hook(site)
    code, output = command(site, *call, paths=(site.parent,))
    with_ours, without = output.splitlines()
    assert with_ours == """['--stage', 'sft', '--bf16'] ["'cce' with loss_options={'workspace_mb': 2}"]"""
    assert (code, without) == (0, "['--stage', 'dpo'] []")
    path = hook.remove_hook(site)
    assert path is not None
    assert not path.exists()
    assert command(site, *call, paths=(site.parent,)) == stock
    assert hook.remove_hook(site) is None


def test_the_hook_costs_other_programs_nothing(site: Path) -> None:
    hook.install_hook(site)
    code, output = command(
        site, "-c", "import sys; print({'torch', 'transformers'} & set(sys.modules))", paths=(site.parent,)
    )
    assert (code, output) == (0, "set()\n")


def test_the_hook_without_the_package_is_silent(tmp_path: Path) -> None:
    line = hook.LINE.replace("loss_plugins", "loss_plugins_that_is_gone")
    code, output = command(tmp_path, "-c", line + "print('started')")
    assert (code, output) == (0, "started\n")


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="nothing can be written there"):
        hook.install_hook(tmp_path / "not" / "there")
    (tmp_path / hook.FILE).mkdir()
    with pytest.raises(UnsupportedError, match="cannot be deleted"):
        hook.remove_hook(tmp_path)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook.sysconfig, "get_path", lambda name: os.fspath(tmp_path))
    first = CliRunner().invoke(app, ["install-hook", "llamafactory"])
    assert first.exit_code == 0
    assert f"Written: {tmp_path / hook.FILE}" in first.output.replace("\n", "")
    assert (tmp_path / hook.FILE).exists()
    assert "Deleted" in CliRunner().invoke(app, ["remove-hook", "llamafactory"]).output
    assert not (tmp_path / hook.FILE).exists()
    assert "There is no hook" in CliRunner().invoke(app, ["remove-hook", "llamafactory"]).output
    assert CliRunner().invoke(app, ["install-hook", "axolotl"]).exit_code == 2


def test_without_llamafactory_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llamafactory", None)
    result = CliRunner().invoke(app, ["llamafactory", "train", "sft.yaml"])
    assert result.exit_code == 2
    assert "pip install llamafactory" in result.stderr


@pytest.mark.parametrize("value", ["1", "True", "y"])
def test_their_other_trainers_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("USE_V1", value)
    result = CliRunner().invoke(app, ["llamafactory", "train", "sft.yaml"])
    assert result.exit_code == 2
    told = " ".join(result.output.split())
    assert f"USE_V1={value} is in the environment" in told
    assert "Unset USE_V1" in told


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_v1_that_is_off_is_not_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("USE_V1", value)
    assert run.refuse_v1() is None
