"""What is refused, with the sentence that says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loss_plugins import LossConfig, VocabParallel, cross_entropy, linear_cross_entropy, linear_cross_entropy_stats
from loss_plugins.config import WITHOUT_FILTER
from loss_plugins.errors import ConfigError, LossPluginError, UnsupportedError
from loss_plugins.strategies import STRATEGIES, projected_cross_entropy_stats

HIDDEN, WEIGHT = torch.randn(6, 8), torch.randn(17, 8)
LABELS = torch.arange(6)
NESTED = torch.nested.nested_tensor([HIDDEN[:2], HIDDEN[2:]], layout=torch.jagged)
NESTED_LABELS = torch.nested.nested_tensor([LABELS[:2], LABELS[2:]], layout=torch.jagged)


def call(hidden=HIDDEN, weight=WEIGHT, labels=LABELS, **kwargs):
    return linear_cross_entropy(hidden, weight, labels, **kwargs)


CASES = {
    "hidden of integers": ({"hidden": LABELS}, r"hidden must be a floating tensor of shape \[\.\.\., H\], got int64"),
    "hidden no tensor": ({"hidden": [1.0]}, r"hidden must be a floating tensor.*got list"),
    "weight transposed": ({"weight": WEIGHT.T}, r"weight must have shape \[V, H\] with H = 8.*got \(8, 17\).*transposed: pass weight\.T"),
    "weight of another model": ({"weight": torch.randn(17, 9)}, r"H = 8.*got \(17, 9\).*same model"),
    "weight flat": ({"weight": torch.randn(17 * 8)}, r"weight must be a floating tensor of shape \[V, H\].*\(136,\)"),
    "weight quantised": ({"weight": torch.zeros(17, 8, dtype=torch.uint8)}, r"quantised head.*patch_model"),
    "weight of no class": ({"weight": torch.randn(0, 8)}, r"weight has no rows"),
    "weight elsewhere": ({"weight": WEIGHT.to("meta")}, r"weight is on meta and hidden on cpu.*weight\.to\('cpu'\)"),
    "labels of another shape": ({"labels": LABELS[:5]}, r"labels must have the shape of hidden without its last axis, \(6,\), got \(5,\)"),
    "labels floating": ({"labels": LABELS.float()}, r"labels must be an integer tensor, got float32.*labels\.long\(\)"),
    "labels bool": ({"labels": LABELS > 2}, r"labels must be an integer tensor, got bool"),
    "labels elsewhere": ({"labels": LABELS.to("meta")}, r"labels are on meta and hidden on cpu.*labels\.to\('cpu'\)"),
    "shift too large": ({"shift": 7}, r"shift=7 was asked for, but labels have a last axis of 6"),
    "shift negative": ({"shift": -1}, r"shift must be 0 or a positive integer, got -1"),
    "shift a number with a point": ({"shift": 1.0}, r"shift must be 0 or a positive integer, got 1\.0"),
    "reduction misspelt": ({"reduction": "maen"}, r"Unknown reduction 'maen'\. Did you mean 'mean'\? Known: mean, none, sum"),
    "strategy misspelt": ({"strategy": "ccee"}, r"Unknown loss strategy 'ccee'\. Did you mean 'cce'\? Known: auto, cce, chunked, flce, naive"),
    "strategy path without attribute": ({"strategy": "loss_plugins.config:NOPE"}, r"could not be loaded.*package\.module:attribute"),
    "option of another strategy": ({"strategy": "flce", "options": {"filter": "off"}}, r"Unknown option of strategy 'flce': 'filter'.*workspace_mb"),
    "option misspelt": ({"strategy": "cce", "options": {"filtre": "off"}}, r"Did you mean 'filter'"),
    "option of no strategy, auto": ({"options": {"chunk": 1}}, r"'auto' chooses among has all of loss_options \{'chunk': 1\}"),
    "workspace of nothing": ({"strategy": "flce", "options": {"workspace_mb": 0}}, r"workspace_mb must be a number of mebibytes above 0, got 0"),
    "preset misspelt": ({"strategy": "cce", "options": {"preset": "cce_exat"}}, r"Unknown cce preset 'cce_exat'. Did you mean 'cce_exact'"),
    "filter above one": ({"strategy": "cce", "options": {"filter": 2.0}}, r"filter must be 'auto', 'off' or a probability.*got 2\.0"),
    "filter against its preset": ({"strategy": "cce", "options": {"filter": 1e-3, "preset": "cce_exact"}}, r"filters nothing, but filter=0\.001"),
    "filter with smoothing": ({"strategy": "cce", "options": {"filter": 1e-3}, "label_smoothing": 0.1}, r"smoothing pulls on every column"),
    "kernels misspelt": ({"strategy": "cce", "options": {"kernels": "tritn"}}, r"Did you mean 'triton'"),
    "compile no bool": ({"strategy": "naive", "options": {"compile": 1}}, r"compile must be true or false, got 1"),
    "smoothing above one": ({"label_smoothing": 1.5}, r"label_smoothing must be a finite number in \[0, 1\], got 1\.5"),
    "smoothing negative": ({"label_smoothing": -0.1}, r"label_smoothing must be a finite number in \[0, 1\], got -0\.1"),
    "smoothing nan": ({"label_smoothing": float("nan")}, r"label_smoothing must be a finite number"),
    "z-loss negative": ({"z_loss": -1e-4}, r"z_loss must be a finite number in \[0, inf\], got -0\.0001"),
    "softcap negative": ({"softcap": -30.0}, r"softcap must be a finite number in \[0, inf\], got -30"),
    "scale of 0": ({"logit_scale": 0.0}, r"logit_scale must not be 0\.0: all logits would be 0.*Leave it out for 1"),
    "strategy in capitals": ({"strategy": "CCE"}, r"Unknown loss strategy 'CCE'\. Did you mean 'cce'\?"),
    "preset in capitals": ({"strategy": "cce", "options": {"preset": "CCE_Exact"}}, r"Did you mean 'cce_exact'"),
    "scale infinite": ({"logit_scale": float("inf")}, r"logit_scale must be a finite number, got inf"),
    "bias of another size": ({"bias": torch.zeros(16)}, r"bias must be a floating tensor of shape \[17\].*got float32 of shape \(16,\)"),
    "class weight of another size": ({"class_weight": torch.ones(8)}, r"class_weight must be a floating tensor of shape \[17\]"),
    "class weight elsewhere": ({"class_weight": torch.ones(17, device="meta")}, r"class_weight is on meta"),
    "token weight of another shape": ({"token_weight": torch.ones(5)}, r"token_weight must be a tensor of the labels' shape \(6,\)"),
    "token weight complex": ({"token_weight": torch.ones(6, dtype=torch.complex64)}, r"token_weight must be a tensor.*got complex64"),
    "class weight that is trained": ({"class_weight": torch.ones(17, requires_grad=True)}, r"class_weight requires a gradient.*class_weight\.detach\(\)"),
    "hidden of no width": ({"hidden": torch.randn(6, 0), "weight": torch.randn(17, 0)}, r"hidden must be a floating tensor.*\(6, 0\)"),
    "hidden of 8 bits": ({"hidden": HIDDEN.to(torch.float8_e4m3fn)}, r"hidden must be a floating tensor.*got float8_e4m3fn"),
    "weight of 8 bits": ({"weight": WEIGHT.to(torch.float8_e4m3fn)}, r"got float8_e4m3fn.*quantised head"),
    "labels of 8 bits that ignore_index wraps to": ({"labels": torch.full((6,), 156, dtype=torch.uint8)}, r"labels hold 156, which is neither in \[0, 17\)"),
    "items of numpy": ({"num_items_in_batch": np.int64(3)}, r"num_items_in_batch must be an int, a float or a tensor.*got np\.int64\(3\)"),
    "strategy no name": ({"strategy": None}, r"strategy must be a name such as 'cce', got None"),
    "strategy path without module": ({"strategy": ":X"}, r"':X' could not be loaded"),
    "strategy path from nowhere": ({"strategy": ".cce:STRATEGY"}, r"could not be loaded"),
    "strategy path to no strategy": ({"strategy": "os:getcwd"}, r"'os:getcwd' points at a builtin_function_or_method without name, Options"),
    "strategy path to a class": ({"strategy": "loss_plugins.strategies.cce:Cce"}, r"points at the class Cce, and an object"),
    "options as text": ({"options": '{"workspace_mb": 1}'}, r"options must be a mapping.*got '\{"),
    "options as a list, by name": ({"strategy": "cce", "options": ["filter"]}, r"options must be a mapping.*got \['filter'\]"),
    "workspace without end": ({"strategy": "cce", "options": {"workspace_mb": float("inf")}}, r"mebibytes above 0, got inf"),
    "preset a list": ({"strategy": "cce", "options": {"preset": ["cce"]}}, r"Unknown cce preset"),
    "items with sum": ({"num_items_in_batch": 4, "reduction": "sum"}, r"num_items_in_batch was given with reduction='sum'"),
    "items zero": ({"num_items_in_batch": 0}, r"num_items_in_batch must be above 0 and finite, got 0"),
    "items without end": ({"num_items_in_batch": float("inf")}, r"num_items_in_batch must be above 0 and finite, got inf"),
    "items negative in a tensor": ({"num_items_in_batch": torch.tensor(-5)}, r"must be a finite number of 0 or more.*holds -5"),
    "items without end in a tensor": ({"num_items_in_batch": torch.tensor([float("inf")])}, r"a tensor that holds inf"),
    "items nan in a tensor": ({"num_items_in_batch": torch.tensor(float("nan"))}, r"a tensor that holds nan"),
    "items a mask": ({"num_items_in_batch": torch.tensor(True)}, r"must hold a number of tokens, got bool"),
    "items complex": ({"num_items_in_batch": torch.tensor(1j)}, r"must hold a number of tokens, got complex64"),
    "kernels a list": ({"strategy": "cce", "options": {"kernels": ["torch"]}}, r"Unknown value of kernels: \"\['torch'\]\""),
    "kernels no text": ({"strategy": "flce", "options": {"kernels": True}}, r"Unknown value of kernels: 'True'"),
    "vocab_parallel a switch": ({"vocab_parallel": True}, r"vocab_parallel must say which rows.*got True\. Pass VocabParallel\("),
    "vocab_parallel bounds alone": ({"vocab_parallel": (0, 17)}, r"vocab_parallel must say which rows.*got \(0, 17\)"),
    "hidden nested": ({"hidden": NESTED}, r"hidden must be a floating tensor.*got a nested tensor.*pad it"),
    "weight sparse": ({"weight": WEIGHT.to_sparse()}, r"weight must be a floating tensor.*layout is torch.sparse_coo: pass to_dense"),
    "labels nested": ({"labels": NESTED_LABELS}, r"labels must be an integer tensor, got a nested tensor"),
    "items of several elements": ({"num_items_in_batch": torch.ones(2)}, r"one element, got shape \(2,\)"),
    "ignore index no integer": ({"ignore_index": "pad"}, r"ignore_index must be an integer, got 'pad'"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=CASES.keys())
def test_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        call(**arguments)


@pytest.mark.parametrize("vocab", ["17", 17.0, True, 0, -1])
def test_a_vocabulary_that_is_no_number(vocab):
    with pytest.raises(ConfigError, match="vocab must be how many classes all processes have together, got"):
        VocabParallel(0, 1, vocab=vocab)
    with pytest.raises(ConfigError, match="vocab must be how many classes all processes have together, got"):
        VocabParallel.even(vocab)


def test_items_of_no_token():
    """A count of 0 is what a batch without a label has: no token, no loss."""
    loss = call(labels=torch.full((6,), -100), num_items_in_batch=torch.tensor(0))
    assert loss == 0


@pytest.mark.parametrize(
    ("project", "vocab", "message"),
    [
        (lambda rows: rows @ WEIGHT.T, 18, r"floating logits of shape \(6, 18\) for these rows, got torch.float32 of shape \(6, 17\)"),
        (lambda rows: (rows @ WEIGHT.T)[:2], 17, r"of shape \(6, 17\) for these rows, got torch.float32 of shape \(2, 17\)"),
        (lambda rows: None, 17, "got NoneType"),
        (lambda rows: (rows @ WEIGHT.T).long(), 17, "got torch.int64"),
        (WEIGHT, 17, "project must be called with rows of hidden, .* got Tensor and 17"),
        (lambda rows: rows @ WEIGHT.T, "17", "vocab be the number of its logits, got function and '17'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["chunked", "naive"])
def test_a_projection_of_something_else(strategy, project, vocab, message):
    with pytest.raises(ConfigError, match=message):
        projected_cross_entropy_stats(project, HIDDEN, LABELS, vocab=vocab, strategy=strategy)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("strategy", STRATEGIES.builtin())
def test_a_forward_mode_derivative_is_right_or_refused(strategy):
    """Operators without one pass it over in silence, as if it were 0."""
    direction = torch.randn(6, 8)

    def loss(hidden):
        return call(hidden=hidden, strategy=strategy)

    if strategy in ("naive", "chunked"):
        _, derivative = torch.func.jvp(loss, (HIDDEN,), (direction,))
        hidden = HIDDEN.clone().requires_grad_()
        loss(hidden).backward()
        torch.testing.assert_close(derivative, (hidden.grad * direction).sum(), rtol=1e-5, atol=1e-6)
        return
    with pytest.raises(UnsupportedError, match="forward-mode derivative"):
        torch.func.jvp(loss, (HIDDEN,), (direction,))
    logits = torch.randn(6, 17)
    with pytest.raises(UnsupportedError, match="forward-mode derivative"):
        torch.func.jvp(lambda logits: cross_entropy(logits, LABELS), (logits,), (logits,))


def test_an_unknown_field():
    with pytest.raises(ConfigError, match=r"Unknown field 'entropie'\. Did you mean 'entropy'"):
        linear_cross_entropy_stats(HIDDEN, WEIGHT, LABELS, fields=("entropie",))


def test_fields_that_are_no_names():
    with pytest.raises(ConfigError, match=r"fields must be names such as \('nll', 'entropy'\), got None"):
        linear_cross_entropy_stats(HIDDEN, WEIGHT, LABELS, fields=None)


def test_a_weight_that_zero3_has_taken_away():
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_shape = (17, 8)
    with pytest.raises(ConfigError, match=r"partitioned by DeepSpeed ZeRO-3 \(its full shape is \(17, 8\)"):
        call(weight=weight)


@pytest.mark.parametrize("strategy", ["flce", "cce"])
def test_a_head_that_must_be_called_is_not_multiplied(strategy):
    with pytest.raises(
        UnsupportedError, match=f"Strategy '{strategy}' was asked for but cannot run here: the head is a module"
    ):
        projected_cross_entropy_stats(lambda h: h @ WEIGHT.T, HIDDEN, LABELS, vocab=17, strategy=strategy)


def test_triton_asked_for_where_it_cannot_launch(monkeypatch):
    from loss_plugins.device import DeviceProfile
    from loss_plugins.strategies import Problem, select

    for profile, why in (
        (DeviceProfile("cpu", has_triton=True), "Triton cannot launch on a cpu device"),
        (DeviceProfile("cuda", capability=(9, 0)), "Triton is not installed"),
        (
            DeviceProfile("cuda", "Tesla T4", (7, 5), has_triton=True),
            r"Triton needs compute capability 8.0 \(Ampere\), and Tesla T4 has 7.5",
        ),
        (
            DeviceProfile("rocm", "a small one", shared_bytes=32 << 10, has_triton=True),
            "the smallest tiles want 64 KiB of shared memory, and a small one has 32 for a program",
        ),
        (DeviceProfile("npu", "Ascend 910B", has_triton=True), "Triton cannot launch on a npu device"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            select("cce", {"kernels": "triton"}, Problem(6, 8, 17), profile)


@pytest.mark.parametrize("strategy", STRATEGIES.builtin())
def test_arguments_are_left_as_they_were(strategy):
    hidden, weight, labels = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_(), LABELS.clone()
    labels[2] = -100
    before = [t.detach().clone() for t in (hidden, weight, labels)]
    call(hidden, weight, labels, strategy=strategy, class_weight=torch.ones(17)).backward()
    for now, then in zip((hidden, weight, labels), before, strict=True):
        assert torch.equal(now.detach(), then)


CONFIGS = {
    "unknown key": ({"loss_stratgey": "cce"}, "Unknown loss setting 'loss_stratgey'. Did you mean 'loss_strategy'"),
    "strategy no name": ({"loss_strategy": 3}, "loss_strategy must be a name such as 'cce', got 3"),
    "options no mapping": ({"loss_options": "filter"}, "loss_options must be a mapping.*got 'filter'"),
    "options of a number": ({"loss_options": {1: 2}}, "loss_options must have names as keys, got 1"),
    "liger_ops of a number": ({"liger_ops": {1: True}}, "liger_ops must have names as keys, got 1"),
    "liger_ops of YAML's on": ({"liger_ops": {True: True}}, "got True. YAML reads on, off, yes and no as true"),
    "smoothing": ({"loss_label_smoothing": 2}, r"loss_label_smoothing must be a number in \[0, 1\], got 2"),
    "z-loss": ({"loss_z_loss": -1.0}, r"loss_z_loss must be a number in \[0, inf\], got -1"),
    "statistics": ({"loss_statistics": ["acuracy"]}, "Did you mean 'accuracy'"),
    "statistics no list": ({"loss_statistics": "accuracy"}, "loss_statistics must be a list of names.*got 'accuracy'"),
    "statistics a number": ({"loss_statistics": 3}, "loss_statistics must be a list of names.*got 3"),
    "class weights as text": ({"loss_class_weight": "1,2"}, "loss_class_weight must be a list of numbers.*got '1,2'"),
    "class weights of text": ({"loss_class_weight": [1.0, "a"]}, "loss_class_weight.*entry 1 is 'a'"),
    "class weights with a nan": ({"loss_class_weight": [float("nan")]}, "loss_class_weight.*entry 0 is nan"),
    "class weights below 0": ({"loss_class_weight": [1.0, -0.5]}, "numbers of 0 or more.*entry 1 is -0.5"),
    "a filter beside smoothing": (
        {"loss_strategy": "cce", "loss_options": {"filter": 0.1}, "loss_label_smoothing": 0.1},
        "smoothing pulls on every column",
    ),
    "class weights of 0": ({"loss_class_weight": [0.0, 0]}, "loss_class_weight must not be 0 for all 2 classes"),
    "dropped without a filter": (
        {"loss_strategy": "flce", "loss_statistics": ["dropped"]},
        "'flce' has no filter. Leave dropped out, or set",
    ),
    "a key in capitals": ({"LOSS_STRATEGY": "cce"}, "Did you mean 'loss_strategy'"),
    "token weights from the labels": ({"loss_token_weight_key": "labels"}, "name of a column.*got 'labels'"),
}


@pytest.mark.parametrize(("values", "message"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_config_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LossConfig.of(values)


def test_class_weights_of_some_classes_may_be_0():
    assert LossConfig(loss_class_weight=[0.0, 1]).loss_class_weight == [0.0, 1]


def test_torch_has_no_mean_where_every_class_weighs_nothing():
    """Why such weights are refused, and those below 0 too, whose sum may be 0 as well."""
    for weights in ([0.0, 0.0], [1.0, -1.0]):
        loss = torch.nn.functional.cross_entropy(torch.randn(2, 2), torch.tensor([0, 1]), torch.tensor(weights))
        assert not loss.isfinite()


def test_strategies_without_a_filter_are_those_that_say_so():
    options = {name: STRATEGIES.get(name).Options.__dataclass_fields__ for name in STRATEGIES.builtin()}
    assert {name for name, known in options.items() if "filter" not in known} == set(WITHOUT_FILTER)
    for name in ("auto", "cce", "other.package:STRATEGY"):
        assert LossConfig(name, loss_statistics=["dropped"]).loss_statistics == ["dropped"]


def test_a_config_of_another_type():
    with pytest.raises(LossPluginError, match="got int"):
        LossConfig.of(3)
