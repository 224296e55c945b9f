"""Writing files so that a crash leaves the old or the new one, never half of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

OWNER_ONLY = 0o600
"""For files that hold keys."""


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``: written beside it, synced, renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
