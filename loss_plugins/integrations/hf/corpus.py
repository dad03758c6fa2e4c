"""Text that is on every machine, and a tokenizer trained on the spot: a job that needs no download."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError

CORPORA = ("python_stdlib",)
END_OF_TEXT = "<|endoftext|>"

# not the library's own prose: its test data, what others installed, and generated tables
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "__pycache__",
}


def read_corpus(name: str, megabytes: float) -> list[tuple[str, str]]:
    """(file, text) of the corpus, in one order on every machine with the same Python, up to ``megabytes``.

    Raises:
        ConfigError: this Python came without its sources.
    """
    assert name in CORPORA
    library = Path(sysconfig.get_paths()["stdlib"])
    documents, left = [], int(megabytes * 1e6)
    for path in _sources(library):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if not text.strip():
            continue
        documents.append((path.relative_to(library).as_posix(), text[:left]))
        left -= len(text)
        if left <= 0:
            break
    if not documents:
        raise ConfigError(
            f"embedded_corpus {name!r} was asked for, but {library} has no sources (*.py). Set train_file to a text of "
            "your own, or use a Python that came with its sources."
        )
    return documents


def _sources(library: Path) -> Iterator[Path]:
    """Sources by a hash of their path, so that a cut of any size mixes packages."""

    def key(path: Path) -> str:
        return hashlib.sha256(path.relative_to(library).as_posix().encode()).hexdigest()

    found = (p for p in library.rglob("*.py") if not _LEFT_OUT.intersection(p.relative_to(library).parts))
    yield from sorted(found, key=key)


def fingerprint(texts: Iterable[str], vocab_size: int) -> str:
    """What a trained tokenizer depends on, as a short string."""
    digest = hashlib.sha256(f"bpe {vocab_size}".encode())
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of at most ``vocab_size`` entries with an end-of-text token, also used as padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 257:
        raise ConfigError(
            f"tokenizer_vocab_size must be at least 257 (256 bytes and {END_OF_TEXT}), got {vocab_size}. Leave it out "
            "for 32768."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
