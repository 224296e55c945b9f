"""Agent files in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wingbeat.client import RolloutPlan, RunnerOptions, processes, run_rollouts
from wingbeat.client.runner import HOPELESS_FAILURES
from wingbeat.client.worker_process import WorkerProcess
from wingbeat.core import deaths
from wingbeat.core.errors import SetupError, WingbeatError

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

AGENT = """
import asyncio, os
import wingbeat

@wingbeat.agent
async def solve(episode):
    mode = os.environ.get("MODE")
    if mode == "stuck":
        await asyncio.Event().wait()
    if mode == "slow":
        await asyncio.sleep(0.5)
    if mode == "die":
        os._exit(7)
    return os.getpid() % 2 + 1.0
"""

PROGRAM = """
import sys
from wingbeat.client import RolloutPlan, RunnerOptions, run_rollouts
from wingbeat.core.errors import WingbeatError

if __name__ == "__main__":
    options, count = RunnerOptions(grace_s=float(sys.argv[4])), int(sys.argv[3])
    plan = RolloutPlan(sys.argv[1], sys.argv[2], concurrency=2, processes=count or 1, watch=not count, options=options)
    try:
        stats = run_rollouts(plan)
    except WingbeatError as error:
        sys.exit(f"error: {error.message}")
    sys.stdout.write(f"{stats.num_finished} {stats.num_cancelled}")
"""


@pytest.fixture
def agent_file(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    (tmp_path / "program.py").write_text(PROGRAM)
    return path


def start(agent_file: Path, server: Any, *, processes: int, mode: str = "", grace_s: float = 5.0) -> Any:
    command = [sys.executable, "program.py", str(agent_file), server.url, str(processes), str(grace_s)]
    environment = {"MODE": mode, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(
        command,
        cwd=agent_file.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_one_process_runs_in_place(server: Any, agent_file: Path) -> None:
    server.add_leases(5)
    ends: list[Any] = []
    stats = run_rollouts(
        RolloutPlan(str(agent_file), server.url, options=RunnerOptions(max_episodes=3)), on_end=ends.append
    )
    assert (stats.num_finished, len(ends)) == (3, 3)


def test_a_faulty_agent_file_is_told_before_any_process_starts(server: Any, tmp_path: Path) -> None:
    with pytest.raises(SetupError):
        run_rollouts(RolloutPlan(str(tmp_path / "none.py"), server.url, processes=4))


def test_sigterm_aborts_after_the_grace(server: Any, agent_file: Path) -> None:
    server.add_leases(2)
    server.stop_when_empty = False
    process = start(agent_file, server, processes=1, mode="stuck", grace_s=0.1)
    server.wait_for(lambda: len(server.records) == 2, 20)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "0 2"), err
    assert len(server.in_state("aborted")) == 2


@pytest.mark.slow
def test_children_share_the_work_and_their_stats_add_up(server: Any, agent_file: Path) -> None:
    server.add_leases(12)
    out, err = start(agent_file, server, processes=2).communicate(timeout=60)
    assert out == "12 0", err
    assert len(server.in_state("finished")) == 12


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_stops_the_children(server: Any, agent_file: Path, number: signal.Signals) -> None:
    server.add_leases(4)
    server.stop_when_empty = False
    process = start(agent_file, server, processes=2, mode="stuck", grace_s=0.1)
    server.wait_for(lambda: len(server.records) == 4, 60)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "0 4"), err


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_the_second_signal_aborts_at_once(server: Any, agent_file: Path, count: int) -> None:
    server.add_leases(2 * count)
    server.stop_when_empty = False
    process = start(agent_file, server, processes=count, mode="stuck", grace_s=600)
    server.wait_for(lambda: len(server.records) == 2 * count, 60)
    process.send_signal(signal.SIGINT)
    server.wait_for(lambda: sum(body["leaving"] for body in server.released) == count, 20)
    assert not server.in_state("aborted")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, f"0 {2 * count}"), err


@pytest.mark.slow
def test_a_signal_to_the_whole_group_counts_once(server: Any, agent_file: Path) -> None:
    server.add_leases(4)
    server.stop_when_empty = False
    process = start(agent_file, server, processes=2, mode="slow", grace_s=20)
    server.wait_for(lambda: len(server.records) == 4, 60)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "4 0"), err


@pytest.mark.slow
def test_children_leave_when_their_parent_is_killed(server: Any, agent_file: Path) -> None:
    server.add_leases(4)
    server.stop_when_empty = False
    process = start(agent_file, server, processes=2, mode="stuck", grace_s=0.1)
    server.wait_for(lambda: len(server.records) == 4, 60)
    process.kill()
    process.communicate(timeout=20)
    server.wait_for(lambda: len(server.in_state("aborted")) == 4, 20)


@pytest.mark.slow
def test_a_child_that_crashes_is_started_again_until_it_crashes_too_often(
    server: Any, agent_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "BACKOFF_S", [0.0] * 2)
    monkeypatch.setattr(deaths, "MAX_DEATHS", 3)
    monkeypatch.setenv("MODE", "die")
    server.add_leases(20)
    plan = RolloutPlan(str(agent_file), server.url, concurrency=1, options=RunnerOptions(episode_timeout_s=100))
    with pytest.raises(WingbeatError, match=r"crashed 3 times .* exit code 7"):
        run_rollouts(plan)
    assert len(server.records) == 3, "each process began one episode"


def test_an_agent_that_swallows_its_cancellation_keeps_no_process_alive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "LEAVING_S", 0.05)

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    async def main() -> int:
        left = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        return int(not left.done())

    assert processes.run_async(main()) == 1
    assert "were cancelled: 1;" in caplog.text


SPINNER = """
import wingbeat

@wingbeat.agent
async def solve(episode):
    while episode.task.id == "lease-0":
        pass
    return 1.0
"""


@pytest.mark.slow
def test_a_process_whose_loop_stands_still_is_killed_and_replaced(
    server: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "agent.py").write_text(SPINNER)
    server.add_leases(4)
    server.stop_when_empty = False
    options = RunnerOptions(episode_timeout_s=0.5, max_episodes=6)
    plan = RolloutPlan(str(tmp_path / "agent.py"), server.url, processes=2, concurrency=1, options=options)

    def more_work() -> None:
        server.wait_for(lambda: bool(server.in_state("aborted")), 60)
        server.add_leases(2)

    helper = threading.Thread(target=more_work)
    helper.start()
    with caplog.at_level(logging.INFO, "wingbeat.client"):
        stats = run_rollouts(plan)
    helper.join()
    (spun,) = server.in_state("aborted")
    assert (spun.abort["outcome"], spun.abort["cause"]) == ("timeout", "agent_deadline")
    assert (stats.num_finished, stats.num_timed_out) == (5, 1), "the killed one counts among the six"
    (told,) = [record.getMessage() for record in caplog.records if "stood still" in record.getMessage()]
    episode_id = next(name for name, record in server.records.items() if record is spun)
    assert f"Episodes that end as timeout: {episode_id}" in told and "episode_timeout_s = 0.5" in told
    assert spun.abort["message"] == told
    assert not [record for record in caplog.records if "crashed" in record.getMessage()]
    assert "in solve" in capfd.readouterr().err, "where it hangs"


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.slow
def test_code_that_kills_its_process_is_tried_once_and_a_module_is_waited_for(server: Any, agent_file: Path) -> None:
    server.stop_when_empty = False
    with (agent_file.parent / "log").open("w+") as log:
        command = [sys.executable, "program.py", str(agent_file), server.url, "0", "5"]
        environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
        process = subprocess.Popen(command, cwd=agent_file.parent, env=environment, stderr=log)

        def said(text: str) -> int:
            return Path(log.name).read_text().count(text)

        try:
            server.wait_for(lambda: bool(server.asked), 30)
            agent_file.write_text("import os\nos._exit(3)\n")
            until(lambda: said("ended with exit code 3"), "the first try")
            agent_file.write_text("import sys\nsys.exit(4)\n")
            until(lambda: said("fails when imported: SystemExit: 4 (line 2)"), "the next version")
            agent_file.write_text(f"import later\n{AGENT}")
            until(lambda: said("imports 'later'"), "the one after that")
            assert said("does not load") == 3, "each was tried once"
            code = server.asked[-1]["code"]
            (agent_file.parent / "later.py").write_text("")
            server.wait_for(lambda: server.asked[-1]["code"] != code, 30)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
    assert process.returncode == 0


def test_what_a_module_keeps_to_the_end_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """A pool of connections for all episodes, as our own examples have it, is nobody's to close."""

    async def main() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    loop = processes.run_async(main())
    loop.call_exception_handler({"message": "Unclosed connector"})
    assert not caplog.records


def test_a_thread_that_never_ends_keeps_no_process_alive() -> None:
    program = (
        "import asyncio, threading; from wingbeat.client.processes import leave_in_time, run_async\n"
        "async def main(): asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)\n"
        "run_async(main()); leave_in_time(7, after_s=0.1)"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=30, check=False).returncode == 7


async def test_a_process_that_gives_its_agent_up_tells_what_it_ran(server: Any, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import wingbeat\n@wingbeat.agent\nasync def solve(episode):\n    raise ValueError\n"
    )
    server.add_leases(100)
    process = WorkerProcess(RolloutPlan(str(tmp_path / "agent.py"), server.url, log_level=50))
    assert await process.start()
    process.go()
    await process.wait()
    assert process.failure is not None and process.failure.is_setup
    assert process.stats.num_failed >= HOPELESS_FAILURES
