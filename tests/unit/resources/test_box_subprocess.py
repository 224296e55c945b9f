"""Boxes of kind subprocess: they keep a machine tidy, not safe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from holding import HOLDS_ALL

from wingbeat.core.process_facts import start_time
from wingbeat.resources.backends.limits_homes import Homes, owner_mark
from wingbeat.resources.backends.sandbox_box import BoxInstance
from wingbeat.resources.backends.sandbox_process import FOLDER_PREFIX, Handle
from wingbeat.resources.backends.subprocess import SubprocessBackend
from wingbeat.resources.specs import Mount, ResourceLost, SubprocessSpec, UnsupportedField

SPEC = SubprocessSpec(network=True, files={"src/a.txt": "hello"}, env={"COLOUR": "blue"}, output_bytes=50_000)


@contextlib.asynccontextmanager
async def folder_box(spec: SubprocessSpec = SPEC) -> AsyncGenerator[BoxInstance]:
    backend = SubprocessBackend()
    backend.check(spec)
    instance = await backend.start(spec, started=lambda _: None)
    try:
        yield instance
    finally:
        await instance.close()
        await instance.close()
        await backend.close()
        assert left_of(instance.handle) == []


def left_of(text: str) -> list[str]:
    """What still exists of a box: its process, its folder, its control groups."""
    handle = Handle.parse(text)
    found = [folder for folder in (handle.folder, *handle.groups) if Path(folder).exists()]
    return [*found, *([f"process {handle.pid}"] if handle.is_alive else [])]


def mode_of(folder: str) -> int:
    return Path(folder).stat().st_mode & 0o777


async def test_a_box_is_a_private_folder_without_our_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINGBEAT_KEY", "secret")
    async with folder_box() as instance:
        box = instance.value
        assert box.workdir.startswith(tempfile.gettempdir())
        assert mode_of(box.workdir) == 0o700
        done = await box.run("pwd; cat src/a.txt; echo $COLOUR $WINGBEAT_KEY; cat; exit 3", stdin=b"in")
        assert (done.exit_code, done.stdout.decode()) == (3, f"{box.workdir}\nhelloblue\nin")
        await box.write("b/c", b"x")
        assert await box.list() == ["b/", "src/"]
        with pytest.raises(ValueError, match="outside"):
            await box.read("/etc/hostname")
        (Path(box.workdir) / "link").symlink_to("/etc")
        with pytest.raises(ValueError, match="outside"):
            await box.read("link/hostname")


@pytest.mark.slow
async def test_limits_are_named() -> None:
    async with folder_box(SPEC.model_copy(update={"file_mb": 1})) as instance:
        box = instance.value
        assert (await box.run("yes")).stopped_by == "output"
        assert (await box.run("head -c 2000000 /dev/zero > big")).stopped_by == "file"
        script = "trap '' TERM; (setsid sh -c 'echo > up; exec sleep 1000' &); sleep 1000"
        done = await box.run(script, timeout_s=0.3)
        assert (done.stopped_by, done.exit_code) == ("timeout", -signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not HOLDS_ALL, reason="control groups cannot be made here")
async def test_control_groups_hold_where_they_can_be_made() -> None:
    async with folder_box(SPEC.model_copy(update={"memory_mb": 60, "pids": 20, "cpu_s": 0.3, "cpus": 1})) as instance:
        box = instance.value
        assert (await box.run(["python3", "-c", "x = bytearray(200_000_000)"])).stopped_by == "memory"
        assert (await box.run("for i in $(seq 40); do sleep 1000 & done; wait")).stopped_by == "pids"
        await box.end_processes()
        assert (await box.run("while :; do :; done")).stopped_by == "cpu"


async def test_reset_ends_what_runs_and_restores_the_files() -> None:
    async with folder_box() as instance:
        box = instance.value
        started = await box.run("echo x > src/a.txt; echo > new; chmod 0 src; (setsid sleep 1000 & echo $!); chmod 0 .")
        pid = int(started.stdout)
        await instance.reset()
        await instance.check()
        assert await box.list() == ["src/"]
        assert await box.read("src/a.txt") == b"hello"
        assert start_time(pid) is None


@pytest.mark.slow
async def test_death_is_noticed_and_cleaned_up_after() -> None:
    async with folder_box() as instance:
        running = asyncio.ensure_future(instance.value.run("echo $$ > begun; exec sleep 1000"))
        while await instance.value.list() != ["begun", "src/"]:
            pass
        pid = int(await instance.value.read("begun"))
        os.kill(Handle.parse(instance.handle).pid, signal.SIGKILL)
        with pytest.raises(ResourceLost):
            await running
        with pytest.raises(ResourceLost):
            await instance.check()
    with contextlib.suppress(ProcessLookupError):  # told to end by the kernel, it takes a moment
        gone = os.pidfd_open(pid)
        assert select.select([gone], [], [], 30)[0]
        os.close(gone)


async def test_reaping_ends_what_a_handle_names() -> None:
    backend = SubprocessBackend()
    instance = await backend.start(SPEC, started=lambda _: None)
    await instance.value.run("(setsid sleep 1000 &)")
    handle = instance.handle
    assert await backend.reap(handle) is True
    assert await backend.reap(handle) is False
    assert left_of(handle) == []
    await instance.close()


def test_folders_of_dead_owners_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    namespace, pid, _ = owner_mark().split("-")
    for mark in (owner_mark(), f"{namespace}-{pid}-1", "something"):
        (tmp_path / f"{FOLDER_PREFIX}{mark}-abc").mkdir()
    SubprocessBackend().check(SPEC)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{FOLDER_PREFIX}{owner_mark()}-abc", f"{FOLDER_PREFIX}something-abc"}


@pytest.mark.parametrize(
    ("update", "field"),
    [
        ({"network": False}, "network"),
        ({"mounts": (Mount(source="/tmp", target="/data"),)}, "mounts"),
        ({"workdir": "/elsewhere"}, "workdir"),
        ({"disk_mb": 10}, "disk_mb"),
        ({"pids": 10}, "pids"),
        ({"cpus": 1.0}, "cpus"),
    ],
)
def test_what_would_need_isolation_is_refused(update: dict[str, object], field: str) -> None:
    backend = SubprocessBackend(homes=lambda: Homes(0, reason="for this test"))
    with pytest.raises(UnsupportedField) as caught:
        backend.check(SPEC.model_copy(update=update))
    assert caught.value.field == field
