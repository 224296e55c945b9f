"""Who shares our memory: a name for this host's boot, and the folder for tensors that pass through it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import tempfile
import uuid
from pathlib import Path

from wingbeat.core.errors import SetupError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")
HOST_ID_VARIABLE = "WINGBEAT_HOST_ID"
"""Names this host where the kernel's boot id does not: processes with the same value must share /dev/shm."""
_HOST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def host_id(*, boot_id_path: Path = _BOOT_ID) -> str:
    """16 hex digits, equal for all processes that can map one another's files, new after a reboot.

    The boot id alone would also be shared by containers of one machine, whose ``/dev/shm`` differ, so
    the host name is hashed with it.  Systems without a boot id use the network card's address.
    ``WINGBEAT_HOST_ID`` rules over both.  Raises SetupError where it is no name.
    """
    if given := os.environ.get(HOST_ID_VARIABLE):
        if _HOST_ID.fullmatch(given) is None:
            raise SetupError(f"{HOST_ID_VARIABLE}: expected letters, digits, '.', '_' and '-', got {given!r}")
        return given
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


def received_dir(run_dir: Path | str, host_id: str, *, min_free_bytes: int = 0) -> Path:
    """Where the engines of a host keep what they pull of a run: one folder for all of them.

    ``run_dir`` names the run; on another host than control's it need not exist.  The folder is beside that of the
    trainers, so that whoever sweeps that one sweeps this one, too.
    """
    name = f"received-{host_id}"
    for folder in run_weights_candidates(run_dir):
        if (folder / name).is_dir():  # another process of this host has chosen it
            return folder / name
    return run_weights_dir(run_dir, min_free_bytes=min_free_bytes) / name


def make_private(folder: Path) -> None:
    """:func:`make_own` of a folder in that of a run, and of that one."""
    make_own(folder.parent)
    make_own(folder)


def make_own(folder: Path) -> None:
    """Make a folder for its owner alone.

    Raises SetupError where it belongs to another user, who could put other weights in the place of ours.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat().st_uid
    if owner != os.getuid():
        raise SetupError(
            f"cannot keep weights there: {folder} belongs to user {owner}, this is user {os.getuid()}; remove it, or"
            " use another run directory"
        )
