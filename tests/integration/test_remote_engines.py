"""Engines that dial out to a training run, are killed, and leave: as processes, of another host as far as they know."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from harness import Api, Server, dialled_in, eventually, serving, train_config, trained_once

from wingbeat.core.errors import SetupError
from wingbeat.core.model_files import fingerprint
from wingbeat.core.worker_protocol import PROTOCOL_VERSION, PolicySpec, Register, Shutdown
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.server.keys.file import KeyFile, NewKey
from wingbeat.server.keys.principals import Role
from wingbeat.workers.link import WorkerLink
from wingbeat.workers.models import ModelFolders


@dataclass(slots=True)
class Crew:
    """A training run with an engine of its own and two that dialled in."""

    server: Server
    models: Path
    key: str
    engines: dict[str, subprocess.Popen[bytes]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crew(models: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crew]:
    folder = tmp_path_factory.mktemp("crew")
    config = train_config(folder, models, run__steps=10_000, eval__at_end=False, dataflow__max_staleness=4)
    with ExitStack() as stack:
        server = stack.enter_context(serving(folder, config, command="train"))
        _, key = KeyFile(server.run_dir.parent / "keys.json").create(NewKey(Role.WORKER, name="elsewhere"))
        engines = {
            name: stack.enter_context(
                dialled_in(server, key, name, "--threads", "1", "--drain-s", "20", host="elsewhere")
            )
            for name in ("killed", "drained")
        }
        yield Crew(server, models, key, engines)


async def engines_of(api: Api) -> dict[str, dict[str, Any]]:
    return {engine["name"]: engine for engine in (await api.get("/api/status"))["engines"]}


@pytest.mark.asyncio(loop_scope="module")
async def test_engines_come_and_go_while_it_trains_and_no_episode_is_lost(crew: Crew) -> None:
    async with Api(crew.server) as api:

        async def both_work() -> bool:
            found = await engines_of(api)
            return all(found.get(name, {}).get("in_flight") for name in crew.engines)

        await eventually(both_work, what="both engines to have generations")
        found = await engines_of(api)
        assert found["killed"]["host"] == "elsewhere" != found["engine-0"]["host"]
        assert {"wingbeat", "torch", "python"} <= found["killed"]["software"].keys()
        crew.engines["killed"].send_signal(signal.SIGKILL)
        crew.engines["drained"].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(crew.engines["drained"].wait, 30) == 0

        async def gone() -> list[dict[str, Any]]:
            left = crew.server.events_named("engine_left")
            return left if len(left) == 2 else []

        left = {e["worker_id"]: e["drained"] for e in await eventually(gone, what="both engines to have left")}
        assert left == {"killed": False, "drained": True}
        step = (await api.get("/api/status"))["train_steps"]

        async def on() -> dict[str, Any]:
            status = await api.get("/api/status")
            return status if status["train_steps"] >= step + 3 else {}

        status = await eventually(on, what="three more steps")
    assert all(name.startswith("agent/") for name in status["endings"]), status["endings"]
    assert (status["metrics"]["staleness_max"], status["metrics"]["discard_rate"]) <= (4.0, 0.0)
    with open_read_only(crew.server.run_dir / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        trained_once(ledger.batches_after("solver", 0))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_is_fetched_from_the_server(crew: Crew, tmp_path: Path) -> None:
    async with Api(crew.server) as api:
        await api.ready()
    model = crew.models / "solver"
    spec = PolicySpec("solver", "/nowhere/solver", 64, {}, "/nowhere/solver", fingerprint(model))
    folders = ModelFolders(crew.server.url, crew.key, folder=tmp_path)
    got = Path((await asyncio.to_thread(folders.local, spec)).model)
    assert (got / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    partial = tmp_path / f"{spec.fingerprint}.partial"
    os.rename(got, partial)
    with (partial / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert await asyncio.to_thread(folders.local, spec) and fingerprint(got) == spec.fingerprint, "it goes on"
    with pytest.raises(SetupError, match="HTTP Error 403"):
        ModelFolders(crew.server.url, "guess", folder=tmp_path / "other").local(spec)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_keeps_an_engine_from_joining_is_told_in_a_line(crew: Crew) -> None:
    _, client = KeyFile(crew.server.run_dir.parent / "keys.json").create(NewKey(Role.CLIENT, name="a client"))
    ours = Register(PROTOCOL_VERSION, "engine", "one-more", "elsewhere", 1)

    async def refusal(key: str = crew.key, **fields: Any) -> str:
        link = WorkerLink(crew.server.url, key, msgspec.structs.replace(ours, **fields))
        link.start()
        assert isinstance((await asyncio.to_thread(link.receive, block=True))[0], Shutdown)
        assert link.error is not None
        return link.error.message

    assert "(it is none that this server knows)" in await refusal("guess")
    assert "there is no policy 'judge' here, only solver" in await refusal(policies=("judge",))
    assert "install the same wingbeat version on both" in await refusal(protocol=1)

    async def known() -> bool:
        return "needs a worker key, and yours is a client key" in await refusal(client)

    await eventually(known, what="the server to see the key")


@pytest.mark.asyncio(loop_scope="module")
async def test_only_workers_read_models_and_only_their_files(crew: Crew) -> None:
    async with Api(crew.server) as api:
        path = "/worker/v1/models/solver"
        files = (await api.get(path, key=crew.key))["files"]
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= {file["name"] for file in files}
        (await api.call("GET", path)).refused(403, "permission_denied", "needs a worker key")
        for other in (f"{path}/..%2f..%2fkeys.json", f"{path}/keys.json", "/worker/v1/models/judge"):
            (await api.call("GET", other, key=crew.key)).refused(404, "not_found")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_leaves_when_it_is_asked_to(crew: Crew) -> None:
    async with Api(crew.server) as api:
        (await api.call("POST", "/api/engines/nobody/drain", {})).refused(404, "not_found", "only engine-0")
        asked = await api.call("POST", "/api/engines/engine-0/drain", {"drain_s": 5})
        assert (asked.status, asked.body) == (200, {"state": "leaving"})

        async def gone() -> bool:
            return crew.server.events_named("engine_left")[-1]["worker_id"] == "engine-0"

        await eventually(gone, what="the engine to leave")
        assert crew.server.events_named("engine_left")[-1]["drained"]
