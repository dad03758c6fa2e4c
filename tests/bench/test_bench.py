"""The measuring protocol: inputs are what they say, wrong results get no time, the command writes what it shows."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from loss_plugins.bench.contenders import contenders
from loss_plugins.bench.inputs import SHAPES, Shape, flat, half_masked, lifted
from loss_plugins.bench.measure import run, truth
from loss_plugins.cli.main import app
from loss_plugins.errors import ConfigError
from loss_plugins.strategies import STRATEGIES, linear_cross_entropy

TINY = Shape(48, 16, 300)


def test_lifting_keeps_the_logits():
    hidden, weight, labels = torch.randn(20, 8), torch.randn(400, 8), torch.randint(0, 400, (20,))
    made = lifted(TINY, hidden, weight, labels, torch.float32, "cpu")
    assert made.hidden.shape == (48, 16) and made.weight.shape == (300, 16) and made.labels.max() < 300
    kept = (labels < 300).nonzero()[:, 0]
    torch.testing.assert_close(
        made.hidden[: len(kept)] @ made.weight.T, hidden[kept] @ weight[:300].T, rtol=1e-4, atol=1e-4
    )


def test_lifting_refuses_a_narrower_shape():
    with pytest.raises(ConfigError, match="hidden width 32 and 300 classes, and cannot be brought to 16"):
        lifted(TINY, torch.randn(4, 32), torch.randn(300, 32), torch.zeros(4, dtype=torch.int64), torch.float32, "cpu")


def test_the_truth_is_the_mean_over_labels():
    inputs = half_masked(flat(TINY, torch.float32, "cpu"))
    assert 0 < (inputs.labels == -100).sum() < 48
    expected = truth(inputs, rows=7)
    hidden = inputs.hidden.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(hidden @ inputs.weight.double().T, inputs.labels)
    (want,) = torch.autograd.grad(loss, hidden)
    assert expected.loss == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(expected.d_hidden.double(), want, rtol=1e-4, atol=1e-7)


def test_a_wrong_result_gets_no_time():
    def doubled(hidden, weight, labels):
        return 2 * linear_cross_entropy(hidden, weight, labels, strategy="naive")

    def broken(hidden, weight, labels):
        raise ValueError("no such kernel")

    contenders = {"doubled": doubled, "broken": broken, "right": lambda h, w, y: linear_cross_entropy(h, w, y)}
    rows = {row.name: row for row in run(contenders, flat(TINY, torch.float32, "cpu"), iterations=1, warm=1)}
    assert rows["doubled"].ms is None and rows["doubled"].failed.startswith("wrong: loss off by")
    assert rows["broken"].ms is None and rows["broken"].failed == "ValueError: no such kernel"
    assert rows["right"].failed is None and rows["right"].ms > 0 and rows["right"].deterministic
    assert rows["right"].error_weight < 1e-5


@pytest.mark.parametrize("mode", ["frozen head", "no gradient"])
def test_modes(mode):
    (row,) = run(
        {"cce": lambda h, w, y: linear_cross_entropy(h, w, y, strategy="cce")},
        flat(TINY, torch.float32, "cpu"),
        mode,
        1,
    )
    assert row.failed is None and row.error_weight is None and (row.error_hidden is None) == (mode == "no gradient")


def test_the_command(tmp_path):
    saved, head = tmp_path / "x.pt", tmp_path / "w.pt"
    torch.save({"X": torch.randn(20, 8), "y": torch.randint(0, 5000, (20,))}, saved)
    torch.save(torch.randn(5000, 8), head)
    arguments = [
        "bench",
        "--shape",
        "tiny",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--iterations",
        "1",
        "--only",
        "naive,cce",
    ]
    files = ["--real-hidden", str(saved), "--real-head", str(head), "--output", str(tmp_path / "out" / "rows.json")]
    result = CliRunner().invoke(app, [*arguments, *files, "--masked", "--frozen"])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())["results"]
    assert {row["inputs"] for row in rows} == {"flat", "real", "real, half masked"}
    assert {row["name"] for row in rows} == {"naive", "cce"} and len(rows) == 12
    assert all(row["failed"] is None and row["ms"] > 0 and row["peak_mib"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "gemma2-2B"], "Unknown shape 'gemma2-2B'. Did you mean 'gemma2-2b'"),
        (["--only", "cc"], "Unknown contender 'cc'"),
        (["--real-head", "w.pt"], "belong together"),
        (["--real-hidden", "x.pt", "--real-head", "w.pt"], "'x.pt' is not a file"),
    ],
)
def test_bad_arguments(arguments, message):
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments])
    assert result.exit_code == 2 and message in result.output


def test_shapes_are_whole():
    assert all(shape.rows > 0 and shape.hidden % 8 == 0 and shape.vocab > 0 for shape in SHAPES.values())


def test_a_device_that_is_not_here_is_refused_in_one_line():
    kind = "xpu" if torch.cuda.is_available() else "cuda"
    result = CliRunner().invoke(app, ["bench", "--shape", "tiny", "--device", kind])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: device '{kind}' was asked for, but this machine has only")
    assert len(result.stderr.splitlines()) == 1


def test_help_lists_shapes_and_contenders():
    from typer.main import get_command

    helps = {p.name: getattr(p, "help", "") for p in get_command(app).commands["bench"].params}
    assert all(name in helps["shape"] for name in SHAPES)
    found, missing = contenders()
    assert all(
        name in helps["only"] for name in [*STRATEGIES.builtin(), *missing, *(set(found) - set(STRATEGIES.names()))]
    )


def test_tables_are_narrow_and_explained(monkeypatch):
    def broken(hidden, weight, labels):
        raise ValueError("a long story " * 30)

    monkeypatch.setattr("loss_plugins.bench.contenders._liger", lambda: broken)
    monkeypatch.setattr("loss_plugins.bench.contenders._liger_cute", lambda: 1 / 0)
    words = [
        "bench",
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--iterations",
        "1",
        "--only",
        "naive,Liger FLCE",
        "--frozen",
    ]
    result = CliRunner().invoke(app, [*words, "--masked"])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert "Liger FLCE failed: ValueError: a long story" in result.stdout
    assert "Not here: Liger FLCE CuTe-DSL (ZeroDivisionError" in result.stdout
    for words in ("flat: every token", "half masked: ", "both: gradients", "frozen head: gradients"):
        assert words in result.stdout
