"""One of two processes that hold a head together; rank 0 prints one JSON line a case. `test_vocab_parallel.py` starts
it."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from loss_plugins import VocabParallel, linear_cross_entropy, linear_cross_entropy_stats, linear_log_probs
from loss_plugins.errors import LossPluginError
from loss_plugins.strategies import FIELDS
from loss_plugins.testing import leave_group

ROWS, WIDTH, VOCAB, CUT = 24, 16, 61, 37
SMALL = {
    "naive": None,
    "chunked": {"workspace_mb": 0.002},
    "flce": {"workspace_mb": 0.002},
    "cce": {"workspace_mb": 0.001},
    "auto": None,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shift": {"shift": 1},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "items": {"num_items_in_batch": 17},
    "bias": {"bias": True},
    "scale and softcap": {"logit_scale": -0.7, "softcap": 3.0, "bias": True},
    "smoothing": {"label_smoothing": 0.1, "bias": True},
    "smoothing only": {"label_smoothing": 1.0},
    "smoothing and class weights": {"label_smoothing": 0.3, "class_weight": True, "softcap": 2.0},
    "class weights": {"class_weight": True},
    "token weights": {"token_weight": True, "shift": 2},
    "z-loss": {"z_loss": 1e-2},
    "ignored class": {"ignore_index": 40},
    "all": {
        "logit_scale": 1.3, "softcap": 4.0, "label_smoothing": 0.05, "z_loss": 1e-3, "class_weight": True, "bias": True,
        "token_weight": True, "num_items_in_batch": 5.5, "shift": 1,
    },
}  # fmt: skip


def say(case: str, **result: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"case": case, **result}), flush=True)


def tensors(dtype: torch.dtype = torch.float64) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    made = {
        "hidden": torch.randn(2, ROWS // 2, WIDTH, generator=g, dtype=torch.float64),
        "weight": torch.randn(VOCAB, WIDTH, generator=g, dtype=torch.float64),
        "bias": torch.randn(VOCAB, generator=g, dtype=torch.float64),
    }
    made["weight"][50] = made["weight"][3]  # the first of equals is in the other part
    made["bias"][50] = made["bias"][3]
    made["hidden"][1, 4] = 9 * made["weight"][3] / made["weight"][3].norm()
    labels = torch.randint(0, VOCAB, (2, ROWS // 2), generator=g)
    labels[:, ::4] = -100
    labels[0, 1], labels[0, 2], labels[0, 3], labels[1, 4] = 0, CUT - 1, CUT, 3
    others = {
        "class_weight": torch.rand(VOCAB, generator=g, dtype=torch.float64) + 0.5,
        "token_weight": torch.rand(2, ROWS // 2, generator=g),
    }
    return {key: value.to(dtype) for key, value in made.items()}, labels, others


def filled(settings: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    return {key: others[key] if value is True else value for key, value in settings.items() if key != "bias"}


def largest(pairs: Any) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def compare(case: str, strategy: str, settings: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
    """Loss, gradients and statistics of two parts with those of the whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    made, labels, others = tensors(dtype)
    if "ignore_index" in settings:
        labels = torch.where(labels == -100, settings["ignore_index"], labels)
    parallel = VocabParallel(0, CUT) if rank == 0 else VocabParallel(CUT, VOCAB)
    with_bias = settings.get("bias", False)
    results = []
    for part in (slice(None), parallel.rows):
        hidden = made["hidden"].clone().requires_grad_()
        weight = made["weight"][part].clone().requires_grad_()
        bias = made["bias"][part].clone().requires_grad_() if with_bias else None
        fields = [name for name in FIELDS if name != "dropped" or strategy != "naive"]
        out = linear_cross_entropy_stats(
            hidden * 1.0, weight, labels, bias=bias, fields=fields, strategy=strategy, options=SMALL[strategy],
            vocab_parallel=None if part == slice(None) else parallel, **filled(settings, others),
        )  # fmt: skip
        upstream = torch.linspace(0.3, 1.7, out.loss.numel(), dtype=out.loss.dtype).reshape(out.loss.shape)
        out.loss.backward(upstream)
        results.append((out, [hidden.grad, weight.grad, *([bias.grad] if with_bias else [])]))
    (whole, gradients), (ours, own) = results
    pairs = [(own[0], gradients[0]), *((a, b[parallel.rows]) for a, b in zip(own[1:], gradients[1:], strict=True))]
    fields = [(a, b) for a, b in zip(ours[1:], whole[1:], strict=True) if b is not None]
    error = torch.tensor([largest([(ours.loss, whole.loss)]), largest(pairs), largest(fields)])
    size = min(a.abs().max().item() for a, _ in pairs)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    same = [ours.loss.clone() for _ in range(world)]
    dist.all_gather(same, ours.loss.detach().contiguous())
    say(
        case, loss=error[0].item(), gradient=error[1].item(), fields=error[2].item(), size=size, count=len(fields),
        equal=torch.equal(same[0], same[1]) or bool(same[0].isnan().all()), shape=ours.loss.shape == whole.loss.shape,
        type=str(ours.loss.dtype) == str(whole.loss.dtype),
    )  # fmt: skip


def special(parallel: VocabParallel) -> None:
    made, labels, _ = tensors()
    rank = dist.get_rank()
    part = made["weight"][parallel.rows]

    def gradients(labels: torch.Tensor, sequence: bool = False, **kwargs: Any) -> Any:
        hidden, weight = made["hidden"].clone().requires_grad_(), made["weight"].clone().requires_grad_()
        whole = linear_cross_entropy(hidden, weight, labels, strategy="chunked", **kwargs)
        whole.backward()
        held = made["hidden"].chunk(2, 1)[rank] if sequence else made["hidden"]
        held, own = held.clone().requires_grad_(), part.clone().requires_grad_()
        here = VocabParallel(parallel.start, parallel.stop, sequence_axis=1 if sequence else None)
        loss = linear_cross_entropy(held, own, labels, strategy="cce", vocab_parallel=here, **kwargs)
        loss.backward()
        d_hidden = hidden.grad.chunk(2, 1)[rank] if sequence else hidden.grad
        pairs = [(loss, whole), (held.grad, d_hidden), (own.grad, weight.grad[parallel.rows])]
        error = torch.tensor([largest((a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)])
        dist.all_reduce(error, dist.ReduceOp.MAX)
        return {"error": error.item(), "nan": bool(loss.isnan())}

    say("no token", **gradients(torch.full_like(labels, -100)))
    say("no token, items", **gradients(torch.full_like(labels, -100), num_items_in_batch=9))
    say("one part has all labels", **gradients(labels.clamp(max=CUT - 1)))
    say("sequence", **gradients(labels, sequence=True, shift=1))

    # half of the hidden states and the weight frozen, each in turn
    for frozen in ("hidden", "weight"):
        leaves = {"hidden": made["hidden"].clone(), "weight": part.clone()}
        full = {"hidden": made["hidden"].clone(), "weight": made["weight"].clone()}
        other = "weight" if frozen == "hidden" else "hidden"
        leaves[other].requires_grad_()
        full[other].requires_grad_()
        linear_cross_entropy(**leaves, labels=labels, strategy="cce", vocab_parallel=parallel).backward()
        linear_cross_entropy(**full, labels=labels, strategy="cce").backward()
        expected = full[other].grad if other == "hidden" else full[other].grad[parallel.rows]
        say(f"frozen {frozen}", error=largest([(leaves[other].grad, expected)]))

    log_probs = linear_log_probs(made["hidden"], part, labels, strategy="flce", vocab_parallel=parallel)
    expected = linear_log_probs(made["hidden"], made["weight"], labels, strategy="flce")
    say("log_probs", error=largest([(log_probs, expected)]))

    compiled = torch.compile(linear_cross_entropy, backend="eager")
    pairs = []
    for function in (compiled, linear_cross_entropy):
        leaves = [made["hidden"].clone().requires_grad_(), part.clone().requires_grad_()]
        loss = function(*leaves, labels, strategy="cce", shift=1, vocab_parallel=parallel)
        loss.backward()
        pairs.append([loss, *(leaf.grad for leaf in leaves)])
    say("compiled", error=largest(zip(*pairs, strict=True)))

    even = VocabParallel.even(VOCAB)
    say("even", bounds=[even.start, even.stop, even.vocab])


def refused(parallel: VocabParallel) -> None:
    made, labels, _ = tensors()
    rank = dist.get_rank()
    hidden, part = made["hidden"], made["weight"][parallel.rows]

    def attempt(case: str, parallel: VocabParallel, part: Any = part, labels: Any = labels, **kwargs: Any) -> None:
        said = ""
        try:
            linear_cross_entropy(hidden, part, labels, strategy="cce", vocab_parallel=parallel, **kwargs)
        except LossPluginError as error:
            said = f"{type(error).__name__}: {error}"
        everywhere: list[Any] = [None, None]
        dist.all_gather_object(everywhere, said)
        say(case, said=everywhere)

    gap = VocabParallel(0, CUT) if rank == 0 else VocabParallel(CUT + 1, VOCAB)
    attempt("gap", gap, made["weight"][gap.rows])
    attempt("overlap", VocabParallel(0, VOCAB), made["weight"])
    attempt("rows of the weight", VocabParallel(parallel.start, parallel.stop), made["weight"])
    attempt("other labels", parallel, labels=torch.where(labels == 0, rank, labels))
    attempt("other tokens", parallel, labels=torch.where(labels == 0, -100 * rank, labels))
    attempt("no such class", parallel, labels=torch.where(labels == 0, VOCAB, labels))
    attempt("whole bias", parallel, bias=made["bias"])
    attempt("unequal sequence", VocabParallel(parallel.start, parallel.stop, sequence_axis=1))
    attempt("the same part", VocabParallel(0, CUT, vocab=VOCAB), made["weight"][:CUT])
    known = VocabParallel(gap.start, gap.stop, vocab=VOCAB)
    attempt("a gap in what is known", known, made["weight"][known.rows])
    known = VocabParallel(0, CUT + 1, vocab=VOCAB) if rank == 0 else VocabParallel(CUT, VOCAB, vocab=VOCAB)
    attempt("an overlap in what is known", known, made["weight"][known.rows])
    attempt("another vocabulary", VocabParallel(parallel.start, parallel.stop, vocab=VOCAB + rank))
    said = ""
    try:
        linear_cross_entropy(
            hidden.clone().requires_grad_(), part, labels, strategy="vocab_parallel_worker:NO_GRADIENT",
            vocab_parallel=parallel,
        )  # fmt: skip
    except LossPluginError as error:
        said = f"{type(error).__name__}: {error}"
    say("no gradient", said=[said])


class NoGradient:
    """A strategy of somebody else's, which knows nothing of parts."""

    name, summary = "nograd", "detached fields"

    def __init__(self) -> None:
        from loss_plugins.strategies.naive import STRATEGY

        self.inner, self.Options = STRATEGY, STRATEGY.Options

    def check(self, *_: Any) -> None:
        return None

    def __call__(self, rows: Any, options: Any, profile: Any) -> Any:
        result = self.inner(rows, options, profile)
        return result._replace(nll=result.nll.detach(), lse=result.lse.detach())

    def peak_bytes(self, *_: Any) -> int:
        return 0

    def kernels(self, *_: Any) -> str:
        return "torch"


NO_GRADIENT = NoGradient()


def main(path: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for strategy in SMALL:
        for name, settings in SETTINGS.items():
            compare(f"{strategy}, {name}", strategy, settings)
    compare("bfloat16", "cce", {"softcap": 4.0}, torch.bfloat16)
    parallel = VocabParallel(0, CUT) if rank == 0 else VocabParallel(CUT, VOCAB)
    special(parallel)
    refused(parallel)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
