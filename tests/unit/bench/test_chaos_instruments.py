"""The chaos benchmark's instruments: the plan, the proxy, the clocks, the disk, the audit, the bars."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.chaos import bars, finite, rate_of
from bench.chaos_audit import Ack, audit, read_acks
from bench.chaos_control import JumpingClocks
from bench.chaos_disk import LimitedDisk
from bench.chaos_faults import Applied, Reach, carry_out, recoveries_s
from bench.chaos_plan import (
    CLOCKS,
    HEAVY,
    SUPERVISOR,
    WALL_CLOCK,
    Fault,
    Kind,
    count_kills,
    count_kinds,
    make_plan,
)
from bench.chaos_processes import MARK_VARIABLE, marked_processes, name_of
from bench.chaos_proxy import ChaosProxy
from bench.chaos_run import ChaosRun, EventTail
from wingbeat.core.deaths import DEATHS_WINDOW_S, MAX_DEATHS
from wingbeat.core.types import Task
from wingbeat.dataflow.task_sources import SourceState, TrainSource

FULL_S = 220.0


# --- the plan -----------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_full_plan_has_all_that_the_bars_ask_for(seed: int) -> None:
    plan = make_plan(seed, faults_s=FULL_S)
    kinds, kills = count_kinds(plan), count_kills(plan)
    assert sum(kinds.values()) >= 60
    assert min(kinds.values()) >= 3
    assert kinds[Kind.SIGKILL] >= 20
    assert min(kills[role] for role in ("control", "trainer", "engine")) >= 3
    assert all(fault.at_s >= 0 and fault.at_s + fault.duration_s < FULL_S + 10 for fault in plan)
    assert plan == sorted(plan, key=lambda fault: fault.at_s)
    assert plan == make_plan(seed, faults_s=FULL_S)


@given(seed=st.integers(0, 10_000), faults_s=st.floats(20, 3000))
@settings(max_examples=40, deadline=None)
def test_no_process_dies_so_often_that_its_supervisor_gives_it_up(seed: int, faults_s: float) -> None:
    kills: dict[str, list[float]] = {}
    for fault in make_plan(seed, faults_s=faults_s):
        if fault.kind is Kind.SIGKILL and fault.target != SUPERVISOR:
            kills.setdefault(fault.target, []).append(fault.at_s)
    for times in kills.values():
        assert all(b - a > DEATHS_WINDOW_S for a, b in zip(times, times[MAX_DEATHS - 1 :], strict=False))


def test_faults_that_stop_training_do_not_come_all_at_once() -> None:
    heavy = [fault for fault in make_plan(0, faults_s=FULL_S) if fault.target in HEAVY]
    gaps = [after.at_s - before.at_s - before.duration_s for before, after in pairwise(heavy)]
    assert min(gaps) > 2.0
    assert sum(gaps) / len(gaps) > 8.0


def test_a_short_plan_has_some_of_every_kind() -> None:
    plan = make_plan(0, faults_s=28.0)
    assert min(count_kinds(plan).values()) >= 1
    assert len(plan) < 20
    assert make_plan(0, faults_s=28.0) != make_plan(1, faults_s=28.0)


# --- the proxy ----------------------------------------------------------------------------------------


@asynccontextmanager
async def echo() -> AsyncIterator[ChaosProxy]:
    """A proxy in front of a server that says everything back."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, ChaosProxy(server.sockets[0].getsockname()[1]) as proxy:
        yield proxy


@asynccontextmanager
async def line(proxy: ChaosProxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection through the proxy; what is said on it comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    yield reader, writer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def say(lines: tuple[asyncio.StreamReader, asyncio.StreamWriter], words: bytes) -> bytes:
    """What comes back."""
    reader, writer = lines
    writer.write(words)
    return await reader.readexactly(len(words))


async def test_a_proxy_forwards_until_either_side_ends() -> None:
    async with echo() as proxy, line(proxy) as (reader, writer):
        assert await say((reader, writer), b"hello") == b"hello"
        writer.write_eof()
        assert await reader.read() == b""


async def test_a_reset_ends_every_connection_and_new_ones_work() -> None:
    async with echo() as proxy:
        async with line(proxy) as ends:
            await say(ends, b"hello")
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                await ends[0].read(1)
        async with line(proxy) as ends:
            assert await say(ends, b"hello") == b"hello"


async def test_a_partition_is_silent_and_resets_only_who_lost_bytes() -> None:
    async with echo() as proxy, line(proxy) as lost, line(proxy) as kept:
        for ends in (lost, kept):
            await say(ends, b"hello")
        partition = asyncio.create_task(proxy.partition(0.2))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await say(lost, b"into the dark")
        await partition
        with pytest.raises(ConnectionResetError):
            await lost[0].read(1)
        assert await say(kept, b"again") == b"again"


async def test_slow_data_arrives_late_and_whole() -> None:
    async with echo() as proxy, line(proxy) as ends:
        slow = asyncio.create_task(proxy.slow(5.0, delay_s=0.05))
        await asyncio.sleep(0)
        began_s = time.monotonic()
        assert await say(ends, b"twice") == b"twice"
        assert time.monotonic() - began_s >= 0.1
        slow.cancel()


async def test_a_truncated_answer_breaks_off_in_its_middle() -> None:
    async with echo() as proxy, line(proxy) as ends:
        truncate = asyncio.create_task(proxy.truncate(5.0))
        await asyncio.sleep(0)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await say(ends, b"0123456789")
        truncate.cancel()


async def test_a_server_that_is_away_refuses() -> None:
    async with ChaosProxy(1) as proxy, line(proxy) as (reader, _):
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


# --- clocks, disk, processes --------------------------------------------------------------------------


def test_clocks_jump_for_every_process_that_maps_them(tmp_path: Path) -> None:
    ours = JumpingClocks.create(tmp_path / "clocks")
    theirs = JumpingClocks(tmp_path / "clocks")
    assert theirs.monotonic() == pytest.approx(time.monotonic(), abs=1)
    ours.jump(monotonic_s=300, wall_s=-86_400)
    ours.jump(monotonic_s=90)
    assert theirs.monotonic() == pytest.approx(time.monotonic() + 390, abs=1)
    assert JumpingClocks(tmp_path / "clocks").wall() == pytest.approx(time.time() - 86_400, abs=1)
    with pytest.raises(ValueError, match="to go ahead"):
        ours.jump(monotonic_s=-1)


WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "ab", buffering=0) as file:
            file.write(b"x")
        print("written", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


def test_a_limited_disk_takes_nothing_while_it_is_full(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as writer:
        asked, told = writer.stdin, writer.stdout
        assert asked is not None and told is not None
        disk = LimitedDisk(tmp_path, lambda: [writer.pid])

        def write() -> str:
            asked.write("\n")
            return told.readline().strip()

        before = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE)
        assert write() == "written"
        disk.fill()
        assert write() == "27"  # EFBIG
        disk.free()
        assert write() == "written"
        assert resource.prlimit(writer.pid, resource.RLIMIT_FSIZE) == before
        asked.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a mark whose command line says that it is an engine."""
    environment = {**os.environ, MARK_VARIABLE: "test-mark"}
    script = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, "--worker-id", "engine-0"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_marked_processes_are_found_whoever_is_their_parent(sleeper: subprocess.Popen[bytes]) -> None:
    found = marked_processes("test-mark")
    assert [name_of(words) for pid, words in found.items() if pid == sleeper.pid] == ["engine-0"]
    assert marked_processes("no such mark") == {}
    assert name_of(["python", "-m", "bench.chaos_control", "launch.json"]) == "control"
    assert name_of(["python", "-m", "bench.chaos_server", "c.json"]) == "supervisor"


async def test_faults_are_carried_out_at_their_time(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    clocks = JumpingClocks.create(tmp_path / "clocks")
    plan = [
        Fault(0.0, Kind.SIGSTOP, "engine-0", 0.1),
        Fault(0.02, Kind.CLOCK, CLOCKS, amount=300.0),
        Fault(0.03, Kind.CLOCK, WALL_CLOCK, amount=-300.0),
        Fault(0.15, Kind.SIGKILL, "engine-0"),
    ]
    reach = Reach(lambda target: sleeper.pid, {}, LimitedDisk(tmp_path, list), clocks)
    applied = await carry_out(plan, reach)
    assert [a.fault for a in applied] == plan
    assert applied[0].ended_s - applied[0].began_s >= 0.1
    assert sleeper.wait(10) == -9
    assert clocks.monotonic() == pytest.approx(time.monotonic() + 300, abs=1)
    assert clocks.wall() == pytest.approx(time.time(), abs=1)


def test_recovery_is_the_time_from_a_faults_end_to_the_next_step() -> None:
    faults = [Applied(Fault(0, Kind.RESET, "clients"), 1.0, end) for end in (2.0, 5.0, 9.0)]
    assert recoveries_s(faults, [1.0, 4.0, 8.5]) == [2.0, 3.5, float("inf")]
    assert finite(float("inf")) is None


def test_events_are_taken_in_line_by_line(tmp_path: Path) -> None:
    path, run = tmp_path / "events.jsonl", ChaosRun(tmp_path, "mark")
    lines = [{"event": "step"}, {"event": "replayed", "exact": True}, {"event": "replayed", "exact": False}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    tail = EventTail(path, run)
    for end in (5, 20, len(text) - 1, len(text)):
        path.write_text(text[:end])
        tail.look()
    assert (len(run.steps_s), run.events["replayed"], run.inexact_replays) == (1, 2, 1)


# --- the audit ----------------------------------------------------------------------------------------

TASKS = [Task("a", f"a-{index}", {}) for index in range(4)]
TABLES = """
CREATE TABLE tasks (task_key INTEGER PRIMARY KEY, source TEXT, id TEXT);
CREATE TABLE groups (group_key INTEGER PRIMARY KEY, group_id TEXT, task_key INTEGER, split TEXT, state TEXT,
    reason TEXT);
CREATE TABLE episodes (episode_id TEXT, attempt INTEGER, state TEXT, outcome TEXT);
CREATE TABLE samples (episode_id TEXT, attempt INTEGER);
CREATE TABLE batches (batch_id TEXT, policy TEXT, state TEXT);
CREATE TABLE members (batch_id TEXT, episode_id TEXT, attempt INTEGER, replayed INTEGER);
"""


class FakeLedger:
    """The columns that the audit reads, of a run in which all went well, until a test breaks it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = sqlite3.connect(path)
        self.db.executescript(TABLES)
        dealer = TrainSource("a", tuple(TASKS), seed=3, state=SourceState(0, 0, 0.0, ""))
        for key in range(6):
            self.db.execute("INSERT INTO tasks VALUES (?, 'a', ?)", (key, dealer.deal().id))
            self.db.execute("INSERT INTO groups VALUES (?, ?, ?, 'train', 'closed', NULL)", (key, f"g{key}", key))
            self.db.execute("INSERT INTO episodes VALUES (?, 1, 'finished', 'agent')", (f"e{key}",))
            self.db.execute("INSERT INTO samples VALUES (?, 1)", (f"e{key}",))
            self.db.execute("INSERT INTO batches VALUES (?, 'solver', 'trained')", (f"b{key}",))
            self.db.execute("INSERT INTO members VALUES (?, ?, 1, 0)", (f"b{key}", f"e{key}"))

    def judge(self, acks: Sequence[Ack]) -> tuple[int, int, int]:
        self.db.commit()
        found = audit(self.path, acks, tasks={"a": TASKS}, seed=3)
        return found.acknowledged_lost, found.trained_twice, found.tasks_skipped


ACKS = [Ack(float(key), f"e{key}", 1) for key in range(6)]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("SELECT 1", (0, 0, 0)),
        ("UPDATE episodes SET state = 'interrupted' WHERE episode_id = 'e1'", (1, 0, 0)),
        ("DELETE FROM episodes WHERE episode_id = 'e1'", (1, 0, 0)),
        ("DELETE FROM samples WHERE episode_id = 'e2'", (1, 0, 0)),
        ("INSERT INTO members VALUES ('b3', 'e1', 2, 0)", (0, 1, 0)),
        ("INSERT INTO members VALUES ('b3', 'e1', 1, 1)", (0, 0, 0)),
        ("UPDATE batches SET state = 'abandoned' WHERE batch_id = 'b1'", (0, 0, 0)),
        ("DELETE FROM groups WHERE group_id = 'g1'", (0, 0, 1)),
        ("UPDATE groups SET reason = 'nobody finished' WHERE group_id = 'g1'", (0, 0, 1)),
        ("UPDATE groups SET state = 'open' WHERE group_id = 'g5'", (0, 0, 0)),
    ],
)
def test_the_audit_sees_each_fault(change: str, found: tuple[int, int, int], tmp_path: Path) -> None:
    ledger = FakeLedger(tmp_path / "ledger.sqlite")
    ledger.db.execute(change)
    assert ledger.judge(ACKS) == found


def test_logs_of_acknowledgements_may_end_in_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "1.acks").write_text("10.000 e1 1\n11.500 e2 3\n12.0")
    (tmp_path / "2.acks").write_text("9.000 e3 1\n")
    acks = read_acks(tmp_path)
    assert sorted(acks) == [Ack(9.0, "e3", 1), Ack(10.0, "e1", 1), Ack(11.5, "e2", 3)]
    assert rate_of(acks, 9.0, 11.0) == 1.0


# --- the bars -----------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "faults": {kind.value: 8 for kind in Kind} | {"sigkill": 20},
    "sigkill_by_role": {"control": 3, "trainer": 3, "engine": 3, "client": 11, "supervisor": 0},
    "acknowledged_lost": 0,
    "trained_twice": 0,
    "tasks_skipped": 0,
    "orphan_processes": 0,
    "leaked_leases": 0,
    "inexact_replays": 0,
    "ledger_problems": [],
    "processes_given_up": [],
    "server_exit_code": 0,
    "recovery_max_s": 20.0,
    "throughput_vs_calm": 0.5,
}


@pytest.mark.parametrize(
    ("key", "value", "always"),
    [
        ("acknowledged_lost", 1, True),
        ("trained_twice", 1, True),
        ("tasks_skipped", 1, True),
        ("orphan_processes", 1, True),
        ("leaked_leases", -1, True),
        ("inexact_replays", 1, True),
        ("ledger_problems", ["a contradiction"], True),
        ("processes_given_up", ["engine-1"], True),
        ("server_exit_code", None, True),
        ("faults", {kind.value: 2 for kind in Kind}, False),
        ("sigkill_by_role", {"control": 2, "trainer": 3, "engine": 3}, False),
        ("recovery_max_s", 20.1, False),
        ("recovery_max_s", None, False),
        ("throughput_vs_calm", 0.49, False),
    ],
)
def test_each_bar_fails_by_itself(key: str, value: object, always: bool) -> None:
    assert all(bars(GOOD, is_full=True).values())
    assert not all(bars(GOOD | {key: value}, is_full=True).values())
    assert all(bars(GOOD | {key: value}, is_full=False).values()) is not always
