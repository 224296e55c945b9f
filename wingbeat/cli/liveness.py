"""Whether the server of a run directory is running: the ledger learns of its end only when the run is continued."""

from __future__ import annotations

import json
import os
from pathlib import Path


def is_served(run_dir: Path) -> bool:
    """Whether a process of the run, by what its supervisor and its control wrote down, lives on this machine."""
    processes = _read(run_dir / "processes.json")
    pids = {*processes.values(), _read(run_dir / "server.json").get("pid")}
    return any(_is_ours(pid) for pid in pids if isinstance(pid, int))


def _read(path: Path) -> dict[str, object]:
    """{} where it is missing; the files are replaced whole, so what is there is complete."""
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _is_ours(pid: int) -> bool:
    """Whether the process runs; where the system says what it runs, it must be ours and no later one's number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    command = Path(f"/proc/{pid}/cmdline")
    return not command.exists() or b"wingbeat" in command.read_bytes()
