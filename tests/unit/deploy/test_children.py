"""Supervised processes: tiny real ones."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wingbeat.core import deaths
from wingbeat.core.deaths import MAX_DEATHS
from wingbeat.core.errors import SetupError
from wingbeat.deploy.children import TRANSITIONS, Child, ChildSpec, ChildState, run_to_end, tail

Build = Callable[..., Child]


class Watched:
    """Every state a child went through, and a way to wait for one."""

    def __init__(self) -> None:
        self.states: list[ChildState] = []
        self._moved = asyncio.Event()

    def __call__(self, child: Child) -> None:
        self.states.append(child.state)
        self._moved.set()

    async def until(self, state: ChildState, *, times: int = 1) -> None:
        async with asyncio.timeout(30):
            while self.states.count(state) < times:
                self._moved.clear()
                await self._moved.wait()


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def build(tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Build:
    monkeypatch.setattr(deaths, "BACKOFF_S", (0.0, 0.01, 0.01, 0.01, 0.01))

    def make(script: str, *, stop_s: float = 10.0, clock: Callable[[], float] = lambda: 0.0) -> Child:
        command = [sys.executable, "-S", "-E", "-u", "-c", script]
        spec = ChildSpec("worker", command, {"GREETING": "hello"}, tmp_path / "worker.log")
        return Child(spec, on_change=watched, clock=clock, stop_s=stop_s)

    return make


async def test_it_inherits_no_key_but_its_own(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WINGBEAT_KEY", "WINGBEAT_KEY_EAST", "WINGBEAT_WORKER_KEY", "WINGBEAT_OWN_ADMIN_KEY"):
        monkeypatch.setenv(name, "wb-admin-of-the-shell")
    child = build("import os; print([name for name, value in os.environ.items() if 'wb-' in value])")
    await child.run()
    assert (tmp_path / "worker.log").read_text() == "[]\n"


async def test_exit_0_means_that_it_was_told_to_end(build: Build, watched: Watched, tmp_path: Path) -> None:
    child = build("import os; print(os.environ['GREETING'], os.environ['WINGBEAT_LIFELINE'])")
    await child.run()
    assert watched.states == [ChildState.RUNNING, ChildState.STOPPED]
    assert (tmp_path / "worker.log").read_text() == "hello 1\n"
    assert child.pid is None and child.restarts == 0


async def test_exit_2_is_a_setup_error_in_its_own_words(build: Build, watched: Watched) -> None:
    child = build("import sys; print('loading'); print('error: no such model; fix it'); sys.exit(2)")
    await child.run()
    assert watched.states == [ChildState.RUNNING, ChildState.FAILED]
    assert child.error == "no such model; fix it"


@pytest.mark.parametrize("content", [None, "neither a program nor a script of one"])
async def test_what_cannot_be_started_is_a_failure_and_not_a_hang(
    watched: Watched, tmp_path: Path, content: str | None
) -> None:
    program = tmp_path / "python"
    if content is not None:
        program.write_text(content)
        program.chmod(0o755)
    child = Child(ChildSpec("agent-a-0", [str(program)], {}, tmp_path / "log"), on_change=watched)
    await child.run()
    assert watched.states == [ChildState.FAILED]
    assert child.error.startswith("agent-a-0 cannot be started: [Errno") and str(program) in child.error


async def test_a_death_is_followed_by_a_restart_and_too_many_by_failure(build: Build, watched: Watched) -> None:
    child = build("import sys; print('Traceback: boom'); sys.exit(1)")
    await child.run()
    assert child.restarts == MAX_DEATHS - 1
    assert watched.states.count(ChildState.RUNNING) == MAX_DEATHS
    assert watched.states[:4] == [ChildState.RUNNING, ChildState.BACKOFF, ChildState.STARTING, ChildState.RUNNING]
    assert watched.states[-1] is ChildState.FAILED
    assert child.error == (
        f"worker ended with exit code 1, for the last of {MAX_DEATHS} times within 120 s: "
        + " | ".join(["Traceback: boom"] * MAX_DEATHS)
    )


async def test_rare_deaths_never_add_up_to_a_failure(build: Build, watched: Watched) -> None:
    minutes = itertools.count(0, 60)
    child = build("import sys; sys.exit(1)", clock=lambda: float(next(minutes)))
    run = asyncio.create_task(child.run())
    await watched.until(ChildState.BACKOFF, times=MAX_DEATHS + 1)
    await child.stop()
    await run
    assert child.state is ChildState.STOPPED and ChildState.FAILED not in watched.states


async def test_a_killed_process_is_started_again(build: Build, watched: Watched) -> None:
    child = build("import sys; sys.stdin.read()")
    run = asyncio.create_task(child.run())
    await watched.until(ChildState.RUNNING)
    first = child.pid
    assert first is not None
    os.kill(first, 9)
    await watched.until(ChildState.RUNNING, times=2)
    assert child.pid not in (None, first) and child.restarts == 1
    await child.stop()
    await run
    assert child.state is ChildState.STOPPED and child.pid is None


async def test_a_process_that_ignores_sigterm_is_killed(build: Build, watched: Watched, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"""
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(fifo)!r}, "w").write("deaf")
sys.stdin.read()
"""
    child = build(script, stop_s=0.1)
    run = asyncio.create_task(child.run())
    await watched.until(ChildState.RUNNING)
    assert await asyncio.to_thread(fifo.read_text) == "deaf"
    pid = child.pid
    assert pid is not None
    await child.stop()
    await run
    assert child.state is ChildState.STOPPED
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_stop_while_the_process_is_being_started_stops_it(build: Build) -> None:
    child = build("import sys; sys.stdin.read()")
    run = asyncio.create_task(child.run())
    await asyncio.sleep(0)  # within the start of the process
    await child.stop()
    await asyncio.wait_for(run, 30)
    assert child.state is ChildState.STOPPED and child.pid is None


async def test_a_stop_ends_the_pause_before_a_restart(
    build: Build, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "BACKOFF_S", (600.0,) * MAX_DEATHS)
    child = build("import sys; sys.exit(1)")
    run = asyncio.create_task(child.run())
    await watched.until(ChildState.BACKOFF)
    await child.stop()
    await asyncio.wait_for(run, 30)
    assert child.state is ChildState.STOPPED and child.restarts == 0
    await child.stop()  # harmless


async def test_a_watcher_that_comes_late_is_told_the_present_state(build: Build) -> None:
    child = build("pass")
    late = Watched()
    child.watch(late)
    await child.run()
    assert late.states == [ChildState.STARTING, ChildState.RUNNING, ChildState.STOPPED]


def test_no_state_follows_stopped() -> None:
    assert TRANSITIONS[ChildState.STOPPED] == frozenset()
    assert set(TRANSITIONS) == set(ChildState)


def test_the_tail_of_a_log_prefers_a_recent_setup_error(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert tail(log).startswith("(no log:")
    log.write_text("error: of an earlier process\n" + "".join(f"line {i}\n" for i in range(9)))
    assert tail(log, num_lines=2) == "line 7 | line 8"
    log.write_text("a\nerror: first\nerror: second\nb\n")
    assert tail(log) == "error: second"


async def test_a_helper_gives_its_output_or_its_last_words() -> None:
    assert await run_to_end([sys.executable, "-S", "-c", "print('done')"], what="helping") == "done\n"
    script = "import sys; sys.stderr.write('one\\ntwo\\n'); sys.exit(3)"
    with pytest.raises(SetupError, match="helping failed: two"):
        await run_to_end([sys.executable, "-S", "-c", script], what="helping")
    with pytest.raises(SetupError, match="exit code 4"):
        await run_to_end([sys.executable, "-S", "-c", "import sys; sys.exit(4)"], what="helping")


async def test_a_cancelled_helper_does_not_live_on(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"import os; open({str(fifo)!r}, 'w').write(str(os.getpid())); os.read(os.pipe()[0], 1)"
    helper = asyncio.create_task(run_to_end([sys.executable, "-S", "-c", script], what="helping"))
    pid = int(await asyncio.to_thread(fifo.read_text))
    helper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await helper
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
