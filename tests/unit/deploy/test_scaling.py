"""How many engines a supervisor keeps: what was asked for last, by scaling or by configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from wingbeat.core.config import Config
from wingbeat.core.deployment import NAME, Wanted, write_wanted
from wingbeat.core.errors import SetupError
from wingbeat.deploy.local import Supervisor
from wingbeat.deploy.processes import Processes, ThisMachine


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of engines that processes are told to be, one after the other."""
    found: list[int] = []

    async def start_control(supervisor: Supervisor, models: object) -> None:
        supervisor.url = supervisor.local_url = "http://here"

    monkeypatch.setattr("wingbeat.deploy.local.SCALE_POLL_S", 0.0)
    monkeypatch.setattr(Supervisor, "prepare_models", lambda _: asyncio.sleep(0, {}))
    monkeypatch.setattr(Supervisor, "_start_control", start_control)
    monkeypatch.setattr(Supervisor, "_accept", lambda _: asyncio.sleep(0))
    monkeypatch.setattr(Processes, "scale_engines", lambda _, group, wanted: found.append(wanted))
    return found


def supervisor_of(
    run_dir: Path, *, count: int = 2, host: str = "127.0.0.1", place: ThisMachine | None = None
) -> Supervisor:
    policies = {"judge": {"model": "m", "trainable": False}}
    server = {"host": host, "admin_key": "a long random text of somebody", "port": 0}
    config = Config.model_validate({"policies": policies, "engine": {"count": count}, "server": server})
    return Supervisor(config, run_dir=run_dir, config_dir=run_dir, place=place)


async def until(counts: list[int], *wanted: int) -> None:
    async with asyncio.timeout(5):
        while counts != list(wanted):  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0)


async def test_each_request_counts_once_and_damage_changes_nothing(
    tmp_path: Path, counts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async with supervisor_of(tmp_path):
        await until(counts, 2)
        write_wanted(tmp_path, Wanted(engines=3, configured=2))
        await until(counts, 2, 3)
        (tmp_path / NAME).write_text("{")
        async with asyncio.timeout(5):
            while "is damaged" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0)
        write_wanted(tmp_path, Wanted(engines=3, configured=2))
        await until(counts, 2, 3, 3)
    assert caplog.text.count("is damaged") == 1


@pytest.mark.parametrize(("count", "started"), [(2, 5), (3, 3)])
async def test_a_continued_run_has_what_was_asked_for_last_be_it_by_scaling_or_by_configuration(
    tmp_path: Path, counts: list[int], count: int, started: int
) -> None:
    write_wanted(tmp_path, Wanted(engines=5, configured=2))
    async with supervisor_of(tmp_path, count=count):
        await until(counts, started)


@pytest.mark.parametrize(
    ("is_remote", "host", "url"),
    [(True, "10.0.0.1", "https://outside"), (True, "127.0.0.1", "http://inside"), (False, "10.0.0.1", "http://inside")],
)
async def test_workers_elsewhere_call_the_server_as_other_machines_do(
    tmp_path: Path, counts: list[int], monkeypatch: pytest.MonkeyPatch, is_remote: bool, host: str, url: str
) -> None:
    called: list[str] = []

    async def start_control(supervisor: Supervisor, models: object) -> None:
        supervisor.url, supervisor.local_url = "https://outside", "http://inside"

    monkeypatch.setattr(Supervisor, "_start_control", start_control)
    monkeypatch.setattr(Processes, "start_workers", lambda _, group, url, *, engines: called.append(url))
    place = ThisMachine(devices=())
    place.is_remote = is_remote
    async with supervisor_of(tmp_path, host=host, place=place):
        assert called == [url]


async def test_a_damaged_request_is_said_before_anything_starts(tmp_path: Path, counts: list[int]) -> None:
    (tmp_path / NAME).write_text('{"engines": "many"}')
    with pytest.raises(SetupError, match="delete it, and scale again"):
        async with supervisor_of(tmp_path):
            raise AssertionError("it started")
    assert counts == []
