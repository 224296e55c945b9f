"""A start that fails before there is a run leaves nothing behind, and is told before anything costs time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from wingbeat.core.config import Config
from wingbeat.core.errors import PortInUse, SetupError, UnavailableError
from wingbeat.deploy import builtin_models
from wingbeat.deploy.local import Supervisor, run_server
from wingbeat.deploy.processes import Place, Processes
from wingbeat.deploy.training import TrainingPlan, run_plan


def config_of(tmp_path: Path, *, port: int = 0, model: str = "builtin:calculator", host: str = "127.0.0.1") -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(tmp_path / "runs")},
            "server": {"port": port, "host": host},
            "policies": {"solver": {"model": model}},
        }
    )


def serve(config: Config, notes: list[str], *, resume: Path | None = None) -> None:
    def ready(supervisor: Supervisor) -> None:
        raise AssertionError("the server is up")

    run_server(config, Path(config.run.dir).parent, resume=resume, on_ready=ready, on_note=notes.append)


def test_a_taken_port_is_told_before_the_model_is_made(tmp_path: Path) -> None:
    notes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
            serve(config_of(tmp_path, port=port), notes)
    assert notes == []
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_place_that_is_not_there_leaves_no_run(tmp_path: Path) -> None:
    def nowhere(config: Config) -> Place:
        raise SetupError("no cluster")

    with pytest.raises(SetupError, match="no cluster"):
        run_server(config_of(tmp_path), tmp_path, on_ready=lambda supervisor: None, place=nowhere)
    plan = TrainingPlan(config_of(tmp_path), tmp_path, place=nowhere)
    with pytest.raises(SetupError, match="no cluster"):
        run_plan(plan)
    assert not (tmp_path / "runs").exists()


def test_a_model_that_is_none_leaves_no_run(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(SetupError, match="model"):
        serve(config_of(tmp_path, model=str(tmp_path / "model")), [])
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("dies", [True, False])
def test_ctrl_c_while_a_model_is_built_is_an_interruption_and_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """A terminal sends it to the whole process group: what builds the model dies of it first, or does not heed it."""

    async def build(command: object, *, what: str) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # noqa: ASYNC110 - until heeded
            await asyncio.sleep(0)
        if not dies:
            await asyncio.Event().wait()
        raise SetupError(f"{what} failed: KeyboardInterrupt")

    monkeypatch.setattr(builtin_models, "run_to_end", build)
    monkeypatch.setenv("WINGBEAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("wingbeat.deploy.training.check_trains", lambda config: None)
    result = run_plan(TrainingPlan(config_of(tmp_path), tmp_path))
    assert (result.complete, result.summary, result.evaluations) == (False, {}, ())
    serve(config_of(tmp_path), [])
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_host_without_a_key_makes_no_run(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="admin_key"):
        serve(config_of(tmp_path, host="0.0.0.0"), [])
    assert not (tmp_path / "runs").exists()


def test_a_run_that_was_there_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "old"
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUse):
        serve(config_of(tmp_path, port=taken.getsockname()[1]), [], resume=run_dir)
    assert (run_dir / "config.toml").is_file()


def test_a_refused_start_leaves_the_settings_of_a_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "old"
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text("old")
    (tmp_path / "model").mkdir()
    with pytest.raises(SetupError, match="model"):
        serve(config_of(tmp_path, model=str(tmp_path / "model")), [], resume=run_dir)
    assert (run_dir / "config.toml").read_text() == "old"


async def test_settings_are_kept_once_every_trainer_took_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "old"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("old")
    trainers = iter(["absent", "", "ready"])
    seen: list[str] = []

    class Server:
        def __init__(self, url: str, key: str | None) -> None:
            assert url == "http://here"

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def status(self) -> Any:
            seen.append((run_dir / "config.toml").read_text())
            trainer = next(trainers)
            if not trainer:
                raise UnavailableError("control is away")
            return SimpleNamespace(policies=[SimpleNamespace(trainer="frozen"), SimpleNamespace(trainer=trainer)])

    async def start_control(supervisor: Supervisor, models: object) -> None:
        supervisor.url = supervisor.local_url = "http://here"

    monkeypatch.setattr("wingbeat.deploy.local.AsyncSwarm", Server)
    monkeypatch.setattr("wingbeat.deploy.local.ACCEPT_POLL_S", 0.0)
    monkeypatch.setattr(Supervisor, "prepare_models", lambda _: asyncio.sleep(0, {}))
    monkeypatch.setattr(Supervisor, "_start_control", start_control)
    monkeypatch.setattr(Processes, "start_workers", lambda *_, **__: None)
    async with Supervisor(config_of(tmp_path), run_dir=run_dir, config_dir=tmp_path):
        async with asyncio.timeout(5):
            while (run_dir / "config.toml").read_text() == "old":  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0)
    assert seen == ["old"] * 3
    assert "builtin:calculator" in (run_dir / "config.toml").read_text()
