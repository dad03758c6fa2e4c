"""What is said of an NPU's machine when something is missing, half-installed or of another version."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loss_plugins import npu
from loss_plugins.kernels.ascend.soc import SOCS
from loss_plugins.npu import FUSED, Npu

ROOT = Path(__file__).parents[2]

TRITON_ASCEND = {
    "triton/__init__.py": "__version__ = '3.2.0'\n",
    "triton/runtime/jit.py": "ours = True\n",
    "triton/_C/libtriton.so": "the compiler\n",
    "triton/runtime/__init__.py": "from . import driver\n",
    "triton/runtime/driver.py": """
        class Target:
            backend = "npu"
        class Active:
            def get_current_target(self):
                return Target()
        active = Active()
    """,
    "triton/backends/__init__.py": "backends = {'ascend': object()}\n",
}


def lay(site: Path, name: str, version: str, files: dict[str, str], entry_points: str = "") -> None:
    """An installed package: its files, and what pip notes about them."""
    record = []
    for file, text in files.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        record.append(f"{file},sha256={digest},{path.stat().st_size}")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("\n".join(record) + "\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


def say(code: str, site: Path, **environment: str) -> str:
    """Standard output of ``code`` in a fresh interpreter, with ``site`` in front of all packages."""
    variables = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    variables.pop("ASCEND_HOME_PATH", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=variables | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OBSTACLE = "from loss_plugins import npu; print(npu.has_ascend_triton(), npu.triton_obstacle() or 'none')"


def test_triton_ascend_beside_a_triton_of_the_same_version(tmp_path: Path) -> None:
    """As pip leaves it from 3.2.1 on: Triton 3.2.0 installed first, as what it needs, and its files laid over."""
    lay(tmp_path, "triton", "3.2.0", {})
    lay(tmp_path, "triton-ascend", "3.2.0", TRITON_ASCEND)
    assert say(OBSTACLE, tmp_path) == "True none"


def test_a_triton_of_the_same_version_over_triton_ascend(tmp_path: Path) -> None:
    lay(tmp_path, "triton-ascend", "3.2.0", TRITON_ASCEND)
    lay(tmp_path, "triton", "3.2.0", {"triton/_C/libtriton.so": "another compiler, by the same version\n"})
    said = say(OBSTACLE, tmp_path)
    assert said.startswith("False triton-ascend 3.2.0 is installed, but Triton 3.2.0 was installed over it"), said
    assert "install triton-ascend last" in said


def test_only_upstream_triton(tmp_path: Path) -> None:
    lay(tmp_path, "triton", "3.7.1", {})
    said = say(OBSTACLE, tmp_path)
    assert said == "False triton-ascend is not installed (Triton 3.7.1 is, which has no code for an NPU)"


def test_a_backend_that_triton_does_not_find(tmp_path: Path) -> None:
    files = TRITON_ASCEND | {"triton/backends/__init__.py": "backends = {'nvidia': 1, 'amd': 2}\n"}
    lay(tmp_path, "triton-ascend", "3.2.0", files)
    assert "Triton finds only nvidia, amd backends" in say(OBSTACLE, tmp_path)


def test_a_compiler_without_cann(tmp_path: Path) -> None:
    driver = """
        class Active:
            def get_current_target(self):
                raise RuntimeError("0 active drivers ([]). There should only be one.")
        active = Active()
    """
    lay(tmp_path, "triton-ascend", "3.2.0", TRITON_ASCEND | {"triton/runtime/driver.py": driver})
    said = say(OBSTACLE, tmp_path)
    assert "triton-ascend 3.2.0 has no driver here (RuntimeError: 0 active drivers" in said
    assert "source /usr/local/Ascend/cann/set_env.sh" in said
    (tmp_path / "Ascend" / "cann").mkdir(parents=True)
    (tmp_path / "Ascend" / "cann" / "set_env.sh").touch()
    if not Path("/usr/local/Ascend").exists():
        said = say(OBSTACLE, tmp_path, HOME=str(tmp_path))
        assert f"source {tmp_path}/Ascend/cann/set_env.sh first" in said


def test_a_compiler_that_cannot_be_imported(tmp_path: Path) -> None:
    lay(tmp_path, "triton-ascend", "3.2.0", TRITON_ASCEND | {"triton/backends/__init__.py": "import pybind_eleven\n"})
    said = say(OBSTACLE, tmp_path)
    assert "triton-ascend 3.2.0 cannot be imported: ModuleNotFoundError: No module named 'pybind_eleven'" in said


@pytest.fixture
def without_cann(tmp_path: Path) -> Path:
    """torch_npu as it is where CANN is not set up."""
    broken = 'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")\n'
    lay(
        tmp_path, "torch_npu", "2.7.1.post2", {"torch_npu/__init__.py": broken},
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n",
    )  # fmt: skip
    return tmp_path


def test_import_torch_raises_and_the_facts_are_still_there(without_cann: Path) -> None:
    said = say(
        """
        from loss_plugins import npu
        print(npu.is_meant(), npu.installed("torch_npu"), npu.cann_version() or "no CANN")
        try:
            import torch
        except Exception as error:
            print(type(error).__name__)
        """,
        without_cann,
    )
    assert said == "True 2.7.1.post2 no CANN\nRuntimeError"


def test_a_cpu_is_used_where_transformers_own_check_raises(without_cann: Path) -> None:
    said = say(
        """
        import torch, transformers.utils
        from loss_plugins import linear_cross_entropy
        from loss_plugins.device import DeviceProfile
        from loss_plugins.diagnostics.environment import report
        try:
            print("transformers says", transformers.utils.is_torch_npu_available())
        except ImportError as error:
            print("transformers raises")
        print(DeviceProfile.probe("cpu").kind, report()["device"]["kind"], report()["versions"]["torch_npu"])
        print(linear_cross_entropy(torch.zeros(2, 4), torch.zeros(7, 4), torch.arange(2)).item())
        """,
        without_cann,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    ).splitlines()
    assert said[0] == "transformers raises", "the trap that this is about is gone"
    assert said[1] == "cpu cpu 2.7.1.post2"
    assert float(said[2]) == pytest.approx(1.94591, abs=1e-5)


# One NPU


class Driver:
    """What `torch.npu` tells about its devices."""

    def __init__(self, name: str, **properties: Any) -> None:
        self.name, self.properties = name, properties

    def get_device_name(self, index: int) -> str:
        if not self.name:
            raise RuntimeError("aclInit failed, error code 507033")
        return self.name

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(**self.properties)


@pytest.fixture
def compiler_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "triton_obstacle", lambda: "")
    monkeypatch.setattr(npu, "_launcher_facts", lambda index: {})


@pytest.mark.parametrize("name", ["Ascend910B3", "Ascend910_9391", "Ascend950PR_9579"])
@pytest.mark.usefixtures("compiler_works")
def test_cores_and_memory_of_known_chips(name: str) -> None:
    found = Npu.probe(Driver(name))
    assert found.obstacle == ""
    assert (found.cube_cores, found.vector_cores) == (SOCS[name].cube_cores, 2 * SOCS[name].cube_cores)
    assert found.ub_bytes == (248 if "950" in name else 192) << 10


@pytest.mark.usefixtures("compiler_works")
def test_a_chip_that_nobody_knows_is_used_where_the_driver_counts_its_cores() -> None:
    """What a chip can do decides, not what its name begins with."""
    assert "how many vector cores Ascend777 has" in Npu.probe(Driver("Ascend777")).obstacle
    counted = Npu.probe(Driver("Ascend777", cube_core_num=30, vector_core_num=60))
    assert (counted.obstacle, counted.cube_cores, counted.vector_cores) == ("", 30, 60)
    assert counted.ub_bytes == 192 << 10, "the least of those that are known"


def test_a_driver_that_does_not_answer() -> None:
    found = Npu.probe(Driver(""))
    assert (found.chip, found.vector_cores, found.ub_bytes) == ("", 0, 0)
    assert found.obstacle


def test_operators_are_looked_for_one_by_one() -> None:
    some = SimpleNamespace(npu_cross_entropy_loss=1)
    assert Npu.probe(Driver("Ascend910B3"), some).operators == FUSED[:1]
    assert Npu.probe(Driver("Ascend910B3")).operators == ()


# Versions


def test_cann_tells_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "cann-8.5.0"
    (home / "aarch64-linux").mkdir(parents=True)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    assert npu.cann_version() == "8.5.0", "by the folder's name"
    info = home / "aarch64-linux" / "ascend_toolkit_install.info"
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.3.RC1\ninnerversion=V100R001\n")
    assert npu.cann_version() == "8.3.RC1"
    monkeypatch.delenv("ASCEND_HOME_PATH")
    assert npu.cann_version() == ""


@pytest.mark.parametrize(
    ("found", "torch", "python", "said"),
    [
        (Npu(cann="8.5.0", torch_npu="2.7.1.post2", triton_ascend="3.2.0"), "2.7.1+cpu", (3, 11), []),
        (Npu(cann="8.5.0", torch_npu="2.6.0.post5", triton_ascend="3.2.0"), "2.6.0", (3, 10), []),
        (Npu(), "2.13.0", (3, 12), []),
        (Npu(torch_npu="2.9.0"), "2.13.0", (3, 11), ["torch_npu 2.9.0 is built for torch 2.9.0, and torch 2.13.0"]),
        (
            Npu(cann="9.0.0", torch_npu="2.7.1.post2", triton_ascend="3.2.0"), "2.7.1", (3, 11),
            ["torch_npu 2.7.1.post2 was not released for CANN 9.0.0: 2.9.0.post2,", "is made for CANN 8.5.0, and CANN 9.0.0"],
        ),
        (Npu(cann="7.0.0", torch_npu="2.7.1"), "2.7.1", (3, 11), ["CANN 7.0.0 is in no line of the matrix"]),
        (
            Npu(cann="8.5.0", torch_npu="2.9.0", triton_ascend="3.2.0"), "2.9.0", (3, 12),
            ["made for torch_npu 2.6.0 or 2.7.1, and 2.9.0", "made for Python 3.9 to 3.11, and this is 3.12"],
        ),
        (Npu(cann="9.1.0", torch_npu="2.9.0.post6", triton_ascend="3.2.2"), "2.9.0", (3, 11), ["checked with triton-ascend 3.2.0, not with 3.2.2"]),
        (
            Npu(cann="9.1.0", torch_npu="2.7.1.post8", triton_ascend="3.2.2"), "2.7.1", (3, 14),
            ["made for torch_npu 2.9.0, and 2.7.1.post8", "checked with triton-ascend 3.2.0"],
        ),
        (Npu(triton_ascend="3.6.0"), "2.10.0", (3, 11), ["triton-ascend 3.6.0 is in no line of the matrix"]),
    ],
)  # fmt: skip
def test_combinations_outside_the_matrix(found: Npu, torch: str, python: tuple[int, int], said: list[str]) -> None:
    got = npu.mismatches(found, torch, python)
    assert len(got) == len(said), got
    for sentence, words in zip(got, said, strict=True):
        assert words in sentence


@pytest.mark.parametrize(
    ("cann", "triton_ascend", "torch_npu"),
    [("", "3.2.0", "2.7.1.post2"), ("8.5.0", "3.2.0", "2.7.1.post2"), ("9.0.0", "3.2.1", "2.7.1.post4"),
     ("9.1.0", "3.2.2", "2.9.0.post6")],
)  # fmt: skip
def test_what_to_install_fits_together_and_comes_in_order(cann: str, triton_ascend: str, torch_npu: str) -> None:
    commands = npu.install_commands(Npu(cann=cann))
    text = "\n".join(commands)
    assert ("set_env.sh" in commands[0]) == (not cann)
    order = ["pip install torch==", f"pip install torch_npu=={torch_npu}", "pip install loss-plugins",
             "pip uninstall -y triton triton-ascend", f"pip install triton-ascend=={triton_ascend} pybind11"]  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert ("osinfra" in text) == (triton_ascend != "3.2.0"), "only 3.2.0 is on PyPI"
    torch = torch_npu.partition(".post")[0]
    built = Npu(cann=cann or "8.5.0", torch_npu=torch_npu, triton_ascend=triton_ascend)
    outside = [said for said in npu.mismatches(built, torch, (3, 11)) if "compiled and checked" not in said]
    assert outside == [], "what is recommended is in the matrix"
