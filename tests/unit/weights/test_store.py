"""The folder of one host's weights: who may be in it at once, and who cleans up."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from wingbeat.core.errors import SetupError, UnavailableError
from wingbeat.weights.host import host_id, received_dir, run_weights_candidates
from wingbeat.weights.store import HostStore


def name(version: int, *, policy: str = "solver", suffix: str = "safetensors") -> str:
    return f"{policy}-{version:08d}-{version:016x}.{suffix}"


def test_one_at_a_time_pulls_a_policy_and_whoever_is_not_wanted_gives_up(tmp_path: Path) -> None:
    first, second = HostStore(tmp_path / "s"), HostStore(tmp_path / "s")
    entered = Event()

    def pull() -> None:
        with second.pulling("solver", is_wanted=lambda: True):
            entered.set()

    with ThreadPoolExecutor(1) as threads:
        with first.pulling("solver", is_wanted=lambda: True):
            other = threads.submit(pull)
            with second.pulling("critic", is_wanted=lambda: True):
                pass  # another policy
            with pytest.raises(UnavailableError, match="not wanted"), second.pulling("solver", is_wanted=lambda: False):
                pass
            assert not entered.is_set()
        other.result(20)


def test_a_sweep_leaves_what_somebody_may_need(tmp_path: Path) -> None:
    store = HostStore(tmp_path / "s")
    for version in range(6):
        store.path(name(version)).touch()
        os.utime(store.path(name(version)), (version, version))
    for other in (name(0, suffix="delta"), name(5, suffix="delta"), name(0, policy="solver-2")):
        store.path(other).touch()
    store.partial(name(0)).touch()
    store.partial(name(9)).touch()
    store.pin(name(1))
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    store.path(f"{name(2)}.pinned.{int(dead.stdout)}").touch()  # of a process that died
    store.sweep("solver", keep={name(9), name(5, suffix="delta")})
    left = {path.name for path in store.folder.iterdir() if not path.name.startswith(".")}
    assert left == {
        *(name(version) for version in (1, 4, 5)),
        name(5, suffix="delta"),
        name(0, policy="solver-2"),
        f"{name(9)}.partial",
        f"{name(1)}.pinned.{os.getpid()}",
    }


def test_nobody_else_may_look(tmp_path: Path) -> None:
    store = HostStore(tmp_path / "run" / "received-a")
    assert {folder.stat().st_mode & 0o777 for folder in (store.folder, store.folder.parent)} == {0o700}
    store.close()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one above: its owner could put another in the place of ours."""
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("wingbeat.weights.host.os.getuid", lambda: 54321)
    with pytest.raises(SetupError, match=r"run belongs to user \d+, this is user 54321"):
        HostStore(tmp_path / "run" / "received-a")


def test_the_last_one_removes_the_folder(tmp_path: Path) -> None:
    first, second = HostStore(tmp_path / "s"), HostStore(tmp_path / "s")
    first.path(name(1)).touch()
    first.close()
    assert second.path(name(1)).exists()
    second.close()
    assert not (tmp_path / "s").exists()


def test_a_host_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_id() == host_id() and len(host_id()) == 16
    monkeypatch.setenv("WINGBEAT_HOST_ID", "gpu-3.west")
    assert host_id() == "gpu-3.west"
    monkeypatch.setenv("WINGBEAT_HOST_ID", "../x")
    with pytest.raises(SetupError, match="WINGBEAT_HOST_ID: expected letters"):
        host_id()


def test_processes_of_a_host_choose_the_same_folder(tmp_path: Path) -> None:
    in_memory, on_disk = run_weights_candidates(tmp_path)
    roomy, cramped = received_dir(tmp_path, "a"), received_dir(tmp_path, "a", min_free_bytes=2**62)
    assert {roomy.parent, cramped.parent} <= {in_memory, on_disk} and cramped.parent == on_disk
    cramped.mkdir(parents=True)
    try:
        assert received_dir(tmp_path, "a") == cramped and received_dir(tmp_path, "b").name == "received-b"
    finally:
        cramped.rmdir()
        on_disk.rmdir()
