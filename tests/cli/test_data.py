"""Rows to token ids and labels; packing; batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_job import POEM

from loss_plugins.errors import ConfigError
from loss_plugins.integrations.hf.corpus import fingerprint, read_corpus, train_tokenizer
from loss_plugins.integrations.hf.data import Collator, DataArguments, Row, Tokens, encode, encode_all, pack, read_rows

IGNORED = -100
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}\n"
    "{% endgeneration %}{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# writes an answer shorter once others follow it, as templates that drop earlier reasoning do
REWRITING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] if loop.last else m['content'][:3] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat on the mat"},
    {"role": "user", "content": "and the rat"},
    {"role": "assistant", "content": "ran round"},
]


def trained(tokenizer: Any, tokens: Tokens) -> str:
    """The text of the tokens with a label."""
    assert all(label in (IGNORED, token) for token, label in zip(tokens.ids, tokens.labels, strict=True))
    text: str = tokenizer.decode([label for label in tokens.labels if label != IGNORED])
    return text


def test_text_is_ended_and_its_first_token_is_not_predicted(tokenizer: Any) -> None:
    ids, labels = encode(Row("here", {"text": "the cat"}), tokenizer)
    assert tokenizer.decode(ids) == "the cat<|endoftext|>"
    assert labels == [IGNORED, *ids[1:]]


def test_prompts_are_masked_unless_asked_for(tokenizer: Any) -> None:
    row = Row("here", {"prompt": "the cat", "completion": " sat"})
    assert trained(tokenizer, encode(row, tokenizer)) == " sat<|endoftext|>"
    both = encode(row, tokenizer, train_on_prompt=True)
    assert both.ids == encode(row, tokenizer).ids
    assert both.labels == [IGNORED, *both.ids[1:]]


@pytest.mark.parametrize("marked", [True, False], ids=["generation marks", "turn by turn"])
def test_only_answers_are_trained(tokenizer: Any, marked: bool) -> None:
    if marked:
        tokenizer.chat_template = MARKED
    tokens = encode(Row("here", {"messages": CHAT}), tokenizer)
    assert tokenizer.decode(tokens.ids) == (
        "<user>the cat\n<assistant>sat on the mat\n<user>and the rat\n<assistant>ran round\n"
    )
    assert trained(tokenizer, tokens) == "sat on the mat\nran round\n"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = REWRITING
    with pytest.raises(ConfigError, match=r"line 7: the chat template neither marks .* train_on_prompt: true"):
        encode(Row("line 7", {"messages": CHAT}), tokenizer)
    tokens = encode(Row("line 7", {"messages": CHAT}), tokenizer, train_on_prompt=True)
    assert tokens.labels == [IGNORED, *tokens.ids[1:]]


def test_a_template_that_refuses_a_row_names_it(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"line 7: .* roles must alternate"):
        encode(Row("line 7", {"messages": CHAT}), tokenizer)


def test_messages_stand_before_a_lone_prompt(tokenizer: Any) -> None:
    both = encode(Row("here", {"prompt": "the cat", "messages": CHAT}), tokenizer)
    assert both == encode(Row("here", {"messages": CHAT}), tokenizer)


def test_txt_documents_are_parted_by_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\none\ntwo\n\n \nthree\n")
    rows = list(read_rows(str(tmp_path / "a.txt")))
    assert [row.values["text"] for row in rows] == ["one\ntwo", "three"]
    assert [row.where.split()[-1] for row in rows] == ["2", "6"]


def _documents(*lengths: int) -> list[Tokens]:
    ids = iter(range(1, 1000))
    documents = [[next(ids) for _ in range(length)] for length in lengths]
    return [Tokens(d, [IGNORED, *d[1:]]) for d in documents]


def test_packing_keeps_every_token_and_marks_each_start() -> None:
    sequences = pack(_documents(3, 6, 1, 4), 5)
    assert torch.cat([s["input_ids"] for s in sequences]).tolist() == list(range(1, 15))
    assert [len(s["input_ids"]) for s in sequences] == [5, 5, 4]
    assert [s["position_ids"].tolist() for s in sequences] == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0], [0, 1, 2, 3]]
    for sequence in sequences:
        starts = sequence["position_ids"] == 0
        assert (sequence["labels"][starts] == IGNORED).all()
        assert (sequence["labels"][~starts] == sequence["input_ids"][~starts]).all()


def test_packing_drops_sequences_without_a_label() -> None:
    masked = Tokens([1, 2, 3, 4], [IGNORED] * 4)
    assert len(pack([masked, *_documents(4)], 4)) == 1


def _loss_sum(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum over the labelled tokens, so that any way of batching must give the same."""
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("Llama", "sdpa"),
        ("Llama", "eager"),
        ("Qwen3", "sdpa"),
        ("Gemma2", "eager"),
        ("GPT2", "sdpa"),
        ("GPT2", "eager"),
    ],
)
def test_packed_documents_do_not_see_each_other(family: str, attention: str) -> None:
    settings: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32, "sliding_window": 8,
    }  # fmt: skip
    if family == "GPT2":
        settings = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = getattr(transformers, f"{family}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    documents = [Tokens(ids, [IGNORED, *ids[1:]]) for ids in torch.randint(1, 64, (5, 7)).tolist()]
    packed = Collator(0)(pack(documents, 14))  # two, two, and one with padding
    assert packed["input_ids"].shape == (3, 14)
    apart = [Collator(0)([{"input_ids": torch.tensor(d.ids), "labels": torch.tensor(d.labels)}]) for d in documents]
    with torch.no_grad():
        expected = sum(_loss_sum(model, batch) for batch in apart)
        torch.testing.assert_close(_loss_sum(model, packed), expected, rtol=1e-10, atol=1e-10)
        seeing = {**packed, "position_ids": torch.arange(14).expand(3, 14)}
        assert abs(_loss_sum(model, seeing) - expected) > 1e-4, (
            "the boundaries made no difference, so nothing was tested"
        )


def test_padded_batches_mask_their_padding() -> None:
    sequences = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([5, 6, 7], [8])]
    batch = Collator(9)(sequences)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {t.dtype for t in batch.values()} == {torch.int64}


def test_long_documents_are_cut_and_that_is_said(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    args = DataArguments(embedded_corpus="python_stdlib", max_length=4)
    rows = [Row("1", {"text": POEM[0]}), Row("2", {"prompt": POEM[0], "completion": "x"})]
    (only,) = encode_all(rows, tokenizer, args)
    assert len(only["input_ids"]) == 4
    assert "2 of 2 documents are longer than max_length 4 and were cut" in caplog.text
    assert "1 of 2 documents have no token to train on" in caplog.text


def test_the_corpus_is_the_same_twice_and_as_large_as_asked() -> None:
    small, large = read_corpus("python_stdlib", 0.3), read_corpus("python_stdlib", 0.6)
    assert large[: len(small) - 1] == small[:-1]
    assert read_corpus("python_stdlib", 0.3) == small
    assert [sum(len(text) for _, text in texts) for texts in (small, large)] == [300_000, 600_000]
    assert all(name.endswith(".py") and "site-packages" not in name for name, _ in large)


def test_a_trained_tokenizer_is_the_same_twice_and_loses_nothing() -> None:
    one, two = train_tokenizer(POEM, 300), train_tokenizer(POEM, 300)
    assert one.get_vocab() == two.get_vocab()
    assert len(one) == 300
    text = "naïve 日本語\t\n  x = {1: 'ü'}"
    assert one.decode(one(text)["input_ids"]) == text
    assert fingerprint(POEM, 300) != fingerprint(POEM, 301)
    assert fingerprint(["ab", "c"], 300) != fingerprint(["a", "bc"], 300)
