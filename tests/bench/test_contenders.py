"""Which ways are measured: ours with any options, other packages' where they can be imported."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from loss_plugins.bench.contenders import all_names, choose, own, own_names
from loss_plugins.bench.inputs import Shape, flat, half_masked
from loss_plugins.bench.peers import PEERS, Peer
from loss_plugins.bench.truth import truth
from loss_plugins.errors import ConfigError
from loss_plugins.strategies import STRATEGIES
from loss_plugins.strategies.cce import PRESETS

TINY = Shape(48, 16, 300)


def test_every_strategy_and_preset_is_listed():
    names = own_names()
    assert {*STRATEGIES.names(), "auto", "cce filter=off", "naive compile=true"} <= set(names)
    assert {f"cce preset={preset}" for preset in PRESETS if preset != "cce"} <= set(names)
    assert len(set(all_names())) == len(all_names())


def test_patterns_choose_and_leave_out():
    found, missing = choose(["cce*", "naive"], ["*kahan*"])
    assert list(found) == ["cce", "cce filter=off", "cce preset=cce_exact", "naive"] and not missing


def test_any_options_make_a_contender():
    found, _ = choose(["cce filter=0.001 workspace_mb=64", "auto", "flce kernels=torch"])
    assert list(found) == ["cce filter=0.001 workspace_mb=64", "auto", "flce kernels=torch"]
    assert found["cce filter=0.001 workspace_mb=64"].options == {"filter": 0.001, "workspace_mb": 64}


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        ("naive", "exact"),
        ("flce", "exact"),
        ("auto", "exact"),
        ("cce filter=off", "exact"),
        ("cce preset=cce_exact", "exact"),
        ("cce preset=cce_kahan_full_c_full_e", "exact"),
        ("cce", "filtered"),
        ("cce filter=0.001", "filtered"),
        ("cce preset=cce_kahan_full_c", "filtered"),
    ],
)
def test_promises(name, promise):
    assert own(name).promise == promise


def test_peaks_are_the_strategies_own():
    from loss_plugins.strategies import Problem

    problem = Problem(1024, 64, 4096, dtype=torch.bfloat16)
    naive = STRATEGIES.get("naive")
    assert own("naive").peak_bytes(problem) == naive.peak_bytes(problem, naive.Options())
    assert own("auto").peak_bytes(problem) == 0


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("cc", "Unknown contender 'cc'"),
        ("cce filter", "'filter' is no option. Write it as option=value"),
        ("cce filtr=off", "Unknown option of strategy 'cce': 'filtr'"),
        ("zzz*", "No contender fits 'zzz\\*'"),
    ],
)
def test_unknown_names(only, message):
    with pytest.raises(ConfigError, match=message):
        choose([only])


def test_a_peer_that_is_not_here(monkeypatch):
    monkeypatch.setitem(PEERS, "Nobody's loss", Peer("nobody", lambda: 1 / 0))
    found, missing = choose(["Nobody*", "naive"])
    assert list(found) == ["naive"] and missing == {"Nobody's loss": "ZeroDivisionError: division by zero"}
    with pytest.raises(ConfigError, match=r"was asked for and is not here: ZeroDivisionError.*Install nobody"):
        choose(["Nobody's loss"])


def test_only_what_is_chosen_is_imported(monkeypatch):
    monkeypatch.setitem(PEERS, "torch eager", Peer("torch", lambda: pytest.fail("imported")))
    assert list(choose(["naive"])[0]) == ["naive"]


def test_apple_releases_without_presets(monkeypatch):
    import types

    package = types.ModuleType("cut_cross_entropy")
    package.linear_cross_entropy = lambda *a, **k: (a, k)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", package)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy.cce_utils", None)
    found, missing = choose(["Apple*"])
    assert list(found) == ["Apple cce", "Apple cce filter=off"]
    assert missing["Apple cce_exact"].startswith("UnsupportedError: the installed release has no preset cce_exact")
    assert found["Apple cce filter=off"].loss(1, 2, 3) == ((1, 2, 3), {"filter_eps": None})
    assert found["Apple cce"].loss(1, 2, 3) == ((1, 2, 3), {"impl": "cce"})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["torch eager", "torch F.linear_cross_entropy", "TRL fused head"])
def test_peers_that_run_on_a_cpu_are_given_what_they_need(name, masked):
    if name.startswith("TRL") and importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    found, missing = choose([f"{name}*"])
    if missing:
        pytest.skip(f"{name}: {missing[name]}")
    inputs = flat(TINY, torch.float32, "cpu")
    inputs = half_masked(inputs) if masked else inputs
    expected = truth(inputs)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    for _ in range(2):  # what is called twice must not remember the first time
        hidden.grad = weight.grad = None
        loss = found[name].loss(hidden, weight, inputs.labels)
        loss.backward()
        assert loss.item() == pytest.approx(expected.loss, rel=1e-5)
        torch.testing.assert_close(hidden.grad.double(), expected.d_hidden, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(weight.grad.double(), expected.d_weight, rtol=1e-4, atol=1e-7)
