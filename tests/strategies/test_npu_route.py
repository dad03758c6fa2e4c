"""Which kernels compute on an NPU: triton-ascend's where they can be launched, else torch's; and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loss_plugins.device import DeviceProfile
from loss_plugins.errors import ConfigError, UnsupportedError
from loss_plugins.npu import FUSED, Npu
from loss_plugins.strategies import STRATEGIES, Problem, _select, select
from loss_plugins.strategies._options import backend_for

MISSING = "triton-ascend is not installed (Triton 3.7.1 is, which has no code for an NPU)"
LAUNCHES = DeviceProfile("npu", "Ascend910B3", npu=Npu(chip="Ascend910B3", vector_cores=40, operators=FUSED))
PLAIN = replace(LAUNCHES, npu=Npu(chip="Ascend910B3", operators=FUSED, obstacle=MISSING), has_triton=True)
LARGE = Problem(8192, 1024, 151_936, torch.bfloat16)


@pytest.mark.parametrize("name", ["Ascend910B3", "Ascend910_9391", "Ascend950PR_9579", "a chip of next year"])
def test_names_decide_nothing(name):
    for profile, kernels in ((LAUNCHES, "ascend"), (PLAIN, "torch")):
        assert backend_for("auto", replace(profile, name=name)) == kernels


@pytest.mark.parametrize("strategy", ["flce", "cce"])
def test_auto_takes_what_can_be_launched(strategy):
    for profile, kernels in ((LAUNCHES, "ascend"), (PLAIN, "torch"), (DeviceProfile("npu"), "torch")):
        plan = select(strategy, None, LARGE, profile)
        assert plan.strategy.kernels(profile, plan.options) == kernels
        assert backend_for("auto", profile, torch.float64) == "torch"
    assert backend_for("torch", LAUNCHES) == "torch"


def test_auto_says_what_it_took_and_why_not_the_other():
    plan = select("auto", None, LARGE, LAUNCHES)
    assert plan.describe(LAUNCHES).startswith("flce (ascend kernels): 4748 MiB of logits")
    plan = select("auto", None, LARGE, PLAIN)
    assert plan.describe(PLAIN).startswith("flce (torch kernels)")
    assert f"no Ascend kernels: {MISSING}" in plan.describe(PLAIN)
    asked = select("cce", {"kernels": "torch"}, LARGE, PLAIN)
    assert "Ascend" not in asked.describe(PLAIN), "torch's were asked for"


@pytest.mark.parametrize("strategy", ["flce", "cce"])
@pytest.mark.parametrize(
    ("kernels", "profile", "dtype", "why"),
    [
        (
            "ascend", PLAIN, torch.bfloat16,
            r"was asked for, but triton-ascend is not installed.*; type pip uninstall -y triton triton-ascend && "
            r"pip install triton-ascend==3\.2\.0 pybind11, and `loss-plugins doctor` says",
        ),
        ("ascend", DeviceProfile("cpu"), torch.bfloat16, "they run on an Ascend NPU, and this is a cpu device"),
        ("ascend", DeviceProfile("cuda", has_triton=True), torch.bfloat16, "they run on an Ascend NPU, and this is a cuda"),
        ("ascend", LAUNCHES, torch.float64, "the Ascend kernels have no float64"),
        ("triton", LAUNCHES, torch.bfloat16, "Triton is not installed; kernels='ascend' are those for it, and `loss-plugins"),
        ("triton", PLAIN, torch.bfloat16, "Triton cannot launch on a npu device; kernels='ascend' are those for it"),
    ],
)  # fmt: skip
def test_what_is_asked_for_by_name_never_degrades(strategy, kernels, profile, dtype, why):
    with pytest.raises(UnsupportedError, match=why):
        select(strategy, {"kernels": kernels}, replace(LARGE, dtype=dtype), profile)


def test_the_word_backend_is_understood_and_corrected():
    with pytest.raises(ConfigError, match=r"'backend', which is called kernels here\. Write kernels: native"):
        select("cce", {"backend": "native"}, LARGE, LAUNCHES)


def test_asked_for_filter_is_applied_by_either():
    for profile, kernels in ((LAUNCHES, "ascend"), (PLAIN, "torch")):
        plan = select("cce", {"filter": 1e-3}, LARGE, profile)
        assert plan.strategy.backends(profile, plan.options) == (kernels, kernels)


def test_versions_that_do_not_fit_are_said_once(monkeypatch, caplog):
    odd = replace(LAUNCHES, npu=Npu(chip="Ascend910B3", torch_npu="2.6.0", triton_ascend="3.2.1"))
    monkeypatch.setattr(DeviceProfile, "probe", lambda device: odd)
    monkeypatch.setattr(_select, "_PROFILES", {})
    device = torch.device("cpu")  # torch knows no "npu" by itself
    assert _select.profile_of(device) is _select.profile_of(device) is odd
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == len(set(said)) == 3
    assert "torch_npu 2.6.0 is built for torch 2.6.0, and torch" in said[0]
    assert "triton-ascend 3.2.1 is made for torch_npu 2.7.1, and 2.6.0 is installed" in said[1]
    assert "checked with triton-ascend 3.2.0, not with 3.2.1" in said[2]


@pytest.mark.parametrize("strategy", STRATEGIES.builtin())
def test_peaks_there(strategy):
    """Every strategy tells its peak on an NPU with and without the compiler, and no fused one comes near naive's."""
    naive = STRATEGIES.get("naive")
    for profile in (LAUNCHES, PLAIN):
        problem = LARGE.on(profile)
        assert problem.ascend == (profile is LAUNCHES) and not problem.triton
        plan = select(strategy, None, LARGE, profile)
        peak = plan.strategy.peak_bytes(problem, plan.options) - LARGE.gradient_bytes
        if strategy != "naive":
            assert 0 < peak < naive.peak_bytes(problem, naive.Options()) / 3
