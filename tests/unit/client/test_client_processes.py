"""Agent files in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wingbeat.client import RolloutPlan, RunnerOptions, fleet, run_rollouts
from wingbeat.core.errors import SetupError, WingbeatError

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
    options = RunnerOptions(grace_s=float(sys.argv[4]))
    plan = RolloutPlan(sys.argv[1], sys.argv[2], concurrency=2, processes=int(sys.argv[3]), options=options)
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
    monkeypatch.setattr(fleet, "BACKOFF_S", [0.0])
    monkeypatch.setattr(fleet, "MAX_DEATHS", 3)
    monkeypatch.setenv("MODE", "die")
    server.add_leases(20)
    plan = RolloutPlan(str(agent_file), server.url, concurrency=1, options=RunnerOptions(episode_timeout_s=100))
    with pytest.raises(WingbeatError, match=r"crashed 3 times .* exit code 7"):
        run_rollouts(plan)
    assert len(server.records) == 3, "each process began one episode"
