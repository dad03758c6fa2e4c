"""What the README shows, run: Python blocks in order in one namespace, YAML blocks as jobs, commands, links, figures.

A block that needs something the reader has (a model, a data set) may be preceded by an HTML comment with the code that
makes it:  <!-- setup: model = ... -->
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", *sorted((ROOT / "loss_plugins").rglob("README.md"))]
PIECE = re.compile(
    r"^<!--\s*setup:(?P<setup>.*?)-->|^```(?P<language>[\w-]*) ?(?P<framework>[\w-]*)[^\n]*\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block, or the setup before one."""

    readme: Path
    language: str
    code: str
    line: int
    """Line of the README that the code begins on."""
    framework: str = ""
    """Whose block it is, where that is written behind the language: run by the tests of frameworks."""

    @property
    def where(self) -> str:
        return f"{self.readme.relative_to(ROOT)}:{self.line}"


def blocks(readme: Path) -> Iterator[Block]:
    text = readme.read_text(encoding="utf-8")
    for piece in PIECE.finditer(text):
        group = "setup" if piece["setup"] is not None else "code"
        line = text.count("\n", 0, piece.start(group)) + 1
        code = piece[group]
        if group == "setup":
            stripped = code.lstrip("\n")
            line += len(code) - len(stripped)
            code = textwrap.dedent(stripped.lstrip(" ") if stripped == code else stripped)
        yield Block(readme, "python" if group == "setup" else piece["language"], code, line, piece["framework"] or "")


def of_language(*languages: str) -> list[Block]:
    every = [block for readme in READMES for block in blocks(readme)]
    return [block for block in every if block.language in languages and not block.framework]


# torch's loader says this to everyone without a GPU; the reader's script need not turn it off
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(readme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example.py"])
    namespace = {"__name__": "__main__"}
    for block in blocks(readme):
        if block.language != "python" or block.framework:
            continue
        try:
            # blank lines first, so that a traceback has the README's own line numbers
            exec(compile("\n" * (block.line - 1) + block.code, str(readme), "exec"), namespace)
        except Exception as error:
            error.add_note(f"in the block at {block.where}:\n{textwrap.indent(block.code, '    ')}")
            raise


@pytest.mark.parametrize("block", of_language("yaml", "yml"), ids=lambda block: block.where)
def test_yaml_blocks_are_jobs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loss_plugins.cli._settings import read_job
    from loss_plugins.integrations.hf.job import SETTINGS

    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(block.code)
    for data in re.findall(r"^(?:train|eval)_file: *(\S+)", block.code, re.MULTILINE):  # the reader's own
        (tmp_path / data).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / data).touch()
    before = sorted(tmp_path.rglob("*"))
    read_job(path, [], SETTINGS)
    assert sorted(tmp_path.rglob("*")) == before, "reading a job writes nothing"


def command_lines() -> list[tuple[str, str]]:
    """(where, command) of every line in a shell block."""
    lines = []
    for block in of_language("bash", "sh", "shell", "console"):
        for number, line in enumerate(block.code.replace("\\\n", " ").splitlines(), block.line):
            command = line.removeprefix("$ ").partition(" #")[0].strip()
            if command and not command.startswith("#"):
                lines.append((f"{block.readme.relative_to(ROOT)}:{number}", command))
    return lines


@pytest.mark.parametrize(("where", "command"), command_lines())
def test_commands_exist(where: str, command: str) -> None:
    from typer.main import get_command

    from loss_plugins.cli.main import app

    words = shlex.split(command)
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file(), f"{where} runs {words[1]}, which does not exist"
    if words[0] == "loss-plugins":
        known = get_command(app).commands  # type: ignore[attr-defined]
        assert words[1] in known or words[1] in ("--help", "--version"), f"{where} runs loss-plugins {words[1]}"
    for word in words[1:]:
        if word.startswith(("configs/", "scripts/", "tests/")):
            assert (ROOT / word).exists(), f"{where} names {word}, which does not exist"
    if words[:2] == ["pip", "install"]:
        declared = (ROOT / "pyproject.toml").read_text()
        for extras in re.findall(r"loss-plugins\[([\w,-]+)\]", command):
            for extra in extras.split(","):
                assert re.search(rf"^{extra} = \[", declared, re.MULTILINE), f"{where}: there is no extra {extra!r}"


def test_readme_has_the_two_commands() -> None:
    commands = [command for where, command in command_lines() if where.startswith("README.md:")]
    assert "bash scripts/quickstart.sh" in commands
    assert "bash scripts/test.sh" in commands


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(readme: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", readme.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", prose, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    targets = re.findall(r"\]\(([^)\s]+)(?:\s[^)]*)?\)", prose) + re.findall(r"(?:src|href)=\"([^\"]+)\"", prose)
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        assert not path or (readme.parent / path).exists(), f"{readme.name} links to {path}, which does not exist"
        assert path or anchor in anchors, f"{readme.name} links to #{anchor}, and no heading is called that"
