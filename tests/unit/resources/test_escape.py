"""What a sandbox must contain, tried for real: every attempt ends in the box, with the limit named that stopped it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from holding import HOLDS_ALL, held

from wingbeat.resources.backends.sandbox import SandboxBackend
from wingbeat.resources.backends.sandbox_process import Handle
from wingbeat.resources.boxes import Box, Finished
from wingbeat.resources.specs import SandboxSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]

needs_groups = pytest.mark.skipif(not HOLDS_ALL, reason="control groups cannot be made here: nothing holds this limit")

SPEC = SandboxSpec(memory_mb=held(96), pids=40, disk_mb=16, file_mb=8, command_timeout_s=30, output_bytes=100_000)


@pytest.fixture
async def box() -> AsyncGenerator[Box]:
    async with sandbox(SPEC) as box:
        yield box
        assert (await box.run("echo fine")).stdout == b"fine\n"  # whatever was tried, the box itself stands


@contextlib.asynccontextmanager
async def sandbox(spec: SandboxSpec) -> AsyncGenerator[Box]:
    backend = SandboxBackend()
    instance = await backend.start(spec, started=lambda _: None)
    try:
        yield instance.value
    finally:
        await instance.close()
        await backend.close()
        assert not is_left(Handle.parse(instance.handle))


def is_left(handle: Handle) -> bool:
    return handle.is_alive or any(Path(folder).exists() for folder in handle.groups)


async def python(box: Box, code: str, timeout_s: float | None = None) -> Finished:
    return await box.run(["python3", "-c", code], timeout_s=timeout_s)


# --- network -------------------------------------------------------------------------------------------------------


async def test_no_connection_reaches_the_host_or_the_world(box: Box) -> None:
    hits: list[str] = []

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hits.append("connected")
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0wingbeat-test-{os.getpid()}")
    abstract.listen()
    port = server.sockets[0].getsockname()[1]
    try:
        done = await python(
            box,
            "import socket\n"
            f"for family, address in [(socket.AF_INET, ('127.0.0.1', {port})), (socket.AF_INET, ('192.0.2.1', 80)),\n"
            f"    (socket.AF_INET, ('10.0.0.1', 53)), (socket.AF_UNIX, '\\0wingbeat-test-{os.getpid()}')]:\n"
            "    try: socket.socket(family).connect(address); print('CONNECTED', address)\n"
            "    except OSError as error: print(error.strerror)\n"
            "try: print('RESOLVED', socket.getaddrinfo('example.com', 80))\n"
            "except OSError as error: print('no name')\n"
            "print(sorted(name for _, name in socket.if_nameindex()))\n",
        )
    finally:
        server.close()
        abstract.close()
    refused, unreachable = "Connection refused", "Network is unreachable"
    assert done.stdout.decode().splitlines() == [refused, unreachable, unreachable, refused, "no name", "['lo']"]
    assert hits == []


async def test_with_network_it_reaches_the_host() -> None:
    """The other way round: it is the namespace that stops it, not the test."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with sandbox(SPEC.model_copy(update={"network": True})) as box:
        done = await python(box, f"import socket; socket.create_connection(('127.0.0.1', {port})); print('in')")
    server.close()
    assert done.stdout == b"in\n", done.stderr


# --- other processes -----------------------------------------------------------------------------------------------


async def test_no_other_process_is_seen_signalled_or_traced(box: Box) -> None:
    code = f"""
import ctypes, os, signal
print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) == [1, os.getpid()])
for pid in ({os.getpid()}, {os.getppid()}):
    try: os.kill(pid, signal.SIGKILL); print("SIGNALLED", pid)
    except OSError as error: print(error.strerror)
print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))
for path in ("mem", "environ", "fd/3", "root", "cwd", "maps"):
    try: print("READ", os.stat("/proc/1/" + path) and open("/proc/1/" + path, "rb").read(1))
    except OSError as error: print(error.strerror)
os.kill(1, signal.SIGKILL), os.kill(1, signal.SIGTERM), os.kill(1, signal.SIGSTOP), os.kill(1, signal.SIGINT)
"""
    done = await python(box, code)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.decode().splitlines() == [
        "True",
        *["No such process"] * 2,
        "-1",
        *["Permission denied"] * 6,
    ]


async def test_the_first_process_cannot_be_slowed_down_or_starved(box: Box) -> None:
    """Its user is that of the commands, and Linux asks for no more than that."""
    code = """
import ctypes, os, resource
for attempt in (
    lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (5, 5)),
    lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)),
    lambda: os.sched_setaffinity(1, {0}),
    lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.sched_setparam(1, os.sched_param(0)),
    *(lambda of=of: os.setpriority(*of, 19) for of in ((os.PRIO_PROCESS, 1), (os.PRIO_PGRP, 1), (os.PRIO_USER, 0))),
):
    try: print("CHANGED", attempt())
    except PermissionError: print("refused")
os.setpriority(os.PRIO_PROCESS, 0, 19), os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
print(open("/proc/self/oom_score_adj").read())
"""
    done = await python(box, code)
    assert done.stdout.decode().split() == ["refused"] * 8 + ["1000"], done


async def test_no_key_can_be_hidden_in_the_kernel(box: Box) -> None:
    call = "c = ctypes.CDLL(None, use_errno=True); print(c.syscall({'x86_64': 248}.get(os.uname().machine, 217), "
    done = await python(box, f"import ctypes, os; {call} b'user', b'name', b'secret', 6, -4), ctypes.get_errno())")
    assert done.stdout == f"-1 {errno.ENOSYS}\n".encode()


async def test_killing_everybody_does_not_end_the_box(box: Box) -> None:
    assert (await box.run("sleep 1000 & (setsid sleep 1000 &); kill -9 -1; wait; echo survived")).ok
    while len((await box.run("echo /proc/[0-9]*")).stdout.split()) > 2:
        pass
    assert (await box.run("(sleep 0.1; kill -9 -1) & (trap '' TERM; sleep 1000)")).exit_code == -signal.SIGKILL


# --- the host's files ----------------------------------------------------------------------------------------------


async def test_no_file_of_the_host_is_there(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("attack at dawn")
    monkeypatch.setenv("MY_API_KEY", "attack at dawn")
    paths = [str(secret), str(tmp_path), "/home", "/root", "/mnt", "/opt", "/sys", "/etc/shadow"]
    done = await box.run(["sh", "-c", 'for path; do test -e "$path" && echo "$path"; done; ls /', "sh", *paths])
    seen = done.stdout.decode().split()
    system = ["bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "tmp", "usr", "var"]
    assert set(seen) <= {*system, "work"}
    looked = await box.run("cat /proc/*/environ 2>/dev/null; grep -rs dawn /tmp /work /run /etc")
    assert b"dawn" not in looked.stdout


async def test_nothing_outside_can_be_written(box: Box) -> None:
    folders = ("/", "/usr", "/usr/bin", "/etc", "/etc/ssl", "/dev", "/run", "/var", "/proc", "/proc/1", "/proc/sys")
    done = await box.run(["sh", "-c", 'for d; do (echo x > "$d/w") 2>&1 && echo "WROTE $d"; done', "sh", *folders])
    assert b"WROTE" not in done.stdout
    for change in (
        "echo x > /etc/passwd",
        "rm /etc/hosts",
        "mv /usr/bin/env /tmp",
        "ln /usr/bin/env /work/env",
        "echo x > /run/wingbeat/init",
        "chmod 777 /etc",
        "echo 1 > /proc/sysrq-trigger",
        "echo x > /proc/sys/kernel/hostname",
        "cat /dev/mem",
    ):
        assert (await box.run(change)).exit_code != 0, change
    found = await box.run("find / -xdev -writable -not -type l; find /etc /usr /run -maxdepth 2 -writable -not -type l")
    assert set(found.stdout.split()) == {b"/tmp", b"/work"}


# --- privileges ----------------------------------------------------------------------------------------------------


async def test_there_are_no_privileges_to_gain(box: Box) -> None:
    status = (await box.run("cat /proc/self/status")).stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Uid"].split() == ["1000"] * 4
    for attempt in (
        "mount -t tmpfs none /tmp",
        "umount /work",
        "mount -o remount,rw /",
        "unshare --user --map-root-user true",
        "unshare --net true",
        "chroot / true",
        "hostname other",
        "mknod /work/disk b 254 0",
        "su -c true",
        "chown 0:0 /work",
        "nsenter -t 1 -m true",
        "setpriv --reuid=0 true",
        "cp /bin/sh /work/sh && chmod u+s /work/sh && ./sh -p -c 'test $(id -u) = 0'",
    ):
        assert (await box.run(attempt)).exit_code != 0, attempt


# --- exhaustion ----------------------------------------------------------------------------------------------------


async def test_a_fork_bomb_is_stopped_by_pids(box: Box) -> None:
    code = "import os, time\nwhile True:\n    os.fork() or time.sleep(1000)"
    done = await python(box, code)
    assert done.stopped_by == "pids", done


async def test_a_fork_bomb_that_never_gives_up_ends_with_its_command(box: Box) -> None:
    done = await box.run("bomb() { bomb | bomb & }; bomb; while :; do :; done", timeout_s=1)
    assert done.stopped_by == "timeout"
    await box.end_processes()
    assert len((await box.run("echo /proc/[0-9]*")).stdout.split()) == 2


async def test_threads_count_too(box: Box) -> None:
    code = (
        "import threading as t, time\nfor _ in range(100): t.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    )
    assert (await python(box, code)).stopped_by == "pids"


@needs_groups
async def test_a_memory_bomb_is_stopped_by_memory(box: Box) -> None:
    done = await python(box, "x = bytearray(500_000_000)")
    assert (done.stopped_by, done.exit_code) == ("memory", -signal.SIGKILL)


@needs_groups
async def test_memory_is_that_of_all_processes_together(box: Box) -> None:
    code = "import os\nfor _ in range(4): os.fork()\nx = bytearray(20_000_000)\nimport time; time.sleep(1); os._exit(0)"
    done = await box.run(["sh", "-c", f"for i in 1 2 3 4 5 6 7; do python3 -c '{code}' || exit 1; done"])
    assert done.stopped_by == "memory"


@needs_groups
async def test_memory_without_an_address_is_memory_too(box: Box) -> None:
    code = "import os\nfds = [os.memfd_create('x') for _ in range(50)]\nfor fd in fds: os.write(fd, bytes(4 * 2**20))"
    done = await python(box, code)
    assert done.stopped_by == "memory"


@pytest.mark.parametrize("folder", ["/work", "/tmp", "/dev/shm"])
async def test_filling_the_disk_is_stopped_by_disk(box: Box, folder: str) -> None:
    done = await box.run(f"for i in 1 2 3 4; do head -c 6000000 /dev/zero > {folder}/$i || exit 1; done")
    assert done.stopped_by == "disk"
    used = await box.run(f"du -sb {folder}; rm {folder}/*")
    assert int(used.stdout.split()[0]) <= 17 * 2**20


@needs_groups
async def test_many_empty_files_are_stopped_by_memory() -> None:
    async with sandbox(SPEC.model_copy(update={"memory_mb": 40})) as box:
        code = "import itertools\nfor i in itertools.count(): open(f'/work/{i}' + 'x' * 200, 'w')"
        assert (await python(box, code)).stopped_by == "memory"


async def test_more_names_than_fit_are_not_listed() -> None:
    async with sandbox(SPEC.model_copy(update={"memory_mb": held(200)})) as box:
        code = "for i in range(42_000): open(f'{i:05}' + 'x' * 200, 'w')"
        assert (await python(box, code)).ok
        with pytest.raises(ValueError, match="bytes of names"):
            await box.list()


async def test_a_huge_file_is_stopped_by_file(box: Box) -> None:
    assert (await box.run("head -c 12000000 /dev/zero > big")).stopped_by == "file"
    assert len(await box.read("big")) == 8 * 2**20


@needs_groups
async def test_spinning_is_stopped_by_cpu() -> None:
    async with sandbox(SPEC.model_copy(update={"cpu_s": 0.4})) as box:
        done = await box.run("while :; do :; done")
        assert done.stopped_by == "cpu"
        many = await box.run("for i in 1 2 3 4; do (setsid sh -c 'while :; do :; done' &); done; sleep 1000")
        assert many.stopped_by == "cpu"
        assert len((await box.run("echo /proc/[0-9]*")).stdout.split()) == 2


@needs_groups
async def test_a_share_of_the_processors_is_kept() -> None:
    async with sandbox(SPEC.model_copy(update={"cpus": 0.2})) as box:
        code = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
        assert float((await python(box, code)).stdout) < 0.5


async def test_a_flood_of_output_is_stopped_by_output(box: Box) -> None:
    for stream in ("1", "2"):
        done = await box.run(f"yes >&{stream}")
        assert done.stopped_by == "output"
        assert done.truncated
        assert len(done.stdout) + len(done.stderr) == 100_000


async def test_what_ignores_being_asked_is_stopped_by_timeout(box: Box) -> None:
    began = time.monotonic()
    done = await box.run("trap '' TERM HUP INT; (trap '' TERM; sleep 1000) & sleep 1000; sleep 1000", timeout_s=0.3)
    assert (done.stopped_by, done.exit_code) == ("timeout", -signal.SIGKILL)
    assert time.monotonic() - began < 10
    assert len((await box.run("echo /proc/[0-9]*")).stdout.split()) == 2


async def test_a_daemon_that_would_outlive_its_command_is_stopped_with_it(box: Box) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork() and os._exit(0)\ntime.sleep(1000)"
    done = await python(box, code, timeout_s=0.5)
    assert done.stopped_by == "timeout"
    assert len((await box.run("echo /proc/[0-9]*")).stdout.split()) == 2


async def test_a_daemon_that_would_outlive_the_box_ends_with_it() -> None:
    name = f"daemon-{os.getpid()}"
    async with sandbox(SPEC) as box:
        wait = f"until grep -qs {name[:15]} /proc/[0-9]*/comm; do sleep 0.01; done"
        assert (await box.run(f"cp /bin/sleep {name}; (setsid ./{name} 1000 &); {wait}")).ok
        assert _named(name)
    assert not _named(name)


def _named(name: str) -> list[str]:
    """The processes of this machine with this name."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() == name[:15]:
                found.append(path.parent.name)
    return found


# --- tricks on whoever reads from outside --------------------------------------------------------------------------


async def test_links_lead_nowhere_for_those_outside(box: Box) -> None:
    await box.run("ln -s /etc out; ln -s /etc/passwd file; ln -s .. up; ln -s /proc/1/root root; ln -s file chain")
    for path in ("out/passwd", "file", "up/etc/passwd", "root/etc/passwd", "chain", "../etc/passwd", "/etc/passwd"):
        with pytest.raises(ValueError):
            await box.read(path)
        with pytest.raises(ValueError):
            await box.write(path, b"x")
    for path in ("out", "up", "..", "/"):
        with pytest.raises(ValueError):
            await box.list(path)


async def test_a_link_that_is_swapped_in_leads_nowhere(box: Box) -> None:
    flip = "while :; do ln -s /etc name; rm name; mv real name; mv name real; done"
    assert (await box.run(f"mkdir real; echo inside > real/passwd; ({flip}) 2>/dev/null &")).ok
    seen: set[str] = set()
    for _ in range(300):
        try:
            seen.add((await box.read("name/passwd")).decode())
        except (OSError, ValueError) as error:
            seen.add(type(error).__name__)
    assert seen <= {"inside\n", "ValueError", "FileNotFoundError", "NotADirectoryError", "OSError"}
    await box.end_processes()


async def test_pipes_and_devices_are_not_read(box: Box) -> None:
    await box.run("mkfifo pipe; ln -s /dev/zero zero; ln -s /dev/stdin stdin; ln -s pipe inner; (sleep 1000 > pipe &)")
    code = "import socket; socket.socket(socket.AF_UNIX).bind('/work/socket')"
    await python(box, code)
    async with asyncio.timeout(10):
        for path in ("pipe", "inner", "zero", "stdin"):
            with pytest.raises(ValueError):
                await box.read(path)
            with pytest.raises(ValueError):
                await box.write(path, b"x")
        with pytest.raises((OSError, ValueError)):
            await box.read("socket")
    await box.end_processes()


async def test_a_file_that_is_larger_than_it_says_is_bounded(box: Box) -> None:
    await box.run("truncate -s 7M sparse")
    with pytest.raises(ValueError, match="at most 1000"):
        await box.read("sparse", max_bytes=1000)
