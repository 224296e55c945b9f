"""Weights on their way to other hosts, in a run of real processes: differences, relays, and a trainer that dies."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from harness import Api, dialled_in, environment, eventually, eventually_now, serving, train_config, trained_once

from wingbeat.core.config import Config
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.server.__main__ import Launch
from wingbeat.server.keys.file import KeyFile, NewKey
from wingbeat.server.keys.principals import Role
from wingbeat.weights.host import received_dir, run_weights_candidates


async def test_engines_elsewhere_follow_by_differences_and_a_trainer_that_dies_unpublished_loses_nothing(
    models: Path, tmp_path: Path
) -> None:
    config = train_config(
        tmp_path,
        models,
        run__steps=10_000,
        eval__at_end=False,
        dataflow__max_staleness=4,
        weights__fan_out=1,
        policies__solver__trainer__checkpoint_every=3,
    )
    with ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, config, command="train"))
        _, key = KeyFile(server.run_dir.parent / "keys.json").create(NewKey(Role.WORKER))
        for host, relay in {"near": ("--relay", "127.0.0.1:0"), "far": ()}.items():
            stack.enter_context(dialled_in(server, key, host, *relay, "--threads", "1", "--drain-s", "1", host=host))
        async with Api(server) as api:
            folders = {host: received_dir(server.run_dir, host) for host in ("near", "far")}

            async def follow() -> dict[str, Any]:
                """Both serve a version that they made of differences."""
                status = await api.get("/api/status")
                served = {e["name"]: e["served"].get("solver") for e in status["engines"]}
                made = all(folder.is_dir() and any(folder.glob("*.delta")) for folder in folders.values())
                both = [served.get(host) for host in folders]
                return status if made and all(one and one["version"] > 3 for one in both) else {}

            await eventually(follow, what="engines of other hosts to follow by differences")
            trainer = server.pid("trainer-solver")
            _, hard = resource.prlimit(trainer, resource.RLIMIT_FSIZE)
            resource.prlimit(trainer, resource.RLIMIT_FSIZE, (1024, hard))  # it cannot write weights any more

            async def unpublished() -> bool:
                """It has taken a step whose weights nobody can have."""
                status = await api.get("/api/status")
                return any("cannot publish its weights" in blocker for blocker in status["blockers"])

            await eventually(unpublished, what="a step whose weights are not published")
            os.kill(trainer, signal.SIGKILL)

            async def lost() -> list[dict[str, Any]]:
                return server.events_named("trainer_lost")

            lost_at = (await eventually(lost, what="the trainer to be missed"))[-1]["version"]

            async def on() -> bool:
                status = await api.get("/api/status")
                served = [e["served"].get("solver", {}).get("version", 0) for e in status["engines"]]
                return status["train_steps"] > lost_at + 2 and len(served) == 3 and min(served) > lost_at

            await eventually(on, what="all three engines to serve what came after")
            replays = server.events_named("replayed")
            assert [event["exact"] for event in replays] == [True] * len(replays) and replays
            assert not server.events_named("lineage_began") and not server.events_named("engine_quarantined")
    with open_read_only(server.run_dir / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        trained_once(ledger.batches_after("solver", 0))
    left = [*run_weights_candidates(server.run_dir), *folders.values()]
    assert not any(folder.exists() for folder in left), "something is left in shared memory"


async def test_a_trainer_elsewhere_brings_control_what_engines_elsewhere_pull(models: Path, tmp_path: Path) -> None:
    """Three hosts, as far as they know: control, the trainer and the engine."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = Config.model_validate(
        {
            "server": {"port": 0},
            "policies": {"solver": {"model": str(models / "solver"), "context_tokens": 128}},
            "engine": {"kv_tokens": 4096},
        }
    )
    launch = tmp_path / "launch.json"
    launch.write_text(Launch(config=config, models={"solver": models / "solver"}, run_dir=run_dir).model_dump_json())
    key = "worker-key-of-this-test"

    def process(host: str, *command: str) -> subprocess.Popen[bytes]:
        variables = {"WINGBEAT_WORKER_KEY": key, "WINGBEAT_HOST_ID": host}
        with (tmp_path / f"{host}.log").open("wb") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**environment(), **variables},
                stdin=subprocess.PIPE,  # whose end would end them
                stdout=log,
                stderr=log,
            )
        stack.enter_context(started)  # waits for its end, and closes the pipe
        stack.callback(started.terminate)
        return started

    with ExitStack() as stack:
        control = process("control", "wingbeat.server", str(launch))
        address = run_dir / "server.json"
        eventually_now(lambda: address.exists() or control.poll() is not None, what="control's address")
        url = json.loads(address.read_bytes())["url"]
        process("trainer", "wingbeat.workers", "trainer", "--url", url, "--worker-id", "t", "--policies", "solver")
        process("engine", "wingbeat.workers", "engine", "--url", url, "--worker-id", "e")
        async with aiohttp.ClientSession() as session:

            async def served() -> dict[str, Any]:
                async with session.get(f"{url}/api/policies") as answer:
                    (policy,) = await answer.json()
                return policy if policy["served_checksum"] else {}

            policy = await eventually(served, what="the engine to serve what the trainer published")
    assert policy["served_checksum"] == policy["published_checksum"] and policy["served_version"] == 0
    for folder in run_weights_candidates(run_dir):  # control's own supervisor would sweep it
        shutil.rmtree(folder, ignore_errors=True)
