"""How the reader of our output can call us again."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def program() -> str:
    """``wingbeat`` where a shell finds it, else the path of the one beside this interpreter.

    ``make demo`` runs from a virtual environment that is not active in the reader's shell.
    """
    if shutil.which("wingbeat"):
        return "wingbeat"
    beside = Path(sys.executable).with_name("wingbeat")
    return str(beside) if beside.exists() else f"{sys.executable} -m wingbeat.cli"
