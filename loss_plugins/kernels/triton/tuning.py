"""Which tile each kernel takes: looked up in small JSON files by device and by class of shape, never searched for here.

A file says for which device it is and lists for each kernel the tiles of its classes; the first that fits is taken:

    {"device": "nvidia-sm90", "note": "where the numbers come from", "kernels": {
      "linear_ce": [{"bytes": 2, "to": 64, "tile": [64, 128, 64], "warps": 4, "stages": 3},
                    {"bytes": 2, "above": 64, "bulk": true, "tile": [128, 256, 64], "warps": 8, "stages": 3}]}}

``bytes`` is an operand's size; ``above`` and ``to`` bound the rows; ``bulk`` asks for bulk tensor copies, and such a
tile is passed over where the matrices cannot be read so; ``tile`` is (rows, columns, depth). "any" stands for the
kernels that are not named.

A device is looked for under its name, then its architecture, then older ones of the same family, then "default":
``nvidia-sm90-h200``, ``nvidia-sm90``, ``default`` (`device_keys`). What one file does not have the next one may. Before
the files beside this one come the user's: the file or folder that ``LOSS_PLUGINS_TUNED`` names, else the folder
``~/.cache/loss_plugins/tuned`` (`XDG_CACHE_HOME` counts). They are read once a process; scripts/tune.py writes them.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "configs"

# kernel -> whether it has no other way than bulk copies
KERNELS = {
    "linear_ce": False, "dz": False, "filtered_dx": False, "filtered_dw": False, "exp": True, "exp_dw": True,
    "product_add": True, "product_store": True,
}  # fmt: skip


@dataclass(frozen=True)
class Blocks:
    """The shape of a tile (rows, columns, depth) and of the program that computes it."""

    n: int
    v: int
    h: int
    warps: int
    stages: int
    tma: bool


@dataclass(frozen=True)
class Entry:
    """A tile, and the class of shapes that it is for."""

    bytes: int
    above: int
    to: int | None
    blocks: Blocks

    def covers(self, rows: int, itemsize: int, bulk: bool) -> bool:
        fits = self.above < rows and (self.to is None or rows <= self.to)
        return fits and itemsize == self.bytes and (bulk or not self.blocks.tma)

    def written(self) -> dict[str, Any]:
        """As it stands in a file."""
        bounds = {name: value for name, value in (("above", self.above), ("to", self.to)) if value}
        b = self.blocks
        bulk = {"bulk": True} if b.tma else {}
        return {"bytes": self.bytes, **bounds, **bulk, "tile": [b.n, b.v, b.h], "warps": b.warps, "stages": b.stages}


@dataclass(frozen=True)
class Table:
    """One file."""

    device: str
    kernels: Mapping[str, tuple[Entry, ...]]

    def entries(self, kernel: str) -> tuple[Entry, ...]:
        return self.kernels.get(kernel, ()) + self.kernels.get("any", ())


def sm(capability: tuple[int, int]) -> str:
    """CUDA's name of an architecture; empty for (0, 0)."""
    return f"sm{capability[0]}{capability[1]}" if any(capability) else ""


@functools.cache
def device_keys(kind: str, name: str, architecture: str) -> tuple[str, ...]:
    """The names under which a device is looked for, the nearest first.

    ``kind`` is cuda, rocm, xpu or interpreter, ``architecture`` sm90 or gfx942.
    """
    vendor = {"cuda": "nvidia", "rocm": "amd", "xpu": "intel"}.get(kind)
    if vendor is None:
        return (kind, "default")
    words = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w and w not in (vendor, "geforce", "r", "tm")]
    base = f"{vendor}-{architecture}" if architecture else vendor
    keys = ["-".join([base, *words[:count]]) for count in range(len(words), -1, -1)]
    if re.fullmatch(r"sm\d+", architecture):
        number = int(architecture[2:])
        # a GPU of a family runs what an older one of it runs: 103 as 100, 89 as 80
        keys += [f"{vendor}-sm{older}" for older in range(number - 1, number // 10 * 10 - 1, -1)]
    return (*keys, *(() if base == vendor else (vendor,)), "default")


def blocks_of(keys: tuple[str, ...], kernel: str, rows: int, itemsize: int, bulk: bool) -> Blocks:
    """The tile for this many rows of operands of ``itemsize`` bytes.

    Raises:
        ValueError: a file of the user's that cannot be read so.
    """
    assert kernel in KERNELS, kernel
    trial = _trials.get(kernel)
    if trial is not None and trial.entry.covers(rows, itemsize, bulk):
        trial.taken += 1
        return trial.entry.blocks
    for entry in _entries(keys, kernel):
        if entry.covers(rows, itemsize, bulk):
            return entry.blocks
    raise ValueError(f"no tile for kernel {kernel!r} of {itemsize}-byte operands, {rows} rows, on {keys[0]}")


@functools.cache
def _entries(keys: tuple[str, ...], kernel: str) -> tuple[Entry, ...]:
    users = {table.device: table for table in user_tables(keys)}
    shipped = (shipped_table(key) for key in keys)
    tables = [users[key] for key in keys if key in users] + [table for table in shipped if table is not None]
    return tuple(entry for table in tables for entry in table.entries(kernel))


@functools.cache
def shipped_table(device: str) -> Table | None:
    """The file of this package for a device, if there is one."""
    path = SHIPPED / f"{device}.json"
    return read_table(path) if path.is_file() else None


def user_tables(keys: tuple[str, ...]) -> tuple[Table, ...]:
    """The user's files. One file that was named must be for the device of ``keys``."""
    return _user_tables(os.environ.get("LOSS_PLUGINS_TUNED"), keys)


@functools.cache
def _user_tables(named: str | None, keys: tuple[str, ...]) -> tuple[Table, ...]:
    place = Path(named).expanduser() if named else user_folder()
    if os.path.isdir(place):  # false where a home may not be looked into; Path.is_dir would raise
        return _once_each([(path, read_table(path)) for path in sorted(place.glob("*.json"))])
    if not named:
        return ()
    if not os.path.isfile(place):
        raise ValueError(f"LOSS_PLUGINS_TUNED={named!r} is neither a file nor a folder. Correct it, or unset it.")
    table = read_table(place)
    if table.device not in keys:
        raise ValueError(
            f"LOSS_PLUGINS_TUNED={named!r} is for device {table.device!r}, but this one is {keys[0]!r}. Name a folder "
            f"with a file for each device, or write one of {', '.join(keys)} into the file."
        )
    return (table,)


def _once_each(read: list[tuple[Path, Table]]) -> tuple[Table, ...]:
    first: dict[str, Path] = {}
    for path, table in read:
        if table.device in first:
            raise ValueError(f"{first[table.device]} and {path} are both for device {table.device!r}. Remove one.")
        first[table.device] = path
    return tuple(table for _, table in read)


def user_folder() -> Path:
    """Where tuned files are found without being named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "loss_plugins" / "tuned"


def forget_tables() -> None:
    """Read the files anew at the next launch."""
    _entries.cache_clear()
    _user_tables.cache_clear()
    shipped_table.cache_clear()


@dataclass
class Trial:
    """A tile that is taken before those of all files, and how often it was."""

    entry: Entry
    taken: int = 0


_trials: dict[str, Trial] = {}


@contextmanager
def trying(kernel: str, entry: Entry) -> Iterator[Trial]:
    """Take this tile wherever it covers a launch: for measuring."""
    _trials[kernel] = Trial(entry)
    try:
        yield _trials[kernel]
    finally:
        del _trials[kernel]


def read_table(path: Path) -> Table:
    """Read and check one file.

    Raises:
        ValueError: what is wrong, and where.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _check_keys(found, "the file", ("device", "kernels"), ("note",))
        if not isinstance(found["device"], str) or not found["device"]:
            raise ValueError(f"device must be a name such as 'nvidia-sm90', got {found['device']!r}")
        if not isinstance(found["kernels"], dict):
            raise ValueError(f"kernels must map a kernel to a list of tiles, got {found['kernels']!r}")
        kernels = {kernel: _read_entries(kernel, listed) for kernel, listed in found["kernels"].items()}
    except (OSError, ValueError) as error:
        raise ValueError(f"Tiles cannot be read from {path}: {error}. Correct the file, or remove it.") from error
    return Table(found["device"], kernels)


def _read_entries(kernel: str, listed: Any) -> tuple[Entry, ...]:
    if kernel != "any" and kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}, known: any, {', '.join(KERNELS)}")
    if not isinstance(listed, list):
        raise ValueError(f"{kernel} must be a list of tiles, got {listed!r}")
    return tuple(_read_entry(given, f"{kernel}[{i}]", KERNELS.get(kernel, False)) for i, given in enumerate(listed))


def _read_entry(given: Any, where: str, bulk_only: bool) -> Entry:
    _check_keys(given, where, ("bytes", "tile", "warps", "stages"), ("above", "to", "bulk"))
    above, to, bulk, tile = given.get("above", 0), given.get("to"), given.get("bulk", False), given["tile"]
    if given["bytes"] not in (2, 4):
        raise ValueError(f"{where}: bytes must be 2 or 4, got {given['bytes']!r}")
    if not isinstance(bulk, bool):
        raise ValueError(f"{where}: bulk must be true or false, got {bulk!r}")
    if bulk_only and not bulk:
        raise ValueError(f'{where}: this kernel knows bulk copies only, write "bulk": true')
    if bulk and given["bytes"] != 2:
        raise ValueError(f"{where}: bulk copies are of 2-byte operands, got bytes {given['bytes']}")
    if not isinstance(tile, list) or len(tile) != 3 or not all(_is_power(size, 16, 256) for size in tile):
        raise ValueError(f"{where}: tile must be three powers of two from 16 to 256, got {tile!r}")
    if not _is_power(given["warps"], 1, 32):
        raise ValueError(f"{where}: warps must be a power of two from 1 to 32, got {given['warps']!r}")
    if not _is_count(given["stages"], 1) or given["stages"] > 8:
        raise ValueError(f"{where}: stages must be a number from 1 to 8, got {given['stages']!r}")
    if not _is_count(above, 0) or not (to is None or (_is_count(to, 1) and to > above)):
        raise ValueError(f"{where}: above and to must bound a number of rows, got {above!r} and {to!r}")
    return Entry(given["bytes"], above, to, Blocks(*tile, given["warps"], given["stages"], bulk))


def _check_keys(given: Any, where: str, needed: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be a mapping, got {given!r}")
    for name in needed:
        if name not in given:
            raise ValueError(f"{where} has no {name!r}")
    for name in given:
        if name not in (*needed, *allowed):
            raise ValueError(f"{where} has unknown {name!r}, known: {', '.join((*needed, *allowed))}")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_power(value: Any, least: int, most: int) -> bool:
    return _is_count(value, least) and value <= most and value & (value - 1) == 0


def write_table(path: Path, device: str, note: str, kernels: Mapping[str, list[Entry]]) -> None:
    """Write a file that `read_table` reads, a tile a line."""
    lists = []
    for kernel, entries in kernels.items():
        lines = ",\n".join("      " + json.dumps(entry.written()) for entry in entries)
        lists.append(f"    {json.dumps(kernel)}: [\n{lines}\n    ]")
    head = f'{{\n  "device": {json.dumps(device)},\n  "note": {json.dumps(note)},\n  "kernels": {{\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + ",\n".join(lists) + "\n  }\n}\n", encoding="utf-8")
    read_table(path)
