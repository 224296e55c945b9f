"""A ledger that its disk garbled: refused by name, restored from the copy that control made, and the run goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import Api, eventually
from typer.testing import CliRunner

from bench.scripted_server import ScriptedServer, scripted_server
from wingbeat.cli.main import app
from wingbeat.dataflow.audit import audit_run
from wingbeat.dataflow.ledger_reader import open_read_only

SETTINGS = {"dataflow.ledger_backup_s": 0.2, "dataflow.groups_per_step": 1, "run.steps": 100}


def events(server: ScriptedServer, kind: str) -> list[dict[str, Any]]:
    lines = (server.run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


async def train(server: ScriptedServer) -> None:
    """One episode, and the step on it."""
    before = len(events(server, "step"))
    async with Api(server) as api:  # pyright: ignore[reportArgumentType]
        episode = await api.begin()
        assert (await api.chat(episode)).status == 200
        assert (await api.finish(episode)).status == 200

        async def trained() -> bool:
            return len(events(server, "step")) > before

        await eventually(trained, what="a step")


async def test_a_garbled_ledger_is_restored_and_its_run_goes_on(tmp_path):
    with scripted_server(tmp_path, ["3"], settings=SETTINGS) as server:
        path, manifest = server.run_dir / "ledger.sqlite", server.run_dir / "ledger.backup.json"
        await train(server)

        async def copied() -> bool:
            return manifest.exists() and bool(json.loads(manifest.read_bytes())["trained_step"])

        await eventually(copied, what="a copy that knows a step")
        assert events(server, "ledger_backup")
        server.kill()
        path.with_name("ledger.sqlite-wal").unlink()  # it would heal what follows
        path.write_bytes(b"\0" * 4096 + path.read_bytes()[4096:])
        with pytest.raises(RuntimeError, match=r"damaged: .*wingbeat ledger restore"):
            server.start()
        server.kill()  # it has ended: takes its exit status
        restored = CliRunner().invoke(app, ["ledger", "restore", str(server.run_dir)])
        assert restored.exit_code == 0, restored.output
        server.start()
        server.until_served()
        assert events(server, "ledger_checked")
        await train(server)
        server.stop()
        assert audit_run(server.run_dir) == []
        with open_read_only(path) as ledger:
            assert sum(count.num_batches for count in ledger.batches()) >= 2
