"""``@agent`` and agent files."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import wingbeat
from wingbeat.client import Agent, load_agent
from wingbeat.core.errors import DependencyMissing, RequestError, SetupError


def write(folder: Path, text: str, name: str = "agent.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


async def test_async_and_sync_functions_run() -> None:
    @wingbeat.agent
    async def asynchronous(episode: Any) -> float:
        """Solves it."""
        return 1.0

    @wingbeat.agent
    def synchronous(episode: Any) -> float:
        return 1.0 if threading.current_thread() is not threading.main_thread() else 0.0

    assert isinstance(asynchronous, Agent)
    assert (asynchronous.__doc__, asynchronous.name) == ("Solves it.", "asynchronous")
    episode: Any = object()
    assert await asynchronous.run(episode) == 1.0
    assert await synchronous.run(episode) == 1.0
    assert await asynchronous(episode) == 1.0


def test_an_agent_may_declare_the_sources_that_it_solves(tmp_path: Path) -> None:
    @wingbeat.agent(sources=["sums", "echo"])
    async def solve(episode: Any) -> float:
        return 1.0

    assert isinstance(solve, Agent) and (solve.name, solve.sources) == ("solve", ("sums", "echo"))
    path = write(tmp_path, "import wingbeat\n@wingbeat.agent(sources=['a'])\ndef f(episode): return 1.0\n")
    assert load_agent(path).sources == ("a",)
    assert Agent(lambda episode: 1.0).sources is None
    for wrong in ("sums", []):
        with pytest.raises(RequestError, match="list of task sources"):
            wingbeat.agent(sources=wrong)(lambda episode: 1.0)


async def test_callable_object_with_async_call() -> None:
    class Team:
        async def __call__(self, episode: Any) -> float:
            return 0.5

    episode: Any = object()
    assert await Agent(Team()).run(episode) == 0.5


@pytest.mark.parametrize("error", [ValueError("x"), StopIteration(), SystemExit(3)])
async def test_exceptions_pass_through_and_exit_stays_inside(error: BaseException) -> None:
    @wingbeat.agent
    def synchronous(episode: Any) -> float:
        raise error

    expected = ValueError if isinstance(error, ValueError) else RuntimeError
    episode: Any = object()
    with pytest.raises(expected):
        await synchronous.run(episode)


async def test_cancelled_sync_agent_is_left_behind() -> None:
    release, running = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @wingbeat.agent
    def stuck(episode: Any) -> float:
        loop.call_soon_threadsafe(running.set)
        release.wait(10)
        return 1.0

    episode: Any = object()
    task = asyncio.create_task(stuck.run(episode))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()


def test_load_the_only_agent(tmp_path: Path) -> None:
    text = "import wingbeat\n@wingbeat.agent\nasync def solve(episode):\n    return 1.0\nalias = solve\n"
    assert load_agent(write(tmp_path, text)).name == "solve"
    assert load_agent("agent.py", base=tmp_path).name == "solve"


def test_load_by_name(tmp_path: Path) -> None:
    text = "import wingbeat\n@wingbeat.agent\ndef a(e): ...\n@wingbeat.agent\ndef b(e): ...\ndef plain(e): ...\nx = 1\n"
    path = write(tmp_path, text)
    assert load_agent(f"{path}:b").name == "b"
    assert load_agent(f"{path}:plain").name == "plain"
    with pytest.raises(SetupError, match="a, b"):
        load_agent(path)
    with pytest.raises(SetupError, match="'x'"):
        load_agent(f"{path}:x")


def test_agent_file_may_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "ANSWER = 42\n", "neighbour_of_agent.py")
    path = write(tmp_path, "import wingbeat, neighbour_of_agent\n@wingbeat.agent\ndef solve(e): ...\n")
    assert load_agent(path).name == "solve"


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("def solve(episode): ...\n", SetupError, "got none"),
        ("x = 1\ny = undefined\n", SetupError, r"NameError.*line 2"),
        ("def f(:\n", SetupError, "SyntaxError"),
        ("import no_such_package_anywhere\n", DependencyMissing, "pip install no_such_package_anywhere"),
    ],
)
def test_faulty_files_are_told_in_one_line(tmp_path: Path, text: str, kind: type[Exception], says: str) -> None:
    path = write(tmp_path, text)
    for _ in range(2):  # a file that failed is not taken for loaded
        with pytest.raises(kind, match=says) as raised:
            load_agent(path)
        assert path in str(raised.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no such file"):
        load_agent(str(tmp_path / "agent.py"))
