"""TRL in a virtual environment of its own, made once per user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TRL, TORCH, TRANSFORMERS = "1.16.0", "2.13.0", "5.23.0"
"""Pinned: TRL's newest release, with the torch and transformers that our side runs with."""


def python() -> Path:
    """Its interpreter."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wingbeat" / "bench"
    folder = cache / f"trl-{TRL}"
    found, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists():
        sys.stderr.write(f"installing trl {TRL} into {folder}\n")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        packages = [f"trl=={TRL}", f"torch=={TORCH}", f"transformers=={TRANSFORMERS}"]
        command = [str(found), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        subprocess.run(command, check=True, stdout=sys.stderr)
        stamp.touch()
    return found
