"""The bubblewrap sandbox as a box: what it does for those who mean well.  Escapes are in ``test_escape.py``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from holding import held

from wingbeat.core.errors import ConfigError
from wingbeat.resources.backends import default_backends, sandbox_box
from wingbeat.resources.backends.limits_homes import Homes
from wingbeat.resources.backends.sandbox import SandboxBackend
from wingbeat.resources.backends.sandbox_box import BoxInstance
from wingbeat.resources.backends.sandbox_process import Handle, children_of, strays_of
from wingbeat.resources.boxes import Box
from wingbeat.resources.specs import Mount, ResourceFailed, ResourceLost, Reuse, SandboxSpec, UnsupportedField

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

SPEC = SandboxSpec(files={"src/a.txt": "hello"}, env={"COLOUR": "blue"}, memory_mb=held(200), reset_timeout_s=20)


@contextlib.asynccontextmanager
async def sandbox(spec: SandboxSpec, backend: SandboxBackend | None = None) -> AsyncGenerator[BoxInstance]:
    handles: list[str] = []
    backend = backend or SandboxBackend()
    backend.check(spec)
    instance = await backend.start(spec, started=handles.append)
    try:
        yield instance
    finally:
        await instance.close()
        await backend.close()
        assert handles == [instance.handle]
        assert left_of(instance.handle) == []


def run_to_its_death(script: str) -> str:
    """What a program printed that killed itself."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.strip()


async def num_processes(box: Box) -> int:
    """Those beside its first one and the shell that looks."""
    return len((await box.run("echo /proc/[0-9]*")).stdout.split()) - 2


def left_of(text: str) -> list[str]:
    """What still exists of a sandbox: its process, its control groups."""
    handle = Handle.parse(text)
    found = [folder for folder in (handle.folder, *handle.groups) if folder and Path(folder).exists()]
    found += [f"stray {pid}" for pid in strays_of(handle)]
    return [*found, *([f"process {handle.pid}"] if handle.is_alive else [])]


async def test_commands_see_their_files_and_variables_and_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINGBEAT_KEY", "secret")
    async with sandbox(SPEC) as instance:
        box = instance.value
        done = await box.run("pwd; cat src/a.txt; echo; env | sort; echo oops >&2; exit 3", env={"SIZE": "big"})
        assert done.exit_code == 3
        assert not done.ok
        assert done.stopped_by is None
        assert done.stderr == b"oops\n"
        folder, text, *variables = done.stdout.decode().splitlines()
        assert (folder, text) == ("/work", "hello")
        names = {line.partition("=")[0] for line in variables}
        assert names == {"COLOUR", "SIZE", "HOME", "LANG", "PATH", "PWD", "TMPDIR"}
        assert {"COLOUR=blue", "SIZE=big"} <= set(variables)
        assert (await box.run(["cat"], stdin=b"x" * 300_000)).stdout == b"x" * 300_000
        assert (await box.run("pwd", cwd="src")).stdout == b"/work/src\n"
        with pytest.raises(ValueError, match="leaves"):
            await box.run("pwd", cwd="../etc")
        assert (await box.run(["no-such-program"])).exit_code == 127
        assert (await box.run(["./src/a.txt"])).exit_code == 126
        assert (await box.run("kill -SEGV $$")).exit_code == -signal.SIGSEGV
        with pytest.raises(ValueError, match="program"):
            await box.run([])


async def test_files_go_in_and_out() -> None:
    async with sandbox(SPEC) as instance:
        box = instance.value
        await box.write("new/deep/b.bin", bytes(range(256)) * 1000)
        assert await box.read("new/deep/b.bin") == bytes(range(256)) * 1000
        assert await box.read("/work/src/a.txt") == b"hello"
        assert await box.list() == ["new/", "src/"]
        assert await box.list("new/deep") == ["b.bin"]
        assert (await box.run("wc -c < new/deep/b.bin")).stdout == b"256000\n"
        with pytest.raises(FileNotFoundError) as caught:
            await box.read("none")
        assert caught.value.filename == "none"
        with pytest.raises(IsADirectoryError):
            await box.read("src")
        with pytest.raises(ValueError, match="outside"):
            await box.read("/etc/passwd")
        with pytest.raises(ValueError, match="expected at most 4"):
            await box.read("src/a.txt", max_bytes=4)


async def test_text_in_place_of_bytes_is_refused_and_the_box_lives_on() -> None:
    text: Any = "text"
    async with sandbox(SPEC) as instance:
        with pytest.raises(TypeError, match="expected bytes"):
            await instance.value.write("a.txt", text)
        with pytest.raises(TypeError, match="expected bytes"):
            await instance.value.run("cat", stdin=text)
        assert (await instance.value.run("echo on")).stdout == b"on\n"


@pytest.mark.slow
async def test_the_background_lives_on_until_it_is_ended() -> None:
    async with sandbox(SPEC) as instance:
        box = instance.value
        serve = (
            "import socket as s; a = s.create_server(('127.0.0.1', 8000)); open('up', 'w'); a.accept()[0].send(b'hi')"
        )
        assert (await box.run(f'(setsid python3 -c "{serve}" & ); until test -e up; do sleep 0.02; done')).ok
        call = "import socket; print(socket.create_connection(('127.0.0.1', 8000)).recv(2).decode())"
        assert (await box.run(["python3", "-c", call])).stdout == b"hi\n"
        while await num_processes(box):
            pass  # the server is on its way out
        await box.run("yes & sleep 1000 & (setsid sleep 1000 &)")
        assert await num_processes(box) == 3
        await box.end_processes()
        assert await num_processes(box) == 0
        assert await box.list() == ["src/", "up"]


@pytest.mark.slow
async def test_reset_makes_it_as_good_as_new() -> None:
    async with sandbox(SPEC.model_copy(update={"reuse": Reuse.AFTER_RESET})) as instance:
        box = instance.value
        dirt = "echo x > src/a.txt; mkdir -p d/e; chmod 0 d; ln -s / l; mkfifo p; echo > /tmp/t; echo > /dev/shm/s"
        hang = "import os; [os.setxattr(d, 'user.x', b'1') for d in ('/work', '/tmp')]"
        await box.run(["python3", "-c", hang])  # since Linux 6.6
        assert (await box.run(f"{dirt}; chmod 500 /tmp /dev/shm /dev/mqueue; chmod 0 .; (setsid sleep 1000 &)")).ok
        await instance.reset()
        await instance.check()
        listed = await box.run("find . /tmp /dev/shm | sort; stat -c %a . /tmp /dev/shm /dev/mqueue")
        found = listed.stdout.decode().split()
        assert found == [".", "./src", "./src/a.txt", "/dev/shm", "/tmp", "755", "1777", "1777", "1777"]
        look = await box.run(["python3", "-c", "import os; print(os.listxattr('/work'), os.listxattr('/tmp'))"])
        assert look.stdout == b"[] []\n"
        assert await num_processes(box) == 0
        assert await box.read("src/a.txt") == b"hello"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dirt",
    [
        "import ctypes; assert ctypes.CDLL(None).shmget(1, 4096, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL(None).semget(1, 1, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL('librt.so.1').mq_open(b'/q', 0o102, 0o600, None) >= 0",
    ],
)
async def test_what_outlives_processes_in_the_kernel_makes_a_reset_fail(dirt: str) -> None:
    async with sandbox(SPEC) as instance:
        done = await instance.value.run(["python3", "-c", dirt])
        assert done.ok, done.stderr
        with pytest.raises(OSError, match="left behind"):
            await instance.reset()


@pytest.mark.slow
async def test_several_commands_run_at_once_and_one_stopped_leaves_the_others() -> None:
    async with sandbox(SPEC) as instance:
        box = instance.value
        long = asyncio.ensure_future(box.run("sleep 1000; echo no", timeout_s=0.3))
        assert (await box.run("mkfifo gate")).ok
        other = asyncio.ensure_future(box.run("read line < gate; echo $line"))
        stopped = await long
        assert stopped.stopped_by == "timeout"
        assert stopped.exit_code == -signal.SIGKILL
        await box.run("echo still > gate")
        assert (await other).stdout == b"still\n"


@pytest.mark.slow
async def test_a_cancelled_command_is_ended() -> None:
    async with sandbox(SPEC) as instance:
        box = instance.value
        running = asyncio.ensure_future(box.run("echo > begun; sleep 1000"))
        while await box.list() != ["begun", "src/"]:
            pass
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while await num_processes(box):
            pass


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may reach and write: a sandbox has a user of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        for name in ("given", "shared"):
            (path / name).mkdir()
            (path / name / "file").write_text(name)
            (path / name).chmod(0o777)
        yield path
        assert (path / "shared" / "new").read_text() == "new\n"
        assert (path / "given" / "file").exists()


@pytest.mark.slow
async def test_mounts_are_read_only_unless_said_otherwise(public: Path) -> None:
    mounts = (
        Mount(source=str(public / "given"), target="/data/given"),
        Mount(source=str(public / "shared"), target="/work/shared", read_only=False),
    )
    async with sandbox(SPEC.model_copy(update={"mounts": mounts})) as instance:
        box = instance.value
        assert (await box.run("cat /data/given/file shared/file; echo new > shared/new")).stdout == b"givenshared"
        assert (await box.run("echo x > /data/given/new")).exit_code != 0
        await instance.reset()  # must not wipe what is the host's


async def test_a_mount_that_is_not_there_fails_with_the_reason() -> None:
    spec = SPEC.model_copy(update={"mounts": (Mount(source="/nowhere", target="/data"),)})
    backend = SandboxBackend()
    with pytest.raises(ConfigError, match="mounts: expected a file"):
        backend.check(spec)
    with pytest.raises(ResourceFailed, match="/nowhere"):  # gone in between
        await backend.start(spec, started=lambda _: None)
    await backend.close()


def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    backend = SandboxBackend()
    with pytest.raises(UnsupportedField) as caught:
        backend.check(SandboxSpec(memory_mb=100, disk_mb=100))
    assert caught.value.field == "disk_mb"
    writable = Mount(source="/tmp", target="/data", read_only=False)
    with pytest.raises(UnsupportedField) as caught:
        backend.check(SandboxSpec(mounts=(writable,), reuse=Reuse.AFTER_RESET))
    assert caught.value.field == "mounts"
    with pytest.raises(ConfigError, match="workdir"):
        backend.check(SandboxSpec(workdir="/etc"))


def test_a_machine_without_bubblewrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="install the package bubblewrap"):
        SandboxBackend().check(SandboxSpec())


async def test_death_from_outside_is_told_to_whoever_waits() -> None:
    async with sandbox(SPEC) as instance:
        running = asyncio.ensure_future(instance.value.run("echo > begun; sleep 1000"))
        while await instance.value.list() != ["begun", "src/"]:
            pass
        os.kill(Handle.parse(instance.handle).pid, signal.SIGKILL)
        with pytest.raises(ResourceLost, match="ended"):
            await running
        with pytest.raises(ResourceLost):
            await instance.check()
        with pytest.raises(ResourceLost):
            await instance.value.run("true")


async def test_one_that_hangs_is_lost_and_still_ends() -> None:
    async with sandbox(SPEC.model_copy(update={"reset_timeout_s": 0.2})) as instance:
        (inner,) = children_of(Handle.parse(instance.handle).pid)
        os.kill(inner, signal.SIGSTOP)
        with pytest.raises(ResourceLost, match="did not answer"):
            await instance.check()


async def test_one_that_is_stopped_in_a_command_is_lost_at_the_commands_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox_box, "GRACE_S", 1000.0)  # which only those that are slow get
    async with sandbox(SPEC) as instance:
        running = asyncio.ensure_future(instance.value.run("echo > begun; sleep 1000", timeout_s=0.5))
        while await instance.value.list() != ["begun", "src/"]:
            pass
        (inner,) = children_of(Handle.parse(instance.handle).pid)
        os.kill(inner, signal.SIGSTOP)
        with pytest.raises(ResourceLost, match="did not end in time"):
            await running


@pytest.mark.slow
async def test_cancelled_at_any_point_a_start_leaves_nothing() -> None:
    backend = SandboxBackend()
    backend.check(SPEC)
    for steps in range(0, 12, 2):
        handles: list[str] = []
        starting = asyncio.ensure_future(backend.start(SPEC, started=handles.append))
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert [left for handle in handles for left in left_of(handle)] == []
    await backend.close()


@pytest.mark.slow
async def test_cancelled_at_any_time_a_start_leaves_nothing() -> None:
    """Other than awaits, the steps of bwrap itself: there is a moment in which its inner half knows no owner."""
    backend = SandboxBackend()
    backend.check(SPEC)
    for number in range(16):
        handles: list[str] = []
        starting = asyncio.ensure_future(backend.start(SPEC, started=handles.append))
        await asyncio.wait([starting], timeout=number * 0.003)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await starting).close()
        assert [left for handle in handles for left in left_of(handle)] == []
    await backend.close()


DYING = """
import asyncio, os, signal, sys
from wingbeat.resources.backends.sandbox import SandboxBackend
from wingbeat.resources.specs import SandboxSpec

async def main():
    backend, spec = SandboxBackend(), SandboxSpec()
    backend.check(spec)
    tell = lambda handle: print(handle, flush=True)
    starts = [asyncio.ensure_future(backend.start(spec, started=tell)) for _ in range(8)]
    await asyncio.wait(starts, timeout={delay_s})
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.02])
async def test_an_owner_killed_while_sandboxes_start_leaves_nothing(delay_s: float) -> None:
    backend = SandboxBackend()
    handles = run_to_its_death(DYING.format(delay_s=delay_s)).splitlines()
    assert handles
    for handle in handles:
        await backend.reap(handle)
        assert left_of(handle) == []
    await backend.close()


OWNER = """
import asyncio, os, signal, sys
from wingbeat.resources.backends.{module} import {name}
from wingbeat.resources.specs import SandboxSpec, SubprocessSpec

async def main():
    instance = await {name}().start({spec}, started=lambda handle: print(handle, flush=True))
    await instance.value.run("(setsid sleep 1000 &); sleep 2000 & echo")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "spec"),
    [
        ("sandbox", "SandboxBackend", "SandboxSpec()"),
        ("subprocess", "SubprocessBackend", "SubprocessSpec(network=True)"),
    ],
)
async def test_a_killed_owner_leaves_nothing(module: str, name: str, spec: str) -> None:
    text = run_to_its_death(OWNER.format(module=module, name=name, spec=spec))
    backend = default_backends()[module]
    await backend.reap(text)  # True or False: its processes may have gone by themselves
    assert left_of(text) == []
    assert await backend.reap(text) is False
    await backend.close()


@pytest.mark.slow
async def test_without_control_groups_it_works_with_limits_of_processes() -> None:
    backend = SandboxBackend(homes=lambda: Homes(0, reason="for this test"))
    with pytest.raises(UnsupportedField, match=r"for this test.*process_memory_mb"):
        backend.check(SandboxSpec(memory_mb=100))
    async with sandbox(SandboxSpec(process_memory_mb=100, pids=20), backend) as instance:
        assert Handle.parse(instance.handle).groups == ()
        done = await instance.value.run(["python3", "-c", "x = bytearray(200_000_000)"])
        assert done.stopped_by == "memory"
        bomb = "import os, time\nfor _ in range(100):\n    os.fork() or time.sleep(1000)"
        done = await instance.value.run(["python3", "-c", bomb])
        assert done.stopped_by == "pids"


WITHOUT_USERS = """
import asyncio, json
from wingbeat.resources.backends.limits_homes import Homes, PIDS
from wingbeat.resources.backends.sandbox import SandboxBackend
from wingbeat.resources.specs import SandboxSpec, UnsupportedField

BREAK = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (-1, -1))"

async def main():
    for spec in (SandboxSpec(), SandboxSpec(pids=20)):
        try:
            SandboxBackend(homes=lambda: Homes(0, reason="for this test")).check(spec)
            print("accepted")
        except UnsupportedField as error:
            print(error.field, error.message)
    backend = SandboxBackend()
    if PIDS not in backend._find_homes():
        return
    spec = SandboxSpec(pids=20, file_mb=1, process_memory_mb=100)
    backend.check(spec)
    instance = await backend.start(spec, started=lambda _: None)
    run = instance.value.run
    bomb = "import os, time\\nfor _ in range(100):\\n    os.fork() or time.sleep(1000)"
    for command in (bomb, "open('a', 'wb').write(bytes(2_000_000))", "x = bytearray(200_000_000)", BREAK):
        done = await run(["python3", "-c", command])
        print(done.exit_code != 0, done.stopped_by)
    await instance.close()
    await backend.close()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has users to give")
def test_root_without_other_users_has_no_limits_that_nothing_holds() -> None:
    """In a user namespace of one user, as in some containers: outside, a sandbox's processes are root's."""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", WITHOUT_USERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    default, explicit, *held_by_others = done.stdout.splitlines()
    assert re.match(r"pids .*nothing would hold 1024 processes, its default: .*for this test.*other users", default)
    assert re.match(r"pids .*nothing would hold 20 processes, as the spec says", explicit)
    assert "sandboxes have no users of their own here (as user 6" in done.stderr
    if held_by_others:
        assert held_by_others == ["True pids", "True file", "True memory", "True None"]
