"""Which code an agent is, and noticing that it changed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import py_compile
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.client import AsyncSwarm, Runner, RunnerOptions, load_agent
from wingbeat.client.code import code_on_disk
from wingbeat.client.watch import FileWatch
from wingbeat.core.protocol import GroupModel, Lease, LeaseReply, TaskModel
from wingbeat.core.types import Split

AGENT = """
import json, wingbeat
import helper
from pack import part
import installed

@wingbeat.agent
async def solve(episode):
    return helper.VALUE

async def other(episode):
    return 0.0
"""


@pytest.fixture
def agent_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "pack").mkdir()
    packages = tmp_path / "venv" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    for path, text in {
        tmp_path / "agent.py": AGENT,
        tmp_path / "helper.py": "VALUE = 1.0\n",
        tmp_path / "pack" / "__init__.py": "",
        tmp_path / "pack" / "part.py": "X = 1\n",
        tmp_path / "unused.py": "",
        packages / "installed.py": "",
    }.items():
        path.write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    yield tmp_path / "agent.py"
    forget(tmp_path)


def forget(folder: Path) -> None:
    """As a process that has loaded nothing of it."""
    for module in [name for name, found in sys.modules.items() if str(folder) in str(getattr(found, "__file__", ""))]:
        del sys.modules[module]


def load(agent: Path, name: str = "") -> tuple[str, list[str]]:
    """Digest and files, as a process sees them that has loaded nothing before."""
    folder = agent.parent
    forget(folder)
    code = load_agent(f"{agent}:{name}" if name else str(agent)).code
    return code.digest, [str(file.relative_to(folder)) for file in code.files]


def test_the_digest_is_of_the_file_and_what_it_imports_from_its_folder(agent_file: Path) -> None:
    digest, files = load(agent_file)
    assert files == ["agent.py", "helper.py", "pack/__init__.py", "pack/part.py"]
    lines = [f"{name}\0{hashlib.sha256((agent_file.parent / name).read_bytes()).hexdigest()}\n" for name in files]
    assert digest == hashlib.sha256("".join(lines).encode()).hexdigest()
    assert digest == code_on_disk([agent_file.parent / name for name in files], agent_file)
    assert load(agent_file, "other")[0] != digest, "another function of the file is another agent"


def test_an_edit_of_the_same_length_within_the_second_is_loaded(agent_file: Path) -> None:
    """Python's cache of compiled files would not notice it."""
    helper = agent_file.parent / "helper.py"
    py_compile.compile(str(helper))
    first, _ = load(agent_file)
    stat = helper.stat()
    helper.write_text("VALUE = 2.0\n")
    os.utime(helper, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load(agent_file)[0] != first
    assert sys.modules["helper"].VALUE == 2.0


async def test_a_runner_says_its_version_and_gives_back_what_it_did_not_begin(server: Any) -> None:
    server.add_leases(8)
    server.stop_when_empty = False
    begun = asyncio.Event()

    async def solve(episode: Any) -> float:
        begun.set()
        await asyncio.sleep(0)
        return 1.0

    async with AsyncSwarm(server.url) as swarm:
        runner = Runner(swarm, solve, concurrency=2, options=RunnerOptions(label="careful"))
        running = asyncio.create_task(runner.run())
        await begun.wait()
        await asyncio.to_thread(server.wait_for, lambda: len(server.in_state("finished")) == 8)
        runner.stop()
        await running
    assert {(body["label"], body["code"]) for body in server.asked} == {("careful", "")}
    (left,) = server.released
    assert left["leaving"] and left["label"] == "careful" and left["instance"] == server.asked[0]["instance"] != ""


async def test_a_lease_under_which_an_episode_is_about_to_begin_is_not_given_back() -> None:
    """A server that heard of the end first would give its slot to others."""
    order: list[str] = []
    asked, may_begin = asyncio.Event(), asyncio.Event()
    lease = Lease(
        lease_id="lease-1",
        task=TaskModel(id="1"),
        group=GroupModel(id="g", size=1),
        split=Split.TRAIN,
        policies=["solver"],
        expires_s=60,
    )

    class Swarm:
        async def lease(self, *_: Any, **__: Any) -> LeaseReply:
            if asked.is_set():
                await asyncio.Event().wait()
            asked.set()
            return LeaseReply(leases=[lease])

        @contextlib.asynccontextmanager
        async def episode(self, **_: Any) -> AsyncGenerator[Any]:
            await may_begin.wait()
            order.append("begun")
            yield SimpleNamespace(id="e", state=None, finish=self.lease)

        async def release(self, leases: Any, **version: Any) -> int:
            order.append("left")
            return 0

    async def solve(episode: Any) -> None:
        await asyncio.sleep(0)

    swarm: Any = Swarm()
    runner = Runner(swarm, solve, concurrency=1)
    running = asyncio.create_task(runner.run())
    await asked.wait()
    await asyncio.sleep(0)
    runner.stop()
    for _ in range(20):
        await asyncio.sleep(0)
    assert order == []
    may_begin.set()
    await asyncio.wait_for(running, 5)
    assert order == ["begun", "left"]


# --- watching ---------------------------------------------------------------------------------------


async def changed(watch: FileWatch, timeout_s: float = 5.0) -> bool:
    try:
        await asyncio.wait_for(watch.changed(), timeout_s)
    except TimeoutError:
        return False
    return True


async def test_a_file_is_waited_for_until_it_is_written_whole(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("whole = 1\n")
    watch = FileWatch(poll_s=0.02)
    watch.follow([file])
    noticing = asyncio.create_task(watch.changed())
    with file.open("w") as half:
        for number in range(6):  # a writer that takes its time
            half.write(f"line_{number} = {number}\n")
            half.flush()
            await asyncio.sleep(0.02)
            assert not noticing.done()
    await asyncio.wait_for(noticing, 5)


async def test_only_content_counts(tmp_path: Path) -> None:
    file, beside = tmp_path / "agent.py", tmp_path / "beside"
    file.write_text("a = 1\n")
    watch = FileWatch(poll_s=0.01)
    watch.follow([file])
    os.utime(file, ns=(1, 1))
    assert not await changed(watch, 0.2), "a touch is no edit"
    beside.write_text("a = 1\n")
    beside.replace(file)
    assert not await changed(watch, 0.2), "nor is the same content under another inode"
    beside.write_text("a = 2\n")
    beside.replace(file)
    assert await changed(watch)
    watch.follow([file])
    file.unlink()
    noticing = asyncio.create_task(changed(watch))
    await asyncio.sleep(0.05)
    file.write_text("a = 3\n")  # away for a moment, as some editors leave it
    assert await noticing
    watch.follow([file])
    watch.forget()
    assert await changed(watch), "what was not tried is tried"
