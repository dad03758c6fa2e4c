"""Training data of ``loss-plugins train``: files or the embedded corpus, to token ids and labels.

A row is one document. Its first label is -100, so that with packing nothing is predicted across a boundary; the model
itself shifts labels against logits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError, MissingDependencyError, nearest, refuse, unknown_name
from .corpus import CORPORA

logger = logging.getLogger(__name__)

IGNORED = -100
FORMATS = (".jsonl", ".parquet", ".txt")


@dataclass
class DataArguments:
    """What a training job reads, and how it becomes sequences."""

    train_file: str | None = field(
        default=None,
        metadata={
            "help": "jsonl or parquet with text, messages, or prompt and completion; or txt, where blank lines "
            "separate documents."
        },
    )
    eval_file: str | None = field(
        default=None,
        metadata={"help": "The same formats. Evaluated at the end, and during training with eval_strategy."},
    )
    embedded_corpus: str | None = field(
        default=None,
        metadata={"help": "In place of train_file: python_stdlib, the sources of Python's standard library."},
    )
    corpus_mb: float = field(default=8.0, metadata={"help": "How many megabytes of the embedded corpus to read."})
    max_length: int = field(default=1024, metadata={"help": "Longest sequence in tokens; longer documents are cut."})
    packing: bool = field(
        default=False,
        metadata={"help": "Put documents one after another into full sequences. None sees or predicts another."},
    )
    train_on_prompt: bool = field(
        default=False, metadata={"help": "Train on prompts and user turns too, not only on completions and answers."}
    )

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if self.max_length < 2:
            yield f"max_length must be at least 2 tokens, got {self.max_length}. Leave it out for 1024."
        if not self.corpus_mb > 0:
            yield f"corpus_mb must be above 0, got {self.corpus_mb}. Leave it out for 8."
        if self.embedded_corpus is not None and self.embedded_corpus not in CORPORA:
            yield unknown_name("embedded_corpus", self.embedded_corpus, CORPORA)
        if self.train_file is not None and self.embedded_corpus is not None:
            yield (
                f"train_file is {self.train_file!r} and embedded_corpus is {self.embedded_corpus!r}, but a job reads "
                "one of them. Remove one, or set it to null."
            )
        if self.train_file is None and self.embedded_corpus is None:
            yield (
                "There is nothing to train on: neither train_file nor embedded_corpus is set. Set train_file to a "
                f"{', '.join(FORMATS)} file, or embedded_corpus to python_stdlib."
            )
        for key in ("train_file", "eval_file"):
            if (name := getattr(self, key)) is not None:
                yield from _file_mistakes(key, name)


class Row(NamedTuple):
    """One document as read, and where it stands, for error messages."""

    where: str
    values: Mapping[str, Any]


class Tokens(NamedTuple):
    """One document as token ids and labels, of one length."""

    ids: list[int]
    labels: list[int]


def check_file(key: str, name: str) -> None:
    """Refuse a data file that does not exist or has no known format.

    Raises:
        ConfigError: as said.
    """
    refuse(_file_mistakes(key, name))


def _file_mistakes(key: str, name: str) -> Iterator[str]:
    path = Path(name).expanduser()
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir() if p.suffix in FORMATS] if path.parent.is_dir() else []
        near = nearest(path.name, beside)
        hint = f" Did you mean {str(path.parent / near)!r}?" if near else " Check the path."
        yield f"{key} {name!r} {'is a folder, not a file' if path.is_dir() else 'does not exist'}.{hint}"
    elif path.suffix not in FORMATS:
        yield (
            f"{key} {name!r} ends in {path.suffix!r}, and the formats known are {', '.join(FORMATS)}. Convert it to "
            "one of them."
        )


def read_rows(name: str) -> Iterator[Row]:
    """The rows of a file, in order.

    Raises:
        ConfigError: a line that is no JSON object, or a file that cannot be decoded; file and line are named.
        MissingDependencyError: a parquet file without pyarrow.
    """
    path = Path(name).expanduser()
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".txt": _read_txt}
    try:
        yield from readers[path.suffix](path)
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise ConfigError(f"{path} is not UTF-8 text: {where}. Convert it to UTF-8.") from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{where} is not JSON: {error.msg} at column {error.colno}. Each line must hold one JSON object."
                ) from error
            if not isinstance(values, dict):
                raise ConfigError(f"{where} is a JSON {type(values).__name__}. Each line must hold one JSON object.")
            yield Row(where, values)


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} is a parquet file, and pyarrow is not installed. Run: pip install 'loss-plugins[data]', or "
            "convert the file to jsonl."
        ) from error
    try:
        batches = parquet.ParquetFile(path).iter_batches()
        number = 0
        for batch in batches:
            for values in batch.to_pylist():
                number += 1
                yield Row(f"{path} row {number}", {k: v for k, v in values.items() if v is not None})
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a parquet file: {error}. Check how it was written.") from error


def _read_txt(path: Path) -> Iterator[Row]:
    start = 1
    held: list[str] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                start = start if held else number
                held.append(line)
            elif held:
                yield Row(f"{path} line {start}", {"text": "".join(held).rstrip("\n")})
                held = []
    if held:
        yield Row(f"{path} line {start}", {"text": "".join(held).rstrip("\n")})


def text_of(row: Row) -> str:
    """All text of a row, for training a tokenizer on."""
    kind = _kind(row)
    if kind == "messages":
        return "\n".join(str(m.get("content", "")) for m in _messages(row))
    return "".join(str(row.values[key]) for key in (("text",) if kind == "text" else ("prompt", "completion")))


def _kind(row: Row) -> str:
    """``messages``, ``prompt`` or ``text``: the first that the row has."""
    values = row.values
    if "messages" in values:
        return "messages"
    kind = "prompt" if "prompt" in values and "completion" in values else "text"
    for key in ("prompt", "completion") if kind == "prompt" else ("text",):
        if key not in values:
            raise ConfigError(
                f"{row.where} has {', '.join(map(repr, values)) or 'no columns'}. A row needs 'text', 'messages', or "
                "'prompt' and 'completion'."
            )
        if not isinstance(values[key], str):
            kind = type(values[key]).__name__
            raise ConfigError(f"{row.where}: {key!r} must be text, got {kind}. Write it as a string.")
    return kind


def _messages(row: Row) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = row.values["messages"]
    good = isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
    if not good:
        raise ConfigError(
            f'{row.where}: \'messages\' must be a list of {{"role": ..., "content": ...}}, got '
            f"{str(messages)[:80]!r}. Write each turn as such an object."
        )
    return messages


def encode(row: Row, tokenizer: Any, train_on_prompt: bool = False) -> Tokens:
    """A document's token ids, ended by the end-of-sequence token where the tokenizer has one, and its labels.

    Raises:
        ConfigError: the row is malformed, or its chat template cannot say which tokens are answers.
    """
    kind = _kind(row)
    if kind == "messages":
        ids, labels = _encode_messages(row, tokenizer, train_on_prompt)
    elif kind == "text":
        ids = _ended(_plain(tokenizer, row.values["text"], special=True), tokenizer)
        labels = list(ids)
    else:
        # apart, so that the boundary never falls inside a token
        prompt = _plain(tokenizer, row.values["prompt"], special=True)
        if prompt and prompt[-1] == tokenizer.eos_token_id:
            prompt = prompt[:-1]
        completion = _ended(_plain(tokenizer, row.values["completion"], special=False), tokenizer)
        ids = prompt + completion
        labels = list(ids) if train_on_prompt else [IGNORED] * len(prompt) + completion
    labels[:1] = [IGNORED] * len(labels[:1])
    return Tokens(ids, labels)


def _plain(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _encode_messages(row: Row, tokenizer: Any, train_on_prompt: bool) -> Tokens:
    messages = _messages(row)
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{row.where} has messages, but the tokenizer has no chat template. Set tokenizer_name_or_path to one of a "
            "chat model, or use rows with prompt and completion."
        )
    import jinja2

    marked = not train_on_prompt and "generation" in _statements(tokenizer.get_chat_template())

    def render(turns: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, list[int]]:
        try:
            encoded = tokenizer.apply_chat_template(list(turns), tokenize=True, return_dict=True, **options)
        except (jinja2.exceptions.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{row.where}: the chat template refused the messages: {error}. Correct the row."
            ) from error
        return dict(encoded)

    if marked:
        encoded = render(messages, return_assistant_tokens_mask=True)
        ids, answers = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        return Tokens(ids, [token if answer else IGNORED for token, answer in zip(ids, answers, strict=True)])
    ids = list(render(messages)["input_ids"])
    if train_on_prompt:
        return Tokens(ids, list(ids))
    labels = [IGNORED] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = list(render(messages[:turn], add_generation_prompt=True)["input_ids"]) if turn else []
        answered = list(render(messages[: turn + 1])["input_ids"])
        if ids[: len(answered)] != answered or answered[: len(asked)] != asked:
            raise ConfigError(
                f"{row.where}: the chat template neither marks answers with {{% generation %}} nor writes earlier "
                "turns the same way when later ones follow, so the tokens of answers cannot be told. Set "
                "train_on_prompt: true to train on all of them, or use rows with prompt and completion."
            )
        labels[len(asked) : len(answered)] = answered[len(asked) :]
    return Tokens(ids, labels)


def _statements(template: str) -> set[str]:
    """First words of a template's ``{% ... %}`` statements."""
    import re

    return set(re.findall(r"\{%-?\s*(\w+)", template))


def encode_all(rows: Iterable[Row], tokenizer: Any, args: DataArguments) -> list[dict[str, Tensor]]:
    """Sequences for the Trainer: dicts of int32 tensors, ``input_ids``, ``labels``, and with packing ``position_ids``.

    Raises:
        ConfigError: a malformed row, or nothing left to train on.
    """
    documents, count, cut, empty = [], 0, 0, 0
    for row in rows:
        count += 1
        document = encode(row, tokenizer, args.train_on_prompt)
        if not args.packing and len(document.ids) > args.max_length:
            cut += 1
            document = Tokens(document.ids[: args.max_length], document.labels[: args.max_length])
        if all(label == IGNORED for label in document.labels):
            empty += 1  # its mean over no label would be NaN
            continue
        documents.append(document)
    if cut:
        logger.warning("%d of %d documents are longer than max_length %d and were cut.", cut, count, args.max_length)
    if empty:
        logger.warning("%d of %d documents have no token to train on and were left out.", empty, count)
    if not documents:
        raise ConfigError(
            f"None of the {count} documents has a token to train on with max_length {args.max_length}. Check the file, "
            "or raise max_length."
        )
    if args.packing:
        return pack(documents, args.max_length)
    return [{"input_ids": _int32(d.ids), "labels": _int32(d.labels)} for d in documents]


def pack(documents: Iterable[Tokens], max_length: int) -> list[dict[str, Tensor]]:
    """Documents one after another, cut into sequences of ``max_length``; only the last may be shorter.

    ``position_ids`` restart at 0 with each document and each sequence, from which the model's attention sees the
    boundaries. A document that goes on in the next sequence starts anew there.
    """
    sequences: list[dict[str, Tensor]] = []
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []

    def close() -> None:
        if any(label != IGNORED for label in labels):
            sequences.append({"input_ids": _int32(ids), "labels": _int32(labels), "position_ids": _int32(positions)})
        for held in (ids, labels, positions):
            held.clear()

    for document in documents:
        start = 0
        while start < len(document.ids):
            stop = min(len(document.ids), start + max_length - len(ids))
            ids += document.ids[start:stop]
            labels += [IGNORED, *document.labels[start + 1 : stop]]
            positions += range(stop - start)
            start = stop
            if len(ids) == max_length:
                close()
    close()
    return sequences


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class Collator:
    """Sequences to a batch of ``(B, T)`` int64, padded on the right to the longest.

    Packed sequences get no attention mask: the model derives it from ``position_ids``, where the padding is one more
    document.
    """

    pad_token_id: int

    def __call__(self, sequences: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        length = max(s["input_ids"].shape[0] for s in sequences)
        batch = {
            "input_ids": torch.full((len(sequences), length), self.pad_token_id),
            "labels": torch.full((len(sequences), length), IGNORED),
        }
        packed = "position_ids" in sequences[0]
        if packed:
            batch["position_ids"] = torch.zeros(len(sequences), length, dtype=torch.int64)
        else:
            batch["attention_mask"] = torch.zeros(len(sequences), length, dtype=torch.int64)
        for i, sequence in enumerate(sequences):
            size = sequence["input_ids"].shape[0]
            for key, values in sequence.items():
                batch[key][i, :size] = values
            if packed:
                batch["position_ids"][i, size:] = torch.arange(length - size)
            else:
                batch["attention_mask"][i, :size] = 1
        return batch
