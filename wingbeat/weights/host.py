"""Who shares our memory: a name for this host's boot, and the folder for tensors that pass through it."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
import uuid
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")


def host_id(*, boot_id_path: Path = _BOOT_ID) -> str:
    """16 hex digits, equal for all processes that can map one another's files, new after a reboot.

    The boot id alone would also be shared by containers of one machine, whose ``/dev/shm`` differ, so
    the host name is hashed with it.  Systems without a boot id use the network card's address.
    """
    try:
        boot = boot_id_path.read_text(encoding="ascii").strip()
    except OSError:
        boot = f"node-{uuid.getnode():x}"
    return hashlib.sha256(f"{boot}\n{platform.node()}".encode()).hexdigest()[:16]


def run_weights_candidates(run_dir: Path | str, *, shared_memory: Path = _SHARED_MEMORY) -> tuple[Path, Path]:
    """Both folders that :func:`run_weights_dir` may choose, for whoever sweeps them at the end of a run."""
    name = f"wingbeat-{hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:16]}"
    return shared_memory / name, Path(tempfile.gettempdir()) / name


def run_weights_dir(run_dir: Path | str, *, min_free_bytes: int = 0, shared_memory: Path = _SHARED_MEMORY) -> Path:
    """Where the trainers of a run publish: shared memory if it is writable and has room, else the temp folder.

    The name is a function of the run directory's real path, so that a supervisor finds and sweeps what a
    killed trainer left.  Nothing is created; :class:`~wingbeat.weights.publish.WeightPublisher` does that.
    ``min_free_bytes`` should cover two versions of all policies, because an old version lives until every
    engine has swapped (containers often have only 64 MiB of shared memory).
    """
    roomy = (
        shared_memory.is_dir()
        and os.access(shared_memory, os.W_OK | os.X_OK)
        and shutil.disk_usage(shared_memory).free >= min_free_bytes
    )
    in_memory, on_disk = run_weights_candidates(run_dir, shared_memory=shared_memory)
    return in_memory if roomy else on_disk
