"""SIGKILL to every kind of process while the system works: nothing acknowledged is lost, nothing trains twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from harness import (
    Api,
    Begun,
    Server,
    alive,
    check_ledger,
    children_of,
    environment,
    eventually,
    serving,
    train_config,
)

from wingbeat.weights.host import run_weights_dir

STEPS = 16


# --- the engine, with requests in flight (shared server) ---------------------------------------------


async def test_requests_in_flight_are_answered_after_the_engine_returned(api: Api, server: Server) -> None:
    episode = await api.begin(split="eval", policies=["babbler"])
    joined = len(server.events_named("engine_joined"))
    streams = [asyncio.create_task(api.chat(episode, max_tokens=3000, stream=True, seed=i)) for i in range(2)]
    wholes = [asyncio.create_task(api.chat(episode, max_tokens=3000, seed=i)) for i in range(2)]
    await api.until_metric("wingbeat_requests_in_flight", 4)
    await sampling(api)
    os.kill(server.pid("engine-0"), signal.SIGKILL)
    for answer in await asyncio.gather(*wholes):
        assert answer.status == 200
        assert answer.body["usage"]["completion_tokens"] == 3000
        assert len(answer.body["choices"][0]["message"]["content"]) == 3000
    for answer in await asyncio.gather(*streams):
        assert answer.status == 200
        assert answer.body.count('"finish_reason":"length"') == 1
        assert answer.body.endswith("data: [DONE]\n\n")
    assert len(server.events_named("engine_joined")) == joined + 1
    assert (await api.finish(episode)).body["num_sampled_tokens"] == 4 * 3000


async def sampling(api: Api) -> None:
    """Wait until the engine has delivered some of the tokens that it was asked for."""
    before = (await api.get("/api/status"))["metrics"]["sampled_tokens"]

    async def more() -> bool:
        return (await api.get("/api/status"))["metrics"]["sampled_tokens"] > before + 50

    await eventually(more, what="tokens to arrive", every_s=0.01)


TRAIN_ON = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from wingbeat.core.config import PolicyConfig
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.trainer.single import PolicyTrainer

torch.set_num_threads(1)
run_dir = Path(sys.argv[1])
launch = json.loads((run_dir / "launch.json").read_text())
config = launch["config"]
trainer = PolicyTrainer(
    Path(launch["models"]["solver"]),
    config=PolicyConfig.model_validate(config["policies"]["solver"]),
    total_steps=config["run"]["steps"],
    seed=config["run"]["seed"],
    device="cpu",
    dtype=torch.float32,
)
with open_read_only(run_dir / "ledger.sqlite") as ledger:
    for batch in ledger.batches_after("solver", 0):
        trainer.train_step(batch)
exported = load_file(run_dir / "export" / "solver" / "model.safetensors")
published = trainer.published_tensors()
shared = exported.keys() & published.keys()
assert len(shared) == len(published), (exported.keys() ^ published.keys())
differing = sum(not torch.equal(exported[name], published[name]) for name in shared)
print(f"{trainer.step} steps, {differing} tensors differ")
"""


# --- a training run that loses its engine, its trainer and its control --------------------------------


@dataclass(slots=True)
class Survivor:
    """A finished training run and what was noted on its way."""

    server: Server
    exit_code: int
    finished: list[Begun] = field(default_factory=list)
    """Episodes whose finish was acknowledged before control was killed."""
    versions: tuple[int, int] = (0, 0)
    """The policy's version before control was killed and when it was back."""


async def until_step(server: Server, step: int) -> None:
    async def reached() -> bool:
        return max((e["step"] for e in server.events_named("step")), default=0) >= step

    await eventually(reached, what=f"step {step}", timeout_s=120)


async def until_event(server: Server, name: str, count: int) -> None:
    async def seen() -> bool:
        return len(server.events_named(name)) >= count

    await eventually(seen, what=f"{count} × {name}")


async def kill_control(server: Server, survivor: Survivor) -> None:
    """Kill it right after it acknowledged finishes of ours, in the middle of a step whose end it will not hear."""
    async with Api(server) as api:
        declared = {"id": "ours", "size": 3}
        survivor.finished = [await api.begin(group=declared, split="eval") for _ in range(3)]
        for episode in survivor.finished:
            assert (await api.chat(episode)).status == 200
            assert (await api.finish(episode, 0.25)).status == 200
        trainer = server.pid("trainer-solver")
        os.kill(trainer, signal.SIGSTOP)

        async def in_step() -> bool:
            policy = (await api.get("/api/policies"))[0]
            survivor.versions = (policy["version"], -1)
            return policy["trainer"] == "training"

        await eventually(in_step, what="a step to be in progress")
        os.kill(server.pid("control"), signal.SIGKILL)
        os.kill(trainer, signal.SIGCONT)
        await until_event(server, "resumed", 1)
        survivor.versions = (survivor.versions[0], server.events_named("resumed")[0]["versions"]["solver"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def survivor(models: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Survivor]:
    folder = tmp_path_factory.mktemp("survivor")
    config = train_config(
        folder,
        models,
        run__steps=STEPS,
        policies__solver__trainer__checkpoint_every=4,
        policies__solver__trainer__threads=1,
    )
    async with AsyncExitStack() as stack:
        server = stack.enter_context(serving(folder, config, command="train"))
        found = Survivor(server, exit_code=-1)
        await until_step(server, 2)
        os.kill(server.pid("engine-0"), signal.SIGKILL)
        await until_event(server, "engine_joined", 2)
        await until_step(server, 6)
        os.kill(server.pid("trainer-solver"), signal.SIGKILL)
        await until_event(server, "replayed", 1)
        await until_step(server, 8)
        await kill_control(server, found)
        found.exit_code = await asyncio.to_thread(server.supervisor.wait, 150)
        yield found


def test_training_completes(survivor: Survivor) -> None:
    assert survivor.exit_code == 0
    events = survivor.server.events()
    assert [e for e in events if e["event"] == "complete"][-1]["train_steps"] == STEPS
    assert (survivor.server.run_dir / "export" / "solver" / "config.json").is_file()
    (after,) = (e for e in events if e["event"] == "evaluation_done" and e["name"] == "after")
    assert (after["version"], after["num_missing"]) == (STEPS, 0)


def test_the_trainer_caught_up_by_exact_replay(survivor: Survivor) -> None:
    first = survivor.server.events_named("replayed")[0]
    assert first["exact"] is True
    assert first["step"] >= 6


def test_the_final_weights_are_those_of_a_run_that_nothing_interrupted(survivor: Survivor) -> None:
    """Bit for bit: the logged batches, taken one after the other by a trainer that was never killed."""
    command = [sys.executable, "-c", TRAIN_ON, str(survivor.server.run_dir)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["16", "steps,", "0", "tensors", "differ"], done.stdout


def test_versions_continue_after_control_died(survivor: Survivor) -> None:
    before, after = survivor.versions
    assert after == before >= 8
    steps = [event["step"] for event in survivor.server.events_named("step")]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS


def test_nothing_is_lost_and_nothing_trains_twice(survivor: Survivor) -> None:
    check_ledger(survivor.server.run_dir, steps=STEPS, finished=[(e.id, e.attempt) for e in survivor.finished])


# --- the supervisor -----------------------------------------------------------------------------------


async def test_a_killed_supervisor_leaves_no_orphans(models: Path, tmp_path: Path) -> None:
    """Nor does its run lose anything: it resumes, through an interrupt, to its end."""
    config = train_config(tmp_path, models, run__steps=10, policies__solver__trainer__checkpoint_every=3)
    with serving(tmp_path, config, command="train") as server:
        await until_step(server, 3)
        family = children_of(server.supervisor.pid)
        assert len(family) >= 4, "control, engine, trainer, agent"
        os.kill(server.supervisor.pid, signal.SIGKILL)
        server.supervisor.wait()

        async def gone() -> bool:
            return not any(alive(pid) for pid in family)

        await eventually(gone, what="every process of the run to end")
    resume = ("--resume", str(server.run_dir))
    with serving(tmp_path, config, command="train", more=resume) as server:
        await until_step(server, 6)
        server.supervisor.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(server.supervisor.wait, 60) == 130
    with serving(tmp_path, config, command="train", more=resume) as server:
        assert await asyncio.to_thread(server.supervisor.wait, 120) == 0
    steps = [event["step"] for event in server.events_named("step")]
    assert steps == list(range(1, 11))
    check_ledger(server.run_dir, steps=10)
    assert not run_weights_dir(server.run_dir).exists(), "published weights were left in shared memory"
