"""A disk that fills up while episodes finish: nothing acknowledged is lost, and work goes on once there is room."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Api, eventually

from bench.scripted_server import scripted_server, write_model_folder
from wingbeat.core.events import read_events
from wingbeat.dataflow.ledger_reader import open_read_only

SIZE = "6m"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Take all the room there is."""
    with path.open("wb", buffering=0) as file:
        block = bytes(65536)
        while block:
            try:
                file.write(block)
            except OSError:
                block = block[: len(block) // 2]


@pytest.mark.slow
async def test_finishes_wait_for_room_and_none_is_lost(disk: Path, tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    with scripted_server(disk, lambda call: "an answer " * 400, model=model) as server:
        async with Api(server) as api:
            before = await api.begin()
            assert (await api.chat(before, max_tokens=2000)).status == 200
            assert (await api.finish(before)).status == 200
            episodes = [await api.begin() for _ in range(3)]
            for episode in episodes:
                assert (await api.chat(episode, max_tokens=2000)).status == 200
            fill(disk / "ballast")
            finishes = [asyncio.create_task(api.finish(episode, 0.5)) for episode in episodes]

            async def told() -> bool:
                blockers = (await api.get("/api/status"))["blockers"]
                return bool(blockers) and "the disk is full" in blockers[0]

            await eventually(told, what="the status to name the full disk")
            assert not any(finish.done() for finish in finishes), "acknowledged before it was durable"
            refused = await api.call("POST", "/api/episodes", api.begin_body())
            refused.refused(429, "admission_full", "the disk is full")
            (disk / "ballast").unlink()
            for finish in finishes:
                assert (await finish).status == 200
            after = await api.begin()
            assert (await api.chat(after, max_tokens=2000)).status == 200
            assert (await api.finish(after)).status == 200

            async def noticed() -> bool:
                return "disk_has_room" in [e["event"] for e in read_events(server.run_dir / "events.jsonl")]

            await eventually(noticed, what="the event that there is room again")
        with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
            assert ledger.verify() == []
            for episode in (before, *episodes, after):
                (view,) = ledger.episode(episode.id)
                assert view.record is not None
        assert server.process is not None and server.process.poll() is None
