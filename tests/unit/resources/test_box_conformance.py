"""Sandboxes and subprocess boxes do what every back-end must, with real processes."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import conformance
import pytest
from holding import held

from wingbeat.resources import Instance, Mount, Reuse, SandboxSpec, Spec, SubprocessSpec
from wingbeat.resources.backends.limits_homes import PREFIX, find_homes
from wingbeat.resources.backends.sandbox import SandboxBackend
from wingbeat.resources.backends.sandbox_process import FOLDER_PREFIX, Handle, children_of
from wingbeat.resources.backends.subprocess import SubprocessBackend

OWNER = """
import asyncio, os, signal
from wingbeat.resources import SandboxSpec, SubprocessSpec
from wingbeat.resources.backends.{module} import {backend}

async def main():
    instance = await {backend}().start({spec}, started=lambda handle: print(handle, flush=True))
    await instance.value.run("(setsid sleep 1000 &)")
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""

ABANDONED: list[Handle] = []


def num_alive() -> int:
    """Processes, folders and control groups of this process and of those that were killed."""
    found: list[object] = [pid for pid in children_of(os.getpid()) if _is_box(pid)]
    for handle in ABANDONED:
        found += [folder for folder in (handle.folder, *handle.groups) if folder and Path(folder).exists()]
        found += [handle.pid] if handle.is_alive else []
    for folder in set(find_homes().folders.values()):
        found += folder.glob(f"{PREFIX}*-{os.getpid()}-*")
    return len(found)


def _is_box(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"bwrap" in words or b"sandbox_init" in words
    return False


async def kill(instance: Instance) -> None:
    """From outside, and wait for what that ends inside."""
    pid = Handle.parse(str(instance.handle)).pid
    ending = [os.pidfd_open(pid) for pid in (pid, *children_of(pid))]
    os.kill(pid, signal.SIGKILL)
    for process in ending:
        assert select.select([process], [], [], 30)[0]
        os.close(process)


def abandon(module: str, backend: str, spec: str) -> str:
    script = OWNER.format(module=module, backend=backend, spec=spec)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    ABANDONED.append(Handle.parse(done.stdout))
    return done.stdout.strip()


def case(backend: type[SandboxBackend | SubprocessBackend], spec: Spec, refused: Spec, field: str) -> conformance.Case:
    words = (spec.kind, backend.__name__, f"{type(spec).__name__}(network=True)")
    return conformance.Case(
        backend=backend,
        spec=spec,
        num_alive=num_alive,
        refused=refused,
        refused_field=field,
        kill=kill,
        abandon=lambda: abandon(*words),
        is_box=True,
    )


MOUNT = Mount(source="/tmp", target="/data", read_only=False)
CASES = {
    "sandbox": case(
        SandboxBackend,
        SandboxSpec(reuse=Reuse.AFTER_RESET, files={"a.txt": "a"}, memory_mb=held(100), pids=50),
        SandboxSpec(reuse=Reuse.AFTER_RESET, mounts=(MOUNT,)),
        "mounts",
    ),
    "subprocess": case(
        SubprocessBackend,
        SubprocessSpec(reuse=Reuse.AFTER_RESET, files={"a.txt": "a"}, network=True),
        SubprocessSpec(network=True, mounts=(MOUNT,)),
        "mounts",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("check", conformance.ALL, ids=conformance.name_of)
async def test_boxes_conform(
    kind: str, check: conformance.Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "sandbox" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    await check(CASES[kind])
    assert [name for name in os.listdir(tmp_path) if name.startswith(FOLDER_PREFIX)] == []
