"""Snapshot policies: when they are taken, what outlives what, and what a restart finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from wingbeat.core.config import Config
from wingbeat.core.weight_protocol import Manifest, UpdateWeights
from wingbeat.server.policies.snapshots import Snapshots
from wingbeat.server.weights.files import WeightFiles
from wingbeat.weights.host import host_id

OpenDesk = Callable[..., Any]
TEAM: dict[str, Any] = {
    "player": {},
    "rival": {"trainable": False, "snapshot_of": "player", "snapshot_every": 2},
}


class Trainer:
    """Publishes versions of ``player`` as real files, which it deletes as soon as the next is there."""

    def __init__(self, desk: Any, make_manifest: Callable[..., Manifest], folder: Path) -> None:
        self._desk = desk
        self._make = make_manifest
        self._folder = folder
        folder.mkdir()

    def publish(self, version: int, *, lineage: int = 0) -> None:
        host = self._desk.policies["player"]
        for old in self._folder.iterdir():
            old.unlink()
        path = self._folder / f"{lineage}-{version}"
        path.write_bytes(f"weights {lineage}-{version}".encode())
        manifest = self._make(version, policy="player")
        manifest = msgspec.structs.replace(
            manifest, path=str(path), host_id=host_id(), lineage=lineage, size_bytes=path.stat().st_size
        )
        host.version = version
        host.versions.adopt(manifest)


@pytest.fixture
def open_team(
    open_desk: OpenDesk, make_manifest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[Any, Snapshots, Trainer]]:
    monkeypatch.setattr("wingbeat.server.weights.files.run_weights_candidates", lambda run_dir: (run_dir,))
    made = 0

    def build() -> tuple[Any, Snapshots, Trainer]:
        nonlocal made
        made += 1
        desk = open_desk(policies=TEAM)
        files = WeightFiles(desk.policies, run_dir=tmp_path, host_id=host_id())
        snapshots = Snapshots(
            desk.policies, run_dir=tmp_path, events=desk.events, changed=desk.changed, path_of=files.path_of
        )
        return desk, snapshots, Trainer(desk, make_manifest, tmp_path / f"weights-{made}")

    return build


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "snapshots" / "rival").iterdir())


def served(desk: Any) -> tuple[int, str]:
    manifest = desk.policies["rival"].manifest
    return desk.policies["rival"].version, Path(manifest.path).read_text() if manifest.path else "base"


def events(desk: Any, name: str) -> list[dict[str, Any]]:
    return [event for event in desk.log if event["event"] == name]


async def test_a_snapshot_follows_at_every_version_that_divides(
    open_team: Any, tmp_path: Path, join_engine: Any
) -> None:
    desk, snapshots, trainer = open_team()
    engine = join_engine(desk.engines)
    player = desk.policies["player"]
    found: list[tuple[int, str]] = []
    for version in range(6):
        trainer.publish(version)
        await snapshots.follow(player)
        found.append(served(desk))
        engine.catch_up("rival")
    two, four = (2, "weights 0-2"), (4, "weights 0-4")
    assert found == [(0, "base"), (0, "base"), two, two, four, four]
    told = [m.manifest for m in engine.of(UpdateWeights) if m.manifest.policy == "rival"]
    assert [manifest.version for manifest in told] == [0, 2, 4]
    assert [e["version"] for e in events(desk, "snapshot")] == [2, 4]


async def test_an_older_copy_stays_while_an_engine_may_be_asked_for_it(
    open_team: Any, tmp_path: Path, join_engine: Any
) -> None:
    desk, snapshots, trainer = open_team()
    engine = join_engine(desk.engines)
    engine.serve(0, policy="rival")
    player, rival = desk.policies["player"], desk.policies["rival"]
    trainer.publish(2)
    await snapshots.follow(player)
    engine.serve(2, policy="rival")
    rival.pin(2)  # an evaluation
    trainer.publish(4)
    await snapshots.follow(player)
    assert len(files(tmp_path)) == 4
    engine.serve(4, policy="rival")
    watching = asyncio.create_task(snapshots.run())
    desk.changed.notify()
    await asyncio.sleep(0)
    assert len(files(tmp_path)) == 4, "pinned"
    rival.unpin(2)
    desk.changed.notify()
    for _ in range(5):
        await asyncio.sleep(0)
    assert files(tmp_path) == ["0-00000004.json", "0-00000004.safetensors"]
    watching.cancel()


async def test_a_restart_serves_the_newest_copy_whatever_became_of_the_original(open_team: Any, tmp_path: Path) -> None:
    desk, snapshots, trainer = open_team()
    for version in (2, 4):
        trainer.publish(version)
        await snapshots.follow(desk.policies["player"])
    desk, snapshots, trainer = open_team()
    desk.policies["player"].version = 5  # as the ledger says
    snapshots.restore()
    assert served(desk) == (4, "weights 0-4")
    assert events(desk, "snapshot_behind") == []
    trainer.publish(4)  # a trainer that comes back at a version that was copied already
    await snapshots.follow(desk.policies["player"])
    assert [e["version"] for e in events(desk, "snapshot")] == [4]


async def test_a_restart_uses_what_is_there_and_tells_what_is_missing(
    open_team: Any, tmp_path: Path, join_engine: Any
) -> None:
    desk, snapshots, trainer = open_team()
    join_engine(desk.engines).serve(0, policy="rival")  # never gets on, so that both copies stay
    for version in (2, 4):
        trainer.publish(version)
        await snapshots.follow(desk.policies["player"])
    (tmp_path / "snapshots" / "rival" / "0-00000004.safetensors").write_bytes(b"cut")
    desk, snapshots, _ = open_team()
    desk.policies["player"].version = 7
    snapshots.restore()
    assert served(desk) == (2, "weights 0-2")
    (event,) = events(desk, "snapshot_behind")
    assert (event["policy"], event["version"], event["expected"]) == ("rival", 2, 6)


async def test_a_copy_that_fails_leaves_the_snapshot_as_it_was(open_team: Any, tmp_path: Path) -> None:
    desk, snapshots, trainer = open_team()
    player = desk.policies["player"]
    (tmp_path / "snapshots").write_text("in the way")
    trainer.publish(2)
    await snapshots.follow(player)
    assert served(desk) == (0, "base")
    (event,) = events(desk, "snapshot_failed")
    assert (event["policy"], event["version"]) == ("rival", 2)
    (tmp_path / "snapshots").unlink()
    await snapshots.follow(player)
    assert served(desk) == (0, "base"), "not again for the same version"
    trainer.publish(4)
    await snapshots.follow(player)
    assert served(desk) == (4, "weights 0-4")


async def test_weights_of_another_host_are_refused_by_name(open_team: Any, make_manifest: Any) -> None:
    desk, snapshots, _ = open_team()
    desk.policies["player"].versions.adopt(make_manifest(2, policy="player"))
    await snapshots.follow(desk.policies["player"])
    (event,) = events(desk, "snapshot_failed")
    assert "the weights lie on the trainer's host" in event["error"]


async def test_after_a_rollback_the_same_number_is_taken_again(open_team: Any, tmp_path: Path) -> None:
    desk, snapshots, trainer = open_team()
    player, rival = desk.policies["player"], desk.policies["rival"]
    for version, lineage in ((4, 0), (3, 1), (4, 1)):
        trainer.publish(version, lineage=lineage)
        await snapshots.follow(player)
    assert served(desk) == (4, "weights 1-4")
    assert rival.manifest_of(4) is rival.manifest, "evaluations can pin it"
    assert files(tmp_path) == ["1-00000004.json", "1-00000004.safetensors"]


async def test_a_trainer_that_comes_back_at_a_missed_version_is_copied_then(open_team: Any) -> None:
    """No step of the original ends there, so nobody but the watcher sees it."""
    desk, snapshots, trainer = open_team()
    watching = asyncio.create_task(snapshots.run())
    await asyncio.sleep(0)
    trainer.publish(2)
    desk.changed.notify()
    while not events(desk, "snapshot"):
        assert await desk.changed.wait(10.0)
    assert served(desk) == (2, "weights 0-2")
    watching.cancel()


@pytest.mark.parametrize(
    ("rival", "message"),
    [
        ({"trainable": False, "snapshot_of": "nobody"}, "expected the name of a policy that trains"),
        ({"trainable": False, "snapshot_of": "judge"}, "expected the name of a policy that trains"),
        ({"snapshot_of": "player"}, "set its `trainable` to false"),
        ({"trainable": False, "snapshot_of": "player", "model": "other"}, "needs the same `model`"),
        ({"trainable": False, "snapshot_of": "player", "dtype": "bfloat16"}, "needs the same `dtype`"),
        ({"trainable": False, "snapshot_of": "player", "snapshot_every": 0}, "greater than or equal to 1"),
    ],
)
def test_a_snapshot_that_cannot_be_is_refused_by_name(rival: dict[str, Any], message: str) -> None:
    policies = {"player": {"model": "m"}, "judge": {"model": "m", "trainable": False}, "rival": {"model": "m", **rival}}
    with pytest.raises(ValueError, match=message):
        Config.model_validate({"policies": policies})
