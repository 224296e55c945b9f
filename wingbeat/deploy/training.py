"""A whole training run: server, tasks, agent processes, until the run is complete."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wingbeat.client import AsyncSwarm
from wingbeat.client.plans import AUTO
from wingbeat.core.config import Config
from wingbeat.core.errors import SetupError, WingbeatError
from wingbeat.core.files import write_atomically
from wingbeat.core.keys import KEY_VARIABLE
from wingbeat.dataflow.evaluation import EvaluationResult, PairedDifference, paired_difference
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.deploy.checks import check_agents, check_exposure, check_trains
from wingbeat.deploy.children import Child, ChildSpec, ChildState
from wingbeat.deploy.local import (
    MakePlace,
    OnNote,
    Supervisor,
    absolute_paths,
    make_run_dir,
    this_machine,
)
from wingbeat.deploy.played import command_line, played_by
from wingbeat.deploy.stopping import Interrupted, stop_event
from wingbeat.deploy.tasks import load_tasks, put_tasks, training_sources

OnEvent = Callable[[dict[str, Any]], None]

BLOCKERS_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a finished (or interrupted) run left."""

    run_dir: Path
    """There is none where it was interrupted before control began it."""
    complete: bool
    summary: dict[str, Any]
    """Control's numbers at completion; empty when interrupted."""
    evaluations: tuple[EvaluationResult, ...]
    """Done ones, oldest first."""
    wall_s: float

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that were evaluated."""
        return tuple(dict.fromkeys(done.spec.policy for done in self.evaluations))

    def difference(self, policy: str) -> PairedDifference | None:
        """A policy's held-out reward after training minus before, task by task."""
        before, after = self.evaluation("before", policy=policy), self.evaluation("after", policy=policy)
        return None if before is None or after is None else paired_difference(before, after)

    def as_dict(self) -> dict[str, Any]:
        """JSON data: the summary, and the mean reward before and after, by task source and of every held-out task.

        Where several policies were evaluated, ``policies`` has the rewards of each.
        """
        data: dict[str, Any] = {
            "run_dir": str(self.run_dir),
            "complete": self.complete,
            "wall_s": round(self.wall_s, 2),
            **self.summary,
        }
        rewards = {policy: self._rewards(policy) for policy in self.policies}
        return data | ({"policies": rewards} if len(rewards) > 1 else next(iter(rewards.values()), {}))

    def _rewards(self, policy: str) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name in ("before", "after"):
            done = self.evaluation(name, policy=policy)
            if done is not None:
                data[f"{name}_mean"] = done.mean
                data[f"{name}_by_source"] = {source: score.mean for source, score in done.sources.items()}
                data[name] = {task: sum(rewards) / len(rewards) for task, rewards in done.rewards.items()}
        difference = self.difference(policy)
        return data if difference is None else {**data, "difference": asdict(difference)}

    def evaluation(self, name: str, *, policy: str | None = None) -> EvaluationResult | None:
        """The last evaluation of a name (``before``, ``during``, ``after``), of one policy or of any."""
        found = (e for e in reversed(self.evaluations) if e.spec.name == name and policy in (None, e.spec.policy))
        return next(found, None)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What to run and whom to tell."""

    config: Config
    config_dir: Path
    resume: Path | None = None
    on_ready: Callable[[Supervisor], None] = lambda supervisor: None
    on_event: OnEvent = lambda record: None
    on_note: OnNote = lambda text: None
    place: MakePlace = this_machine


def run_plan(plan: TrainingPlan) -> TrainingResult:
    """Run to the end, or to the first SIGINT or SIGTERM.  Raises SetupError where something must be fixed first."""
    return asyncio.run(_run(plan))


async def _run(plan: TrainingPlan) -> TrainingResult:
    started = time.monotonic()
    check_trains(plan.config)
    plan = replace(plan, config=absolute_paths(plan.config, plan.config_dir))
    tasks = load_tasks(plan.config, plan.config_dir)  # faults of the user's files are told before anything starts
    check_agents(plan.config, plan.config_dir)
    check_exposure(plan.config, plan.config_dir, resume=plan.resume)
    stop = stop_event()
    where = plan.place(plan.config)  # before there is a run directory: there may be no such place
    run_dir = plan.resume or make_run_dir(plan.config)
    summary: dict[str, Any] = {}
    start = Supervisor(
        plan.config,
        run_dir=run_dir,
        config_dir=plan.config_dir,
        sources=training_sources(tasks),
        on_note=plan.on_note,
        place=where,
        stop=stop,
    )
    try:
        async with start as supervisor:
            plan.on_ready(supervisor)
            async with supervisor.swarm() as swarm:
                await put_tasks(swarm, tasks)
                specs = agent_specs(
                    plan.config, url=supervisor.local_url, key=supervisor.agent_key, run_dir=supervisor.run_dir
                )
                async with kept_running(specs) as clients:
                    summary = await _follow(plan, swarm, supervisor, clients, stop)
    except Interrupted:
        pass  # and there is no run, or the old one as it was
    result = TrainingResult(run_dir, bool(summary), summary, _evaluations(run_dir), time.monotonic() - started)
    if run_dir.exists():
        write_atomically(run_dir / "result.json", json.dumps(result.as_dict(), indent=1).encode())
    return result


def _evaluations(run_dir: Path) -> tuple[EvaluationResult, ...]:
    """That are done; none where the run was interrupted before control began it."""
    path = run_dir / "ledger.sqlite"
    if not path.exists():
        return ()
    with open_read_only(path) as ledger:
        return tuple(e for e in ledger.evaluations() if e.done)


async def _follow(
    plan: TrainingPlan, swarm: AsyncSwarm, supervisor: Supervisor, clients: Sequence[Child], stop: asyncio.Event
) -> dict[str, Any]:
    """Wait for completion; pass events on; end early on a signal or when something cannot go on."""
    done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    watchers = {
        asyncio.create_task(_events(swarm, plan.on_event, done), name="events"),
        asyncio.create_task(_blockers(swarm, plan.on_event), name="blockers"),
        asyncio.create_task(stop.wait(), name="stop"),
        asyncio.create_task(supervisor.wait_failed(), name="failed"),
        asyncio.create_task(supervisor.wait_ended(), name="ended"),
        asyncio.create_task(agents_failed(clients), name="agents"),
    }
    try:
        finished, _ = await asyncio.wait({*watchers, done}, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            result = task.result()
            if isinstance(result, SetupError):
                raise result
        if not done.done():
            return {}
        await check_trained(swarm, supervisor.run_dir)
        return done.result()
    finally:
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


async def check_trained(swarm: AsyncSwarm, run_dir: Path) -> None:
    """Raises SetupError where a run is complete because training stopped before its last step."""
    status = await swarm.status()
    if status.ended:
        return
    for policy in status.policies:
        if policy.trainer != "frozen" and policy.version < (status.total_steps or 0):
            raise SetupError(
                f"policy {policy.name!r} stopped at step {policy.version} of {status.total_steps}:"
                f" {'; '.join(status.blockers)}; fix it and continue with --resume {run_dir}"
            )


async def _events(swarm: AsyncSwarm, on_event: OnEvent, done: asyncio.Future[dict[str, Any]]) -> None:
    """Follow the event stream over restarts of control; the status tells of a completion that we missed."""
    while True:
        with contextlib.suppress(WingbeatError):
            async with contextlib.aclosing(swarm.events()) as events:
                status = await swarm.status()
                if status.state == "complete" and not done.done():
                    done.set_result(dict(status.metrics))
                async for record in events:
                    on_event(record)
                    if record["event"] == "complete" and not done.done():
                        done.set_result({k: v for k, v in record.items() if k not in ("t", "event")})
        await asyncio.sleep(0.2)


async def _blockers(swarm: AsyncSwarm, on_event: OnEvent) -> None:
    """Ask now and then what the run waits for (without it, a run that cannot move would look like a slow one) and what
    people should know though it moves (also of before a restart)."""
    while True:
        await asyncio.sleep(BLOCKERS_EVERY_S)
        with contextlib.suppress(WingbeatError):
            status = await swarm.status()
            on_event({"event": "blockers", "blockers": status.blockers, "warnings": status.warnings})


async def agents_failed(clients: Sequence[Child]) -> SetupError:
    """Returns once an agent process cannot be kept running; never where there are none."""
    failed = asyncio.Event()
    for client in clients:
        client.watch(lambda child: failed.set() if child.state is ChildState.FAILED else None)
    await failed.wait()
    broken = next(c for c in clients if c.state is ChildState.FAILED)
    return SetupError(f"{broken.error} ({broken.spec.log})")


# --- agents ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def kept_running(specs: Sequence[ChildSpec]) -> AsyncIterator[list[Child]]:
    """The agents' client processes, while the block lasts."""
    children = [Child(spec, on_change=lambda child: None) for spec in specs]
    lives = [asyncio.create_task(child.run(), name=child.spec.name) for child in children]
    try:
        yield children
    finally:
        await asyncio.gather(*(child.stop() for child in children))
        await asyncio.gather(*lives)


def agent_specs(config: Config, *, url: str, key: str, run_dir: Path) -> list[ChildSpec]:
    """Each process of each configured agent: ``wingbeat rollout``, as anyone would run it.

    The key goes through the environment, since others can read command lines.
    """
    environment = {"OMP_NUM_THREADS": "1", KEY_VARIABLE: key}
    specs: list[ChildSpec] = []
    for name, agent in config.running_agents.items():
        what = command_line(played_by(config, agent)) if agent.is_builtin else [str(agent.path)]
        command = [agent.python or sys.executable, "-m", "wingbeat.cli", "rollout", *what, "--server", url]
        command += [part for source in agent.sources or () for part in ("--source", source)]
        command += ["--concurrency", str(agent.concurrency), "--grace-s", "3"]
        command += ["--resources", AUTO] if config.resources.count else []
        label = agent.label or (name if config.agents or agent.weight is not None else "")
        command += ["--label", label] if label else []
        for option, value in (
            ("--episode-timeout-s", agent.episode_timeout_s),
            ("--max-memory-mb", agent.max_memory_mb),
        ):
            command += [] if value is None else [option, str(value)]
        if agent.watch:  # one command watches for all processes
            command += ["--watch", "--processes", str(agent.processes)]
        for index in range(1 if agent.watch else agent.processes):
            process = f"agent-{name}-{index}" if config.agents else f"agent-{index}"
            specs.append(ChildSpec(process, command, environment, run_dir / "logs" / f"{process}.log"))
    return specs
