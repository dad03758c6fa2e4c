"""Runs `axolotl train` with its own loss, with ours and with its other losses, and compares losses, time and memory.

    python scripts/axolotl_runs.py --output results.json                                      # on one GPU
    python scripts/axolotl_runs.py --ranks 2 --kinds fsdp2,fsdp2+lora --output results.json   # on two
    python scripts/axolotl_runs.py --from results.json --output results.md                    # the table again

Needs axolotl; for `qlora` bitsandbytes, for `liger` liger-kernel, for `cut_cross_entropy` axolotl's fork of it. A run
that cannot be made, fails, or takes longer than --seconds is a line that says so, and the others go on.

The model is a Llama of the shape of 3.2 with random weights, the text random words, one for each of its classes, by a
law like that of real ones. Kinds are words joined by +: full, lora, qlora, packed (sample packing), fsdp2; with several
ranks and without fsdp2 it is DDP. Each run is a process of its own, or several under torchrun.

A step is forward, backward and optimizer: the median of those behind the warm-up. The peak is the allocator's, the
largest of all steps and processes, weights and optimizer included.

Losses differ from stock's by rounding. What rounding alone does is measured: `stock in halves` takes the batch in two
accumulated halves, which is the same sum in another order. Ours may differ by three times that, and at least by 2^-9
of the loss, which is what bfloat16's own rounding of a logit comes to; in float32 by 1e-4.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from many_devices import exit_code, number, table
from many_devices_rank import MODELS

from loss_plugins.diagnostics.environment import best_device, report

METER = Path(__file__).with_name("axolotl_runs_meter.py")
STOCK, HALVES, OURS = "stock", "stock in halves", "ours"
PLUGIN = "loss_plugins.integrations.axolotl.LossPlugin"
LIGER = "axolotl.integrations.liger.LigerPlugin"
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
LOSSES: dict[str, dict[str, Any]] = {
    STOCK: {},
    HALVES: {},
    OURS: {"plugins": [PLUGIN], "loss_strategy": "cce"},
    "chunked_cross_entropy": {"chunked_cross_entropy": True},
    "liger": {"plugins": [LIGER], "liger_fused_linear_cross_entropy": True},
    "cut_cross_entropy": {"plugins": [CUT]},
}
"""The lines of axolotl's file that choose a loss."""
NEEDS = {"liger": "liger_kernel", "cut_cross_entropy": "cut_cross_entropy", "qlora": "bitsandbytes"}
LORA = {"lora_r": 16, "lora_alpha": 32, "lora_target_linear": True, "learning_rate": 1e-3}
FSDP2 = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "state_dict_type": "FULL_STATE_DICT", "reshard_after_forward": True, "offload_params": False,
}  # fmt: skip
WORDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": "lora", **LORA},
    "qlora": {"adapter": "qlora", "load_in_4bit": True, **LORA},
    "packed": {"sample_packing": True},
    "fsdp2": {"fsdp_version": 2, "fsdp_config": FSDP2},
}
"""What a kind is joined from."""
COMPARED = 10
ULP, TIMES_NOISE, FLOAT32 = 2**-9, 3.0, 1e-4
Row = dict[str, Any]

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def write_model(folder: Path, name: str, device: str) -> int:
    """Random weights, and a tokenizer with a word for each class. Returns how many classes there are."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(**MODELS[name], pad_token_id=0, bos_token_id=None, eos_token_id=1)
    names = ["<pad>", "</s>", *(f"w{place}" for place in range(2, config.vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    if device != "cpu":
        torch.get_device_module(device).empty_cache()  # the runs are other processes
    return config.vocab_size


def write_text(path: Path, classes: int, tokens: int, least: int, most: int) -> None:
    """Documents of ``least`` to ``most`` words by Zipf's law, with ``tokens`` words in all."""
    draw = random.Random(0)
    names = [f"w{place}" for place in range(2, classes)]
    weights = list(accumulate(1 / (rank + 3) for rank in range(len(names))))
    with path.open("w") as file:
        while tokens > 0:
            length = draw.randint(least, most)
            file.write(json.dumps({"text": " ".join(draw.choices(names, cum_weights=weights, k=length))}) + "\n")
            tokens -= length


class Jobs:
    """A folder with a model and texts, and axolotl's runs in it."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        length, batch = settings["length"], settings["batch"]
        classes = write_model(folder / "model", settings["model"], settings["device"])
        rows = (settings["steps"] + 1) * batch * settings["ranks"]
        write_text(folder / "whole.jsonl", classes, rows * length, length * 3 // 4, length - 2)
        write_text(folder / "short.jsonl", classes, rows * length * 5 // 4, length // 16 + 1, length // 3)

    def keys(self, kind: str, loss: str) -> dict[str, Any]:
        """The file of a run."""
        said = self.settings
        parts = kind.split("+")
        batch, accumulated = (said["batch"] // 2, 2) if loss == HALVES else (said["batch"], 1)
        data = "short" if "packed" in parts else "whole"
        keys: dict[str, Any] = {
            "base_model": "./model",
            "datasets": [{"path": f"./{data}.jsonl", "ds_type": "json", "type": "completion"}],
            "dataset_prepared_path": f"./prepared-{data}", "dataset_num_proc": 1, "val_set_size": 0,
            "output_dir": f"./out/{kind}-{loss.replace(' ', '-')}", "save_strategy": "no", "seed": 7,
            "sequence_len": said["length"], "pad_to_sequence_len": True, "attn_implementation": "sdpa",
            "micro_batch_size": batch, "gradient_accumulation_steps": accumulated, "max_steps": said["steps"],
            "num_epochs": 1, "optimizer": "adamw_torch", "lr_scheduler": "constant", "learning_rate": said["rate"],
            "bf16": said["dtype"] == "bfloat16", "fp16": False, "tf32": False,
            "gradient_checkpointing": said["checkpointing"], "logging_steps": 1,
        }  # fmt: skip
        for part in parts:
            keys |= WORDS[part]
        if said["device"] == "cpu" and "adapter" in keys:  # its kernels for adapters are for GPUs
            keys |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
        chosen = LOSSES[loss]
        return keys | chosen | said["also"] | {"plugins": [*chosen.get("plugins", ()), f"{METER.stem}.Meter"]}

    def run(self, kind: str, loss: str, seconds: float) -> Row:
        """What the run's processes wrote, or why there is nothing."""
        ranks = self.settings["ranks"]
        row: Row = {"kind": kind, "loss": loss, "ranks": ranks}
        for part in (*kind.split("+"), loss):
            if part in NEEDS and importlib.util.find_spec(NEEDS[part]) is None:
                return row | {"failed": f"not run: {NEEDS[part]} is not installed"}
        keys = self.keys(kind, loss)
        file, out = self.folder / "job.yaml", self.folder / keys["output_dir"]
        file.write_text(yaml.safe_dump(keys, sort_keys=False))
        launcher = ["--launcher", "python"]
        if ranks > 1:
            launcher = ["--launcher", "torchrun", "--", "--standalone", f"--nproc-per-node={ranks}"]
        begin = time.perf_counter()
        failed, output = execute(self.folder, ["train", file.name, *launcher], self.settings["device"], seconds)
        row["run_seconds"] = time.perf_counter() - begin
        meters = [json.loads(path.read_text()) for path in sorted(out.glob("meter-*.json"))]
        failed = failed or self.missing(kind, loss, meters)
        if failed is not None:
            print(output[-6000:], file=sys.stderr)
            return row | {"failed": failed}
        return row | self.summary(meters)

    def missing(self, kind: str, loss: str, meters: list[Row]) -> str | None:
        """What the run says it did and did not do."""
        if len(meters) != self.settings["ranks"]:
            return f"{len(meters)} of {self.settings['ranks']} processes came to the end of training"
        found = meters[0]
        if "fsdp2" in kind and not found["sharded"]:
            return "no weight is cut over the processes"
        if "qlora" in kind and "4 bits" not in found["weights"]:
            return f"no weight has 4 bits: {', '.join(found['weights'])}"
        if loss == OURS and (not found.get("hits") or found["materialised"]):
            return f"{found.get('hits', 0)} losses went through us, and {found.get('materialised', 0)} logits were made"
        if loss != OURS and "hits" in found:
            return "the model was patched"
        return None

    def summary(self, meters: list[Row]) -> Row:
        """Rank 0's numbers, and the largest peak of all."""
        said = self.settings
        timed = meters[0].pop("seconds")
        step = statistics.median(timed[said["warm"] :])
        peaks = [meter["peak_mib"] for meter in meters if meter["peak_mib"]]
        tokens = said["batch"] * said["length"] * said["ranks"]
        return meters[0] | {
            "ms": step * 1e3, "ms_all": [round(s * 1e3, 1) for s in timed], "tokens_per_s": tokens / step,
            "peak_mib": max(peaks, default=None),
        }  # fmt: skip


def execute(folder: Path, arguments: list[str], device: str, seconds: float) -> tuple[str | None, str]:
    """Runs axolotl's command. Returns why it failed, if it did, and its output."""
    here = [str(METER.parent), str(METER.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "500"} | os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, here)), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),  # torchrun
    }  # fmt: skip
    if device == "cpu":
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "axolotl.cli.main", *arguments]
    with (folder / "output.txt").open("w+") as file:
        # a session of its own, so that its processes can be ended together
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = exit_code(process, seconds)
        file.seek(0)
        output = file.read()
    if code is None:
        return f"no end within {seconds:.0f} s", output
    return (None if code == 0 else last_error(output) or f"it ended with {code}"), output


def last_error(output: str) -> str:
    """The last line that is an exception's, but not the launcher's own."""
    found = re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|Refused)\b.*)$", output, re.MULTILINE)
    return next((line.strip()[:300] for line in reversed(found) if "ChildFailed" not in line), "")


def off(row: Row, stock: Row) -> float:
    """The largest difference of the first losses from stock's, as a part of stock's."""
    pairs = list(zip(row["losses"][:COMPARED], stock["losses"][:COMPARED], strict=True))
    return max(abs(mine - theirs) / theirs for mine, theirs in pairs)


def compare(rows: list[Row], dtype: str) -> None:
    """Add to each run how far its losses are from stock's, and to ours how far they may be."""
    for kind in {row["kind"] for row in rows}:
        ran = {row["loss"]: row for row in rows if row["kind"] == kind and "failed" not in row}
        if STOCK not in ran:
            continue
        for loss, row in ran.items():
            if loss != STOCK:
                row["off"] = off(row, ran[STOCK])
        if OURS in ran:
            noise = ran[HALVES]["off"] if HALVES in ran else 0.0
            bound = FLOAT32 if dtype == "float32" else max(ULP, TIMES_NOISE * noise)
            ran[OURS] |= {"bound": bound, "same": ran[OURS]["off"] <= bound}


def line(row: Row) -> list[str]:
    if "failed" in row:
        return [row["loss"], row["failed"].replace("|", "/"), *[""] * 7]
    verdict = "" if "same" not in row else f" ({'within' if row['same'] else 'BEYOND'} {row['bound']:.1e})"
    losses = row["losses"][:COMPARED]
    return [
        row["loss"], f"{losses[0]:.4f}, {losses[-1]:.4f}", number(row.get("off"), ".1e") + verdict,
        number(row["ms"], ".1f"), number(row["tokens_per_s"]), number(row["peak_mib"]),
        number(row["peak_loss_mib"] or None), str(row.get("hits", "")), ", ".join(row.get("kernels", ())),
    ]  # fmt: skip


def document(run: dict[str, Any]) -> str:
    """A run as Markdown."""
    packages = ", ".join(f"{name} {version}" for name, version in run["environment"]["versions"].items())
    said = run["settings"]
    text = [f"# axolotl: {run['device']}", "", f"{run['date']}, `{run['command']}`", "", packages + ".", ""]
    text += [
        f"Model {said['model']}, {said['dtype']}, {said['ranks']} x {said['batch']} sequences of {said['length']:,} "
        f"tokens, gradient checkpointing {'on' if said['checkpointing'] else 'off'}; medians of steps "
        f"{said['warm'] + 1} to {said['steps']}.",
        f"Off: the largest difference from stock in {COMPARED} steps' losses, as a part of them.",
    ]
    head = [
        "loss",
        "first and last compared",
        "off",
        "ms a step",
        "tokens/s",
        "peak MiB",
        "of the loss",
        "hits",
        "kernels",
    ]
    for kind in dict.fromkeys(row["kind"] for row in run["rows"]):
        text += ["", f"## {kind}", "", *table(head, [line(row) for row in run["rows"] if row["kind"] == kind])]
    for note in run["notes"]:
        text += ["", note]
    return "\n".join(text) + "\n"


def write(run: dict[str, Any], output: Path | None) -> None:
    """As JSON and as Markdown beside it, or as the one that the name says."""
    if output is None:
        return
    if output.suffix == ".json":
        output.write_text(json.dumps(run, indent=1) + "\n")
    output.with_suffix(".md").write_text(document(run))


def check(kinds: list[str], losses: list[str], settings: dict[str, Any]) -> None:
    """Raises:
    typer.BadParameter: something that is unknown, or cannot be.
    """
    unknown = [word for kind in kinds for word in kind.split("+") if word not in WORDS]
    unknown += dict.fromkeys(loss for loss in losses if loss not in LOSSES)
    if unknown:
        raise typer.BadParameter(f"unknown: {unknown}. Kinds: {', '.join(WORDS)}. Losses: {', '.join(LOSSES)}.")
    if settings["model"] not in MODELS:
        raise typer.BadParameter(f"--model is {settings['model']!r}. Known: {', '.join(MODELS)}.")
    if settings["dtype"] not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype is {settings['dtype']!r}. Known: bfloat16, float32.")
    if settings["dtype"] == "bfloat16" and settings["device"] == "cpu":
        raise typer.BadParameter("axolotl trains in bfloat16 on accelerators alone. Give --dtype float32.")
    if settings["warm"] >= settings["steps"] or settings["steps"] < COMPARED:
        raise typer.BadParameter(
            f"--steps is {settings['steps']}: it must be {COMPARED} or more, and more than --warm."
        )
    if HALVES in losses and settings["batch"] % 2:
        raise typer.BadParameter(f"--batch is {settings['batch']}, which has no halves.")
    if importlib.util.find_spec("axolotl") is None:
        raise typer.BadParameter("axolotl is not installed: pip install axolotl.")


@app.command()
def main(
    output: Annotated[Path | None, typer.Option(help="A .json file; the table is written beside it.")] = None,
    model: Annotated[str, typer.Option(help="1b, 3b or tiny.")] = "1b",
    kinds: Annotated[str, typer.Option(help="What is trained, and how.")] = "full,lora,qlora,packed",
    losses: Annotated[str, typer.Option(help="For every kind.")] = f"{STOCK},{OURS}",
    more: Annotated[str, typer.Option(help="For the first kind, last.")] = f"{HALVES},chunked_cross_entropy,liger",
    ranks: Annotated[int, typer.Option(help="Processes, each with a GPU.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences of a process in a step.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 2048,
    steps: Annotated[int, typer.Option(help="Of each run.")] = 16,
    warm: Annotated[int, typer.Option(help="Steps that are not timed.")] = 4,
    rate: Annotated[float, typer.Option(help="Learning rate of full fine-tuning.")] = 1e-4,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    checkpointing: Annotated[bool, typer.Option(help="Gradient checkpointing.")] = True,
    also: Annotated[str, typer.Option(help="Lines for every file, as YAML: {lora_mlp_kernel: false}")] = "{}",
    device: Annotated[str, typer.Option(help="Default: what is here.")] = "",
    seconds: Annotated[float, typer.Option(help="Limit of each run.")] = 90,
    source: Annotated[Path | None, typer.Option("--from", help="Only print the table of an earlier run.")] = None,
) -> None:
    if source is not None:
        run = json.loads(source.read_text())
        print(document(run))
        write(run, output)
        return
    device = device or best_device()
    settings = {
        "model": model, "ranks": ranks, "batch": batch, "length": length, "steps": steps, "warm": warm, "rate": rate,
        "dtype": dtype, "checkpointing": checkpointing, "also": yaml.safe_load(also), "device": device,
    }  # fmt: skip
    plan = [(kind, loss) for kind in words(kinds) for loss in words(losses)]
    plan += [(words(kinds)[0], loss) for loss in words(more)]
    check(words(kinds), [loss for _, loss in plan], settings)
    facts, rows, notes = report(), [], []
    name = facts["device"].get("name") if device != "cpu" else facts["cpu"]
    run = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(["python", *sys.argv]),
        "device": f"{ranks} x {name or device}", "environment": facts, "settings": settings, "notes": notes,
        "rows": rows,
    }  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a run in progress is ended too
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(Path(folder), settings)
        notes.append(f"Model and texts: {time.perf_counter() - begin:.0f} s.")
        for kind, loss in plan:
            rows.append(jobs.run(kind, loss, seconds))
            compare(rows, dtype)
            print(f"{kind}, {' | '.join(line(rows[-1]))} | {rows[-1].get('run_seconds', 0):.0f} s", flush=True)
            write(run, output)  # what is measured survives
    notes.append(f"All runs: {time.perf_counter() - begin:.0f} s.")
    print(document(run))
    write(run, output)


if __name__ == "__main__":
    app()
