"""Docker containers as boxes: the official client against a fake daemon whose containers are real ones."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import conformance
import fake_container
import pytest
from fake_docker import FakeDocker

from wingbeat.core.errors import ConfigError
from wingbeat.resources import DockerSpec, Mount, Needs, ResourceFailed, ResourceLost, Reuse, UnsupportedField
from wingbeat.resources.backends.container_box import ChannelBroken, archive_of, within
from wingbeat.resources.backends.docker import DockerBackend, DockerInstance
from wingbeat.resources.backends.docker_exec import DockerExec

pytestmark = pytest.mark.skipif(bool(fake_container.WHY_NOT), reason=fake_container.WHY_NOT)
IMAGE = "python:3.12-slim"


@pytest.fixture
def fake() -> Iterator[FakeDocker]:
    with FakeDocker() as made:
        yield made


def spec_of(fake: FakeDocker, **more: Any) -> DockerSpec:
    return DockerSpec(**{"image": IMAGE, "host": fake.url, "reuse": Reuse.AFTER_RESET, **more})


@asynccontextmanager
async def started(spec: DockerSpec, told: Callable[[str], None] = lambda handle: None) -> AsyncIterator[DockerInstance]:
    backend = DockerBackend()
    backend.check(spec)
    instance = await backend.start(spec, started=told)
    try:
        yield instance
    finally:
        await instance.close()
        await backend.close()


async def test_a_container_has_the_limits_of_its_spec_and_no_way_out(fake: FakeDocker, tmp_path: Path) -> None:
    mount = Mount(source=str(tmp_path), target="/data")
    spec = spec_of(
        fake,
        env={"MODE": "test"},
        mounts=(mount,),
        cpus=0.5,
        memory_mb=256,
        pids=30,
        disk_mb=64,
        file_mb=8,
    )
    (tmp_path / "given.txt").write_text("from outside")
    async with started(spec) as instance:
        assert await instance.value.run(["cat", "/data/given.txt"]) is not None
        seen = await instance.value.run('cat /data/given.txt; echo " $MODE $HOME"; touch /data/x /etc/x')
        assert seen.stdout == b"from outside test /work\n" and seen.exit_code != 0
        [made] = fake.containers.values()
    host = made.config["HostConfig"]
    assert made.config["User"] == "65534:65534" and made.config["Image"] == IMAGE
    assert (host["NetworkMode"], host["ReadonlyRootfs"]) == ("none", True) and not host.get("Privileged")
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges"])
    assert host["Memory"] == host["MemorySwap"] == 256 << 20
    assert (host["NanoCpus"], host["PidsLimit"], host["ShmSize"]) == (500_000_000, 38, 8 << 20)
    assert host["Ulimits"] == [{"Name": "fsize", "Soft": 8 << 20, "Hard": 8 << 20}]
    assert host["Tmpfs"]["/work"] == "rw,exec,nosuid,nodev,uid=65534,gid=65534,mode=0755,size=48m"
    assert host["Tmpfs"]["/tmp"].endswith("mode=1777,size=8m")
    assert host["Mounts"] == [{"Type": "bind", "Source": str(tmp_path), "Target": "/data", "ReadOnly": True}]


@pytest.mark.slow
async def test_commands_end_as_they_end(fake: FakeDocker) -> None:
    async with started(spec_of(fake, files={"a/b.txt": "given"})) as instance:
        box = instance.value
        assert (await box.run(["cat", "a/b.txt"])).stdout == b"given"
        assert (await box.run("echo out; echo err >&2; exit 7")).exit_code == 7
        assert (await box.run(["echo", "-n", r"\n"])).stdout in (b"\\n", b"-n \\n")  # the program, not the shell's own
        assert (await box.run(["no-such-program"])).exit_code == 127
        assert (await box.run("kill -TERM $$")).exit_code == -15
        assert (await box.run("trap 'exit 9' INT; kill -INT $$")).exit_code == 9
        assert (await box.run("cat; pwd", stdin=b"in ", cwd="a")).stdout == b"in /work/a\n"
        assert (await box.run("printf '%s\\n' \"$V\"", env={"V": "a b\n'c'"})).stdout == b"a b\n'c'\n"
        big = bytes(range(256)) * 2000
        assert (await box.run("cat", stdin=big)).stdout == big
        assert (await box.run("exit 0", stdin=big)).ok  # it need not read its input
        for wrong in ({"command": []}, {"command": "x", "timeout_s": 0}, {"command": "x", "env": {"A-B": ""}}):
            with pytest.raises(ValueError, match="expected"):
                await box.run(**wrong)
        with pytest.raises(FileNotFoundError):
            await box.run("true", cwd="nowhere")


@pytest.mark.slow
async def test_a_command_that_a_limit_stops_takes_along_all_that_it_started(fake: FakeDocker) -> None:
    async with started(spec_of(fake, output_bytes=1000)) as instance:
        box = instance.value
        late = await box.run("setsid sleep 300 & sleep 301", timeout_s=0.2)
        assert (late.exit_code, late.stopped_by) == (-9, "timeout")
        loud = await box.run("yes & sleep 302")
        assert (loud.exit_code, loud.stopped_by, loud.truncated, len(loud.stdout)) == (-9, "output", True, 1000)
        left = (await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
        assert b"sleep 30" not in left.replace(b"sleep 3600", b"") and b"yes" not in left


@pytest.mark.slow
async def test_what_goes_on_in_the_background_does_until_it_is_ended(fake: FakeDocker) -> None:
    async with started(spec_of(fake)) as instance:
        box = instance.value
        done = await box.run("sleep 300 & echo $!")  # it holds the command's output open
        pid = done.stdout.decode().strip()
        assert done.ok and (await box.run(["kill", "-0", pid])).ok
        await box.end_processes()
        assert not (await box.run(["kill", "-0", pid])).ok
        assert (await box.run("echo still there")).stdout == b"still there\n"


@pytest.mark.slow
async def test_a_cancelled_command_is_ended(fake: FakeDocker) -> None:
    async with started(spec_of(fake)) as instance:
        box = instance.value
        running = asyncio.create_task(box.run("touch begun; exec sleep 300"))
        async with asyncio.timeout(10):
            while "begun" not in await box.list():
                pass
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(10):
            while b"sleep\x00300\x00" in (await box.run("cat /proc/[0-9]*/cmdline")).stdout:
                pass


@pytest.mark.slow
async def test_a_command_that_is_cancelled_while_it_begins_is_ended(fake: FakeDocker) -> None:
    loop, begins, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    begun: list[str] = []

    def hold(method: str, path: str) -> None:
        if path.startswith("/exec/") and path.endswith("/start") and not begun:
            begun.append(path.split("/")[2])
            loop.call_soon_threadsafe(begins.set)
            go.wait(10)

    async with started(spec_of(fake)) as instance:
        fake.on_request = hold
        running = asyncio.create_task(instance.value.run("sleep 300"))
        await begins.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        go.set()
        async with asyncio.timeout(10):
            while fake.execs[begun[0]].exit_code is None:
                await instance.value.list()


def test_an_output_that_is_cut_within_a_frame_is_no_whole_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\x01\x00\x00\x00\x00\x00\x00\x04good\x01\x00\x00\x00\x00\x00\x00\x0ahalf")
        theirs.shutdown(socket.SHUT_RDWR)
        frames = DockerExec(cast(Any, None), "e1", ours, b"").frames()
        assert next(frames) == (1, b"good")
        with pytest.raises(ChannelBroken, match="within a frame"):
            next(frames)


async def test_an_address_over_ssh_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedField, match="ssh -L"):
        DockerBackend().check(DockerSpec(image="x", host="ssh://me@there"))
    monkeypatch.setenv("DOCKER_HOST", "ssh://me@there")
    with pytest.raises(ConfigError, match="DOCKER_HOST: expected unix:// or tcp://"):
        await DockerBackend().start(DockerSpec(image="x"), started=lambda handle: None)


@pytest.mark.slow
async def test_files_stay_in_the_folder(fake: FakeDocker) -> None:
    async with started(spec_of(fake)) as instance:
        box = instance.value
        await box.run("ln -s /etc out; ln -s /etc/hostname host; mkdir in; ln -s in link; mkfifo pipe; echo x > in/f")
        await box.run("ln -s loop loop; ln -s /tmp/new fresh; touch -- .hidden 'a b' -n")
        names = ["-n", ".hidden", "a b", "fresh", "host", "in/", "link", "loop", "out", "pipe"]
        assert await box.list() == names and await box.list("link") == ["f"]
        assert await box.read("link/f") == b"x\n" == await box.read("/work/in/f")
        for path in ("out/passwd", "host", "../etc/passwd", "/etc/passwd", "in/../../etc/passwd", "", "a\0b"):
            with pytest.raises(ValueError):
                await box.read(path)
        with pytest.raises(ValueError, match="leaves"):
            await box.write("out/wingbeat", b"")
        await box.write("fresh", b"replaced, not written through")
        assert not (await box.run("ls /tmp/new")).ok and (await box.read("fresh")).startswith(b"replaced")
        with pytest.raises(ValueError, match="no regular file"):
            await box.read("pipe")
        with pytest.raises(ValueError, match="at most 1 bytes"):
            await box.read("in/f", max_bytes=1)
        for wrong, kind in (("in", IsADirectoryError), ("nothing", FileNotFoundError), ("loop", FileNotFoundError)):
            with pytest.raises(kind):
                await box.read(wrong)
        with pytest.raises(NotADirectoryError):
            await box.list("in/f")
        with pytest.raises(NotADirectoryError):
            await box.write("in/f/g", b"")
        with pytest.raises(IsADirectoryError):
            await box.write("in", b"")
        await box.write("deep/er/file", b"")
        assert await box.read("deep/er/file") == b""


@pytest.mark.slow
async def test_memory_is_named_where_the_daemon_names_it(fake: FakeDocker) -> None:
    async with started(spec_of(fake, memory_mb=64, file_mb=1)) as instance:
        [made] = fake.containers.values()
        assert (await instance.value.run("kill -9 $$")).stopped_by is None
        made.container.oom_killed = True
        assert (await instance.value.run("kill -9 $$")).stopped_by == "memory"
        assert (await instance.value.run("kill -XFSZ $$")).stopped_by == "file"


@pytest.mark.slow
async def test_a_container_that_dies_is_lost_and_says_why(fake: FakeDocker) -> None:
    async with started(spec_of(fake)) as instance:
        [made] = fake.containers.values()
        running = asyncio.create_task(instance.value.run("touch begun; sleep 300"))
        async with asyncio.timeout(10):
            while "begun" not in await instance.value.list():
                pass
        made.container.kill()
        with pytest.raises(ResourceLost, match="has ended: exit code 137"):
            await running
        with pytest.raises(ResourceLost, match="has ended"):
            await instance.check()
        with pytest.raises(ResourceLost, match="has ended"):
            await instance.value.read("begun")


@pytest.mark.slow
async def test_a_missing_image_is_pulled_once_or_not_at_all(fake: FakeDocker) -> None:
    fake.registry = {"repo.example/team/tools:2"}
    backend = DockerBackend()
    spec = spec_of(fake, image="repo.example/team/tools:2")
    boxes = await asyncio.gather(*(backend.start(spec, started=lambda handle: None) for _ in range(2)))
    assert fake.pulls == ["repo.example/team/tools:2"]
    for box in boxes:
        await box.close()
    for wrong, why in (({"image": "absent"}, "manifest for absent:latest not found"), ({"pull": "never"}, "no image")):
        with pytest.raises(ResourceFailed, match=why):
            await backend.start(spec_of(fake, **{"image": "absent:1", **wrong}), started=lambda handle: None)
    assert fake.containers == {}
    await backend.close()


async def test_what_cannot_start_says_why_and_leaves_nothing(fake: FakeDocker) -> None:
    backend = DockerBackend()
    fake.fail_start = "OCI runtime create failed: exec: /bin/sh: not found"
    with pytest.raises(ResourceFailed, match="OCI runtime create failed"):
        await backend.start(spec_of(fake), started=lambda handle: None)
    assert fake.containers == {}
    nowhere = DockerSpec(image=IMAGE, host="tcp://127.0.0.1:1")
    with pytest.raises(ResourceFailed, match="no Docker daemon at tcp"):
        await backend.start(nowhere, started=lambda handle: None)
    await backend.close()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cpu_s": 3}, "cpu_s"),
        ({"reuse": Reuse.SHARED}, "reuse"),
        ({"needs": Needs(gpus=1)}, "needs.gpus"),
        ({"disk_mb": 1}, "disk_mb"),
        ({"workdir": "/tmp"}, "workdir"),
        ({"mounts": (Mount(source="/a", target="/b", read_only=False),)}, "mounts"),
    ],
)
def test_what_docker_cannot_honour_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    spec = DockerSpec(**{"image": IMAGE, "reuse": Reuse.AFTER_RESET, **fields})
    with pytest.raises(UnsupportedField, match=f"'{named}'"):
        DockerBackend().check(spec)


def test_names_of_variables_are_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="A-B"):
        DockerBackend().check(DockerSpec(image=IMAGE, env={"A-B": "x"}))


def test_paths_are_relative_to_the_folder() -> None:
    assert within("/work", "a/./b", is_file=True) == "a/b" == within("/work", "/work/a/b", is_file=True)
    assert within("/work", ".", is_file=False) == "."
    for path in ("..", "/workshop/x", "a/../../work2"):
        with pytest.raises(ValueError, match="expected one in /work"):
            within("/work", path, is_file=False)
    assert archive_of({"a/b/c.txt": "x", "a/d.txt": ""}) == archive_of({"a/b/c.txt": "x", "a/d.txt": ""})


ABANDON = """
import asyncio, sys
from wingbeat.resources import DockerSpec
from wingbeat.resources.backends.docker import DockerBackend

async def main():
    spec = DockerSpec(image=sys.argv[1], host=sys.argv[2])
    instance = await DockerBackend().start(spec, started=lambda _: None)
    print(instance.handle, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("check", conformance.ALL, ids=conformance.name_of)
async def test_docker_conforms(fake: FakeDocker, check: conformance.Check) -> None:
    async def kill(instance: conformance.Instance) -> None:
        name = (instance.handle or "").partition(" ")[0]
        fake.containers[name].container.kill()

    def abandon() -> str:
        with subprocess.Popen([sys.executable, "-c", ABANDON, IMAGE, fake.url], stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            handle = owner.stdout.readline().decode().strip()
            owner.kill()
        return handle

    case = conformance.Case(
        backend=DockerBackend,
        spec=spec_of(fake, files={"given.txt": "x"}),
        num_alive=lambda: len(fake.containers),
        refused=spec_of(fake, cpu_s=1),
        refused_field="cpu_s",
        kill=kill,
        abandon=abandon,
        is_box=True,
    )
    await check(case)
