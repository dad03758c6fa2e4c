"""What the Triton kernels share: the transform of a tile of logits, and how launches are shaped.

In kernels ``i_`` is an index, ``o_`` offsets, ``m_`` a mask, ``b_`` a block, ``p_`` a pointer; capitals are sizes.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tuning import Blocks, blocks_of, device_keys, sm

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None


@triton.jit
def logits_tile(
    hidden,  # descriptor, or pointers (BLOCK_N, 1)
    weight,  # descriptor, or pointers (1, BLOCK_V)
    hidden_col,
    weight_col,
    i_n,  # first row
    i_v,  # first column
    m_n,
    m_v,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """``hidden @ weight.T`` of one tile, float32."""
    b_z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for i_h in range(0, H, BLOCK_H):
        if TMA:
            b_z = tl.dot(hidden.load([i_n, i_h]).to(DTYPE), weight.load([i_v, i_h]).to(DTYPE).T, b_z)
        else:
            o_h = i_h + tl.arange(0, BLOCK_H)
            m_h = o_h < H
            b_h = tl.load(hidden + o_h[None, :] * hidden_col, mask=m_n[:, None] & m_h[None, :], other=0.0)
            b_w = tl.load(weight + o_h[:, None] * weight_col, mask=m_v[None, :] & m_h[:, None], other=0.0)
            b_z = tl.dot(b_h.to(DTYPE), b_w.to(DTYPE), b_z, input_precision=PRECISION)
    return b_z


@triton.jit
def transform(
    b_z, bias, o_v, m_v, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Bias, scale and softcap, eq. (1)."""
    if HAS_BIAS:
        b_z += tl.load(bias + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
    if HAS_SCALE:
        b_z *= scale
    if HAS_SOFTCAP:
        b_z = softcap * (2 * tl.sigmoid(2 * b_z / softcap) - 1)
    return b_z


@triton.jit
def exp_difference(b_high, b_low, FAST: tl.constexpr):
    """``exp(b_high - b_low)``. ``FAST``: one fused product and the GPU's own power of two, without the extra
    instructions that keep results below 2**-126 from being zero; a few units in the seventh digit."""
    if FAST:
        b_log2 = b_high * 1.4426950408889634 - b_low * 1.4426950408889634
        b_exp = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_log2], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        b_exp = tl.exp(b_high - b_low)
    return b_exp


@triton.jit
def softmax_gradient(b_z, lse, coef_p, coef_label, labels, o_n, m_n, o_v, FAST: tl.constexpr):
    """Eq. (5) of one tile without what smoothing spreads."""
    b_dz = weighted_probabilities(b_z, lse, tl.load(coef_p + o_n, mask=m_n, other=0.0), o_n, m_n, FAST)
    b_label = tl.load(labels + o_n, mask=m_n, other=-1)
    b_at_label = tl.load(coef_label + o_n, mask=m_n, other=0.0)
    b_dz -= tl.where(o_v[None, :] == b_label[:, None], b_at_label[:, None], 0.0)
    return b_dz


@triton.jit
def weighted_probabilities(b_z, lse, b_coef, o_n, m_n, FAST: tl.constexpr):
    """The same of a tile in which no label counts."""
    # rows past the end have an infinite log-sum-exp, so their probabilities are zero
    b_lse = tl.load(lse + o_n, mask=m_n, other=float("inf"))
    return exp_difference(b_z, b_lse[:, None], FAST) * b_coef[:, None]


@triton.jit
def before_transform(b_dz, b_z, scale, softcap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Eq. (6): the gradient of what `transform` was given, from that of the logits ``b_z`` it returned."""
    if HAS_SOFTCAP:
        b_z = b_z / softcap
        b_dz *= 1 - b_z * b_z
    if HAS_SCALE:
        b_dz *= scale
    return b_dz


@triton.jit
def grouped_tile(i_tile, height, width, group):
    """(row, column) of a tile of ``height * width``: groups of rows walk the columns together, so that both operands
    stay in the cache."""
    i_group = i_tile // (group * width)
    i_inside = i_tile % (group * width)
    high = tl.minimum(height - i_group * group, group)
    return i_group * group + i_inside % high, i_inside // high


@triton.jit
def halves_of(b_tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile, so that a float32 one fits shared memory beside the operands."""
    return tl.split(tl.permute(tl.reshape(b_tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def log_of(b_sum, FAST: tl.constexpr):
    """``log(b_sum)``; ``FAST`` as in `exp_difference`, off by 1e-7 near 1."""
    if FAST:
        b_log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [b_sum], dtype=tl.float32, is_pure=True, pack=1
        )
        return b_log2 * 0.6931471805599453
    return tl.log(b_sum)


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
INTERPRETED = not isinstance(logits_tile, triton.JITFunction)
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# whether what was compiled is launched again without Triton's look at it: an older one wants other arguments there
REUSED = _VERSION >= (3, 6)
GLUON = (3, 6) <= _VERSION <= (3, 9)


def blocks_for(
    rows: int,
    dtype: torch.dtype,
    tma: bool,
    tall: bool = False,
    kernel: str | None = None,
    device: torch.device | None = None,
) -> Blocks:
    """The tile for this many rows, from the files of `tuning`. ``kernel`` is one of its `KERNELS`; without it
    ``tall`` says forward or dZ."""
    name = kernel or ("linear_ce" if tall else "dz")
    return blocks_of(_keys(device or _current_device()), name, rows, dtype.itemsize, tma)


@functools.cache
def _keys(device: torch.device) -> tuple[str, ...]:
    if INTERPRETED:
        return device_keys("interpreter", "", "")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return device_keys("rocm", properties.name, properties.gcnArchName.split(":")[0])
        return device_keys("cuda", properties.name, sm((properties.major, properties.minor)))
    if device.type == "xpu":
        return device_keys("xpu", torch.xpu.get_device_properties(device).name, "")
    return device_keys(device.type, "", "")


def _current_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    xpu = hasattr(torch, "xpu") and torch.xpu.is_available()
    return torch.device("xpu", torch.xpu.current_device()) if xpu else torch.device("cpu")


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; Triton's own takes 2 us on the host."""
    return -(-a // b)


def row_tiles(rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """(grid, options) of a kernel that only moves whole rows; the interpreter takes as long for a few as for many."""
    block_n, block_h = 64 if INTERPRETED else 4, min(1024, 1 << (width - 1).bit_length())
    return (cdiv(rows, block_n), cdiv(width, block_h)), {"BLOCK_N": block_n, "BLOCK_H": block_h, "num_warps": 4}


def can_tma(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether both matrices can be read by bulk tensor copies, as they are."""
    if dtype.itemsize != 2 or hidden.dtype != dtype or weight.dtype != dtype:
        return False
    return has_bulk_copies(hidden.device) and is_bulk_readable(hidden) and is_bulk_readable(weight)


def can_cast(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether slices of the weight could be read so once they are cast: a float32 head under autocast."""
    half = dtype.itemsize == 2 and hidden.dtype == dtype and weight.dtype != dtype
    return half and has_bulk_copies(hidden.device) and is_bulk_readable(hidden) and weight.shape[1] % 8 == 0


@functools.cache
def has_bulk_copies(device: torch.device) -> bool:
    """Whether the device has a tensor memory accelerator: Hopper or later, or the interpreter."""
    if TensorDescriptor is None:
        return False
    if INTERPRETED:
        return True
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def has_warpgroups(device: torch.device) -> bool:
    """Whether warps may share the work as `flce_hopper.py` has them: Hopper, and a Triton whose Gluon it is written
    for, which is experimental and changes."""
    if not has_bulk_copies(device) or INTERPRETED or not GLUON:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def is_bulk_readable(matrix: Tensor) -> bool:
    """Whether a matrix's rows are whole and begin on 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0


def descriptor(matrix: Tensor, block: list[int]) -> Any:
    """A host-side descriptor: unlike one made on the device it needs no allocator, which autograd's threads lack."""
    return TensorDescriptor.from_tensor(matrix, block)


class Reused:
    """A kernel whose ``kernel[grid](...)`` takes half of the host's time from the second launch with such arguments on.

    Triton compiles a kernel anew for other types, for pointers and integers that are multiples of 16 or not, for
    integers that are 1 or need 64 bits, for other tiles behind a descriptor, and for other constants. All of that is in
    the key here, also of arguments that the kernel is not specialised for, so Triton itself looks at any launch for
    which it may compile.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names, self.__name__ = kernel, kernel.arg_names, kernel.__name__
        self._compiled = dict[Any, Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        first = args[0]
        # whose device is the current one, see `on`
        device = (first if isinstance(first, Tensor) else first.base).device
        key = (device, tuple(options), *map(_kind, args), *options.values())
        compiled = self._compiled.get(key) if REUSED else None
        if compiled is not None:
            launch_again(compiled, self.arg_names, grid, args, options)
            return compiled
        compiled = self.kernel[grid](*args, **options)
        if REUSED and device.type != "xpu":  # whose compiler may look at more
            if len(self._compiled) >= 1024:
                self._compiled.clear()
            self._compiled[key] = compiled
        return compiled


def reused(kernel: Any) -> Any:
    """Decorates a kernel that the host launches. ROCm's compiler looks at more of a tensor than the key has."""
    return kernel if INTERPRETED or torch.version.hip else Reused(kernel)


def _kind(arg: Any) -> Any:
    """What a kernel may be compiled for, of an argument that is no constant."""
    if isinstance(arg, Tensor):
        return arg.dtype if arg.data_ptr() % 16 == 0 else (arg.dtype, "unaligned")
    if type(arg) is int:
        if not -(1 << 31) < arg < 1 << 31:
            return arg
        return "16" if arg % 16 == 0 else "1" if arg == 1 else "int"
    if type(arg) is float:
        return "float"
    return arg if arg is None or type(arg) is bool else (arg.base.dtype, *arg.block_shape)


def launch_again(
    compiled: Any, names: list[str], grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Launch what is compiled already, without a look at the arguments."""
    compiled[(*grid, 1, 1)[:3]](*args, *[options[name] for name in names[len(args) :]])


class Launches:
    """A kernel launched many times in a row, with other numbers and with tensors of the same kinds.

    Looking at every argument takes longer than a small kernel does; here only the first launch with a ``key`` does so,
    and whoever gives the key vouches for the others: constants and options are those of the key, tensors have the first
    one's types and begin on 16 bytes if it did, and only numbers that the kernel is not specialised for differ.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._compiled = kernel, dict[Any, Any]()

    def __call__(self, key: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        compiled = self._compiled.get(key)
        if compiled is not None:
            launch_again(compiled, self._kernel.arg_names, grid, args, options)
        else:
            found = self._kernel[grid](*args, **options)
            if REUSED and not INTERPRETED:
                self._compiled[key] = found


def compute_dtype(dtype: torch.dtype) -> Any:
    """The operands' type. The interpreter multiplies bfloat16 as raw integers, so there it is float32."""
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else _TRITON_DTYPES[dtype]


def gathered(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight for kernels that gather some of its rows and cast them on the way; the interpreter, whose operands are
    wider, gets them cast already."""
    return weight.to(dtype) if INTERPRETED else weight


def precision(tensor: Tensor, dtype: torch.dtype) -> str:
    """float32 products as torch's own setting says."""
    return "tf32" if dtype == torch.float32 and tensor.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee"


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs run at a time; one under the interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 1


@functools.cache
def cached_rows(device: torch.device, row_bytes: int) -> int:
    """How many rows that all running programs read again and again stay in the device's cache, with room for the rest:
    beyond that every tile of columns reads them from memory."""
    if device.type != "cuda":
        return 1 << 30
    return max(1, torch.cuda.get_device_properties(device).L2_cache_size // 2 // row_bytes)


def fast_exp(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `exp_difference` may use an instruction of NVIDIA's; float32 inputs keep every digit."""
    return not INTERPRETED and device.type == "cuda" and not torch.version.hip and dtype.itemsize == 2


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type == "cuda" and (device.index is None or torch.cuda.current_device() == device.index):
        return nullcontext()
    return getattr(torch, device.type).device(device) if device.type in ("cuda", "xpu") else nullcontext()
