"""The house rules that a machine can check: who imports whom, what importing costs, sizes, words, the registries."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
import textwrap
import tokenize
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import loss_plugins
from loss_plugins import linear_cross_entropy
from loss_plugins.device import DeviceProfile
from loss_plugins.errors import ConfigError
from loss_plugins.strategies import STRATEGIES, Problem

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "loss_plugins"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

FILE_LINES, KERNEL_FILE_LINES = 500, 600
FUNCTION_LINES, KERNEL_FUNCTION_LINES = 60, 80
"""A kernel is one pass over one tile, and cutting it in two would hand a dozen tensors across."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run(code: str, **environment: str) -> str:
    """Standard output of ``code`` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCK_TRITON = """
    import importlib.util
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "triton":
                raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

    sys.meta_path.insert(0, Blocked())
    real_find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "triton" else real_find_spec(name, *rest)
"""


# Who may import whom


def test_import_contracts() -> None:
    # in a process of its own: import-linter configures logging, which silences every logger that exists
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def contract(name: str) -> dict[str, list[str]]:
    (found,) = (c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["name"].startswith(name))
    return found


def test_contracts_list_every_strategy() -> None:
    listed = {m.rpartition(".")[2] for m in contract("strategies do not know each other")["modules"]}
    assert listed == {*STRATEGIES.builtin(), "_select"}


def test_contracts_list_every_backend() -> None:
    from loss_plugins.kernels import ops

    listed = {m.rpartition(".")[2] for m in contract("kernel backends do not know each other")["modules"]}
    assert listed == {*ops.backends(), "reference"}


def test_kernels_can_be_moved() -> None:
    # as a folder of another package: relative imports that stay inside it, and torch, triton and the standard library
    for path in (PACKAGE / "kernels").rglob("*.py"):
        depth = len(path.relative_to(PACKAGE / "kernels").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level <= depth, f"{name_of(path)}:{node.lineno} imports from outside kernels/"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                for name in names:
                    top = name.partition(".")[0]
                    assert top in {"torch", "triton", *sys.stdlib_module_names}, f"{name_of(path)} imports {name}"


# What importing costs


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = run(
        """
        import sys
        import loss_plugins
        dir(loss_plugins), loss_plugins.__version__, loss_plugins.LossConfig("cce")
        print(*{name.partition(".")[0] for name in sys.modules})
        """
    ).split()
    assert "loss_plugins" in loaded
    assert not {"torch", "triton", "transformers", "accelerate", "numpy"} & set(loaded)


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    loaded = run(
        """
        import sys
        import loss_plugins.cli.main
        print(*{name.partition(".")[0] for name in sys.modules})
        """
    ).split()
    assert not {"torch", "triton", "transformers", "accelerate", "datasets", "matplotlib"} & set(loaded)


def test_listing_strategies_imports_none() -> None:
    loaded = run(
        """
        import sys
        from loss_plugins.registry import Registry
        names = Registry("loss_plugins.strategies", "STRATEGY", "loss strategy").names()
        assert {"naive", "chunked", "flce", "cce"} <= set(names), names
        print(*sys.modules)
        """
    ).split()
    assert "torch" not in loaded
    assert "loss_plugins.strategies.flce" not in loaded


def test_public_names_exist_and_are_all_listed() -> None:
    assert sorted(loss_plugins.__all__) == sorted(loss_plugins._HOMES)
    for name in loss_plugins.__all__:
        assert getattr(loss_plugins, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'linear_cross_entrpy'"):
        loss_plugins.linear_cross_entrpy  # noqa: B018


def test_importing_patches_nothing() -> None:
    # every module of ours is imported, and torch and transformers are as they were
    modules = [module_of(p) for p in SOURCES if p.stem != "__main__"]
    run(
        f"""
        import importlib, torch, transformers
        from transformers.loss import loss_utils
        nn, Trainer = torch.nn, transformers.Trainer
        watched = [(nn.functional, "cross_entropy"), (nn.functional, "linear"), (nn.Linear, "forward"),
                   (nn.CrossEntropyLoss, "forward"), (nn.Module, "__call__"), (torch.Tensor, "__getitem__"),
                   (torch.Tensor, "float"), (Trainer, "compute_loss"), (Trainer, "train"),
                   (transformers.LlamaForCausalLM, "forward"), (loss_utils, "ForCausalLMLoss")]
        before = [getattr(home, name) for home, name in watched]
        mapping = dict(loss_utils.LOSS_MAPPING)
        for module in {modules!r}:
            importlib.import_module(module)
        for (home, name), value in zip(watched, before, strict=True):
            assert getattr(home, name) is value, (home, name)
        assert dict(loss_utils.LOSS_MAPPING) == mapping
        """
    )


def test_every_module_imports_without_triton() -> None:
    kernels = ("_kernels.py", "_math.py")  # of kernels/ascend, whose host code needs none
    modules = [
        module_of(p) for p in SOURCES if p.stem != "__main__" and "triton" not in p.parts and p.name not in kernels
    ]
    assert "loss_plugins.kernels.ops" in modules
    code = f"""
        {BLOCK_TRITON}
        import importlib
        for module in {modules!r}:
            importlib.import_module(module)
        assert "triton" not in sys.modules
    """
    run(dedented(code))


def test_builtin_strategies_run_without_triton_and_without_the_compiler() -> None:
    code = f"""
        {BLOCK_TRITON}
        import torch

        def refused(*args, **kwargs):
            raise AssertionError("torch.compile was called")

        torch.compile = refused
        from loss_plugins import linear_cross_entropy, linear_cross_entropy_stats
        from loss_plugins.device import DeviceProfile
        from loss_plugins.errors import UnsupportedError

        assert not DeviceProfile.probe("cpu").has_triton
        hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
        labels = torch.randint(0, 30, (9,))
        want = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
        for strategy in ("naive", "chunked", "flce", "cce", "auto"):
            loss = linear_cross_entropy(hidden, weight, labels, strategy=strategy)
            loss.backward()
            torch.testing.assert_close(loss, want)
            out = linear_cross_entropy_stats(hidden, weight, labels, strategy=strategy, reduction="none",
                                             fields=("entropy", "predicted"), label_smoothing=0.1, z_loss=1e-3)
            out.loss.sum().backward()
        assert "triton" not in sys.modules
        try:
            linear_cross_entropy(hidden, weight, labels, strategy="cce", options={{"kernels": "triton"}})
        except UnsupportedError as error:
            assert "Triton is not installed" in str(error), error
        else:
            raise AssertionError("kernels='triton' without Triton must be refused")
    """
    run(dedented(code))


def dedented(code: str) -> str:
    """``code`` with `BLOCK_TRITON`, whose own indentation is a level less, put on the margin."""
    return "\n".join(
        textwrap.dedent(part) for part in re.split(r"(?<=real_find_spec\(name, \*rest\)\n)", code, maxsplit=1)
    )


# Sizes and names


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_file_is_small_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    limit = KERNEL_FILE_LINES if "kernels" in path.parts else FILE_LINES
    assert text.count("\n") < limit
    assert path.stem not in ("utils", "helpers", "misc", "common_utils")
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{name_of(path)} has no module docstring"


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines that hold code: no comments, blank lines or docstrings."""
    lines: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in skipped:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    code = code_lines(path)
    limit = KERNEL_FUNCTION_LINES if "kernels" in path.parts else FUNCTION_LINES
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # from the first statement: a signature with a shape beside each tensor is no complexity
            body = code & set(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
            assert len(body) <= limit, f"{node.name} has {len(body)} lines of code"


# Words that must not stand in the code


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr, node
            elif isinstance(node.func, ast.Name):
                yield node.func.id, node


SYNCS = {"item", "tolist", "cpu", "numpy"}
STEP_PATH = [p for p in SOURCES if p.parent.name != "__pycache__" and {"strategies", "kernels"} & set(p.parts)]


@pytest.mark.parametrize("path", STEP_PATH, ids=name_of)
def test_step_path_does_not_wait_for_the_device(path: Path) -> None:
    for name, node in calls(path):
        assert name not in SYNCS, f"{name_of(path)}:{node.lineno} calls {name}()"
        assert name != "make_block_ptr", f"{name_of(path)}:{node.lineno} uses block pointers"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_library_does_not_print(path: Path) -> None:
    if "cli" in path.parts:
        return
    for name, node in calls(path):
        is_print = name == "print" and isinstance(node.func, ast.Name)
        assert not is_print, f"{name_of(path)}:{node.lineno} prints; log, return or raise instead"


# variable -> the files that may read it, and why
ENVIRONMENT = {
    "TRITON_INTERPRET": {"loss_plugins/device.py"},  # Triton's own switch, which decides whether it can launch
    "ASCEND_HOME_PATH": {"loss_plugins/npu.py"},  # how CANN's set_env.sh tells where it is
    # a machine's measurements, as Triton's own cache is: they change no result
    "LOSS_PLUGINS_TUNED": {"loss_plugins/kernels/triton/tuning.py"},
    "XDG_CACHE_HOME": {"loss_plugins/kernels/triton/tuning.py"},
    # how accelerate's launcher tells the processes that it starts what it was asked for
    "ACCELERATE_USE_FSDP": {"loss_plugins/integrations/hf/launch.py"},
    "ACCELERATE_USE_PARALLELISM_CONFIG": {"loss_plugins/integrations/hf/launch.py"},
    "PARALLELISM_CONFIG_TP_SIZE": {"loss_plugins/integrations/hf/launch.py"},
    # how LLaMA-Factory is told which of its trainers are meant
    "USE_V1": {"loss_plugins/integrations/llamafactory/run.py"},
}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_environment_variables_are_no_interface(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            line = path.read_text().splitlines()[node.lineno - 1]
            names = re.findall(r'"([A-Z][A-Z0-9_]+)"', line)
            allowed = names and all(name_of(path) in ENVIRONMENT.get(name, ()) for name in names)
            assert allowed, f"{name_of(path)}:{node.lineno} reads the environment: {line.strip()}"


# The registries


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_strategy_answers_about_itself(name: str) -> None:
    strategy = STRATEGIES.get(name)
    assert strategy.name == name
    assert strategy.summary
    assert "\n" not in strategy.summary
    assert dataclasses.is_dataclass(strategy.Options)
    for option in dataclasses.fields(strategy.Options):
        assert option.metadata.get("help"), f"option {option.name} of {name} has no help"
    options = strategy.Options()  # every option has a default
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.anything = 1
    problem, profile = Problem(rows=1024, hidden=64, vocab=4096), DeviceProfile("cpu")
    assert strategy.check(problem, profile, options) is None
    peak = strategy.peak_bytes(problem, options)
    assert isinstance(peak, int)
    assert peak >= problem.gradient_bytes
    assert isinstance(strategy.kernels(profile, options), str)


def test_names_are_unique() -> None:
    for group in PYPROJECT["project"]["entry-points"]:
        installed = [e.name for e in entry_points(group=group)]
        assert len(installed) == len(set(installed))
    names = STRATEGIES.names()
    assert len(names) == len(set(names))


PLUGIN = '''
"""A strategy of another package: naive with twice the loss, so that a test can see it ran."""

from dataclasses import dataclass, field

from loss_plugins.strategies import RowLoss
from loss_plugins.strategies.naive import STRATEGY as naive


@dataclass(frozen=True)
class Options:
    factor: float = field(default=2.0, metadata={"help": "What the loss is multiplied by."})


class Doubled:
    name = "doubled"
    summary = "naive, multiplied"
    Options = Options

    def check(self, problem, profile, options):
        return None

    def peak_bytes(self, problem, options):
        return naive.peak_bytes(problem, naive.Options())

    def kernels(self, profile, options):
        return "torch"

    def __call__(self, rows, options, profile):
        result = naive(rows, naive.Options(), profile)
        return result._replace(loss=result.loss * options.factor)


STRATEGY = Doubled()
'''


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with an entry point, laid as pip would: its module and its ``dist-info`` on ``sys.path``."""
    (tmp_path / "acme_losses.py").write_text(PLUGIN)
    info = tmp_path / "acme_losses-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-losses\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[loss_plugins.strategies]\ndoubled = acme_losses:STRATEGY\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "doubled"
    sys.modules.pop("acme_losses", None)


def check_doubled(strategy: str) -> None:
    hidden, weight, labels = torch.randn(6, 8), torch.randn(20, 8), torch.randint(0, 20, (6,))
    want = F.cross_entropy(hidden @ weight.T, labels)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, strategy=strategy), 2 * want)
    tripled = linear_cross_entropy(hidden, weight, labels, strategy=strategy, options={"factor": 3.0})
    torch.testing.assert_close(tripled, 3 * want)
    with pytest.raises(ConfigError, match=r"Did you mean 'factor'\?"):
        linear_cross_entropy(hidden, weight, labels, strategy=strategy, options={"facto": 3.0})


def test_third_party_strategy_by_entry_point(third_party: str) -> None:
    assert third_party in STRATEGIES.names()
    check_doubled(third_party)
    with pytest.raises(ConfigError, match="Did you mean 'doubled'"):
        STRATEGIES.get("doubledd")


def test_third_party_strategy_by_dotted_path(third_party: str) -> None:
    check_doubled("acme_losses:STRATEGY")
    with pytest.raises(ConfigError, match="could not be loaded"):
        STRATEGIES.get("acme_losses:MISSING")
    with pytest.raises(ConfigError, match="could not be loaded"):
        STRATEGIES.get("acme_lossess:STRATEGY")


def test_third_party_strategy_is_gone_with_its_package() -> None:
    assert "doubled" not in STRATEGIES.names()


def test_builtin_names_cannot_be_shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thief = EntryPoint("naive", "acme_losses:STRATEGY", "loss_plugins.strategies")
    monkeypatch.setattr("loss_plugins.registry.entry_points", lambda group: [thief])
    assert STRATEGIES.get("naive").__class__.__module__ == "loss_plugins.strategies.naive"
    assert STRATEGIES.names().count("naive") == 1


# Versions


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(v for v in versions if v != "Unreleased") == loss_plugins.__version__


def test_hooks_use_the_pinned_tools() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "scripts/constraints.txt").read_text(), re.MULTILINE))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for tool, version in re.findall(r"\[([\w.-]+)==([\w.]+)\]", hooks):
        assert pins.get(tool, version) == version, f"{tool} is {pins[tool]} in the tests and {version} in the hooks"


def test_required_packages_are_pinned() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "scripts/constraints.txt").read_text(), re.MULTILINE))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    wanted = [*PYPROJECT["project"]["dependencies"]]
    for extra in PYPROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    for group in ("lint", "test"):
        wanted += PYPROJECT["dependency-groups"][group]
    from packaging.requirements import Requirement

    for requirement in map(Requirement, wanted):
        version = pins.get(requirement.name.lower().replace("_", "-"))
        assert version, f"scripts/constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} does not admit the pinned {version}"
