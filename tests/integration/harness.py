"""What the integration tests share: a server as real processes, an HTTP client, bounded waiting.

A test may read everything a user can: HTTP, the run directory, the process table. It reaches into
nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp

from wingbeat.core.samples import TrainingBatch
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.tracking import EpisodeGraph, load_graph

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""How long a condition may take on a busy machine."""

TASK = {"source": "calculator", "id": "plus-1-2", "payload": {"question": "what is 1 plus 2 ?"}}
QUESTION = [{"role": "user", "content": "what is 1 plus 2 ?"}]

T = TypeVar("T")


async def eventually(
    condition: Callable[[], Awaitable[T]], *, what: str, timeout_s: float = PATIENCE_S, every_s: float = 0.05
) -> T:
    """The first truthy value of ``condition``; fails the test with the last value when time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = await condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}; last value: {value!r}"
        await asyncio.sleep(every_s)


def eventually_now(condition: Callable[[], T], *, what: str, timeout_s: float = PATIENCE_S) -> T:
    """:func:`eventually` for conditions that are plain functions, outside of a loop."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}; last value: {value!r}"
        time.sleep(0.05)
    return value


def make_models(script: Path, folder: Path) -> Path:
    """The folder, with the models that a script writes there; a process, so that the tests load no torch."""
    command = [sys.executable, str(script), str(folder)]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=200)
    return folder


def environment() -> dict[str, str]:
    """The environment of every process of ours."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def cli(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run ``wingbeat ARGUMENTS`` to its end."""
    command = [sys.executable, "-m", "wingbeat.cli", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False)


def config_text(folder: Path, models: Path, **settings: Any) -> str:
    """A configuration; ``settings`` are dotted keys with ``__`` for the dot, and win over these."""
    table: dict[str, Any] = {
        "run.name": "t",
        "run.dir": str(folder / "runs"),
        "run.steps": 1000,
        "server.port": 0,
        "server.heartbeat_s": 2.0,
        "server.begin_wait_s": 0.3,
        "policies.solver.model": str(models / "solver"),
        "policies.solver.context_tokens": 128,
        "policies.solver.trainer.learning_rate": 1e-3,
        "engine.max_running": 64,
        "engine.kv_tokens": 32768,
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


def train_config(folder: Path, models: Path, **settings: Any) -> str:
    """A small training run with the calculator agent, as ``wingbeat train`` takes it."""
    defaults: dict[str, Any] = {
        "dataflow__group_size": 4,
        "dataflow__groups_per_step": 2,
        "dataflow__max_staleness": 1,
        "tasks__environment": "calculator",
        "eval__at_start": False,
        "eval__max_tasks": 6,
        "agent__path": str(ROOT / "wingbeat" / "environments" / "calculator" / "agent.py"),
        "agent__concurrency": 8,
    }
    return config_text(folder, models, **{**defaults, **settings})


@dataclass(frozen=True, slots=True)
class Server:
    """A running ``wingbeat serve`` (or ``train``) and its run directory."""

    url: str
    run_dir: Path
    supervisor: subprocess.Popen[bytes]

    def pid(self, name: str) -> int:
        """The process now behind ``control``, ``engine-0`` or ``trainer-POLICY``."""
        return self.pids()[name]

    def pids(self) -> dict[str, int]:
        return json.loads((self.run_dir / "processes.json").read_bytes())

    def events(self) -> list[dict[str, Any]]:
        """Whole lines of ``events.jsonl``, oldest first."""
        lines = (self.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def events_named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == name]


@contextlib.contextmanager
def serving(folder: Path, config: str, *, command: str = "serve", more: tuple[str, ...] = ()) -> Iterator[Server]:
    """Start ``wingbeat COMMAND`` on a configuration; on leaving, end it and everything it started."""
    path = folder / "config.toml"
    path.write_text(config, encoding="utf-8")
    log = folder / f"{command.replace(' ', '-')}-{uuid.uuid4().hex[:6]}.log"
    known = set(folder.glob("runs/*/server.json"))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "wingbeat.cli", *command.split(), str(path), *more],
            env=environment(),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    server: Server | None = None
    try:
        resumed = Path(more[more.index("--resume") + 1]) if "--resume" in more else None

        def up() -> Path | None:
            assert process.poll() is None, f"{command} ended with {process.returncode}: {log.read_text()}"
            if resumed is not None:
                return resumed if _is_fresh(resumed / "server.json", process) else None
            return next((found.parent for found in set(folder.glob("runs/*/server.json")) - known), None)

        run_dir = eventually_now(up, what="the server's address")
        url = json.loads((run_dir / "server.json").read_bytes())["url"]
        server = Server(url, run_dir, process)
        yield server
    finally:
        _end(process, server)


@contextlib.contextmanager
def dialled_in(server: Server, key: str, name: str, *more: str, host: str) -> Iterator[subprocess.Popen[bytes]]:
    """``wingbeat engine`` as a process of another host, as far as it knows; on leaving, ended."""
    command = [sys.executable, "-m", "wingbeat.cli", "engine", "--server", server.url, "--name", name, *more]
    variables = {"WINGBEAT_WORKER_KEY": key, "WINGBEAT_HOST_ID": host}
    with (server.run_dir / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env={**environment(), **variables}, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_fresh(address: Path, process: subprocess.Popen[bytes]) -> bool:
    """Whether a control of this start wrote the address: its parent is our supervisor."""
    try:
        pid = json.loads(address.read_bytes())["pid"]
        return f"PPid:\t{process.pid}\n" in Path(f"/proc/{pid}/status").read_text()
    except (OSError, ValueError):
        return False


def children_of(pid: int) -> list[int]:
    """All live descendants of a process."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return sorted(family - {pid})


def _end(process: subprocess.Popen[bytes], server: Server | None) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in server.pids().values() if server is not None else ():
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer whose body was JSON."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def error(self) -> dict[str, Any]:
        return self.body["error"]

    def refused(self, status: int, code: str, *hints: str) -> None:
        """Assert that this is a specific refusal that says what is wrong."""
        assert self.status == status, self
        assert self.error["code"] == code, self
        for hint in hints:
            assert hint in self.error["message"], self


@dataclass(frozen=True, slots=True)
class Begun:
    """An episode that a test began."""

    id: str
    key: str
    attempt: int
    reply: dict[str, Any]


class Api:
    """JSON over HTTP to one server, as any client without the SDK would do it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=PATIENCE_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def call(self, method: str, path: str, body: Any = None, *, key: str = "", raw: Any = None) -> Answer:
        """``raw`` is sent as it is (bytes, or an iterator of them where the length is unknown)."""
        assert self._session is not None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        data = raw if raw is not None else None if body is None else io.BytesIO(json.dumps(body).encode())
        async with self._session.request(method, self.url + path, data=data, headers=headers) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return Answer(response.status, json.loads(text) if is_json else text, dict(response.headers))

    async def get(self, path: str, *, key: str = "") -> Any:
        """The body of a GET that must succeed."""
        answer = await self.call("GET", path, key=key)
        assert answer.status == 200, answer
        return answer.body

    def begin_body(self, **fields: Any) -> dict[str, Any]:
        """A group of its own by default, so that a slot that reopens is nobody else's."""
        group = {"id": uuid.uuid4().hex, "size": 1}
        return {"idempotency_key": uuid.uuid4().hex, "task": TASK, "policies": ["solver"], "group": group, **fields}

    async def begin(self, **fields: Any) -> Begun:
        """Begin an episode on a task of our own (``split``, ``group``, ``policies``, ... as the API takes them)."""
        return self.begun(await self.call("POST", "/api/episodes", self.begin_body(**fields)))

    async def begin_leased(self, lease_id: str) -> Begun:
        body = {"idempotency_key": uuid.uuid4().hex, "lease_id": lease_id}
        return self.begun(await self.call("POST", "/api/episodes", body))

    @staticmethod
    def begun(answer: Answer) -> Begun:
        assert answer.status == 200, answer
        return Begun(answer.body["episode_id"], answer.body["api_key"], answer.body["attempt"], answer.body)

    async def chat(self, episode: Begun, **fields: Any) -> Answer:
        """One model call."""
        body = {"model": episode.reply["policies"][0], "messages": QUESTION, "max_tokens": 8, **fields}
        return await self.call("POST", "/v1/chat/completions", body, key=episode.key)

    async def finish(self, episode: Begun, rewards: Any = 1.0, **fields: Any) -> Answer:
        body = {"rewards": rewards, **fields}
        return await self.call("POST", f"/api/episodes/{episode.id}/finish", body, key=episode.key)

    async def abort(self, episode: Begun) -> Answer:
        return await self.call("POST", f"/api/episodes/{episode.id}/abort", {}, key=episode.key)

    async def metrics(self) -> dict[str, float]:
        """``name{labels}`` to value."""
        lines = (await self.get("/metrics")).splitlines()
        return {name: float(value) for name, _, value in (li.rpartition(" ") for li in lines if li and li[0] != "#")}

    async def metric(self, name: str) -> float:
        """Raises KeyError where the server does not have it."""
        return (await self.metrics())[name]

    async def until_metric(self, name: str, value: float) -> None:
        async def equal() -> bool:
            return (await self.metrics()).get(name) == value

        await eventually(equal, what=f"{name} = {value:g}")

    async def ready(self) -> None:
        """Wait until every policy is served and every trainable one has its trainer."""

        async def served() -> bool:
            try:
                policies = await self.get("/api/policies")
            except aiohttp.ClientError:
                return False
            return all(p["served_version"] is not None and p["trainer"] != "absent" for p in policies)

        await eventually(served, what="every policy to be served", timeout_s=120)

    async def lines(self, path: str) -> AsyncIterator[str]:
        """The lines of a stream."""
        assert self._session is not None
        async with self._session.get(self.url + path, timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as response:
            assert response.status == 200
            async for line in response.content:
                yield line.decode().rstrip("\n")


def trained_once(batches: Sequence[TrainingBatch]) -> list[tuple[str, int]]:
    """The attempts of these batches, none of them twice."""
    members = [(e.episode_id, e.attempt) for batch in batches for e in batch.episodes]
    assert len(members) == len(set(members)) > 0
    return members


def check_ledger(run_dir: Path, *, steps: int, finished: Sequence[tuple[str, int]] = ()) -> None:
    """The run's truth: consecutive steps, no episode in two of them, no acknowledged finish missing."""
    with open_read_only(run_dir / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        batches = ledger.batches_after("solver", 0)
        summary = ledger.summary()
        missing = [
            (episode_id, attempt)
            for episode_id, attempt in finished
            if not any(view.attempt == attempt and view.record is not None for view in ledger.episode(episode_id))
        ]
    assert [batch.step for batch in batches] == list(range(1, steps + 1))
    assert dict(summary.trained_step) == {"solver": steps}
    members = trained_once(batches)
    assert len({episode_id for episode_id, _ in members}) == len(members), "two attempts of one episode were trained"
    trained = sum(count.num_attempts for count in summary.samples if count.state == "trained")
    assert trained == len(members)
    assert missing == []


def read_graph(server: Server, episode_id: str, attempt: int) -> EpisodeGraph:
    """The token graph of a finished attempt, from the ledger."""
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        view = next(view for view in ledger.episode(episode_id) if view.attempt == attempt)
    assert view.record is not None
    return load_graph(view.record.graph)
