"""What is recorded, what makes logits real, and that both are exact, aliasing included."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, WIDTH, assert_same_gradients
from torch import Tensor, nn

from loss_plugins import patch_model

Post = Callable[["Toy", Any, Tensor], Tensor]


class Toy(nn.Module):
    """A model whose forward does ``post`` between head and loss."""

    def __init__(self, post: Post, bias: bool = False, head: nn.Module | None = None) -> None:
        super().__init__()
        self.post = post
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lm_head = head or nn.Linear(WIDTH, VOCAB, bias=bias)
        self.temperature = nn.Parameter(torch.tensor(1.7))
        self.extra = nn.Parameter(torch.randn(VOCAB))

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        logits = self.lm_head(self.embed(input_ids).tanh())
        loss = None if labels is None else self.post(self, logits, labels)
        return {"loss": loss, "logits": logits}


def plain(logits: Any, labels: Tensor, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].reshape(-1, VOCAB), labels[..., 1:].reshape(-1), **kwargs)


def twin_toys(post: Post, **kwargs: Any) -> tuple[Toy, Toy]:
    toys = []
    for _ in range(2):
        torch.manual_seed(3)
        toys.append(Toy(post, **kwargs).double())
    return toys[0], toys[1]


def inputs(rows: int = 2, length: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def compare(post: Post, strategy: str = "cce", **kwargs: Any) -> Any:
    """Run both; loss and gradients must agree. Returns the handle."""
    ours, stock = twin_toys(post, **kwargs)
    handle = patch_model(ours, strategy)
    expected, output = stock(**inputs()), ours(**inputs())
    torch.testing.assert_close(output["loss"], expected["loss"], atol=1e-10, rtol=0)
    expected["loss"].sum().backward()
    output["loss"].sum().backward()
    assert_same_gradients(gradients(ours), gradients(stock), atol=1e-10)
    if handle.counts.materialised:
        assert torch.equal(output["logits"], expected["logits"])
    else:
        assert output["logits"] is None
    return handle


def masked(z: Any, columns: Any, value: float | None = None) -> Any:
    z[:, :, columns] = torch.finfo(z.dtype).min if value is None else value
    return z


def chameleon(m: Toy, z: Any, y: Tensor) -> Tensor:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[3:9] = True
    return plain(masked(z, mask), below(y, 3, 9))


def below(labels: Tensor, start: int, stop: int) -> Tensor:
    """Labels none of which is in that part of the vocabulary."""
    return labels.masked_fill((labels >= start) & (labels < stop), 20)


def log_probs(m: Toy, z: Any, y: Tensor, **kwargs: Any) -> Tensor:
    return F.nll_loss(F.log_softmax(z, -1).view(-1, VOCAB), y.view(-1), **kwargs)


def prophetnet(m: Toy, z: Any, y: Tensor) -> Tensor:
    z = z.view(2, 7, VOCAB).transpose(0, 1).contiguous()
    return F.nll_loss(F.log_softmax(z.view(-1, z.size(-1)), dim=-1, dtype=torch.float64), y.t().reshape(-1))


def codebooks(m: Toy, z: Any, y: Tensor) -> Tensor:
    stacked = torch.stack([z, z * 2, z.tanh()], dim=1)
    assert stacked.shape == (2, 3, 7, VOCAB)
    tail = stacked[:, :, -5:]
    assert tail.shape == (2, 3, 5, VOCAB)
    losses = [F.cross_entropy(tail[:, i].contiguous().view(-1, VOCAB), y[:, -5:].reshape(-1)) for i in range(3)]
    assert stacked.reshape(-1, *stacked.shape[2:]).shape == (6, 7, VOCAB)
    return sum(losses, torch.zeros([]))


RECORDED: dict[str, Post] = {
    "plain": lambda m, z, y: plain(z, y),
    "module": lambda m, z, y: nn.CrossEntropyLoss()(z.view(-1, VOCAB), y.view(-1)),
    "float": lambda m, z, y: plain(z.double(), y),
    "scale": lambda m, z, y: plain(2.5 * z / 3, y),
    "negative scale": lambda m, z, y: plain(z * -0.5, y),
    "torch.mul and torch.div": lambda m, z, y: plain(torch.div(torch.mul(z, 3.0), 2), y),
    "softcap": lambda m, z, y: plain(torch.tanh(z / 0.7) * 0.7, y),
    "F.tanh, cap of another size": lambda m, z, y: plain(F.tanh(z / 0.7) * 1.9, y),
    "tanh alone": lambda m, z, y: plain(z.tanh(), y),
    "cap turned over": lambda m, z, y: plain((z * 3).tanh() * -2.0 / 5, y),
    "0-d tensor": lambda m, z, y: plain(z / m.temperature, y),
    "0-d tensor from the left": lambda m, z, y: plain(m.temperature * z, y),
    "0-d tensor, then cap": lambda m, z, y: plain((z * m.temperature).tanh() * 2, y),
    "added vector": lambda m, z, y: plain(z + m.extra[None, None], y),
    "scaled, added, scaled": lambda m, z, y: plain((z * 3 + m.extra) * 0.4 / m.temperature, y),
    "added from the left": lambda m, z, y: plain(m.extra + z, y),
    "columns": lambda m, z, y: plain_narrow(z[..., : VOCAB - 7], y),
    "added, columns": lambda m, z, y: plain_narrow((z + m.extra)[..., : VOCAB - 7], y),
    "columns, added": lambda m, z, y: plain_narrow(z[..., : VOCAB - 7] + m.extra[: VOCAB - 7], y),
    "reshape with -1": lambda m, z, y: F.cross_entropy(z.reshape(14, -1), y.reshape(-1)),
    "torch.reshape": lambda m, z, y: F.cross_entropy(torch.reshape(z, (-1, VOCAB)), y.reshape(-1)),
    "flatten": lambda m, z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "view of two": lambda m, z, y: F.cross_entropy(z.view(z.size(0) * z.shape[1], z.size(-1)), y.view(-1)),
    "mask": lambda m, z, y: F.cross_entropy(z[y != -100], y[y != -100]),
    "rows by index": lambda m, z, y: F.cross_entropy(z[:, torch.tensor([0, 2, 5])].view(-1, VOCAB), y[:, :3].flatten()),
    "one position": lambda m, z, y: F.cross_entropy(z[:, -1, :], y[:, -1]),
    "one row": lambda m, z, y: F.cross_entropy(z[1], y[1]),
    "contiguous and clone": lambda m, z, y: plain(z.contiguous().clone(), y),
    "own arguments": lambda m, z, y: F.cross_entropy(
        z.view(-1, VOCAB),
        y.view(-1),
        weight=m.extra.detach().abs(),
        label_smoothing=0.1,
        reduction="sum",
        ignore_index=-100,
    ),
    "another ignore_index": lambda m, z, y: F.cross_entropy(z.view(-1, VOCAB), y.clamp(min=0).view(-1), ignore_index=0),
    "none": lambda m, z, y: plain(z, y, reduction="none"),
    "two losses": lambda m, z, y: plain(z, y) + 0.3 * F.cross_entropy(z[:, 0], y[:, 1].clamp(min=0)),
    "iterated": lambda m, z, y: sum(F.cross_entropy(row, target) for row, target in zip(z, y, strict=True)),
    "chameleon": chameleon,
    "masked by a list": lambda m, z, y: plain(masked(z, [3, 5]), below(y, 3, 6)),
    "masked by a slice of all": lambda m, z, y: plain(masked(z, slice(100, None)), y.clamp(max=99)),
    "masked and scaled": lambda m, z, y: plain(masked(z, [3, 5]) / 2, below(y, 3, 6)),
    "masked twice": lambda m, z, y: plain(masked(masked(z, 3), torch.tensor([5])), below(y, 3, 6)),
    "log_softmax": log_probs,
    "log_softmax, weights, sum": lambda m, z, y: log_probs(m, z, y, weight=m.extra.detach().abs(), reduction="sum"),
    "log_softmax as a method": lambda m, z, y: F.nll_loss(z.log_softmax(-1)[0], y[0]),
    "log_softmax as a module": lambda m, z, y: nn.NLLLoss()(nn.LogSoftmax(2)(z).reshape(-1, VOCAB), y.flatten()),
    "torch.log_softmax": lambda m, z, y: F.nll_loss(torch.log_softmax(z[:, 0], 1), y[:, 4]),
    "tokens transposed": lambda m, z, y: F.cross_entropy(torch.transpose(z, 0, 1).reshape(-1, VOCAB), y.t().flatten()),
    "codebooks": codebooks,
    "prophetnet": prophetnet,
    "moved nowhere": lambda m, z, y: plain(z.to(z.device).to(y.device, torch.float64).type_as(z), y),
}


def plain_narrow(logits: Any, labels: Tensor) -> Tensor:
    labels = labels.clamp(max=VOCAB - 8)
    return F.cross_entropy(logits.reshape(-1, VOCAB - 7), labels.reshape(-1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("what", RECORDED)
def test_recorded(what: str, bias: bool) -> None:
    for strategy in ("naive", "chunked", "flce", "cce"):
        handle = compare(RECORDED[what], strategy, bias=bias)
        assert handle.counts.materialised == 0, handle.materialised_by
        assert handle.counts.fused >= 1


REPLAYED: dict[str, Post] = {
    "two caps": lambda m, z, y: plain((z.tanh() * 3).tanh(), y),
    "tensor after cap": lambda m, z, y: plain(z.tanh() * m.temperature, y),
    "added after cap": lambda m, z, y: plain(z.tanh() + m.extra[None], y),
}


@pytest.mark.parametrize("what", REPLAYED)
def test_replayed_in_chunks(what: str, caplog: pytest.LogCaptureFixture) -> None:
    for strategy in ("naive", "chunked", "auto"):
        assert compare(REPLAYED[what], strategy).counts.materialised == 0
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    compare(REPLAYED[what], "cce")
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "'cce' was asked for" in record.getMessage()
    assert "'chunked' runs instead" in record.getMessage()


def copy_then_write(m: Toy, z: Any, y: Tensor) -> Tensor:
    copied, seen = z.clone(), z[:, :-1]
    z[:, :, :5] = -3.0
    return plain(copied, y) + 0.5 * F.cross_entropy(seen.reshape(-1, VOCAB), y[:, 1:].reshape(-1))


def write_through_a_view(m: Toy, z: Any, y: Tensor) -> Tensor:
    z[:, 2:].mul_(3.0)
    return plain(z, y)


def write_then_copy_then_write(m: Toy, z: Any, y: Tensor) -> Tensor:
    z *= 2
    kept = z.contiguous() * 1
    z.masked_fill_(torch.ones((), dtype=torch.bool), 0.0)
    return plain(kept, y) + z.sum()


def mask_after_copy(m: Toy, z: Any, y: Tensor) -> Tensor:
    seen = z * 1
    return plain(masked(z, [3]), below(y, 3, 4)) + plain(seen, y)


def mask_one_token(m: Toy, z: Any, y: Tensor) -> Tensor:
    z[:, 2, 3:9] = torch.finfo(z.dtype).min
    return plain(z, below(y, 3, 9))


def write_after_log_softmax(m: Toy, z: Any, y: Tensor) -> Tensor:
    log = F.log_softmax(z, -1)
    z.mul_(3.0)
    return F.nll_loss(log.view(-1, VOCAB), y.view(-1)) + plain(z, y)


MATERIALISED: dict[str, tuple[Post, str]] = {
    "masked after a copy": (mask_after_copy, "__setitem__"),
    "masked with a number that leaves something": (lambda m, z, y: plain(masked(z, [3], -1e4), y), "__setitem__"),
    "masked with infinity": (lambda m, z, y: plain(masked(z, [3], -math.inf), below(y, 3, 4)), "__setitem__"),
    "masked at one token": (mask_one_token, "__setitem__"),
    "copy, then write": (copy_then_write, "__setitem__"),
    "write through a view": (write_through_a_view, "mul_"),
    "write, copy, write": (write_then_copy_then_write, "__imul__"),
    "F.relu in place": (lambda m, z, y: plain(F.relu(z, inplace=True), y), "relu"),
    "logsumexp after the loss": (lambda m, z, y: plain(z, y) + 1e-2 * z.logsumexp(-1).pow(2).mean(), "logsumexp"),
    "torch.logsumexp": (lambda m, z, y: plain(z, y) + torch.logsumexp(z, -1).mean(), "logsumexp"),
    "sum of log_softmax": (lambda m, z, y: log_probs(m, z, y) - F.log_softmax(z, -1).sum(), "log_softmax, sum"),
    "log_softmax over tokens": (lambda m, z, y: plain(z, y) + F.log_softmax(z, 1).sum(), "log_softmax"),
    "written to after log_softmax": (write_after_log_softmax, "mul_"),
    "channels second": (lambda m, z, y: F.cross_entropy(z.transpose(1, 2), y), "transpose"),
    "three axes": (lambda m, z, y: F.cross_entropy(z, (y % 7)[:, :1].expand(-1, VOCAB)), "cross_entropy"),
    "probabilities": (
        lambda m, z, y: F.cross_entropy(z.view(-1, VOCAB), F.one_hot(y.clamp(min=0), VOCAB).double().view(-1, VOCAB)),
        "cross_entropy",
    ),
    "vector scale": (lambda m, z, y: plain(z * m.extra, y), "mul"),
    "minus": (lambda m, z, y: plain(z - z.amax(-1, keepdim=True), y), "amax"),
    "stack at the end": (lambda m, z, y: plain(torch.stack([z, z], -1)[..., 0], y), "stack"),
    "sum of codebooks": (lambda m, z, y: plain(torch.stack([z, z * 2]).sum(0), y), "sum"),
    "one codebook as a view": (lambda m, z, y: plain(torch.stack([z, z * 2]).view(4, 7, VOCAB)[2:], y), "__getitem__"),
    "new axis": (lambda m, z, y: plain(z[None][0], y), "__getitem__"),
    "steps in the vocabulary": (lambda m, z, y: F.cross_entropy(z[..., ::2].reshape(-1, 60), y.view(-1) % 60), "__getitem__"),
    "numpy": (lambda m, z, y: plain(z, y) + float(z.detach().numpy().max()), "numpy"),
}  # fmt: skip


@pytest.mark.parametrize("what", MATERIALISED)
def test_materialised(what: str, caplog: pytest.LogCaptureFixture) -> None:
    post, why = MATERIALISED[what]
    handle = compare(post)
    assert handle.counts.materialised == 1
    assert handle.materialised_by == [why]
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert repr(why) in record.getMessage()
    assert "exact" in record.getMessage()


def test_said_once_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    ours, _ = twin_toys(MATERIALISED["channels second"][0])
    handle = patch_model(ours, "cce")
    for _ in range(3):
        ours(**inputs())
    assert handle.counts.materialised == 3
    assert len(caplog.records) == 1


def test_detached_logits_give_no_gradient() -> None:
    ours, stock = twin_toys(lambda m, z, y: plain(z.detach(), y))
    patch_model(ours, "cce")
    expected, output = stock(**inputs())["loss"], ours(**inputs())["loss"]
    torch.testing.assert_close(output, expected, atol=1e-10, rtol=0)
    assert not output.requires_grad


def test_hidden_states_written_to_are_refused() -> None:
    from loss_plugins.errors import UnsupportedError

    class Writing(Toy):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
            hidden = self.embed(input_ids).tanh()
            logits = self.lm_head(hidden)
            with torch.no_grad():
                hidden.zero_()
            return {"loss": plain(logits, labels), "logits": None}

    model = Writing(lambda *_: torch.zeros(())).double()
    patch_model(model, "cce")
    with pytest.raises(UnsupportedError, match="hidden states in place"):
        model(**inputs())


def test_what_a_tensor_answers_about_itself() -> None:
    seen: dict[str, Any] = {}

    def post(m: Toy, z: Any, y: Tensor) -> Tensor:
        seen[type(z).__name__] = (
            z.shape, z.size(), z.size(-1), z.dim(), z.ndim, len(z), z.numel(), z.dtype, z.device, z.is_floating_point(),
            torch.numel(z), torch.is_floating_point(z), z.requires_grad, z[0].shape, z[:, 1:].size(1), z[0, 0].ndim,
            z.half().dtype, z.detach().requires_grad,
        )  # fmt: skip
        return plain(z, y)

    handle = compare(post)
    assert handle.counts.materialised == 0
    assert seen["DeferredLogits"] == seen["Tensor"]


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    ours, _ = twin_toys(lambda m, z, y: z.no_such_thing)
    patch_model(ours, "cce")
    with pytest.raises(AttributeError, match="no_such_thing"):
        ours(**inputs())


def test_a_forward_without_a_loss_returns_its_logits() -> None:
    ours, stock = twin_toys(lambda m, z, y: None)
    handle = patch_model(ours, "cce")
    assert torch.equal(ours(**inputs())["logits"], stock(**inputs())["logits"])
    assert handle.counts.materialised == 1


@pytest.mark.parametrize("strategy", ["naive", "chunked", "flce", "cce"])
def test_out_of_range_labels_raise(strategy: str) -> None:
    ours, _ = twin_toys(RECORDED["plain"])
    patch_model(ours, strategy)
    batch = inputs()
    batch["labels"][1, 3] = VOCAB
    with pytest.raises(ValueError, match="labels hold 120"):
        ours(**batch)
