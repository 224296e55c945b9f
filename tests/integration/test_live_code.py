"""An agent is edited while it trains: a scripted server, real client processes, real files."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import environment, eventually_now

from bench.scripted_server import ScriptedServer, scripted_server
from wingbeat.client import Swarm
from wingbeat.core.protocol_variants import LabelReply
from wingbeat.core.types import Task
from wingbeat.dataflow.audit import audit_run

SETTINGS = {
    "run.steps": 1_000_000,
    "dataflow.group_size": 4,
    "dataflow.groups_per_step": 2,
    "dataflow.max_staleness": 4,
    "policies.solver.trainer.algorithm": "reinforce",
}
AGENT = """
import asyncio, json, urllib.request
import wingbeat
from helper import REWARD

@wingbeat.agent
async def solve(episode):
    body = json.dumps({"model": episode.model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Authorization": f"Bearer {episode.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{episode.base_url}/chat/completions", body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    await asyncio.to_thread(lambda: opener.open(request).read())
    await asyncio.sleep(0.05)
    return REWARD
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("live"), lambda call: "hello", settings=SETTINGS) as running:
        with Swarm(running.url) as swarm:
            swarm.put_tasks("t", [Task("t", str(number)) for number in range(50)])
        yield running


class Ledger:
    """What a run's ledger says, read beside its server."""

    def __init__(self, server: ScriptedServer) -> None:
        self._db = sqlite3.connect(f"file:{server.run_dir / 'ledger.sqlite'}?mode=ro", uri=True)

    def rows(self, query: str, *values: Any) -> list[Any]:
        return self._db.execute(query, values).fetchall()

    def finished(self) -> dict[str, int]:
        """Finished episodes by digest."""
        return dict(self.rows("SELECT code, COUNT(*) FROM episodes WHERE state = 'finished' GROUP BY code"))

    def steps(self) -> int:
        return self.rows("SELECT COUNT(*) FROM batches WHERE state = 'trained'")[0][0]


def write(path: Path, text: str) -> None:
    """As editors do: beside the file, then renamed."""
    beside = path.with_suffix(".tmp")
    beside.write_text(text)
    beside.replace(path)


def start(folder: Path, server: ScriptedServer, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "wingbeat.cli", "rollout", str(folder / "agent.py"), "--server", server.url]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [*command, "--concurrency", "4", "--json", *options],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def test_edits_replace_the_processes_and_training_goes_on(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("REWARD = 1.0\n")
    (tmp_path / "agent.py").write_text(AGENT)
    ledger, log = Ledger(server), tmp_path / "log"
    client = start(tmp_path, server, "--watch", "--processes", "2", "--label", "lively", "--grace-s", "5")
    try:
        eventually_now(lambda: ledger.steps() >= 2, what="training with the first version")
        (first,) = ledger.finished()

        write(tmp_path / "helper.py", "REWARD = 2.0\n")  # same size, same second: a cached compilation would be taken
        second = eventually_now(lambda: set(ledger.finished()) - {first}, what="episodes of the second version").pop()
        before = ledger.steps()
        eventually_now(lambda: ledger.steps() >= before + 2, what="training with the second version")
        rewards = ledger.rows("SELECT DISTINCT rewards FROM episodes WHERE code = ? AND state = 'finished'", second)
        assert rewards == [('{"solver":2.0}',)]

        write(tmp_path / "agent.py", AGENT.replace("return REWARD", "return REWARD +"))
        eventually_now(lambda: "does not load" in log.read_text(), what="the refusal of broken code")
        before = ledger.steps()
        eventually_now(lambda: ledger.steps() >= before + 2, what="training with the code that loads")
        assert set(ledger.finished()) == {first, second}

        for reward in ("3.0", "4.0", "5.0"):  # in quick succession
            write(tmp_path / "agent.py", AGENT.replace("return REWARD", f"return {reward}"))
        eventually_now(lambda: len(ledger.finished()) >= 3, what="episodes of the version that came of it")
        before = ledger.steps()
        eventually_now(lambda: ledger.steps() >= before + 2, what="training with that")
        last = ledger.rows("SELECT DISTINCT rewards FROM episodes WHERE code NOT IN (?, ?)", first, second)
        assert ('{"solver":5.0}',) in last and ('{"solver":3.0}',) not in last
    finally:
        client.send_signal(signal.SIGINT)
        out, _ = client.communicate(timeout=30)
    assert client.returncode == 0, log.read_text()
    assert '"failed": 0' in out and '"cancelled": 0' in out, out + log.read_text()
    per_group = "SELECT COUNT(DISTINCT code) FROM episodes WHERE state = 'finished' GROUP BY group_id"
    assert {row[0] for row in ledger.rows(per_group)} == {1}
    assert ledger.rows("SELECT DISTINCT label FROM episodes") == [("lively",)]
    ended = ledger.rows("SELECT state, outcome, COUNT(*) FROM episodes WHERE state != 'running' GROUP BY 1, 2")
    assert [row[:2] for row in ended] == [("finished", "agent")], ended
    assert audit_run(server.run_dir) == []


def test_two_agents_share_the_groups_by_weight(server: ScriptedServer, tmp_path: Path) -> None:
    clients = []
    with Swarm(server.url) as swarm:
        assert swarm.set_weights({"one": 0.75}).weights == {"one": 0.75}
        for name, reward in {"one": "1.0", "two": "2.0"}.items():
            folder = tmp_path / name
            folder.mkdir()
            (folder / "helper.py").write_text(f"REWARD = {reward}\n")
            (folder / "agent.py").write_text(AGENT)
            clients.append(start(folder, server, "--label", name))
        try:
            eventually_now(
                lambda: {"one", "two"} <= {v.label for v in swarm.variants().variants if v.here}, what="both"
            )
            before = swarm.variants().labels

            def since(kind: str) -> dict[str, int]:
                now = swarm.variants().labels
                none = LabelReply(weight=None, groups_dealt=0, groups_counted=0, share=0, ahead=0)
                return {n: getattr(now.get(n, none), kind) - getattr(before.get(n, none), kind) for n in ("one", "two")}

            eventually_now(lambda: sum(since("groups_counted").values()) >= 60, what="sixty groups")
            # what is in flight is another mix, and of some groups more is dealt than counts
            for kind, slack in {"groups_dealt": 4, "groups_counted": 8}.items():
                found = since(kind)
                assert found["one"] / sum(found.values()) == pytest.approx(0.75, abs=slack / 60), (kind, found)
        finally:
            for client in clients:
                client.send_signal(signal.SIGINT)
            for client in clients:
                client.communicate(timeout=30)
        swarm.set_weights({})
    assert [client.returncode for client in clients] == [0, 0]
    assert audit_run(server.run_dir) == []
