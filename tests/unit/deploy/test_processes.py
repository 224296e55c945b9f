"""Which processes a server has, with a place that only notes what it is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from wingbeat.core.config import Config
from wingbeat.core.config.lending import load_lending
from wingbeat.core.deployment import NAME, Requests, Wanted, read_wanted, write_wanted
from wingbeat.core.errors import SetupError
from wingbeat.core.keys import WORKER_KEY_VARIABLE
from wingbeat.core.lifeline import LENDING_GRACE_S
from wingbeat.deploy.children import ChildSpec, ChildState
from wingbeat.deploy.devices import VARIABLE, Needs
from wingbeat.deploy.processes import CONTROL, DRAIN_S, Drain, Kept, OnChange, Processes, ThisMachine
from wingbeat.deploy.run_keys import RunKeys


class Noted:
    """A process that runs until it is stopped."""

    error = ""
    pid = 7

    def __init__(self, spec: ChildSpec, needs: Needs, on_change: OnChange) -> None:
        self.spec = spec
        self.needs = needs
        self.state = ChildState.RUNNING
        self._on_change = on_change
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        self._on_change(self)
        await self._stopped.wait()
        self.state = ChildState.STOPPED
        self._on_change(self)

    async def stop(self) -> None:
        self._stopped.set()


class Notes:
    is_remote = False

    def __init__(self) -> None:
        self.made: list[Noted] = []

    def control(self, spec: ChildSpec, *, on_change: OnChange) -> Kept:
        return self.worker(spec, Needs(), on_change=on_change)

    def worker(self, spec: ChildSpec, needs: Needs, *, on_change: OnChange) -> Noted:
        self.made.append(Noted(spec, needs, on_change))
        return self.made[-1]

    async def close(self) -> None: ...


async def unknown(name: str, drain_s: float) -> bool:
    """Control does not know the engine that is to be drained."""
    return False


def processes_of(
    tmp_path: Path,
    place: Notes,
    *,
    drain: Drain = unknown,
    trainer: Mapping[str, object] | None = None,
    **engine: object,
) -> Processes:
    solver = {"model": "m", "trainer": {"threads": 3, **(trainer or {})}}
    policies = {"solver": solver, "judge": {"model": "m", "trainable": False}}
    config = Config.model_validate({"policies": policies, "engine": {"count": 2, "threads": 2, **engine}})
    return Processes(config, run_dir=tmp_path, keys=RunKeys.new(), place=place, drain=drain)


async def test_a_trainer_for_what_trains_and_as_many_engines_as_are_wanted_now(tmp_path: Path) -> None:
    place = Notes()
    drained: list[str] = []

    async def drain(name: str, drain_s: float) -> bool:
        assert drain_s == DRAIN_S
        drained.append(name)
        if name == "engine-1":  # it ends by itself
            await next(noted for noted in place.made if noted.spec.name == name).stop()
        return name == "engine-1"

    processes = processes_of(tmp_path, place, drain=drain)
    async with asyncio.TaskGroup() as group:
        processes.start_control(group, "wingbeat.server", tmp_path / "launch.json")
        processes.start_workers(group, "http://here", engines=2)
        assert list(processes.all) == [CONTROL, "trainer-solver", "engine-0", "engine-1"]
        needs = {noted.spec.name: noted.needs for noted in place.made}
        assert needs["trainer-solver"] == Needs(threads=3, devices=1)
        assert needs["engine-0"] == Needs(threads=2, devices=1)
        assert "http://here" in place.made[-1].spec.command
        processes.scale_engines(group, 3)
        assert "engine-2" in processes.all
        await asyncio.gather(*processes.scale_engines(group, 1))
        assert list(processes.all) == [CONTROL, "trainer-solver", "engine-0"]
        assert drained == ["engine-1", "engine-2"]
        assert set(json.loads((tmp_path / "processes.json").read_bytes())) == set(processes.all)
        assert not processes.ended.is_set()
        await processes.stop()
    assert processes.ended.is_set() and not processes.failed.is_set()
    assert len([noted for noted in place.made if noted.spec.name == "engine-1"]) == 1


async def test_resources_servers_run_beside_and_are_told_all_but_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "of a judge")
    place, secret = Notes(), "a secret that nobody reads"
    data = {
        "policies": {"solver": {"model": "m", "trainable": False}},
        "server": {"admin_key": secret, "keys_file": str(tmp_path / "keys.json")},
        "resources": {
            "count": 2,
            "port": 9000,
            "kinds": ["endpoint"],
            "cpus": 1.5,
            "cost": {"judge.a": 3},
            "urls": ["https://judge.example/v1"],
            "key_variables": {"JUDGE_KEY": ["https://judge.example/v1"]},
        },
    }
    config = Config.model_validate(data)
    keys = RunKeys.new()
    processes = Processes(config, run_dir=tmp_path, keys=keys, place=place, drain=unknown)
    async with asyncio.TaskGroup() as group:
        processes.start_workers(group, "http://here", engines=0)
        assert list(processes.all) == ["resources-0", "resources-1"]
        await processes.stop()
    for index, made in enumerate(place.made):
        assert made.needs == Needs(threads=2, devices=0, grace_s=LENDING_GRACE_S), "it has a port of its own"
        assert made.spec.environment["JUDGE_KEY"] == "of a judge", "another machine has it in no environment"
        assert secret not in str(made.spec)
        assert made.spec.environment[WORKER_KEY_VARIABLE] == keys.worker
        assert keys.admin not in str(made.spec.environment)
        assert made.spec.command[-4:] == ["--key-file", str(tmp_path / "keys.json"), "--server", "http://here"]
        settings = [word for word in made.spec.command if word.startswith(("--resources.", "--server."))]
        told = load_lending(None, settings)
        assert told.resources == config.resources.model_copy(update={"count": 0, "port": 9000 + index})
        assert told.server == config.server.without_keys()


async def test_a_resources_server_that_lends_devices_cannot_do_without_them(tmp_path: Path) -> None:
    place = Notes()
    data = {
        "policies": {"solver": {"model": "m", "trainable": False}},
        "resources": {"count": 1, "port": 0, "gpus": 2},
    }
    processes = Processes(Config.model_validate(data), run_dir=tmp_path, keys=RunKeys.new(), place=place, drain=unknown)
    async with asyncio.TaskGroup() as group:
        processes.start_workers(group, "http://here", engines=0)
        await processes.stop()
    assert [made.needs for made in place.made] == [Needs(threads=1, devices=2, insists=True)]


async def test_what_is_kept_on_the_cpu_needs_no_device(tmp_path: Path) -> None:
    place = Notes()
    async with asyncio.TaskGroup() as group:
        processes = processes_of(tmp_path, place, device="cpu")
        processes.start_workers(group, "http://here", engines=2)
        assert [noted.needs.devices for noted in place.made] == [1, 0, 0]
        await processes.stop()


async def test_what_several_devices_share_asks_for_all_of_them_and_says_if_it_cannot_do_without(tmp_path: Path) -> None:
    place = Notes()
    processes = processes_of(tmp_path, place, trainer={"processes": 2, "device": "cuda"}, tensor_parallel=4)
    async with asyncio.TaskGroup() as group:
        processes.start_workers(group, "http://here", engines=1)
        assert [noted.needs for noted in place.made] == [
            Needs(threads=3, devices=2, ranks=2, insists=True),
            Needs(threads=2, devices=4, ranks=4),
        ]
        assert "--tensor-parallel 4" in " ".join(place.made[1].spec.command)
        await processes.stop()


def test_workers_of_this_machine_see_devices_of_their_own(tmp_path: Path) -> None:
    spec = ChildSpec("a", ["x"], {"k": "v"}, tmp_path / "log")
    here = ThisMachine(devices=("0", "1"))
    seen = [
        here.worker(ChildSpec(name, ["x"], {"k": "v"}, spec.log), Needs(devices=1), on_change=lambda kept: None)
        for name in ("a", "b", "c")
    ]
    assert [kept.spec.environment for kept in seen] == [{"k": "v", VARIABLE: name} for name in ("0", "1", "0")]
    alone = ThisMachine(devices=()).worker(spec, Needs(), on_change=lambda kept: None)
    assert alone.spec.environment == {"k": "v"}


async def draining(
    tmp_path: Path, place: Notes, group: asyncio.TaskGroup, *, answer_s: float
) -> tuple[Processes, asyncio.Task[None]]:
    """Processes of which the last engine of three is being drained, and the task that waits for its end; control takes
    ``answer_s`` to answer."""
    begun = asyncio.Event()

    async def drain(name: str, drain_s: float) -> bool:
        begun.set()
        await asyncio.sleep(answer_s)
        return True

    processes = processes_of(tmp_path, place, drain=drain)
    processes.start_workers(group, "http://here", engines=3)
    (retiring,) = processes.scale_engines(group, 2)
    await begun.wait()
    return processes, retiring


async def test_a_draining_engine_is_left_alone_until_it_ends(tmp_path: Path) -> None:
    place = Notes()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        processes, retiring = await draining(tmp_path, place, group, answer_s=0.0)
        for _ in range(10):
            await asyncio.sleep(0)
        last = place.made[-1]
        assert last.state is ChildState.RUNNING and not retiring.done()
        await last.stop()  # it ends by itself
        await retiring
        await processes.stop()


async def test_control_is_stopped_before_its_workers(tmp_path: Path) -> None:
    """It tells them, and closes the ledger in peace."""
    place, order = Notes(), list[str]()
    async with asyncio.TaskGroup() as group:
        processes = processes_of(tmp_path, place)
        processes.start_control(group, "wingbeat.server", tmp_path / "launch.json")
        processes.start_workers(group, "http://here", engines=1)
        for noted in place.made:
            before = noted.stop

            async def stop(name: str = noted.spec.name, before: Any = before) -> None:
                order.append(name)
                await asyncio.sleep(0)
                order.append(f"{name} has ended")
                await before()

            noted.stop = stop
        await processes.stop()
    assert order[:2] == [CONTROL, f"{CONTROL} has ended"] and {*order} > {"trainer-solver", "engine-0"}


async def test_stopping_does_not_wait_for_engines_that_are_being_drained(tmp_path: Path) -> None:
    """Control, which would tell them, is gone by then."""
    place = Notes()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        processes, retiring = await draining(tmp_path, place, group, answer_s=600.0)
        await processes.stop()
        assert retiring.cancelled()
    assert [noted.state for noted in place.made] == [ChildState.STOPPED] * 4


async def test_an_engine_that_somebody_drained_is_started_again_when_it_is_asked_for(tmp_path: Path) -> None:
    place = Notes()
    async with asyncio.TaskGroup() as group:
        processes = processes_of(tmp_path, place)
        processes.start_workers(group, "http://here", engines=2)
        await asyncio.sleep(0)
        await place.made[1].stop()
        await asyncio.sleep(0.01)
        assert processes.all["engine-0"].state is ChildState.STOPPED
        processes.scale_engines(group, 2)
        assert [noted.spec.name for noted in place.made].count("engine-0") == 2
        assert [noted.spec.name for noted in place.made].count("engine-1") == 1
        await processes.stop()


async def test_an_engine_that_is_to_end_anyway_does_not_fail_the_server(tmp_path: Path) -> None:
    place = Notes()
    async with asyncio.TaskGroup() as group:
        processes = processes_of(tmp_path, place)
        processes.start_workers(group, "http://here", engines=3)
        retiring = processes.scale_engines(group, 2)
        await asyncio.sleep(0)
        last = place.made[-1]
        last.state = ChildState.FAILED
        last._on_change(last)  # pyright: ignore[reportPrivateUsage]
        assert last.spec.name == "engine-2" and not processes.failed.is_set()
        await asyncio.gather(*retiring)
        last = place.made[1]
        last.state = ChildState.FAILED
        last._on_change(last)  # pyright: ignore[reportPrivateUsage]
        assert processes.failed.is_set()
        await processes.stop()


def test_what_is_wanted_is_read_as_it_was_written_and_damage_is_said(tmp_path: Path) -> None:
    assert read_wanted(tmp_path, configured=1) is None
    write_wanted(tmp_path, Wanted(engines=5, configured=1))
    assert read_wanted(tmp_path, configured=1) == Wanted(engines=5, configured=1)
    assert read_wanted(tmp_path, configured=2) is None, "the run was continued with another engine.count"
    (tmp_path / NAME).write_text('{"engines": -1}')
    with pytest.raises(SetupError, match="damaged"):
        read_wanted(tmp_path, configured=1)


def test_each_request_is_given_once_and_damage_is_said_once(tmp_path: Path) -> None:
    requests = Requests(tmp_path, configured=1)
    assert requests.new() is None
    for engines in (5, 5, 3):
        write_wanted(tmp_path, Wanted(engines=engines, configured=1))
        wanted = requests.new()
        assert wanted is not None and wanted.engines == engines
        assert requests.new() is None
    (tmp_path / NAME).write_text("{")
    with pytest.raises(SetupError, match="damaged"):
        requests.new()
    assert requests.new() is None
