"""Scoring a model on an environment in one go: a server of frozen policies, the environment's agent, one evaluation.

With the URL of a server, the evaluation runs there: on that server's own held-out tasks of the environment's sources,
where it has some, else on the environment's, which are taken out again at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from wingbeat.client import AsyncSwarm
from wingbeat.core.config import Config
from wingbeat.core.errors import NoEngine, NotFoundError, SetupError, WingbeatError
from wingbeat.core.protocol import EvaluationReply, EvaluationRequest
from wingbeat.core.types import Split
from wingbeat.deploy.checks import check_agents, check_sources
from wingbeat.deploy.children import ChildSpec, tail
from wingbeat.deploy.local import OnNote, Supervisor, make_run_dir
from wingbeat.deploy.paths import absolute_paths
from wingbeat.deploy.stopping import stop_event, unless_stopped
from wingbeat.deploy.tasks import Tasks, load_tasks, put_tasks
from wingbeat.deploy.training import agent_specs, agents_failed, kept_running

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""Between looks at how far the evaluation is."""
STALL_S = 60.0
"""Without the end of an episode for so long, an evaluation says what it waits for."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """What to score, where, and whom to tell."""

    config: Config
    """With the environment in ``tasks``, and a built-in agent."""
    config_dir: Path
    request: EvaluationRequest
    server: str | None = None
    """None: one of its own, which ends with the evaluation."""
    key: str | None = None
    """For ``server``: an admin key."""
    keep: bool = False
    """Keep the run directory of the own server, in ``run.dir``; else it is a temporary one."""
    on_note: OnNote = lambda text: None
    on_progress: Callable[[EvaluationReply], None] = lambda reply: None


@dataclass(frozen=True, slots=True)
class EvaluationOutcome:
    """What came of it."""

    reply: EvaluationReply | None
    """None: it was interrupted."""
    run_dir: Path | None
    """Of the own server, where it was kept."""
    shown: str
    """How far it came, in words."""


def run_evaluation(plan: EvaluationPlan) -> EvaluationOutcome:
    """To the end, or to the first SIGINT or SIGTERM; then all that was started has ended.

    Raises SetupError where something must be fixed first.
    """
    return asyncio.run(_on_server(plan) if plan.server is not None else _on_own(plan))


# --- a server of its own ----------------------------------------------------------------------


async def _on_own(plan: EvaluationPlan) -> EvaluationOutcome:
    check_sources(plan.config, plan.config_dir)
    check_agents(plan.config, plan.config_dir)
    tasks = held_out(load_tasks(plan.config, plan.config_dir))
    config = absolute_paths(plan.config, plan.config_dir)
    progress = Progress(plan.on_progress)
    stop = stop_event()
    with _run_dir(config, keep=plan.keep) as run_dir:
        scoring = _scored_on_own(replace(plan, config=config, on_progress=progress), tasks, run_dir, progress)
        reply = await unless_stopped(scoring, stop)
        kept = run_dir if plan.keep and run_dir.exists() else None  # stopped before it ran, it leaves none
    return EvaluationOutcome(reply, kept, progress.shown)


async def _scored_on_own(plan: EvaluationPlan, tasks: Tasks, run_dir: Path, progress: Progress) -> EvaluationReply:
    async with Supervisor(
        plan.config, run_dir=run_dir, config_dir=plan.config_dir, sources=[], on_note=plan.on_note
    ) as supervisor:
        specs = agent_specs(plan.config, url=supervisor.local_url, key=supervisor.agent_key, run_dir=run_dir)
        async with supervisor.swarm() as swarm, kept_running(specs) as clients:
            await put_tasks(swarm, tasks)
            plan.on_note("evaluating")
            faults = supervisor.wait_failed(), agents_failed(clients), tell_stalls(swarm, progress, specs[0].log)
            reply = await _unless_broken(_evaluated(swarm, plan), *faults)
            check_finished(reply, specs[0].log)
            return reply


@contextlib.contextmanager
def _run_dir(config: Config, *, keep: bool) -> Iterator[Path]:
    if keep:
        yield make_run_dir(config)
        return
    folder = Path(tempfile.mkdtemp(prefix="wingbeat-eval-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- a running server -------------------------------------------------------------------------


async def _on_server(plan: EvaluationPlan) -> EvaluationOutcome:
    assert plan.server is not None
    check_agents(plan.config, plan.config_dir)
    tasks = held_out(load_tasks(plan.config, plan.config_dir))
    config = absolute_paths(plan.config, plan.config_dir)
    progress = Progress(plan.on_progress)
    stop = stop_event()
    with tempfile.TemporaryDirectory(prefix="wingbeat-eval-") as folder:
        logs = Path(folder) / "logs"
        logs.mkdir()
        specs = agent_specs(config, url=plan.server, key=plan.key or "", run_dir=Path(folder))
        specs = [replace(spec, command=[*spec.command, "--split", Split.EVAL.value]) for spec in specs]
        scoring = _scored_there(replace(plan, on_progress=progress), plan.server, tasks, specs, progress)
        reply = await unless_stopped(scoring, stop)
    return EvaluationOutcome(reply, None, progress.shown)


async def _scored_there(
    plan: EvaluationPlan, server: str, tasks: Tasks, specs: Sequence[ChildSpec], progress: Progress
) -> EvaluationReply:
    async with AsyncSwarm(server, plan.key, retry_budget_s=10.0) as swarm, kept_running(specs) as clients:
        faults = agents_failed(clients), tell_stalls(swarm, progress, specs[0].log)
        reply = await _unless_broken(_evaluated_there(swarm, plan, tasks), *faults)
        check_finished(reply, specs[0].log)
        return reply


async def _evaluated_there(swarm: AsyncSwarm, plan: EvaluationPlan, tasks: Tasks) -> EvaluationReply:
    """On what the server has of the source; else bring it, and take it out again."""
    (source,) = {source for source, _ in tasks}
    plan = replace(plan, request=plan.request.model_copy(update={"source": source}))
    try:
        return await _evaluated(swarm, plan)
    except NotFoundError as error:
        logger.info("%s", error.message)
    await put_tasks(swarm, tasks)
    try:
        return await _evaluated(swarm, plan)
    finally:
        await swarm.remove_tasks(source)


# --- both -------------------------------------------------------------------------------------


def held_out(tasks: Tasks) -> Tasks:
    """The eval tasks alone.  Raises SetupError where there are none."""
    found = {key: members for key, members in tasks.items() if key[1] is Split.EVAL and members}
    if not found:
        raise SetupError("the environment has no held-out tasks (`tasks('eval')` is empty): nothing to evaluate on")
    return found


def check_finished(reply: EvaluationReply, log: Path) -> None:
    """Raises WingbeatError where no episode came to its end, with the last words of the agent, whose log goes away."""
    if not reply.num_finished:
        raise WingbeatError(f"none of {reply.num_expected} episodes came to its end; the agent's log ends: {tail(log)}")


class Progress:
    """How far an evaluation is; passes it on."""

    def __init__(self, on_progress: Callable[[EvaluationReply], None]) -> None:
        self._on_progress = on_progress
        self.shown = "not begun"

    def __call__(self, reply: EvaluationReply) -> None:
        self.shown = f"{reply.num_finished} of {reply.num_expected} episodes have ended"
        self._on_progress(reply)


async def tell_stalls(swarm: AsyncSwarm, progress: Progress, log: Path, *, every_s: float = STALL_S) -> SetupError:
    """Say what an evaluation waits for, while no episode ends: one that hangs would look like a slow one.

    Never returns: whether to wait on is not known here.
    """
    before = progress.shown
    while True:
        await asyncio.sleep(every_s)
        if progress.shown == before:
            try:
                waits = "; ".join((await swarm.status()).blockers) or "episodes run, and none ends"
            except WingbeatError as error:
                waits = error.message
            logger.warning(
                "nothing new for %g s (%s): %s; without --server, --agent.episode_timeout_s=SECONDS ends what hangs."
                " The agent's log ends: %s",
                every_s,
                before,
                waits,
                tail(log),
            )
        before = progress.shown


async def _evaluated(swarm: AsyncSwarm, plan: EvaluationPlan) -> EvaluationReply:
    """Start once an engine serves the policy, and wait for the last episode."""
    while True:
        try:
            return await swarm.evaluate(plan.request, poll_s=POLL_S, on_progress=plan.on_progress)
        except NoEngine:
            if plan.server is not None:
                raise
        await asyncio.sleep(POLL_S)


async def _unless_broken(work: Coroutine[Any, Any, T], *faults: Coroutine[Any, Any, SetupError]) -> T:
    """The result of ``work``; raises a fault that comes first."""
    working = asyncio.create_task(work)
    watching = [asyncio.create_task(fault) for fault in faults]
    try:
        await asyncio.wait({working, *watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in watching:
            if task.done():
                raise task.result()
        return working.result()
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)
