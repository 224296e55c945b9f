"""A process whose file descriptors run out: starts fail in words, nothing is left, nobody alive is taken for dead."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_backend import FakeBackend

from wingbeat.resources import ResourceFailed, reap
from wingbeat.resources.backends.limits_homes import PREFIX, Homes, find_homes, is_abandoned, owner_mark
from wingbeat.resources.backends.sandbox_means import find_means
from wingbeat.resources.ledger import Ledger

STARTS = """
import asyncio, os, resource
from wingbeat.resources import ResourceFailed, SubprocessSpec
from wingbeat.resources.backends.subprocess import SubprocessBackend

async def main():
    backend, spec = SubprocessBackend(), SubprocessSpec(network=True)
    first = await backend.start(spec, started=lambda _: None)
    (soft, hard), before = resource.getrlimit(resource.RLIMIT_NOFILE), os.listdir("/proc/self/fd")
    for more in (1, 3, 5, 7, 9, 30):
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + more, hard))
        try:
            instance = await backend.start(spec, started=lambda _: None)
            await instance.close()
            print("started")
        except ResourceFailed as error:
            print(error.message)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert os.listdir("/proc/self/fd") == before
    await first.close()
    await backend.close()
    print(os.getpid(), os.listdir(os.environ["TMPDIR"]))

asyncio.run(main())
"""


@pytest.mark.slow
def test_starts_without_descriptors_fail_in_words_and_leave_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    failed = [line for line in said if line != "started"]
    assert failed
    assert said[-1] == "started"
    assert all("no file descriptor is left: raise their limit (ulimit -n)" in line for line in failed), failed
    pid, _, left = last.partition(" ")
    assert left == "[]"
    groups = [group for folder in set(find_homes().folders.values()) for group in folder.glob(f"{PREFIX}*-{pid}-*")]
    assert groups == []


async def test_who_cannot_be_looked_at_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    ledger.started("fake", "thing")
    ledger.forked()  # lets go of its lock, as its death would
    name, descriptors = f"{PREFIX}{owner_mark()}-1", len(os.listdir("/proc/self/fd"))

    def no_descriptor(self: Path) -> bytes:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", no_descriptor)
        with pytest.raises(OSError, match="Too many open files"):
            is_abandoned(name)
        with pytest.raises(OSError, match="Too many open files"):
            await reap(tmp_path, backends={"fake": FakeBackend()})
    assert not is_abandoned(name)
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_moment_without_descriptors_chooses_nothing_weaker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process finds out once it keeps: no sandbox as root, or without limits, for a moment's sake."""

    def no_descriptor(*_: object, **__: object) -> str:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", no_descriptor)
        with pytest.raises(ResourceFailed, match=r"no sandbox can be made now.*ulimit -n"):
            find_means(Homes(0))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", no_descriptor)
        with pytest.raises(ResourceFailed, match=r"control groups cannot be looked up.*ulimit -n"):
            find_homes()
