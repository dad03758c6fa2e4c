"""Facts about Ascend NPUs: what is there, what is installed for it, what fits together, and what to install.

No torch is imported here: where torch_npu lies beside torch but CANN is not set up, `import torch` itself raises, and
then this file is what can still say why. Nothing here raises either: what cannot be found out is left empty.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

FUSED = (
    "npu_cross_entropy_loss",
    "npu_fused_linear_online_max_sum",
    "npu_fused_linear_cross_entropy_loss_with_max_sum_backward",
)
"""Operators of torch_npu that the `native` kernels call. Some releases lack the last two, so they are looked for."""


@dataclass(frozen=True)
class Release:
    """One line of triton-ascend's official matrix.

    Attributes:
        triton_ascend: Its version.
        cann: The CANN that it is made for.
        torch: The releases of torch and torch_npu that it is made for.
        torch_npu: The build of torch_npu to install, for that CANN and the last of ``torch``.
        python: First and last minor version of Python 3, where the matrix tells.
        index: Where it can be had, empty for PyPI.
    """

    triton_ascend: str
    cann: str
    torch: tuple[str, ...]
    torch_npu: str
    python: tuple[int, int] | None
    index: str = ""


_INDEX = "https://triton-ascend.osinfra.cn/pypi/simple"
RELEASES = (
    Release("3.2.0", "8.5.0", ("2.6.0", "2.7.1"), "2.7.1.post2", (9, 11)),
    Release("3.2.1", "9.0.0", ("2.7.1",), "2.7.1.post4", (10, 13), _INDEX),
    Release("3.2.2", "9.1.0", ("2.9.0",), "2.9.0.post6", None, _INDEX),
)
CHECKED = "3.2.0"
"""The triton-ascend that the kernels are compiled with in the tests."""
TORCH_NPU = {
    "8.2": ("2.6.0",),
    "8.3": ("2.8.0", "2.7.1", "2.6.0.post3"),
    "8.5": ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
    "9.0": ("2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
    "9.1": ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"),
}
"""CANN -> the builds of torch_npu that were released for it."""

SET_ENV = "source /usr/local/Ascend/cann/set_env.sh"
"""The line that sets CANN up, where it is installed as root; before 8.5 its folder is called ascend-toolkit."""


@dataclass(frozen=True)
class Npu:
    """One NPU and the software for it, as plain values. What is not known is 0 or empty.

    Attributes:
        chip: The driver's name of it, such as ``Ascend910B3``.
        cube_cores: Cores with a matrix unit, one a program of a kernel that has a `tl.dot`.
        vector_cores: Cores with a vector unit, one a program of any other kernel.
        ub_bytes: On-chip memory of a vector core.
        cann: Version of CANN.
        torch_npu: Version of torch_npu.
        triton_ascend: Version of triton-ascend.
        operators: Those of `FUSED` that torch_npu has.
        obstacle: Why triton-ascend cannot launch a kernel here; empty where it can.
    """

    chip: str = ""
    cube_cores: int = 0
    vector_cores: int = 0
    ub_bytes: int = 0
    cann: str = ""
    torch_npu: str = ""
    triton_ascend: str = ""
    operators: tuple[str, ...] = ()
    obstacle: str = ""

    @classmethod
    def probe(cls, device: Any, operators: Any = None, index: int = 0) -> Npu:
        """The facts of one NPU.

        Args:
            device: The module ``torch.npu``.
            operators: The namespace ``torch.ops.npu``.
            index: Its number.
        """
        from .kernels.ascend.soc import SOCS, soc_of

        name = str(_asked(device, "get_device_name", index) or "")
        properties = _asked(device, "get_device_properties", index)
        obstacle = triton_obstacle()
        launcher = {} if obstacle else _launcher_facts(index)
        cube = launcher.get("num_aicore") or getattr(properties, "cube_core_num", 0)
        vector = launcher.get("num_vectorcore") or getattr(properties, "vector_core_num", 0)
        known = SOCS.get(name)
        if not obstacle and known is None and not (cube and vector):
            obstacle = (
                f"neither the driver nor loss_plugins knows how many vector cores {name or 'this chip'} has; chips "
                f"that are known: {', '.join(SOCS)}"
            )
        return cls(
            chip=name,
            cube_cores=int(cube or (known.cube_cores if known else 0)),
            vector_cores=int(vector or (known.vector_cores if known else 0)),
            ub_bytes=soc_of(name).ub_bytes if known or not obstacle else 0,
            cann=cann_version(),
            torch_npu=installed("torch_npu") or _loaded_version("torch_npu"),
            triton_ascend=installed("triton-ascend"),
            operators=tuple(name for name in FUSED if operators is not None and hasattr(operators, name)),
            obstacle=obstacle,
        )

    @property
    def has_fused_linear(self) -> bool:
        return set(FUSED[1:]) <= set(self.operators)


def _asked(device: Any, function: str, index: int) -> Any:
    try:
        return getattr(device, function)(index)
    except Exception:  # a driver that does not answer is a fact too
        return None


def _loaded_version(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__version__", ""))


def installed(package: str) -> str:
    """The version of an installed package; empty if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


# triton-ascend


def has_ascend_triton() -> bool:
    """Whether the folder `triton` is triton-ascend's.

    It and Triton lay their files over each other's, and both may say version 3.2.0 and stand in pip's list. So the
    sizes of the files that triton-ascend brought are compared with what lies there now.
    """
    return bool(installed("triton-ascend")) and not _overwritten()


def _overwritten() -> str:
    """A file of triton-ascend in whose place another lies; empty if there is none."""
    try:
        files = metadata.files("triton-ascend") or []
    except metadata.PackageNotFoundError:
        return ""
    for file in files:
        if str(file) not in ("triton/__init__.py", "triton/runtime/jit.py", "triton/_C/libtriton.so"):
            continue
        try:
            size = Path(str(file.locate())).stat().st_size
        except OSError:
            return str(file)
        if file.size is not None and size != file.size:
            return str(file)
    return ""


def triton_obstacle() -> str:
    """Why triton-ascend cannot launch a kernel in this process; empty where it can. Imports it."""
    version = installed("triton-ascend")
    if not version:
        beside = installed("triton")
        upstream = f" (Triton {beside} is, which has no code for an NPU)" if beside else ""
        return f"triton-ascend is not installed{upstream}"
    if file := _overwritten():
        upstream = f"Triton {installed('triton')}" if installed("triton") else "another package"
        return (
            f"triton-ascend {version} is installed, but {upstream} was installed over it ({file} is not its own): pip "
            "uninstall both, and install triton-ascend last"
        )
    try:
        from triton.backends import backends
        from triton.runtime import driver
    except Exception as error:  # whatever a half-installed compiler raises
        return f"triton-ascend {version} cannot be imported: {_first_line(error)}"
    if "ascend" not in backends:
        return f"triton-ascend {version} is installed, but Triton finds only {', '.join(backends) or 'no'} backends"
    try:
        with warnings.catch_warnings():  # that CANN is missing is said below
            warnings.simplefilter("ignore")
            target = driver.active.get_current_target()
    except Exception as error:
        return f"triton-ascend {version} has no driver here ({_first_line(error)}): {cann_advice()}"
    return "" if target.backend == "npu" else f"Triton's active driver is for {target.backend}, not for an NPU"


def _launcher_facts(index: int) -> dict[str, Any]:
    from triton.runtime import driver

    try:
        return dict(driver.active.utils.get_device_properties(index))
    except Exception:
        return {}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


# CANN


def cann_home() -> Path | None:
    """Where CANN lies, if its set_env.sh was sourced."""
    home = os.environ.get("ASCEND_HOME_PATH")
    return Path(home) if home and Path(home).is_dir() else None


def unset_cann() -> Path | None:
    """The set_env.sh of a CANN that is installed but not set up in this shell."""
    if cann_home() is not None:
        return None
    for root in (Path("/usr/local/Ascend"), Path.home() / "Ascend"):
        for folder in ("cann", "ascend-toolkit"):
            if (root / folder / "set_env.sh").is_file():
                return root / folder / "set_env.sh"
    return None


def cann_version(home: Path | None = None) -> str:
    """The version of the CANN that is set up; empty if none is, or it does not tell."""
    home = home or cann_home()
    if home is None:
        return ""
    for path in sorted(home.glob("*-linux/ascend_toolkit_install.info")):
        try:
            found = re.search(r"^version\s*=\s*(\d[\w.]*)", path.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        if found:
            return found[1]
    named = re.search(r"\d+\.\d+\.\w+", home.resolve().name)
    return named[0] if named else ""


def cann_advice() -> str:
    """What is wrong with CANN, in a few words."""
    if cann_home() is not None:
        return f"CANN {cann_version() or ''} is set up, so look at npu-smi info for the driver".replace("  ", " ")
    unset = unset_cann()
    return f"source {unset} first" if unset else f"CANN is not installed, or not set up: {SET_ENV}"


def has_hardware() -> bool:
    """Whether the kernel's driver shows an NPU."""
    return any(Path("/dev").glob("davinci[0-9]*"))


def is_meant() -> bool:
    """Whether somebody wants an NPU here: there is one, or software for one."""
    packages = installed("torch_npu") or installed("triton-ascend")
    return has_hardware() or bool(packages) or cann_home() is not None or unset_cann() is not None


# What fits together


def release_for(cann: str) -> Release:
    """The line of the matrix for a CANN, the first where there is none."""
    return next((release for release in RELEASES if _minor(release.cann) == _minor(cann)), RELEASES[0])


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def mismatches(npu: Npu, torch: str, python: tuple[int, int] = sys.version_info[:2]) -> list[str]:
    """What of the installed versions lies outside the official matrix, or outside what was checked here."""
    said = []
    base = npu.torch_npu.partition(".post")[0].partition("rc")[0]
    if npu.torch_npu and torch and base != torch.partition("+")[0]:
        said.append(f"torch_npu {npu.torch_npu} is built for torch {base}, and torch {torch} is installed")
    if npu.cann and npu.torch_npu:
        listed = TORCH_NPU.get(_minor(npu.cann))
        if listed is None:
            said.append(f"CANN {npu.cann} is in no line of the matrix: {', '.join(TORCH_NPU)} are")
        elif npu.torch_npu not in listed:
            said.append(f"torch_npu {npu.torch_npu} was not released for CANN {npu.cann}: {', '.join(listed)} were")
    if npu.triton_ascend:
        said += _triton_mismatches(npu, base, python)
    return said


def _triton_mismatches(npu: Npu, base: str, python: tuple[int, int]) -> list[str]:
    name = f"triton-ascend {npu.triton_ascend}"
    release = next((each for each in RELEASES if each.triton_ascend == npu.triton_ascend), None)
    if release is None:
        known = ", ".join(each.triton_ascend for each in RELEASES)
        return [f"{name} is in no line of the matrix: {known} are. The kernels were checked with {CHECKED}"]
    said = []
    if npu.cann and _minor(npu.cann) != _minor(release.cann):
        said.append(f"{name} is made for CANN {release.cann}, and CANN {npu.cann} is set up")
    if base and base not in release.torch:
        said.append(f"{name} is made for torch_npu {' or '.join(release.torch)}, and {npu.torch_npu} is installed")
    if release.python is not None and not release.python[0] <= python[1] <= release.python[1]:
        low, high = release.python
        said.append(f"{name} is made for Python 3.{low} to 3.{high}, and this is {python[0]}.{python[1]}")
    if npu.triton_ascend != CHECKED:
        said.append(f"the kernels were compiled and checked with triton-ascend {CHECKED}, not with {npu.triton_ascend}")
    return said


def install_commands(npu: Npu) -> list[str]:
    """What to type, in this order, for a machine on which the kernels run. What is in place already is not left out,
    since the order matters."""
    release = release_for(npu.cann)
    unset = unset_cann()
    commands = []
    if not npu.cann:
        commands.append(
            f"source {unset}" if unset else f"{SET_ENV}   # after installing CANN {release.cann}, toolkit and ops"
        )
    torch = release.torch_npu.partition(".post")[0]
    index = f" --extra-index-url {release.index}" if release.index else ""
    return [
        *commands,
        f"pip install torch=={torch} --index-url https://download.pytorch.org/whl/cpu",
        f"pip install torch_npu=={release.torch_npu}",
        "pip install loss-plugins   # and all else that may bring Triton, which would be laid over triton-ascend later",
        "pip uninstall -y triton triton-ascend",
        f"pip install triton-ascend=={release.triton_ascend} pybind11{index}",
        "loss-plugins doctor",
    ]
