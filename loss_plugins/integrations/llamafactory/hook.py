"""The opt-in hook: a `.pth` file beside the installed packages, which Python reads whenever it starts."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from ...errors import UnsupportedError

# The name sorts behind those of editable installations, which are read in order. Where the package is gone but the
# file is not, Python starts without a word.
FILE = "zz_loss_plugins_llamafactory.pth"
LINE = (
    "import sys; exec('try:\\n from loss_plugins.integrations.llamafactory.autoload import install\\n"
    "except ImportError:\\n pass\\nelse:\\n install()')\n"
)


def install_hook(folder: Path | None = None) -> Path:
    """Write the file. Doing it again changes nothing.

    Args:
        folder: Default: where this Python's packages are.

    Raises:
        UnsupportedError: nothing can be written there.
    """
    path = _path(folder)
    try:
        path.write_text(LINE)
    except OSError as error:
        raise UnsupportedError(
            f"The hook for LLaMA-Factory belongs into {path.parent}, and nothing can be written there "
            f"({error.strerror}). Use `loss-plugins llamafactory train`, which needs no hook, or a virtual environment."
        ) from error
    return path


def remove_hook(folder: Path | None = None) -> Path | None:
    """Delete the file. Returns its path, or None if it was not there.

    Raises:
        UnsupportedError: it is there and cannot be deleted.
    """
    path = _path(folder)
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnsupportedError(
            f"The hook for LLaMA-Factory is {path}, and it cannot be deleted ({error.strerror}). Delete it as the user "
            "who installed it."
        ) from error
    return path


def _path(folder: Path | None) -> Path:
    return (folder or Path(sysconfig.get_path("purelib"))) / FILE
