"""The registered operators: schema, fake, autograd, and a launch that loads its backend on first use.

The operators, each opaque to torch.compile (the loss runs once a step, so a call's few microseconds do not matter):

- ``linear_ce``: per-row losses without logits; its backward computes the logits again (``linear_ce_backward``).
- ``flce``: the total over rows, with its gradients computed in the forward; its backward only scales them.
- ``cross_entropy``: per-row losses of logits that exist; its backward may write over them.

``kernels`` names the backend folder that computes. All shapes: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ._ops import NAMESPACE
from ._rows import accumulator

_launched: set[str] = set()


def launched() -> frozenset[str]:
    """``backend.entry`` of every entry function that has run in this process since `forget_launches`."""
    return frozenset(_launched)


def forget_launches() -> None:
    """Start `launched` anew."""
    _launched.clear()


def record(entry: str) -> None:
    """Let `launched` tell of what runs past the operators of this file."""
    _launched.add(entry)


def backends() -> list[str]:
    """Names of the backend folders."""
    import pkgutil

    return sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(__package__).__path__) if m.ispkg)


_added: dict[str, Any] = {}


def add_backend(name: str, entries: Any) -> None:
    """Let ``kernels`` name a backend of another package: an object with the entry functions of `kernels/torch`."""
    _added[name] = entries


def backend(name: str) -> Any:
    """The backend's package, imported on first use; or what was added under that name."""
    return _added[name] if name in _added else importlib.import_module(f".{name}", __package__)


def _launch(name: str, function: str, *args: Any) -> Any:
    _launched.add(f"{name}.{function}")
    device = args[0].device.type
    if not torch.is_autocast_enabled(device):
        return getattr(backend(name), function)(*args)
    # the types are chosen already; inside, autocast would round the float32 products to the half type
    with torch.autocast(device, enabled=False):
        return getattr(backend(name), function)(*args)


@torch.library.custom_op(f"{NAMESPACE}::linear_ce", mutates_args=())
def linear_ce(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    want_entropy: bool,
    want_predicted: bool,
    filter_hidden: float,
    filter_weight: float,
    want_dropped: bool,
    tile_bytes: int,
    forward_kernels: str,
    backward_kernels: str,
    filter_bound: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, lse, entropy, predicted, dropped, marks): (N,) each, the three from entropy (0,) unless asked for.
    The first three are differentiable.

    The filters are the probability below which columns are left out of dX and of dW, 0 for none. A backend that marks
    columns for its backward leaves out no more than ``filter_bound`` of a row.
    """
    below = min((below for below in (filter_hidden, filter_weight) if below > 0), default=0.0)
    alone = forward_kernels != backward_kernels  # then the backward looks for itself
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = _launch(
        forward_kernels, "linear_ce_forward", hidden, weight, bias, labels, class_weight, ignore_index, scale, softcap,
        label_smoothing, z_loss, dtype, want_entropy, want_predicted, tile_bytes, 0.0 if alone else below,
        filter_bound, want_dropped,
    )  # fmt: skip
    if want_dropped and below and alone and backward_kernels == "torch":
        dropped = _launch(
            "torch", "dropped_mass", hidden, weight, bias, labels, results[2], ignore_index, scale, softcap, dtype,
            below, tile_bytes,
        )  # fmt: skip
        return (*results[:5], dropped, results[6])
    return results


@linear_ce.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None, ignore_index: int,
    scale: float, softcap: float, label_smoothing: float, z_loss: float, dtype: torch.dtype, want_entropy: bool,
    want_predicted: bool, filter_hidden: float, filter_weight: float, want_dropped: bool, tile_bytes: int,
    forward_kernels: str, backward_kernels: str, filter_bound: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, vocab = hidden.shape[0], weight.shape[0]
    acc = accumulator(dtype)
    marks = (0, 0)
    if forward_kernels == "ascend" and (filter_hidden > 0 or filter_weight > 0) and forward_kernels == backward_kernels:
        marks = backend(forward_kernels).marks_shape(rows, vocab, tile_bytes, dtype.itemsize)
    elif forward_kernels == "triton":
        marked = (filter_hidden > 0 or filter_weight > 0) and forward_kernels == backward_kernels
        marks = ((rows + 127) // 128 if marked else 0, (vocab + 31) // 32)
    return (
        hidden.new_empty(rows, dtype=acc),
        hidden.new_empty(rows, dtype=acc),
        hidden.new_empty(rows, dtype=acc),
        hidden.new_empty(rows if want_entropy else 0, dtype=acc),
        hidden.new_empty(rows if want_predicted else 0, dtype=torch.int64),
        hidden.new_empty(rows if want_dropped else 0, dtype=acc),
        hidden.new_empty(marks, dtype=torch.int32),
    )


@torch.library.custom_op(f"{NAMESPACE}::linear_ce_backward", mutates_args=())
def linear_ce_backward(
    grad: Tensor,  # (N,)
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    class_weight: Tensor | None,  # (V,)
    lse: Tensor,  # (N,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    filter_hidden: float,
    filter_weight: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    tile_bytes: int,
    kernels: str,
    marks: Tensor | None = None,  # (blocks, ceil(V / 32)) int32 from the forward, or empty
    grad_nll: Tensor | None = None,  # (N,) beside ``grad``, where nll and lse are used too
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dW, db), empty where not needed."""
    gradients: tuple[Tensor, Tensor, Tensor] = _launch(
        kernels, "linear_ce_backward", grad, hidden, weight, bias, labels, class_weight, lse, ignore_index, scale,
        softcap, label_smoothing, z_loss, dtype, filter_hidden, filter_weight, need_hidden, need_weight, need_bias,
        tile_bytes, marks, grad_nll, grad_lse,
    )  # fmt: skip
    return gradients


@linear_ce_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None,
    lse: Tensor, ignore_index: int, scale: float, softcap: float, label_smoothing: float, z_loss: float,
    dtype: torch.dtype, filter_hidden: float, filter_weight: float, need_hidden: bool, need_weight: bool,
    need_bias: bool, tile_bytes: int, kernels: str, marks: Tensor | None = None, grad_nll: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (rows, width), vocab = hidden.shape, weight.shape[0]
    return (
        hidden.new_empty(rows if need_hidden else 0, width),
        weight.new_empty((vocab, width) if need_weight else (0,)),
        (hidden if bias is None else bias).new_empty(
            vocab if need_bias else 0, dtype=accumulator(dtype) if bias is None else bias.dtype
        ),
    )


def _linear_ce_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, class_weight, *ctx.scalars = inputs
    ctx.save_for_backward(hidden, weight, bias, labels, class_weight, output[2], output[6])
    ctx.set_materialize_grads(False)


def _linear_ce_grad(
    ctx: Any, grad_loss: Tensor | None, grad_nll: Tensor | None, grad_lse: Tensor | None, *others: Tensor | None
) -> tuple[Any, ...]:
    hidden, weight, bias, labels, class_weight, lse, marks = ctx.saved_tensors
    (ignore_index, scale, softcap, label_smoothing, z_loss, dtype, _, _, filter_hidden, filter_weight, _, tile_bytes, _,
     kernels, _) = ctx.scalars  # fmt: skip
    unused = (None,) * (2 + len(ctx.scalars))
    if grad_loss is None and grad_nll is None and grad_lse is None:
        return (None, None, None, *unused)
    grad_loss = torch.zeros_like(lse) if grad_loss is None else grad_loss
    need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    d_hidden, d_weight, d_bias = linear_ce_backward(
        grad_loss, hidden, weight, bias, labels, class_weight, lse, ignore_index, scale, softcap, label_smoothing,
        z_loss, dtype, filter_hidden, filter_weight, need_hidden, need_weight, need_bias, tile_bytes, kernels, marks,
        grad_nll, grad_lse,
    )  # fmt: skip
    return (
        d_hidden if need_hidden else None,
        d_weight if need_weight else None,
        d_bias if need_bias else None,
        *unused,
    )


linear_ce.register_autograd(_linear_ce_grad, setup_context=_linear_ce_setup)


@torch.library.custom_op(f"{NAMESPACE}::flce", mutates_args=())
def flce(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    row_scale: Tensor,  # (N,)
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    want_entropy: bool,
    want_predicted: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    chunk_rows: int,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(total, dX, dW, db, nll, lse, entropy, predicted): the total is ``(loss * row_scale).sum()``."""
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = _launch(
        kernels, "flce_forward", hidden, weight, bias, labels, row_scale, class_weight, ignore_index, scale, softcap,
        label_smoothing, z_loss, dtype, want_entropy, want_predicted, need_hidden, need_weight, need_bias, chunk_rows,
    )  # fmt: skip
    return results


@flce.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, row_scale: Tensor, class_weight: Tensor | None,
    ignore_index: int, scale: float, softcap: float, label_smoothing: float, z_loss: float, dtype: torch.dtype,
    want_entropy: bool, want_predicted: bool, need_hidden: bool, need_weight: bool, need_bias: bool, chunk_rows: int,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (rows, width), vocab = hidden.shape, weight.shape[0]
    acc = accumulator(dtype)
    return (
        hidden.new_empty((), dtype=acc),
        hidden.new_empty(rows if need_hidden else 0, width),
        weight.new_empty((vocab, width) if need_weight else (0,)),
        (hidden if bias is None else bias).new_empty(
            vocab if need_bias else 0, dtype=acc if bias is None else bias.dtype
        ),
        hidden.new_empty(rows, dtype=acc),
        hidden.new_empty(rows, dtype=acc),
        hidden.new_empty(rows if want_entropy else 0, dtype=acc),
        hidden.new_empty(rows if want_predicted else 0, dtype=torch.int64),
    )


def _flce_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:4])
    ctx.inputs, ctx.kernels = len(inputs), inputs[-1]
    ctx.set_materialize_grads(False)


def _flce_grad(ctx: Any, grad_total: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    unused = (None,) * (ctx.inputs - 3)
    if grad_total is None:
        return (None, None, None, *unused)
    # a second backward over a retained graph must find the same numbers
    gradients = ctx.saved_tensors  # asked for once: a checkpoint computes them again for who asks
    in_place = _is_last(*gradients, grad_total) and hasattr(backend(ctx.kernels), "scale_")
    scale = _scaled_in_place if in_place else _scaled
    scaled = [
        scale(saved, grad_total, ctx.kernels) if need else None
        for saved, need in zip(gradients, ctx.needs_input_grad[:3], strict=True)
    ]
    return (*scaled, *unused)


def _is_last(*tensors: Tensor) -> bool:
    """Whether the graph is freed after this backward, so that nobody will read what it saved. False also where torch
    cannot say: while it compiles, inside its function transforms, before 2.6."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    transforms = torch._C._functorch
    wrapped = (transforms.is_functorch_wrapped_tensor, transforms.is_legacy_batchedtensor)
    plain = all(type(t) is Tensor and not any(is_so(t) for is_so in wrapped) for t in tensors)
    return keeps is not None and plain and not torch.compiler.is_compiling() and not keeps()


def _scaled_in_place(saved: Tensor, factor: Tensor, kernels: str) -> Tensor:
    saved = saved.detach()
    backend(kernels).scale_(saved, factor)
    return saved


@torch.library.custom_op(f"{NAMESPACE}::scaled", mutates_args=())
def _scaled(saved: Tensor, factor: Tensor, kernels: str) -> Tensor:
    """``saved * factor`` in the type of ``saved``. An operator without autograd, so that a second derivative through
    gradients that were computed in the forward is an error and not a wrong number."""
    scaled: Tensor = backend(kernels).scaled(saved, factor)
    return scaled


@_scaled.register_fake
def _(saved: Tensor, factor: Tensor, kernels: str) -> Tensor:
    return torch.empty_like(saved)


flce.register_autograd(_flce_grad, setup_context=_flce_setup)


@torch.library.custom_op(f"{NAMESPACE}::cross_entropy", mutates_args=())
def cross_entropy(
    logits: Tensor,  # (B, T, V), any strides
    labels: Tensor,  # (B * T,) int64 or int32
    class_weight: Tensor | None,  # (V,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    want_entropy: bool,
    want_predicted: bool,
    inplace: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, maximum, log of the sum, entropy, predicted), each (B * T,), the last two (0,) unless asked for.

    The log-sum-exp of a row is maximum + log of the sum. With ``inplace`` the backward writes the gradient over the
    logits, once: see `cross_entropy_backward_inplace`. Whether that is allowed is for the caller to know.
    """
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = _launch(
        kernels, "cross_entropy_forward", logits, labels, class_weight, ignore_index, scale, softcap, label_smoothing,
        z_loss, want_entropy, want_predicted,
    )  # fmt: skip
    return results


@cross_entropy.register_fake
def _(
    logits: Tensor, labels: Tensor, class_weight: Tensor | None, ignore_index: int, scale: float, softcap: float,
    label_smoothing: float, z_loss: float, want_entropy: bool, want_predicted: bool, inplace: bool, kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, acc = labels.shape[0], accumulator(logits.dtype)
    loss, nll, max_, log_sum = (logits.new_empty(rows, dtype=acc) for _ in range(4))
    entropy = logits.new_empty(rows if want_entropy else 0, dtype=acc)
    return loss, nll, max_, log_sum, entropy, logits.new_empty(rows if want_predicted else 0, dtype=torch.int64)


@torch.library.custom_op(f"{NAMESPACE}::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    grad: Tensor,  # (B * T,)
    logits: Tensor,  # (B, T, V)
    labels: Tensor,  # (B * T,)
    class_weight: Tensor | None,  # (V,)
    max_: Tensor,  # (B * T,)
    log_sum: Tensor,  # (B * T,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    kernels: str,
) -> Tensor:
    """The gradient of the logits."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _launch(
        kernels, "cross_entropy_backward", grad, logits, out, labels, class_weight, max_, log_sum, ignore_index, scale,
        softcap, label_smoothing, z_loss,
    )  # fmt: skip
    return out


@cross_entropy_backward.register_fake
def _(
    grad: Tensor, logits: Tensor, labels: Tensor, class_weight: Tensor | None, max_: Tensor, log_sum: Tensor,
    ignore_index: int, scale: float, softcap: float, label_smoothing: float, z_loss: float, kernels: str,
) -> Tensor:  # fmt: skip
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{NAMESPACE}::cross_entropy_backward_inplace", mutates_args=("logits",))
def cross_entropy_backward_inplace(
    grad: Tensor,  # (B * T,)
    logits: Tensor,  # (B, T, V)
    labels: Tensor,  # (B * T,)
    class_weight: Tensor | None,  # (V,)
    max_: Tensor,  # (B * T,)
    log_sum: Tensor,  # (B * T,)
    ignore_index: int,
    scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    kernels: str,
) -> None:
    """`cross_entropy_backward` over the logits. An operator that says so raises their version, so whoever saved them
    for a backward of its own is told by autograd."""
    _launch(
        kernels, "cross_entropy_backward", grad, logits, logits, labels, class_weight, max_, log_sum, ignore_index,
        scale, softcap, label_smoothing, z_loss,
    )  # fmt: skip


@cross_entropy_backward_inplace.register_fake
def _(
    grad: Tensor, logits: Tensor, labels: Tensor, class_weight: Tensor | None, max_: Tensor, log_sum: Tensor,
    ignore_index: int, scale: float, softcap: float, label_smoothing: float, z_loss: float, kernels: str,
) -> None:  # fmt: skip
    return None


def _cross_entropy_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, class_weight, *ctx.scalars = inputs
    ctx.save_for_backward(logits, labels, class_weight, output[2], output[3])
    ctx.set_materialize_grads(False)
    ctx.written = False


def _cross_entropy_grad(ctx: Any, grad_loss: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    unused = (None,) * (2 + len(ctx.scalars))
    if grad_loss is None:
        return (None, *unused)
    *numbers, _, _, inplace, kernels = ctx.scalars
    if not inplace:
        return (cross_entropy_backward(grad_loss, *ctx.saved_tensors, *numbers, kernels), *unused)
    if ctx.written:
        raise RuntimeError(
            "A second backward through a cross-entropy with inplace=True was asked for, but the first one has written "
            "the gradient over the logits. Leave inplace out where the graph is retained."
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "A backward with create_graph=True through a cross-entropy with inplace=True was asked for, and a gradient "
            "that lies where the logits were cannot be differentiated. Leave inplace out."
        )
    logits, *saved = ctx.saved_tensors
    ctx.written = True
    cross_entropy_backward_inplace(grad_loss, logits, *saved, *numbers, kernels)
    return (logits.detach(), *unused)


cross_entropy.register_autograd(_cross_entropy_grad, setup_context=_cross_entropy_setup)
