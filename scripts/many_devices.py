"""Training speed and memory on several GPUs, and a loss whose head is cut by rows over them, as a table.

    python scripts/many_devices.py --output results.json                       # 1b, on one GPU and on all of them
    python scripts/many_devices.py --model 3b --ranks 2,4 --output results.json
    python scripts/many_devices.py --from results.json --output results.md     # the table again

A Llama of the shape of 3.2 with random weights, under FSDP2 and DeepSpeed's ZeRO-3 (where deepspeed can be imported),
with a batch of one size on each GPU; AdamW has a rate of 0, so that all contenders compute the same loss. Contenders:
stock, ours, and the losses of other packages that can be imported, called inside the head's own call, where the engine
has its weight. Each engine and number of GPUs is a run of torchrun of its own, which is ended after --seconds.

A step is forward, backward and optimizer. Times are medians; the peak is the largest of any GPU, weights and optimizer
included (on a CPU: what the step adds). A loss that is off by 1 % of stock's, taken a sequence at a time, or gradients
whose norm is off by 10 % of the first contender's, are wrong and get no speed.

The cut head: forward and backward of one problem (flat inputs) on each GPU alone, and with the rows of its head over
all (`VocabParallel`), in turn in the same processes. The results must be equal, within the same bounds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from loss_plugins.diagnostics.environment import best_device, report
from loss_plugins.errors import ConfigError, LossPluginError

RANK = Path(__file__).with_name("many_devices_rank.py")
ENGINES = {"fsdp2": "FSDP2", "zero3": "ZeRO-3", "vocab": "Head cut by rows"}
CONTENDERS = "stock,cce,cce filter=off,flce,chunked,Liger FLCE,Apple cce,TRL fused head"
Rows = list[dict[str, Any]]

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def launch(kind: str, ranks: int, settings: dict[str, Any], seconds: float) -> Rows:
    """The rows of one run of torchrun; those it had, and one that says what happened, where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        lines, file = Path(folder) / "lines.jsonl", Path(folder) / "settings.json"
        lines.touch()
        file.write_text(json.dumps(settings | {"kind": kind, "lines": str(lines)}))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(RANK),
            str(file),
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"DS_ACCELERATOR": settings["device"]}
        # a session of its own, so that its processes can be ended together
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        code = exit_code(process, seconds)
        failed = None if code == 0 else f"its processes ended with {code}"
        if code is None:
            failed = f"no answer within {seconds:.0f} s"
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
    if failed is not None:
        kinds = {"kind": "vocab" if kind == "vocab" else "training", "engine": kind, "model": settings["model"]}
        rows.append(kinds | {"contender": "(the run)", "ranks": ranks, "failed": failed})
    return rows


def exit_code(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """That of a session's first process; None if it took longer, and then, or if waiting breaks off, all of them are
    ended."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def number(value: Any, form: str = ",.0f") -> str:
    return "" if value is None else format(value, form)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)]


def training_table(rows: Rows) -> list[str]:
    """A line a contender, with columns for each number of GPUs. No speed without a right loss."""
    counts = sorted({row["ranks"] for row in rows})
    head = ["contender"]
    for n in counts:
        head += [f"tokens/s on {n}", f"ms on {n}", f"peak MiB on {n}"]
    lines = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        by_count = {row["ranks"]: row for row in rows if row["contender"] == name}
        cells = [name]
        for n in counts:
            row = by_count.get(n, {})
            if "failed" in row:
                cells += [row["failed"], "", ""]
            else:
                cells += [number(row.get("tokens_per_s")), number(row.get("ms"), ".1f"), number(row.get("peak_mib"))]
        first, last = (by_count.get(n, {}).get("tokens_per_s") for n in (counts[0], counts[-1]))
        lines.append([*cells, f"{last / first:.2f}" if first and last else ""])
    if len(counts) == 1:
        return table(head, [cells[:-1] for cells in lines])
    return table([*head, f"{counts[0]} to {counts[-1]}"], lines)


def vocab_table(rows: Rows) -> list[str]:
    lines = [
        [
            row.get("shape", ""), row["contender"], str(row["ranks"]), number(row.get("ms_one"), ".2f"),
            row.get("failed") or number(row.get("ms"), ".2f"), number(row.get("faster"), ".2f"),
            number(row.get("hidden_off"), ".1e"), number(row.get("weight_off"), ".1e"),
        ] for row in rows
    ]  # fmt: skip
    return table(["problem", "strategy", "GPUs", "ms alone", "ms cut", "faster", "dX off", "dW off"], lines)


def document(run: dict[str, Any]) -> str:
    """A run as Markdown."""
    packages = ", ".join(f"{name} {version}" for name, version in run["environment"]["versions"].items())
    text = [f"# Many devices: {run['device']}", "", f"{run['date']}, `{run['command']}`", "", packages + "."]
    trained = [row for row in run["rows"] if row["kind"] == "training"]
    for engine, model in dict.fromkeys((row["engine"], row["model"]) for row in trained):
        rows = [row for row in trained if (row["engine"], row["model"]) == (engine, model)]
        tokens = max(row.get("tokens", 0) for row in rows)
        text += ["", f"## {ENGINES[engine]}, {model}, {tokens:,} tokens a GPU", "", *training_table(rows)]
    cut = [row for row in run["rows"] if row["kind"] == "vocab"]
    if cut:
        text += ["", f"## {ENGINES['vocab']}", "", *vocab_table(cut)]
    for note in run["notes"]:
        text += ["", note]
    return "\n".join(text) + "\n"


def write(run: dict[str, Any], output: Path | None) -> None:
    """As JSON and as Markdown beside it, or as the one that the name says."""
    print(document(run))
    if output is None:
        return
    if output.suffix == ".json":
        output.write_text(json.dumps(run, indent=1) + "\n")
    output.with_suffix(".md").write_text(document(run))


def check(ranks: list[int], engines: list[str], device: str) -> None:
    """Raises:
    ConfigError: something that is not here, or is unknown.
    """
    unknown = [engine for engine in engines if engine not in ENGINES]
    if unknown:
        raise ConfigError(f"--engines has {unknown}. Known: {', '.join(ENGINES)}.")
    here = torch.accelerator.device_count() if device != "cpu" else max(ranks)
    if not ranks or min(ranks) < 1 or max(ranks) > here:
        raise ConfigError(
            f"--ranks is {ranks}, and there are {here} devices of kind {device}. Give numbers up to that."
        )


@app.command()
def main(
    output: Annotated[Path | None, typer.Option(help="A .json file; the table is written beside it.")] = None,
    model: Annotated[str, typer.Option(help="1b, 3b or tiny.")] = "1b",
    engines: Annotated[str, typer.Option(help="Of fsdp2, zero3, vocab.")] = "fsdp2,zero3,vocab",
    ranks: Annotated[str, typer.Option(help="Numbers of GPUs. Default: 1 and all.")] = "",
    contenders: Annotated[str, typer.Option(help="As in loss-plugins bench, and stock.")] = CONTENDERS,
    batch: Annotated[int, typer.Option(help="Sequences on each GPU.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 2048,
    shapes: Annotated[str, typer.Option(help="Of the cut head: names or NxHxV.")] = "llama3-8b,gemma2-2b",
    strategies: Annotated[str, typer.Option(help="For the cut head.")] = "cce,cce filter=off,flce",
    steps: Annotated[int, typer.Option(help="Timed steps of each.")] = 7,
    device: Annotated[str, typer.Option(help="Default: what is here.")] = "",
    seconds: Annotated[float, typer.Option(help="Limit of each run of torchrun.")] = 150,
    source: Annotated[Path | None, typer.Option("--from", help="Only print the table of an earlier run.")] = None,
) -> None:
    if source is not None:
        return write(json.loads(source.read_text()), output)
    device = device or best_device()
    everything = torch.accelerator.device_count() if device != "cpu" else 2
    counts = [int(word) for word in words(ranks)] or sorted({1, everything})
    try:
        check(counts, words(engines), device)
    except LossPluginError as error:
        raise typer.BadParameter(str(error)) from error
    notes, rows = [], []
    settings = {
        "device": device, "model": model, "batch": batch, "length": length, "contenders": words(contenders),
        "shapes": words(shapes), "strategies": words(strategies), "steps": steps,
    }  # fmt: skip
    facts = report()
    name = facts["device"].get("name") if device != "cpu" else facts["cpu"]
    run: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(["python", *sys.argv]),
        "device": f"{max(counts)} x {name or device}", "environment": facts, "notes": notes, "rows": rows,
    }  # fmt: skip
    for kind in words(engines):
        if kind == "zero3" and importlib.util.find_spec("deepspeed") is None:
            notes.append("ZeRO-3 was not measured: deepspeed is not installed here.")
            continue
        for count in counts:
            if kind == "vocab" and count == 1:
                continue
            begin = time.perf_counter()
            rows += launch(kind, count, settings, seconds)
            notes.append(f"{ENGINES[kind]} on {count}: {time.perf_counter() - begin:.0f} s in all.")
            if output is not None and output.suffix == ".json":  # what is measured survives
                output.write_text(json.dumps(run, indent=1) + "\n")
    return write(run, output)


if __name__ == "__main__":
    app()
