"""Find the fastest tiles of this GPU and write them where the kernels look for them:

python scripts/tune.py --shapes 8192x2304x256000 8192x4096x128256 --seconds 120
python scripts/tune.py --dry-run
python scripts/tune.py --kernels linear_ce --shapes 64x4096x128256 --output mine.json

A shape is TOKENSxHIDDENxVOCABULARY. A few candidates a kernel and class of rows, each run through the public losses,
checked against the result of the tile that is in force, and timed, the median of a few calls. What is more than 2 %
faster on the shapes of its class goes into the file, which the kernels read from the next process on
(loss_plugins/kernels/triton/tuning.py says how).
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from loss_plugins import linear_cross_entropy
from loss_plugins.device import DeviceProfile
from loss_plugins.kernels.triton import _common, tuning
from loss_plugins.kernels.triton.tuning import Blocks, Entry

# a class of rows is above the one and up to the other; kernels that know bulk copies only have one class
CLASSES: tuple[tuple[int, int | None], ...] = ((0, 16), (16, 32), (32, 64), (64, 128), (128, None))
BULK = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (128, 128, 64, 8, 4),
    (128, 128, 64, 4, 4), (128, 128, 128, 8, 2), (128, 128, 64, 8, 2),
)  # fmt: skip
POINTERS = (
    (128, 128, 64, 8, 3), (128, 128, 32, 8, 4), (128, 256, 32, 8, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3),
    (128, 128, 32, 4, 4),
)  # fmt: skip
FEW_ROWS = ((128, 64, 4, 3), (256, 64, 4, 3), (256, 64, 8, 3), (64, 128, 4, 3), (128, 128, 4, 2), (128, 64, 4, 5))
FLOAT32 = ((64, 64, 32, 4, 2), (64, 64, 32, 4, 3), (64, 128, 32, 4, 3), (128, 64, 32, 8, 3), (128, 128, 32, 8, 2))
FASTER = 0.98
UNUSED = "this kernel is not launched here"
HEAVY = {"bias": True, "softcap": 30.0, "logit_scale": 0.5, "label_smoothing": 0.1, "class_weight": True}


@dataclass(frozen=True)
class Shape:
    rows: int
    width: int
    vocab: int

    @classmethod
    def read(cls, text: str) -> Shape:
        try:
            rows, width, vocab = map(int, text.lower().split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not TOKENSxHIDDENxVOCABULARY") from None
        return cls(rows, width, vocab)

    def limits(self, kernel: str) -> tuple[int, int | None]:
        if tuning.KERNELS[kernel]:
            return 0, None
        return next((above, to) for above, to in CLASSES if to is None or self.rows <= to)

    def __str__(self) -> str:
        return f"{self.rows}x{self.width}x{self.vocab}"


def candidates(kernel: str, limits: tuple[int, int | None], itemsize: int, bulk: bool) -> list[Entry]:
    """The tiles to try for a class of rows."""
    above, to = limits
    found: list[Blocks] = []
    if bulk and itemsize == 2 and (to is None or to > 64):
        found += [Blocks(*tile, True) for tile in BULK if to is None or tile[0] <= to]
    if not tuning.KERNELS[kernel]:
        if itemsize == 4:
            found += [Blocks(*tile, False) for tile in FLOAT32 if to is None or tile[0] <= to]
        elif to is not None and to <= 64:
            found += [Blocks(to, *tile, False) for tile in FEW_ROWS]
        elif not bulk:
            found += [Blocks(*tile, False) for tile in POINTERS]
    return [Entry(itemsize, above, to, blocks) for blocks in found]


def operand_bytes(entry: Entry) -> int:
    """What the operands of a tile take at least, one stage in registers."""
    b = entry.blocks
    return (b.n + b.v) * b.h * entry.bytes * max(1, b.stages - 1)


def described(blocks: Blocks) -> str:
    way = "bulk copies" if blocks.tma else "pointers"
    return f"{blocks.n}x{blocks.v}x{blocks.h}, {blocks.warps} warps, {blocks.stages} stages, {way}"


def workload(
    kernel: str, shape: Shape, dtype: torch.dtype, device: torch.device, heavy: bool = False
) -> Callable[[], list[Tensor]]:
    """Something that runs this kernel and little else, and returns what it computed."""
    torch.manual_seed(0)
    hidden = torch.randn(shape.rows, shape.width, device=device).to(dtype)
    weight = (torch.randn(shape.vocab, shape.width, device=device) * shape.width**-0.5).to(dtype)
    labels = torch.randint(0, shape.vocab, (shape.rows,), device=device)
    options = dict(HEAVY) if heavy else {}
    filtered = kernel.startswith("filtered")
    if filtered:  # a model that is sure enough for few columns to count
        hidden = (3 * shape.width**0.5 * weight[labels] + hidden).to(dtype)
    wanted = {
        "dz": (hidden,), "product_add": (hidden,), "product_store": (weight,), "exp": (hidden, weight),
        "exp_dw": (weight,), "filtered_dx": (hidden,), "filtered_dw": (weight,),
    }  # fmt: skip
    leaves = list(wanted.get(kernel, ()))
    if heavy:
        options["bias"] = torch.randn(shape.vocab, device=device).to(dtype)
        options["class_weight"] = torch.rand(shape.vocab, device=device) + 0.5
        leaves += [options["bias"]] if leaves and not filtered else []
        if kernel.startswith("exp") or filtered:  # they smooth no labels
            del options["label_smoothing"]
    for leaf in leaves:
        leaf.requires_grad_()
    strategy = "flce" if kernel.startswith("exp") else "cce"
    choice: dict[str, object] = {"kernels": "triton"}
    if strategy == "cce":
        choice["filter"] = 2**-12 if filtered else "off"

    def loss() -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, strategy=strategy, options=choice, **options)

    def whole() -> list[Tensor]:
        value = loss()
        return [value.detach(), *(torch.autograd.grad(value, leaves) if leaves else ())]

    if kernel == "linear_ce" or strategy == "flce" or heavy:
        return whole
    kept = loss()
    return lambda: list(torch.autograd.grad(kept, leaves, retain_graph=True))


def same(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether two results differ by rounding only."""
    most = 1e-2 if dtype.itemsize == 2 else 1e-4
    return all(
        bool((one.float() - other.float()).norm() <= most * other.float().norm() + 1e-30)
        for one, other in zip(found, expected, strict=True)
    )


def milliseconds(run: Callable[[], object], device: torch.device, most: int, until: float) -> float:
    """The median of up to ``most`` calls, at least one."""
    times = []
    for _ in range(most):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        if time.monotonic() > until:
            break
    return statistics.median(times)


class Search:
    """One kernel, one class of rows, the shapes of that class."""

    def __init__(
        self, kernel: str, shapes: list[Shape], dtype: torch.dtype, device: torch.device, calls: int, until: float
    ) -> None:
        self.kernel, self.dtype, self.device, self.calls, self.until = kernel, dtype, device, calls, until
        small = Shape(min(shapes[0].rows, 256), 64, 1000)
        self.runs = [workload(kernel, shape, dtype, device) for shape in shapes]
        # with everything on a tile takes the most shared memory: it must fit then too
        self.runs_heavy = workload(kernel, small, dtype, device, heavy=True)
        self.expected = [run() for run in (*self.runs, self.runs_heavy)]
        self.before = self.times()

    def times(self) -> list[float]:
        return [milliseconds(run, self.device, self.calls, self.until) for run in self.runs]

    def attempt(self, entry: Entry) -> tuple[float | None, str]:
        """(time as a share of that of the tile in force, or None; what to say of it)."""
        with tuning.trying(self.kernel, entry) as trial:
            try:
                results = [run() for run in (self.runs_heavy, *self.runs)]
            except (RuntimeError, triton.TritonError) as error:
                return None, f"cannot run: {str(error).splitlines()[0][:60]}"
            if not trial.taken:
                return None, UNUSED
            expected = [self.expected[-1], *self.expected[:-1]]
            if not all(same(one, other, self.dtype) for one, other in zip(results, expected, strict=True)):
                return None, "WRONG RESULT"
            now = self.times()
        share = statistics.fmean(after / before for after, before in zip(now, self.before, strict=True))
        return share, ", ".join(f"{after:.3f}" for after in now)

    def confirmed(self, entry: Entry) -> bool:
        """Whether a tile is still the faster one when both are timed again, the old one last."""
        with tuning.trying(self.kernel, entry):
            now = self.times()
        again = self.times()
        return statistics.fmean(after / before for after, before in zip(now, again, strict=True)) < FASTER


def search(arguments: argparse.Namespace, device: torch.device, shared: int) -> Iterator[tuple[str, Entry]]:
    """The tiles that are faster than those in force, (kernel, entry) each, found within the time."""
    dtype = getattr(torch, arguments.dtype)
    bulk = _common.has_bulk_copies(device) and dtype.itemsize == 2
    jobs = [
        (kernel, limits, shapes)
        for kernel in arguments.kernels
        for limits in dict.fromkeys(shape.limits(kernel) for shape in arguments.shapes)
        for shapes in [[shape for shape in arguments.shapes if shape.limits(kernel) == limits]]
    ]
    end = time.monotonic() + arguments.seconds
    for done, (kernel, limits, shapes) in enumerate(jobs):
        # what earlier jobs left over is shared among those that are to come
        until = time.monotonic() + max(0.0, end - time.monotonic()) / (len(jobs) - done)
        readable = bulk and all(shape.width % 8 == 0 for shape in shapes)
        tried = candidates(kernel, limits, dtype.itemsize, readable)
        if not tried:
            continue
        job = Search(kernel, shapes, dtype, device, arguments.calls, until)
        in_force = tuning.blocks_of(_common._keys(device), kernel, shapes[0].rows, dtype.itemsize, readable)
        print(f"\n{kernel} at {', '.join(map(str, shapes))}")
        print(f"  {described(in_force):48} {', '.join(f'{t:.3f}' for t in job.before)} ms  (in force)")
        best, best_share = None, FASTER
        for i, entry in enumerate(tried):
            if entry.blocks == in_force or (shared and operand_bytes(entry) > shared):
                continue
            if time.monotonic() > until:
                print(f"  out of time: {len(tried) - i} not tried")
                break
            share, words = job.attempt(entry)
            words = words if share is None else f"{words} ms  {share:.2f} of it"
            print(f"  {described(entry.blocks):48} {words}", flush=True)
            if words == UNUSED:
                break
            if share is not None and share < best_share:
                best, best_share = entry, share
        if best is not None and job.confirmed(best):
            print(f"  -> {described(best.blocks)}")
            yield kernel, best
        del job
        if device.type == "cuda":
            torch.cuda.empty_cache()


def merged(path: Path, found: list[tuple[str, Entry]]) -> dict[str, list[Entry]]:
    """What the file has, with the new tiles in front, in place of those of the same class."""
    old = tuning.read_table(path).kernels if path.is_file() else {}
    kernels = {kernel: list(entries) for kernel, entries in old.items()}
    for kernel, entry in found:
        others = [
            e for e in kernels.get(kernel, []) if (e.bytes, e.above, e.to) != (entry.bytes, entry.above, entry.to)
        ]
        kernels[kernel] = [entry, *others]
    return kernels


def dry_run(arguments: argparse.Namespace) -> None:
    itemsize = getattr(torch, arguments.dtype).itemsize
    for kernel in arguments.kernels:
        for limits in dict.fromkeys(shape.limits(kernel) for shape in arguments.shapes):
            for bulk in (True, False):
                above, to = limits
                for entry in candidates(kernel, limits, itemsize, bulk):
                    if entry.blocks.tma == bulk:
                        rows = f"{above + 1} to {to} rows" if to else f"{above + 1} rows or more"
                        kib = f"at least {operand_bytes(entry) >> 10} KiB"
                        print(f"{kernel:13} {rows:18} {described(entry.blocks):48} {kib}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=Shape.read, default=[Shape(8192, 2304, 256_000)])
    parser.add_argument("--kernels", nargs="+", choices=list(tuning.KERNELS), default=list(tuning.KERNELS))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda", help="cpu works under TRITON_INTERPRET=1, where times mean nothing")
    parser.add_argument("--seconds", type=float, default=120.0, help="stop trying after that (default 120)")
    parser.add_argument("--calls", type=int, default=5, help="timed calls of each candidate (default 5)")
    parser.add_argument("--output", type=Path, help="the file to write (default: in the folder that is always read)")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates and do nothing")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        dry_run(arguments)
        return
    device = torch.empty(0, device=arguments.device).device
    profile = DeviceProfile.probe(device)
    if profile.triton_obstacle:
        sys.exit(f"Nothing to tune: {profile.triton_obstacle}.")
    key = _common._keys(device)[0]
    path = arguments.output or tuning.user_folder() / f"{key}.json"
    found = list(search(arguments, device, profile.shared_bytes))
    if not found:
        print(f"\nNothing is more than 2 % faster than what is in force; {path} is left as it is.")
        return
    note = f"{profile.name}, torch {torch.__version__}, Triton {triton.__version__}, {datetime.date.today()}"
    tuning.write_table(path, key, f"{note}: {', '.join(map(str, arguments.shapes))}", merged(path, found))
    print(f"\nWritten to {path}" + (f"; set LOSS_PLUGINS_TUNED={path} to use it." if arguments.output else "."))


if __name__ == "__main__":
    main()
