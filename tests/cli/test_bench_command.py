"""``loss-plugins bench``: it writes what it shows, in every format, and reads it again; bad words are one sentence."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from typer.testing import CliRunner

from loss_plugins.bench import plots
from loss_plugins.bench.contenders import all_names
from loss_plugins.bench.document import COLUMNS, regrets, remarks
from loss_plugins.bench.inputs import SHAPES
from loss_plugins.bench.peers import PEERS, Peer
from loss_plugins.cli.main import app

CPU = ("--device", "cpu", "--dtype", "fp32", "--iterations", "1")
SMALL = ("--hidden", "16", "--vocab", "300", "--rows", "24")


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_every_format_has_what_is_shown(tmp_path):
    states, head = tmp_path / "x.pt", tmp_path / "w.pt"
    torch.save({"X": torch.randn(20, 8), "y": torch.randint(0, 300, (20,))}, states)
    torch.save(torch.randn(300, 8), head)
    files = [tmp_path / "out" / f"rows.{suffix}" for suffix in ("json", "csv", "md")]
    real = (
        "--real-hidden",
        states,
        "--real-head",
        head,
        "--inputs",
        "flat,real,masked",
        "--modes",
        "both,frozen,forward",
    )
    outputs = [word for path in files for word in ("--output", path)]
    result = bench(*CPU, *SMALL, *real, *outputs, "--only", "naive,flce")
    assert result.exit_code == 0, result.output
    (run,) = json.loads(files[0].read_text())["runs"]
    rows = run["results"]
    assert {row["inputs"] for row in rows} == {"flat", "real", "real, half masked"}
    assert {row["mode"] for row in rows} == {"both", "frozen head", "forward only"}
    assert {row["rows"] for row in rows} == {24} and len(rows) == 3 * 3 * 2
    assert all(row["failed"] is None and row["ms"] > 0 and row["peak_mib"] > 0 for row in rows)
    assert run["date"][:2] == "20" and "torch" in run["environment"]["versions"] and run["device"]
    assert run["command"].startswith("loss-plugins bench --rows 24 --hidden 16 --vocab 300 --inputs flat,real,masked")
    with files[1].open() as lines:
        table = list(csv.DictReader(lines))
    assert len(table) == len(rows) and float(table[0]["ms"]) == rows[0]["ms"]
    assert {table[0]["date"], table[0]["where"]} == {run["date"], run["device"]} and table[0]["torch"]
    text = files[2].read_text()
    assert text.count("| " + " | ".join(COLUMNS) + " |") == 9 and run["command"] in text

    again = bench("--from", files[0], "--from", files[0], "--only", "na*", "--modes", "frozen", "--json")
    assert again.exit_code == 0, again.output
    runs = json.loads(again.stdout)["runs"]
    kept = [row for row in rows if row["name"] == "naive" and row["mode"] == "frozen head"]
    assert len(runs) == 2 and len(kept) == 3 and runs[0]["results"] == runs[1]["results"] == kept


def test_figures(tmp_path):
    output = tmp_path / "rows.json"
    result = bench(*CPU, *SMALL, "--only", "naive,flce", "--plot", tmp_path / "figures", "--output", output)
    assert result.exit_code == 0, result.output
    drawn = sorted((tmp_path / "figures").iterdir())
    assert [path.name.rpartition("both-")[2] for path in drawn] == ["bars.png", "time-memory.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in drawn)
    again = bench("--from", output, "--from", output, "--plot", tmp_path / "twice")
    assert again.exit_code == 0, again.output
    names = sorted(path.name.rpartition("both-")[2] for path in (tmp_path / "twice").iterdir())
    assert names == ["bars-2.png", "bars.png", "time-memory-2.png", "time-memory.png"], "a run draws over no other"


def test_titles_of_figures_say_the_mode_in_full(tmp_path, monkeypatch):
    output, titles = tmp_path / "rows.json", []
    monkeypatch.setattr(plots, "draw_bars", lambda rows, title, path: titles.append(title.split("\n")[0]))
    modes = ("--modes", "both,frozen,forward")
    result = bench(*CPU, *SMALL, *modes, "--only", "naive", "--output", output, "--plot", tmp_path / "figures")
    assert result.exit_code == 0, result.output
    assert [title.rpartition("flat inputs, ")[2] for title in titles] == [
        "forward and backward", "forward and backward of a frozen head", "forward only",
    ]  # fmt: skip


def test_a_grid_tells_how_far_auto_is_from_the_best(tmp_path):
    output = tmp_path / "grid.json"
    result = bench(
        *CPU,
        *SMALL,
        "--rows",
        "24,48",
        "--grid",
        "--output",
        output,
        "--only",
        "naive,chunked,auto",
        "--plot",
        tmp_path,
    )
    assert result.exit_code == 0, result.output
    assert "What auto took" in result.stdout and "auto at its worst is" in result.stdout
    (run,) = json.loads(output.read_text())["runs"]
    assert run["grid"] and {row["name"] for row in run["results"]} == {"naive", "chunked", "auto"}
    assert [(entry["rows"], entry["chosen"]) for entry in regrets(run["results"])] == [(24, "naive"), (48, "naive")]
    assert [path.name for path in tmp_path.glob("*.png")] == ["auto.png"]


def row(name, ms, own=True, **others):
    table = {"shape": "", "rows": 8, "hidden": 4, "vocab": 16, "dtype": "bfloat16", "inputs": "flat", "mode": "both"}
    return table | {"name": name, "ms": ms, "own": own, "chosen": "cce" if name == "auto" else ""} | others


def test_regret_is_against_the_best_of_our_strategies_with_its_defaults():
    rows = [
        row("auto", 11.0),
        row("cce", 12.0),
        row("flce", 10.0),
        row("cce filter=0.1", 1.0),
        row("peer", 1.0, own=False),
    ]
    rows += [row("naive", None)]
    (entry,) = regrets(rows)
    assert entry["best"] == "flce" and entry["regret_percent"] == pytest.approx(10) and entry["chosen"] == "cce"
    assert regrets(rows[1:]) == [] and regrets([row("auto", None), row("cce", 1.0)]) == []
    two = regrets([*rows, row("auto", 3.0, rows=16), row("cce", 3.0, rows=16)])
    assert [e["regret_percent"] for e in two] == [pytest.approx(10), 0]


def test_a_peer_that_is_better_at_both_is_named():
    nothing = {"failed": None, "skipped": None, "broken_promise": None}
    rows = [
        row("cce", 10.0, peak_mib=100, **nothing),
        row("flce", 8.0, peak_mib=300, **nothing),
        row("lean", 9.0, own=False, peak_mib=100, **nothing),
        row("large", 7.0, own=False, peak_mib=400, **nothing),
        row("wrong", None, own=False, peak_mib=1, **nothing | {"failed": "wrong: loss off by 1"}),
    ]
    assert list(remarks(rows)) == [
        "wrong failed: wrong: loss off by 1",
        "lean is faster than cce and takes no more memory: 9.00 ms for 10.00, 100 MiB for 100",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "gemma2-2B"], "Unknown shape 'gemma2-2B'. Did you mean 'gemma2-2b'"),
        (["--only", "cc"], "Unknown contender 'cc'"),
        (["--only", "naive", "--skip", "naive"], "No contender is left to measure"),
        (["--real-head", "w.pt"], "belong together"),
        (["--real-hidden", "x.pt", "--real-head", "w.pt"], "'x.pt' is not a file"),
        (["--inputs", "real"], "Real inputs were asked for without files"),
        (["--modes", "none"], "Unknown mode 'none'"),
        (["--rows", "1k"], "--rows must be whole numbers above 0, with commas, got '1k'"),
        (["--hidden", "8"], "Give both without it"),
        (["--grid", "--shape", "tiny"], "--grid has sizes of its own"),
        (["--output", "rows.txt"], "Results cannot be written to 'rows.txt'. End it with one of .json, .csv, .md"),
        (["--from", "nowhere.json"], "'nowhere.json' cannot be read: No such file"),
    ],
)
def test_bad_arguments(arguments, message):
    result = bench("--device", "cpu", *arguments)
    assert result.exit_code == 2 and message in result.output, result.output


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    result = bench("--from", tmp_path / "a.json")
    assert result.exit_code == 2 and "holds no results of loss-plugins bench" in result.stderr


def test_a_device_that_is_not_here_is_refused_in_one_line():
    kind = "xpu" if torch.cuda.is_available() else "cuda"
    result = bench("--shape", "tiny", "--device", kind)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: device '{kind}' was asked for, but this machine has only")
    assert len(result.stderr.splitlines()) == 1


def test_help_and_list_have_every_name():
    from typer.main import get_command

    helps = {p.name: getattr(p, "help", "") for p in get_command(app).commands["bench"].params}
    assert all(name in helps["shape"] for name in SHAPES)
    listed = bench("--list").stdout
    assert all(name in listed for name in all_names())
    assert "naive" not in bench("--list", "--skip", "naive*").stdout


def test_tables_are_narrow_and_explained(monkeypatch):
    def broken(hidden, weight, labels):
        raise ValueError("a long story " * 30)

    monkeypatch.setitem(PEERS, "Liger FLCE", Peer("liger-kernel", lambda: broken))
    monkeypatch.setitem(PEERS, "Liger FLCE CuTe-DSL", Peer("liger-kernel", lambda: 1 / 0))
    only = ("--only", "naive,flce workspace_mb=0.125 kernels=torch,Liger FLCE*")
    result = bench(*CPU, *SMALL, *only, "--inputs", "masked", "--modes", "both,frozen,forward")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert "flce workspace_mb=0.125 kernels=torch" in result.stdout
    assert "Liger FLCE failed: ValueError: a long story" in result.stdout
    assert "Not here: Liger FLCE CuTe-DSL (ZeroDivisionError" in result.stdout
    for words in (
        "flat: every token",
        "half masked: ",
        "both: gradients",
        "frozen head: gradients",
        "forward only: no",
    ):
        assert words in " ".join(result.stdout.split())
    assert "Liger FLCE" in result.stderr and "] 24 x 16 x 300, flat, half masked: inputs and truth" in result.stderr
