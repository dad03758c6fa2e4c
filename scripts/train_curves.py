"""Train the same model once with each strategy and seed, and say whether the curves differ by more than the seeds do.

    python scripts/train_curves.py prepare tokens.npz TEXT... --vocab 131072
    python scripts/train_curves.py run tokens.npz OUT
    python scripts/train_curves.py run tokens.npz OUT --model FOLDER_OR_GGUF --precision bf16 --learning-rate 2e-5

``run`` starts from random weights (a Llama of 106 million parameters with the tokens' vocabulary and a tied head), or
with ``--model`` from trained ones. For a seed, every variant sees the same initial weights and the same batches, so its
curve is compared with naive's for that seed. Written to OUT: curves.json, curves.csv, curves.png.

The verdict. For each measure below, ``d`` is a variant's value minus naive's for the same seed; its mean over the seeds
has a 95 % interval (Student's t). ``noise`` is the standard deviation of naive's own values over the seeds. A variant
is within seed noise when for every measure the mean of ``d`` is no larger than ``noise``. The interval says what else
is known: one that excludes 0 is a difference that is real, however small; one wider than the noise needs more seeds.
Measures: the last validation loss; the mean training loss of the last quarter of the steps; and the validation loss
where the mean of ``d`` is largest after the warm-up, against the noise pooled over those validations.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
import yaml
from torch import Tensor, nn

from loss_plugins import LossConfig, patch_model
from loss_plugins.device import DeviceProfile
from loss_plugins.diagnostics.environment import best_device, versions
from loss_plugins.errors import ConfigError, LossPluginError
from loss_plugins.integrations.hf.corpus import train_tokenizer
from loss_plugins.integrations.hf.loading import ModelArguments, load_model, load_tokenizer
from loss_plugins.kernels import ops

PRECISIONS = ("autocast", "bf16", "float32")
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 97.5 % for 1 to 10 degrees of freedom; the last serves beyond, which errs on the wide side."""

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


class Tokens(NamedTuple):
    """Token ids of a text, documents one after another, each with an end-of-text token behind it."""

    train: np.ndarray  # (n,) uint32
    validation: np.ndarray  # (m,) uint32
    vocab: int


def documents(files: Sequence[Path]) -> Iterator[str]:
    """The texts of files; a form feed separates documents inside one."""
    for file in files:
        yield from filter(str.strip, file.read_text(encoding="utf-8", errors="replace").split("\f"))


def digest(text: str) -> int:
    """32 bits of a document's content: files in another order give the same split and the same mixture."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def encode(texts: Sequence[str], tokenizer: Any) -> np.ndarray:
    pieces = [np.zeros(0, np.uint32)]
    for start in range(0, len(texts), 2000):
        batch = tokenizer(list(texts[start : start + 2000]), add_special_tokens=False, verbose=False)["input_ids"]
        pieces += [np.array([*ids, tokenizer.eos_token_id], np.uint32) for ids in batch]
    return np.concatenate(pieces)


@app.command()
def prepare(
    output: Annotated[Path, typer.Argument(help="The .npz to write.")],
    texts: Annotated[list[Path], typer.Argument(help="Text files (UTF-8); a form feed separates documents.")],
    vocab: int = typer.Option(131072, help="Entries of the BPE that is trained on the texts."),
    tokenizer: str = typer.Option("", help="In its place: a model's folder or .gguf, whose tokenizer is taken."),
    validation_share: float = typer.Option(0.05, help="Share of the documents that is held out."),
    most: int = typer.Option(10_000_000, help="Training tokens to keep."),
) -> None:
    """Tokenise texts for `run`."""
    found = list(documents(texts))
    if tokenizer:
        words, _ = load_tokenizer(ModelArguments(model_name_or_path=tokenizer), [], output.parent)
    else:
        words = train_tokenizer(found, vocab)
    found.sort(key=digest)
    cut = sum(digest(text) < validation_share * 2**32 for text in found)
    size = len(words) if tokenizer else max(vocab, len(words))
    tokens = Tokens(encode(found[cut:], words)[:most], encode(found[:cut], words), size)
    output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(output, train=tokens.train, validation=tokens.validation, vocab=np.int64(tokens.vocab))
    typer.echo(
        f"{output}: {len(tokens.train):,} tokens to train on, {len(tokens.validation):,} to validate on, "
        f"vocabulary {tokens.vocab:,}, of which {len(np.unique(tokens.train)):,} occur."
    )


def load_tokens(path: Path) -> Tokens:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist. Make it with: python scripts/train_curves.py prepare {path} TEXT...")
    with np.load(path) as file:
        return Tokens(file["train"], file["validation"], int(file["vocab"]))


class Variant(NamedTuple):
    """A strategy with options, by the name it was asked for."""

    name: str
    strategy: str
    options: dict[str, Any] | None

    @classmethod
    def parse(cls, text: str) -> Variant:
        """``cce:filter=off:workspace_mb=64``."""
        strategy, *settings = text.strip().split(":")
        options: dict[str, Any] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(f"{text!r} is no variant: {setting!r} has no '='. Write for example cce:filter=off.")
            options[key] = yaml.safe_load(value)
        return cls(text.strip(), strategy, options or None)


@dataclass(frozen=True)
class Settings:
    """What every run shares."""

    steps: int
    batch: int
    length: int
    learning_rate: float
    precision: str
    validations: int
    validation_batches: int
    device: str


class Run(NamedTuple):
    """One variant and seed."""

    variant: str
    seed: int
    training: list[float]
    validation: list[tuple[int, float]]
    seconds: float
    kernels: list[str]


def windows(tokens: np.ndarray, length: int, device: str) -> Tensor:
    """Whole sequences, shape (n, length) int64."""
    whole = len(tokens) // length
    if whole == 0:
        raise ConfigError(f"There are {len(tokens)} tokens, fewer than a sequence of {length}. Use a shorter --length.")
    return torch.from_numpy(tokens[: whole * length].astype(np.int64)).view(whole, length).to(device)


def batch_order(count: int, settings: Settings, seed: int) -> Tensor:
    """(steps, batch): which sequences each step sees. Each is seen once before any is seen again."""
    generator = torch.Generator().manual_seed(seed)
    needed = settings.steps * settings.batch
    rounds = [torch.randperm(count, generator=generator) for _ in range(math.ceil(needed / count))]
    return torch.cat(rounds)[:needed].view(settings.steps, settings.batch).to(settings.device)


def validation_steps(settings: Settings) -> list[int]:
    """After how many steps the model is validated; the last step is one of them."""
    count = min(settings.validations, settings.steps)
    return [round(settings.steps * (i + 1) / count) for i in range(count)]


def learning_rate_at(step: int, steps: int) -> float:
    """Share of the highest rate: a tenth of the steps to rise, then a cosine down to a tenth."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(
    make_model: Callable[[int], nn.Module],
    variant: Variant,
    seed: int,
    settings: Settings,
    train_data: Tensor,
    validation_data: Tensor,
) -> Run:
    """Train one model. The host waits for the device at the end only."""
    device = torch.device(settings.device)
    model = make_model(seed)
    handle = patch_model(model, LossConfig(variant.strategy, variant.options))
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_at(step, settings.steps))
    order = batch_order(len(train_data), settings, seed)
    at = validation_steps(settings)
    training, validation = [], []
    ops.forget_launches()
    start = time.perf_counter()
    for step in range(settings.steps):
        ids = train_data[order[step]]
        model.train()
        with _autocast(settings):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        training.append(loss.detach())
        if step + 1 in at:
            with handle.scope(loss_only=True):
                validation.append(_validate(model, settings, validation_data))
    losses, held_out = torch.stack(training).tolist(), torch.stack(validation).tolist()
    assert handle.counts.fused > 0 and not handle.materialised_by, handle.materialised_by
    return Run(
        variant.name, seed, losses, list(zip(at, held_out, strict=True)), time.perf_counter() - start,
        sorted(ops.launched()),
    )  # fmt: skip


def _autocast(settings: Settings) -> Any:
    if settings.precision != "autocast":
        return nullcontext()
    return torch.autocast(torch.device(settings.device).type, torch.bfloat16)


@torch.no_grad()
def _validate(model: nn.Module, settings: Settings, data: Tensor) -> Tensor:
    model.eval()
    losses = []
    for start in range(0, len(data), settings.batch):
        ids = data[start : start + settings.batch]
        with _autocast(settings):
            losses.append(model(input_ids=ids, labels=ids).loss * len(ids))
    return torch.stack(losses).sum() / len(data)


def new_model(hidden: int, layers: int, vocab: int, settings: Settings) -> Callable[[int], nn.Module]:
    """What makes a Llama with random weights and a tied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64), num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=settings.length, tie_word_embeddings=True, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        with torch.device(settings.device):
            return LlamaForCausalLM(config).to(dtype)

    return make


def trained_model(name: str, settings: Settings, vocab: int) -> Callable[[int], nn.Module]:
    """What copies a model that was trained already; only the order of the batches depends on the seed then."""
    dtype = "bfloat16" if settings.precision == "bf16" else "float32"
    model = load_model(ModelArguments(model_name_or_path=name, dtype=dtype, attn_implementation="sdpa"), None)
    model.config.use_cache = False
    rows = model.get_input_embeddings().weight.shape[0]
    if vocab > rows:
        raise ConfigError(
            f"The tokens have a vocabulary of {vocab}, and {name} one of {rows}. Prepare them with --tokenizer {name}."
        )

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return copy.deepcopy(model).to(settings.device)

    return make


class Measure(NamedTuple):
    """A variant's difference from naive, over the seeds."""

    variant: str
    measure: str
    naive: float
    difference: float
    low: float
    high: float
    noise: float

    @property
    def within(self) -> bool:
        return abs(self.difference) <= self.noise


def paired(variant: str, measure: str, values: Sequence[float], naive: Sequence[float], noise: float) -> Measure:
    """``values`` and ``naive`` by seed, in the same order."""
    differences = [a - b for a, b in zip(values, naive, strict=True)]
    mean, degrees = statistics.fmean(differences), len(differences) - 1
    quantile = T_QUANTILES[min(degrees, len(T_QUANTILES)) - 1]
    half = quantile * float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return Measure(variant, measure, statistics.fmean(naive), mean, mean - half, mean + half, noise)


def verdict(runs: Sequence[Run], reference: str = "naive") -> list[Measure]:
    """All measures of all variants but the reference. Numbers that are not finite are never within.

    Raises:
        ConfigError: fewer than two seeds, or the reference was not run.
    """
    by_variant: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        by_variant.setdefault(run.variant, []).append(run)
    if reference not in by_variant or len(by_variant[reference]) < 2:
        raise ConfigError(f"A verdict needs {reference} with two seeds or more. Use more --seeds.")
    own = by_variant.pop(reference)
    steps = len(own[0].training)
    late = [i for i, (step, _) in enumerate(own[0].validation) if step > steps // 10]

    def tail(run: Run) -> float:
        return statistics.fmean(run.training[-max(1, steps // 4) :])

    def held_out(run: Run, i: int) -> float:
        return run.validation[i][1]

    pooled = math.sqrt(statistics.fmean(float(np.var([held_out(r, i) for r in own], ddof=1)) for i in late))
    measures = []
    for name, theirs in by_variant.items():
        if [run.seed for run in theirs] != [run.seed for run in own]:
            raise ConfigError(f"{name} and {reference} were run with different seeds. Run both with the same.")
        for what, value in (("last validation", lambda r: held_out(r, -1)), ("training, last quarter", tail)):
            naive = [value(r) for r in own]
            measures.append(paired(name, what, [value(r) for r in theirs], naive, float(np.std(naive, ddof=1))))
        curve = [
            paired(name, f"validation after {own[0].validation[i][0]} steps", [held_out(r, i) for r in theirs],
                   [held_out(r, i) for r in own], pooled)
            for i in late
        ]  # fmt: skip
        measures.append(max(curve, key=lambda m: math.inf if math.isnan(m.difference) else abs(m.difference)))
    return measures


def describe(measures: Sequence[Measure]) -> str:
    lines = [f"{'variant':<24}{'measure':<30}{'naive':>9}{'mean d':>11}{'95 % interval':>24}{'noise':>10}  within"]
    for m in measures:
        interval = f"[{m.low:+.1e}, {m.high:+.1e}]"
        says = "yes" if m.within else "NO"
        if m.within and not m.low <= 0 <= m.high:
            says += ", but not 0"
        lines.append(
            f"{m.variant:<24}{m.measure:<30}{m.naive:>9.4f}{m.difference:>+11.1e}{interval:>24}{m.noise:>10.1e}  {says}"
        )
    outside = ", ".join(sorted({m.variant for m in measures if not m.within}))
    says = f"outside seed noise of naive: {outside}" if outside else "every variant is within seed noise of naive"
    return "\n".join([*lines, f"VERDICT: {says}"])


def write(folder: Path, runs: Sequence[Run], measures: Sequence[Measure], settings: Settings, what: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "settings": asdict(settings) | what,
        "versions": versions(),
        "device": DeviceProfile.probe(settings.device).name,
        "verdict": [m._asdict() | {"within": m.within} for m in measures],
        "runs": [run._asdict() for run in runs],
    }
    (folder / "curves.json").write_text(json.dumps(whole, indent=1) + "\n")
    with (folder / "curves.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["variant", "seed", "step", "training_loss", "validation_loss"])
        for run in runs:
            held_out = dict(run.validation)
            for step, loss in enumerate(run.training, 1):
                rows.writerow([run.variant, run.seed, step, f"{loss:.6f}", f"{held_out.get(step, math.nan):.6f}"])


def plot(runs: Sequence[Run], path: Path, title: str, reference: str = "naive") -> None:
    """Left: validation loss, the reference's spread over the seeds shaded. Right: differences from it, seed by seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(run.variant for run in runs))
    steps = [step for step, _ in runs[0].validation]
    curves = {n: np.array([[loss for _, loss in r.validation] for r in runs if r.variant == n]) for n in names}
    own = curves[reference]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.fill_between(steps, own.min(0), own.max(0), color="#bbbbbb", label=f"{reference}, all seeds")
    noise = own.std(0, ddof=1)
    right.fill_between(steps, -noise, noise, color="#dddddd", label=f"{reference}: ± 1 s.d. over seeds")
    for place, name in enumerate(names):
        left.plot(steps, curves[name].mean(0), f"C{place}", lw=1.4, label=name)
        if name != reference:
            right.plot(steps, (curves[name] - own).mean(0), f"C{place}", lw=1.8, label=name)
            right.plot(steps, (curves[name] - own).T, f"C{place}", lw=0.6, alpha=0.5)
    left.set_ylabel("validation loss, nats a token (mean of seeds)")
    right.set_ylabel(f"the same minus {reference}'s, thin: each seed")
    left.set_title(title, fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(True, alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def fitting(settings: Settings, variants: Sequence[Variant], seeds: int, budget: float, trial: Any) -> Settings:
    """The settings with as many steps as the budget allows, from a few timed steps of each variant."""
    start = time.perf_counter()
    few = Settings(**(asdict(settings) | {"steps": 6, "validations": 1, "validation_batches": 1}))
    seconds = {}
    for variant in variants:
        trial(variant, few)  # compiles
        seconds[variant.name] = min(trial(variant, few).seconds for _ in range(2)) / 7
        typer.echo(f"{variant.name}: {1e3 * seconds[variant.name]:.0f} ms a step")
    # a validation batch has no backward and no optimizer: about half a step
    others = settings.validations * settings.validation_batches // 2
    left = budget - (time.perf_counter() - start)
    possible = int(left * 0.9 / (seeds * sum(seconds.values())) - others)
    steps = min(settings.steps, possible)
    if steps < 10:
        raise ConfigError(
            f"{budget:.1f} seconds are left, enough for {max(0, possible)} steps. Raise --budget-seconds."
        )
    if steps < settings.steps:
        typer.echo(f"{settings.steps} steps do not fit {budget:.0f} seconds; taking {steps}.")
    return Settings(**(asdict(settings) | {"steps": steps}))


@app.command()
def run(
    tokens: Annotated[Path, typer.Argument(help="What `prepare` wrote.")],
    output: Annotated[Path, typer.Argument(help="Folder for curves.json, curves.csv, curves.png.")],
    model: str = typer.Option("", help="Fine-tune this folder or .gguf. Default: a new Llama."),
    variants: str = typer.Option(
        "naive,chunked,flce,cce,cce:filter=off", help="Strategies to compare, with options; naive is the yardstick."
    ),
    seeds: int = typer.Option(3, help="Seeds 0, 1, ...; at least 2."),
    steps: int = typer.Option(300, help="Optimizer steps of each run."),
    batch: int = typer.Option(8, help="Sequences a step."),
    length: int = typer.Option(1024, help="Tokens a sequence."),
    learning_rate: float = typer.Option(1e-3, help="The highest."),
    precision: str = typer.Option("autocast", help="autocast (float32 weights, bfloat16 products), bf16 or float32."),
    hidden: int = typer.Option(512, help="Width of the new Llama."),
    layers: int = typer.Option(12, help="Its layers."),
    validations: int = typer.Option(8, help="How often to validate."),
    validation_tokens: int = typer.Option(131072, help="Held-out tokens to validate on."),
    budget_seconds: float = typer.Option(240.0, help="Take fewer steps where all would last longer."),
    device: str = typer.Option("", help="Default: the accelerator, or the CPU."),
) -> None:
    """Train with every variant and seed; exit code 1 if one lies outside seed noise."""
    if precision not in PRECISIONS:
        raise typer.BadParameter(f"--precision must be one of {', '.join(PRECISIONS)}, got {precision}.")
    start = time.perf_counter()
    chosen = [Variant.parse(text) for text in variants.split(",")]
    data, device = load_tokens(tokens), device or best_device()
    batches = max(1, validation_tokens // (batch * length))
    settings = Settings(steps, batch, length, learning_rate, precision, validations, batches, device)
    train_data, held_out = windows(data.train, length, device), windows(data.validation, length, device)
    held_out = held_out[: batches * batch]
    make = trained_model(model, settings, data.vocab) if model else new_model(hidden, layers, data.vocab, settings)
    count = sum(p.numel() for p in make(0).parameters())
    typer.echo(f"{count / 1e6:.1f} M parameters, vocabulary {data.vocab:,}, {batch * length:,} tokens a step, {device}")

    def trial(variant: Variant, few: Settings) -> Run:
        return train(make, variant, 0, few, train_data, held_out[: few.validation_batches * batch])

    settings = fitting(settings, chosen, seeds, budget_seconds - (time.perf_counter() - start), trial)
    what = {"model": model or f"llama {hidden} x {layers}", "vocab": data.vocab, "parameters": count}
    runs: list[Run] = []
    for seed in range(seeds):
        for variant in chosen:
            runs.append(train(make, variant, seed, settings, train_data, held_out))
            typer.echo(
                f"seed {seed} {variant.name}: {runs[-1].seconds:.1f} s, training {runs[-1].training[-1]:.4f}, "
                f"validation {runs[-1].validation[-1][1]:.4f}, {', '.join(runs[-1].kernels) or 'torch'}"
            )
        write(output, runs, [], settings, what)
    measures = verdict(runs)
    write(output, runs, measures, settings, what)
    plot(runs, output / "curves.png", f"{what['model']}, vocabulary {data.vocab:,}, {precision}, {seeds} seeds")
    typer.echo(describe(measures))
    typer.echo(f"Written: {output}/curves.json, .csv, .png; {time.perf_counter() - start:.0f} s in all")
    raise typer.Exit(0 if all(m.within for m in measures) else 1)


if __name__ == "__main__":
    try:
        app()
    except LossPluginError as error:
        raise SystemExit(f"Error: {error}") from None
