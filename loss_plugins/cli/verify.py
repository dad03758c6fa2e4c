"""``loss-plugins verify``."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..errors import ConfigError, unknown_name
from ._problem import DTYPES, profile_of
from ._show import explains_errors, show_json, show_table

TINY = "tiny:"
COLUMNS = ("strategy", "", "loss off by", "gradient off by", "of", "time", "memory")


class _Subject(NamedTuple):
    """What is compared: a model and a batch on their device, and in words where both come from."""

    model: Any
    batch: dict[str, Any]
    words: str
    is_tiny: bool


@explains_errors
def verify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, a hub id, a GGUF file, or tiny:<model_type> for a small random model."
        ),
    ],
    strategy: Annotated[list[str] | None, typer.Option(help="Only this strategy; may be given again.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16; for tiny models fp64 too.")] = "fp32",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...: default is this machine's accelerator, else its CPU.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the batch.")] = 2,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens in the longest sequence.")] = 128,
    data: Annotated[
        str | None, typer.Option(help="A .txt, .jsonl or .parquet file as in training; default is a built-in text.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A folder with a PEFT adapter for the model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a model, patched with each strategy, with itself unpatched: loss, all gradients, time and memory.

    Exit code 1 if one differs, or if the model cannot be patched.
    """
    from ..models.verification import verify_model

    name = DTYPES.get(dtype, dtype)
    if name not in DTYPES.values():
        raise ConfigError(unknown_name("dtype", dtype, [*DTYPES, *DTYPES.values()]))
    strategies = _known(strategy or [])
    place = _device(device)
    with _quiet(), contextlib.redirect_stdout(sys.stderr):
        if model.startswith(TINY):
            subject = _tiny(model.removeprefix(TINY), name, place, batch, tokens, data, adapter)
        else:
            subject = _loaded(model, name, place, batch, tokens, data, adapter)
        with _precision(subject, name):
            report = verify_model(subject.model, subject.batch, strategies)
    if as_json:
        show_json({"batch": subject.words, "device": place} | report.as_dict())
    else:
        _show(report, subject.words, place)
    if not report.equal:
        raise typer.Exit(1)


def _known(names: list[str]) -> list[str]:
    from ..strategies import STRATEGIES

    for name in names:
        if name != "auto":
            STRATEGIES.get(name)
    return names


def _device(device: str | None) -> str:
    from ..diagnostics.environment import best_device

    profile_of(device)  # refuses what is not there
    return device or best_device()


def _tiny(
    name: str, dtype: str, device: str, rows: int, length: int, data: str | None, adapter: str | None
) -> _Subject:
    """A small random model of a model type or class, with random tokens."""
    import torch

    from ..models.tiny import class_of_type, model_classes, tiny_inputs, tiny_model
    from ..models.tiny.inputs import floating

    for option, value in (("--data", data), ("--adapter", adapter)):
        if value is not None:
            raise ConfigError(f"{option} {value!r} was given for {TINY}{name}, which is random. Give a real model.")
    known = model_classes()
    found = name if name in known else class_of_type(name)
    if found is None:
        types = {model_type for each in known.values() for model_type in each}
        raise ConfigError(
            unknown_name("model_type", name, types).split(" Known: ")[0] + " loss-plugins families has all."
        )
    length = min(length, 12)  # their positions and images are made for that
    try:
        model = tiny_model(found)
        batch = _padded(tiny_inputs(model, rows=max(rows, 2), length=length))
        kind = getattr(torch, dtype)
        model.to(device=device, dtype=kind)
        if kind is torch.float64:
            with contextlib.suppress(Exception):
                model.set_experts_implementation("eager")  # grouped products know no float64
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"No tiny {found} could be made: {type(error).__name__}: {said}. Give a real model of that type."
        ) from error
    words = f"a random {found}, {max(rows, 2)} x {length} random tokens"
    return _Subject(model, _on(floating(batch, kind), device), words, True)


def _padded(batch: dict[str, Any]) -> dict[str, Any]:
    """With the end of the last row as padding, where the class takes a mask for that."""
    mask = batch.get("attention_mask")
    labels = batch.get("labels")
    if mask is not None and labels is not None and mask.shape == labels.shape:
        mask[-1, -2:] = 0
        labels[-1, -2:] = -100
    return batch


def _loaded(
    name: str, dtype: str, device: str, rows: int, length: int, data: str | None, adapter: str | None
) -> _Subject:
    """A model as training loads it, with text where it has a tokenizer."""
    from ..integrations.hf.data import check_file
    from ..integrations.hf.loading import ModelArguments, load_adapter, load_config, load_model
    from ..models.verification.batches import fitted

    if data is not None:
        check_file("--data", data)
    arguments = ModelArguments(model_name_or_path=name, dtype=dtype)
    config = load_config(arguments)
    batch, words = _batch(arguments, config, rows, length, data)
    model = load_model(arguments, config)
    inner = model
    if adapter is not None:
        model = load_adapter(model, adapter)
    model.to(device)
    sizes = " x ".join(str(size) for size in batch["labels"].shape)
    where = name if adapter is None else f"{name} with {adapter}"
    return _Subject(model, _on(fitted(inner, batch), device), f"{where}, {sizes} tokens of {words}", False)


def _batch(arguments: Any, config: Any, rows: int, length: int, data: str | None) -> tuple[dict[str, Any], str]:
    """A right-padded batch with some labels masked, and what it is of."""
    import torch

    from ..integrations.hf.data import Collator, DataArguments, encode_all, read_rows
    from ..integrations.hf.loading import load_tokenizer
    from ..models.verification.batches import TEXT, padded_batch, random_ids

    try:
        tokenizer, _ = load_tokenizer(arguments, [], Path())
    except ConfigError as error:
        if data is not None:
            raise ConfigError(f"--data {data!r} is read with the model's tokenizer. {error}") from error
        vocab = getattr(config.get_text_config(), "vocab_size", None)
        if not vocab:
            raise ConfigError(f"The model has no tokenizer, and its config names no vocab_size. {error}") from error
        return padded_batch(random_ids(vocab, rows * length), rows, length, 0), "random ids: it has no tokenizer"
    if data is None:
        ids = tokenizer("".join(TEXT), verbose=False)["input_ids"]
        return padded_batch(torch.tensor(ids), rows, length, tokenizer.pad_token_id), "the built-in text"
    found = encode_all(read_rows(data), tokenizer, DataArguments(train_file=data, max_length=length))
    return Collator(tokenizer.pad_token_id)(found[:rows]), data


def _on(batch: dict[str, Any], device: str) -> dict[str, Any]:
    return {key: value.to(device) if hasattr(value, "to") else value for key, value in batch.items()}


def _precision(subject: _Subject, dtype: str) -> contextlib.AbstractContextManager[None]:
    """Tiny models in float64 must not round to float32 on the way."""
    if dtype != "float64" or not subject.is_tiny:
        return contextlib.nullcontext()
    from ..models.conformance.double import all_double

    return all_double()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, and without what the report says anyway."""
    from transformers.utils import logging as theirs

    loggers = {name: logging.getLogger(name) for name in ("transformers", "loss_plugins")}
    before = {name: logger.level for name, logger in loggers.items()}
    bars = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    for logger in loggers.values():
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(before[name])
        if bars:
            theirs.enable_progress_bar()


def _show(report: Any, words: str, device: str) -> None:
    typer.echo(f"{report.model} on {device}: {words}")
    if report.touched:
        typer.echo(report.touched.rpartition("\n")[0])  # without the counts of the last run
    if report.parameters:
        stock = report.stock
        rows: list[tuple[str, ...]] = [
            ("stock", f"loss {stock.loss:.6f}", "", "", "", _time(stock.seconds), _memory(stock.peak_bytes))
        ]
        rows += [_row(row) for row in report.rows]
        title = f"{report.parameters} gradients and the loss, relative to stock's"
        note = f"Allowed: {report.tolerance}."
        if report.own is not None:
            note += f"\nStock's own: {report.own[0]:.1e} for the loss, {report.own[1]:.1e} for all gradients."
        show_table(title, COLUMNS, rows, right=(COLUMNS[2], COLUMNS[3], COLUMNS[5], COLUMNS[6]), note=note)
        typer.echo("Time and memory: from the call of the head to the gradient of its input.")
    for row in report.rows:
        if row.beyond:
            worst = [(what, f"{off:.1e}", f"{allowed:.1e}") for what, off, allowed in row.beyond[:10]]
            columns = ("what", "off by", "allowed")
            show_table(f"{row.name}: {len(row.beyond)} too far", columns, worst, right=columns[1:])
    if report.equal:
        typer.echo("Equal to stock: " + ", ".join(row.name for row in report.rows if row.status == "equal"))
    else:
        typer.echo(report.reason)


def _row(row: Any) -> tuple[str, ...]:
    status = f"{row.status}, {row.way}" if row.way else row.status
    if row.reason:
        status += f": {row.reason}"
    off = "" if row.loss_off is None else f"{row.loss_off:.1e}"
    gradient = "" if row.gradient_off is None else f"{row.gradient_off:.1e} (<= {row.gradient_allowed:.1e})"
    return row.name, status, off, gradient, _end_of(row.gradient), _time(row.seconds), _memory(row.peak_bytes)


def _end_of(name: str, limit: int = 34) -> str:
    return name if len(name) <= limit else "..." + name[3 - limit :]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _memory(count: int | None) -> str:
    from ..diagnostics.plots import human_bytes

    return "-" if count is None else human_bytes(count)
