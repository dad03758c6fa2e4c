"""Tiles come from files: which file and which line for which device and shape, the user's first, and clear words for a
file that cannot be read."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from loss_plugins import linear_cross_entropy
from loss_plugins.device import TILE_BYTES, DeviceProfile
from loss_plugins.errors import ConfigError
from loss_plugins.kernels.triton import _common, tuning
from loss_plugins.kernels.triton.tuning import Blocks, Entry, blocks_of, device_keys

H200 = device_keys("cuda", "NVIDIA H200", "sm90")
TILE = {"bytes": 2, "tile": [64, 64, 32], "warps": 4, "stages": 2}


@pytest.fixture(autouse=True)
def no_files_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LOSS_PLUGINS_TUNED", raising=False)
    tuning.forget_tables()
    yield
    tuning.forget_tables()


def write(path, device="nvidia-sm90", **kernels):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": device, "kernels": kernels}))
    return str(path)


DEVICES = {
    "H200": ("cuda", "NVIDIA H200", "sm90", ("nvidia-sm90-h200", "nvidia-sm90", "nvidia", "default")),
    "A100": (
        "cuda", "NVIDIA A100-SXM4-80GB", "sm80",
        ("nvidia-sm80-a100-sxm4-80gb", "nvidia-sm80-a100-sxm4", "nvidia-sm80-a100", "nvidia-sm80", "nvidia", "default"),
    ),
    "an older one of the family": ("cuda", "", "sm121", ("nvidia-sm121", "nvidia-sm120", "nvidia", "default")),
    "a family of its own": ("cuda", "", "sm110", ("nvidia-sm110", "nvidia", "default")),
    "MI300X": (
        "rocm", "AMD Instinct MI300X", "gfx942",
        ("amd-gfx942-instinct-mi300x", "amd-gfx942-instinct", "amd-gfx942", "amd", "default"),
    ),
    "Intel": ("xpu", "Intel(R) Arc(TM) B580", "", ("intel-arc-b580", "intel-arc", "intel", "default")),
    "interpreter": ("interpreter", "", "", ("interpreter", "default")),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "architecture", "keys"), DEVICES.values(), ids=DEVICES.keys())
def test_names_of_a_device(kind, name, architecture, keys):
    assert device_keys(kind, name, architecture) == keys


TAKEN = {
    "H200, forward": (H200, "linear_ce", 8192, 2, True, Blocks(256, 128, 64, 8, 3, True)),
    "H200, forward, one block of rows": (H200, "linear_ce", 128, 2, True, Blocks(128, 256, 64, 8, 3, True)),
    "H200, dZ": (H200, "dz", 8192, 2, True, Blocks(128, 256, 64, 8, 3, True)),
    "H200, products": (H200, "product_add", 2304, 2, True, Blocks(128, 256, 64, 8, 3, True)),
    "H200, unaligned": (H200, "dz", 8192, 2, False, Blocks(128, 128, 64, 8, 3, False)),
    "H200, few rows": (H200, "linear_ce", 17, 2, True, Blocks(32, 128, 64, 4, 3, False)),
    "H200, float32": (H200, "dz", 8192, 4, False, Blocks(64, 64, 32, 4, 2, False)),
    "4090": (
        device_keys("cuda", "NVIDIA GeForce RTX 4090", "sm89"),
        "dz",
        8192,
        2,
        False,
        Blocks(128, 128, 64, 8, 3, False),
    ),
    "5090": (
        device_keys("cuda", "NVIDIA GeForce RTX 5090", "sm120"),
        "dz",
        8192,
        2,
        True,
        Blocks(128, 128, 64, 8, 2, True),
    ),
    "MI300X": (device_keys("rocm", "", "gfx942"), "dz", 8192, 2, False, Blocks(128, 128, 64, 8, 2, False)),
}


@pytest.mark.parametrize(("keys", "kernel", "rows", "itemsize", "bulk", "blocks"), TAKEN.values(), ids=TAKEN.keys())
def test_the_tile_that_is_taken(keys, kernel, rows, itemsize, bulk, blocks):
    assert blocks_of(keys, kernel, rows, itemsize, bulk) == blocks


@pytest.mark.parametrize("path", sorted(tuning.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_has_a_tile_for_everything(path):
    """It is named after its device, and nothing of it can never be reached."""
    table = tuning.read_table(path)
    assert table.device == path.stem
    for kernel, only_bulk in tuning.KERNELS.items():
        for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 1 << 20):
            for itemsize, bulk in ((2, True),) if only_bulk else ((2, True), (2, False), (4, False)):
                blocks = blocks_of((table.device, "default"), kernel, rows, itemsize, bulk)
                assert only_bulk or blocks.n <= (max(16, 1 << (rows - 1).bit_length()) if rows <= 64 else 256)
    listed = [entry for entries in table.kernels.values() for entry in entries]
    classes = [(kernel, e.bytes, e.above, e.to, e.blocks.tma) for kernel, es in table.kernels.items() for e in es]
    assert listed and len(set(classes)) == len(classes)


def test_the_default_fits_what_the_device_check_asks_for():
    for entry in tuning.shipped_table("default").entries("any"):
        b = entry.blocks
        assert (b.n + b.v) * b.h * entry.bytes * b.stages <= TILE_BYTES


def test_a_folder_of_the_user_comes_first():
    write(tuning.user_folder() / "mine.json", "nvidia-sm90-h200", dz=[{**TILE, "above": 128}])
    assert blocks_of(H200, "dz", 8192, 2, True) == Blocks(64, 64, 32, 4, 2, False)
    assert blocks_of(H200, "dz", 128, 2, True) == Blocks(128, 256, 64, 8, 3, True)
    assert blocks_of(H200, "linear_ce", 8192, 2, True) == Blocks(256, 128, 64, 8, 3, True)
    assert blocks_of(device_keys("cuda", "NVIDIA H100", "sm90"), "dz", 8192, 2, True).v == 256


def test_a_named_file_replaces_the_folder(tmp_path, monkeypatch):
    write(tuning.user_folder() / "mine.json", dz=[TILE])
    monkeypatch.setenv("LOSS_PLUGINS_TUNED", write(tmp_path / "named.json", linear_ce=[TILE]))
    assert blocks_of(H200, "linear_ce", 8192, 2, True).n == 64
    assert blocks_of(H200, "dz", 8192, 2, True).v == 256


def test_bulk_tiles_are_for_what_can_be_read_so(tmp_path, monkeypatch):
    monkeypatch.setenv("LOSS_PLUGINS_TUNED", write(tmp_path / "a.json", dz=[{**TILE, "bulk": True}]))
    assert blocks_of(H200, "dz", 8192, 2, True) == Blocks(64, 64, 32, 4, 2, True)
    assert blocks_of(H200, "dz", 8192, 2, False) == Blocks(128, 128, 64, 8, 3, False)


MALFORMED = {
    "no JSON": ("{", "Expecting property name"),
    "no mapping": ("[]", "the file must be a mapping"),
    "no device": ('{"kernels": {}}', "the file has no 'device'"),
    "unknown key": ('{"device": "a", "kernels": {}, "kernel": 1}', "unknown 'kernel', known: device, kernels, note"),
    "unknown kernel": ({"forward": []}, "unknown kernel 'forward', known: any, linear_ce"),
    "no list": ({"dz": {}}, "dz must be a list"),
    "no tile": ({"dz": [{"bytes": 2, "warps": 4, "stages": 2}]}, r"dz\[0\] has no 'tile'"),
    "tile": (
        {"dz": [TILE, {**TILE, "tile": [64, 48, 32]}]},
        r"dz\[1\]: tile must be three powers of two.*got \[64, 48, 32\]",
    ),
    "warps": ({"dz": [{**TILE, "warps": 3}]}, r"warps must be a power of two from 1 to 32, got 3"),
    "stages": ({"dz": [{**TILE, "stages": True}]}, r"stages must be a number from 1 to 8, got True"),
    "bytes": ({"dz": [{**TILE, "bytes": 8}]}, "bytes must be 2 or 4, got 8"),
    "bounds": ({"dz": [{**TILE, "above": 64, "to": 64}]}, "above and to must bound a number of rows, got 64 and 64"),
    "bulk": ({"dz": [{**TILE, "bulk": 1}]}, "bulk must be true or false, got 1"),
    "bulk float32": ({"dz": [{**TILE, "bulk": True, "bytes": 4}]}, "bulk copies are of 2-byte operands"),
    "pointers": ({"exp": [TILE]}, "this kernel knows bulk copies only"),
}


@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_is_named(content, message, tmp_path, monkeypatch):
    text = content if isinstance(content, str) else json.dumps({"device": "nvidia-sm90", "kernels": content})
    path = tmp_path / "mine.json"
    path.write_text(text)
    monkeypatch.setenv("LOSS_PLUGINS_TUNED", str(path))
    with pytest.raises(ValueError, match=f"Tiles cannot be read from {re.escape(str(path))}: .*{message}"):
        blocks_of(H200, "dz", 8192, 2, True)


def test_a_file_for_another_device_and_one_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("LOSS_PLUGINS_TUNED", write(tmp_path / "a.json", "nvidia-sm80", dz=[TILE]))
    with pytest.raises(ValueError, match="for device 'nvidia-sm80', but this one is 'nvidia-sm90-h200'"):
        blocks_of(H200, "dz", 8192, 2, True)
    monkeypatch.setenv("LOSS_PLUGINS_TUNED", str(tmp_path / "nothing.json"))
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        blocks_of(H200, "dz", 8192, 2, True)


def test_two_files_for_one_device(tmp_path, monkeypatch):
    write(tmp_path / "a.json", dz=[TILE])
    write(tmp_path / "b.json", dz=[TILE])
    monkeypatch.setenv("LOSS_PLUGINS_TUNED", str(tmp_path))
    with pytest.raises(ValueError, match=r"a.json and .*b.json are both for device 'nvidia-sm90'"):
        blocks_of(H200, "dz", 8192, 2, True)


INTERPRETED = pytest.mark.skipif(not _common.INTERPRETED, reason="the kernels run on the GPU here")


@INTERPRETED
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_with_a_malformed_file_says_so(compiled, tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    path.write_text("{")
    monkeypatch.setenv("LOSS_PLUGINS_TUNED", str(path))

    def loss(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, strategy="cce", options={"kernels": "triton"})

    run = torch.compile(loss, backend="eager") if compiled else loss
    with pytest.raises(Exception, match="Tiles cannot be read from") as error:
        run(torch.randn(6, 8), torch.randn(17, 8), torch.arange(6))
    assert compiled or isinstance(error.value, ConfigError)


@INTERPRETED
def test_a_tile_of_the_user_is_the_one_that_runs(tmp_path, monkeypatch):
    entry = {**TILE, "bytes": 4, "tile": [16, 32, 16]}
    monkeypatch.setenv("LOSS_PLUGINS_TUNED", write(tmp_path / "a.json", "interpreter", any=[entry]))
    hidden, weight, labels = torch.randn(40, 48), torch.randn(90, 48), torch.randint(0, 90, (40,))
    assert _common.blocks_for(40, torch.float32, False) == Blocks(16, 32, 16, 4, 2, False)
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    grads = []
    for kernels in ("triton", "torch"):
        loss = linear_cross_entropy(hidden, weight, labels, strategy="cce", options={"kernels": kernels})
        grads.append([loss.detach(), *torch.autograd.grad(loss, (hidden, weight))])
    torch.testing.assert_close(grads[0], grads[1])


def test_a_trial_counts_its_launches():
    entry = Entry(2, 0, None, Blocks(64, 64, 32, 4, 2, False))
    with tuning.trying("dz", entry) as trial:
        assert blocks_of(H200, "dz", 8192, 2, True) == entry.blocks
        blocks_of(H200, "linear_ce", 8192, 2, True)
        blocks_of(H200, "dz", 8192, 4, False)
    assert trial.taken == 1
    assert blocks_of(H200, "dz", 8192, 2, True).v == 256


def test_what_is_written_is_read(tmp_path):
    entries = [Entry(2, 64, None, Blocks(128, 256, 64, 8, 3, True)), Entry(4, 0, 64, Blocks(64, 64, 32, 4, 2, False))]
    tuning.write_table(tmp_path / "folder" / "a.json", "nvidia-sm90", 'a "note"', {"dz": entries})
    assert tuning.read_table(tmp_path / "folder" / "a.json").kernels == {"dz": tuple(entries)}


@pytest.fixture
def tune():
    path = Path(__file__).parents[2] / "scripts" / "tune.py"
    spec = importlib.util.spec_from_file_location("tune", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tune"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tune"]


def test_tune_lists_what_it_would_try(tune, capsys):
    tune.main(["--dry-run", "--kernels", "linear_ce", "product_add", "--shapes", "8192x2304x256000", "12x64x900"])
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"linear_ce +129 rows or more +256x128x64, 8 warps, 4 stages, bulk", line) for line in lines)
    assert any(re.match(r"linear_ce +1 to 16 rows +16x128x64", line) for line in lines)
    assert not any(line.startswith("product_add") and "pointers" in line for line in lines)


def test_every_candidate_could_stand_in_a_file(tune, tmp_path):
    for kernel in tuning.KERNELS:
        for limits in tune.CLASSES:
            for itemsize, bulk in ((2, True), (2, False), (4, False)):
                entries = tune.candidates(kernel, limits, itemsize, bulk)
                tuning.write_table(tmp_path / "a.json", "nvidia-sm90", "", {kernel: entries})
                assert all(entry.blocks.n <= (limits[1] or 256) for entry in entries)


@INTERPRETED
def test_tune_finds_the_faster_tile_and_writes_it(tune, tmp_path, monkeypatch, capsys):
    """Of two tiles one is made slow, and one is made wrong."""
    slow, fast, wrong = (
        Blocks(32, 16, 16, 4, 2, False),
        Blocks(32, 256, 64, 4, 2, False),
        Blocks(32, 64, 64, 4, 2, False),
    )
    output = tmp_path / "tuned.json"
    write(output, "interpreter", linear_ce=[{**TILE, "tile": [32, 16, 16]}])
    monkeypatch.setenv("LOSS_PLUGINS_TUNED", str(output))
    monkeypatch.setattr(tune, "candidates", lambda *_: [Entry(2, 16, 32, b) for b in (slow, wrong, fast)])
    inner = tune.linear_cross_entropy

    def loss(*args, **kwargs):
        right = inner(*args, **kwargs)
        tried = _common.blocks_for(20, torch.bfloat16, True, kernel="linear_ce")
        return right * 2 if tried == wrong else right

    monkeypatch.setattr(tune, "linear_cross_entropy", loss)
    tune.main(
        ["--device", "cpu", "--kernels", "linear_ce", "--shapes", "20x64x200", "--calls", "1", "--output", str(output)]
    )
    words = capsys.readouterr().out
    assert "32x16x16, 4 warps, 2 stages, pointers" in words and "WRONG RESULT" in words
    assert "-> 32x256x64" in words
    first, second = tuning.read_table(output).kernels["linear_ce"]
    assert first == Entry(2, 16, 32, fast) and second.blocks == slow


@INTERPRETED
@pytest.mark.parametrize("kernel", tuning.KERNELS)
def test_tune_runs_every_kernel(kernel, tune, tmp_path, capsys):
    output = tmp_path / "tuned.json"
    shape = "260x64x700" if kernel.startswith("filtered") else "130x64x300"  # too few rows are not filtered
    tune.main(["--device", "cpu", "--kernels", kernel, "--shapes", shape, "--calls", "1", "--seconds", "0",
               "--output", str(output)])  # fmt: skip
    words = capsys.readouterr().out
    assert f"{kernel} at {shape}" in words and "out of time" in words and not output.exists()


def test_tune_refuses_a_cpu_without_the_interpreter(tune, monkeypatch):
    monkeypatch.setattr(tune.DeviceProfile, "probe", lambda device: DeviceProfile("cpu", has_triton=True))
    with pytest.raises(SystemExit, match="Nothing to tune: Triton cannot launch on a cpu device"):
        tune.main(["--device", "cpu"])
