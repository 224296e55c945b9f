"""Control as a whole: wires the parts, admits workers, runs the background tasks.

TaskGroup
  ├─ one step loop per trainable policy                                      (policies/step_loop.py)
  ├─ the reaper: lapsed leases, silent episodes, undecided transactions, keys (below)
  ├─ the director: evaluation before, during and after training; completion  (director.py)
  ├─ copies of policies that train, for self-play                             (policies/snapshots.py)
  ├─ copies of the ledger                                                     (ledger_watch.py)
  └─ collected conversations: idle ones, and those that get no feedback       (collect/collecting.py)
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wingbeat.core.config import Config
from wingbeat.core.events import EventLog
from wingbeat.core.files import LineFile
from wingbeat.core.lifeline import is_orphaned
from wingbeat.core.signals import Changed
from wingbeat.core.types import Cause
from wingbeat.core.worker_protocol import (
    ControlMessage,
    PolicySpec,
    Refused,
    Register,
    Welcome,
)
from wingbeat.dataflow.barrier import Barrier
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.groups import GroupBook
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.operators import Fault, check_operators
from wingbeat.dataflow.records import DropReason
from wingbeat.server.assembly import (
    make_director,
    make_finishing,
    make_host,
    make_rollouts,
    make_snapshots,
    make_teams,
    make_variants,
    make_weight_files,
)
from wingbeat.server.calls.gateway import Gateway
from wingbeat.server.collect.conversations import CollectedEpisode
from wingbeat.server.collect.setup import make_collecting
from wingbeat.server.episodes.endings import Endings
from wingbeat.server.episodes.evaluations import EvaluationParts, Evaluations
from wingbeat.server.episodes.recovery import dump_noted_turn
from wingbeat.server.episodes.registry import EpisodeRegistry, OpenEpisode
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.ledger_watch import LedgerWatch
from wingbeat.server.limits import Limits
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.overlap import OverlapMeter
from wingbeat.server.policies.health import HealthWatch
from wingbeat.server.policies.host import PolicyHost
from wingbeat.server.restore import restore_run
from wingbeat.server.teams.deciders import Deciders
from wingbeat.server.workers.hub import WorkerHub, WorkerSession
from wingbeat.server.workers.sessions import EngineSession, TrainerSession
from wingbeat.server.workers.setup import make_admission, make_engines, make_session_parts
from wingbeat.tracking.turns import Turn

logger = logging.getLogger(__name__)

REAP_EVERY_S = 1.0


class Control:
    """Composition root of the control process; an async context manager."""

    def __init__(
        self,
        config: Config,
        *,
        models: dict[str, Path],
        run_dir: Path,
        keys: KeyRing,
        sources: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``models`` holds the resolved folder of every policy, ``sources`` the task sources that will be brought.

        ``clock`` rules every deadline; what ``wall`` says is recorded and decides nothing.
        """
        check_operators(config)
        self.config = config
        self.keys = keys
        self.run_dir = run_dir
        self.clock = clock
        self.events = EventLog(run_dir / "events.jsonl", clock=wall)
        self.metrics = ControlMetrics(clock=clock)
        self.endings = Endings(self.metrics)
        self.limits = Limits(config.limits, metrics=self.metrics, clock=clock)
        self.changed = Changed()
        self.overlap = OverlapMeter(clock)
        self.engines = make_engines(self)
        self.admission = make_admission(self)
        meta = RunMeta(run_id=run_dir.name, seed=config.run.seed, config=config.model_dump_json())
        self.ledger = Ledger.open(run_dir / "ledger.sqlite", run=meta, clock=wall)
        self.dealer = TaskDealer(
            config.run.seed,
            ratios=config.tasks.ratios,
            epochs=config.tasks.epochs,
            slack=config.dataflow.groups_per_step,
            expected=sources,
        )
        self.book = GroupBook(
            max_attempts=config.dataflow.max_attempts,
            group_floor=config.dataflow.group_floor,
            group_deadline_s=config.dataflow.group_deadline_s,
            clock=clock,
            mixes_variants=config.dataflow.mix_agent_versions,
        )
        self.barrier = Barrier(lambda: self.policies.values(), is_set=config.dataflow.barrier)
        self.policies = {name: make_host(self, name, models[name]) for name in config.policies}
        self.ledger_watch = LedgerWatch(self.ledger, every_s=config.dataflow.ledger_backup_s, events=self.events)
        self.health = HealthWatch(
            config, events=self.events, metrics=self.metrics, ledger=self.ledger, watch=self.watch
        )
        self.weight_files = make_weight_files(self)
        self.snapshots = make_snapshots(self)
        self.registry = EpisodeRegistry(keys, clock=clock)
        self.registry.on_add = self.limits.began
        self.evaluations = Evaluations(
            EvaluationParts(self.policies, self.dealer, self.ledger, self.events, self.changed, self.watch)
        )
        self.variants = make_variants(self)
        self.rollouts = make_rollouts(self)
        self.finishing = make_finishing(self)
        self.deciders = Deciders(frozenset(config.server.peers))
        self.teams = make_teams(self)
        self.collecting = make_collecting(self, keys, wall=wall)
        self.gateway = Gateway(self.policies, self.engines, self.metrics, capture=self._capture)
        self.hub = WorkerHub(keys, heartbeat_s=config.server.heartbeat_s, admit=self._admit_worker)
        self._session_parts = make_session_parts(self)
        self.director = make_director(self)
        self.stopping = False
        self.error: BaseException | None = None
        self.on_stop: Callable[[], None] = lambda: None
        """Called when a client asks the server to stop."""
        self._metrics_file = LineFile(run_dir / "metrics.jsonl")
        self._disk_is_full = False
        self._tasks: asyncio.Task[None] | None = None
        self._started = clock()

    def _capture(self, episode: OpenEpisode, turn: Turn) -> None:
        """A turn that its caller may have seen must outlive this process."""
        if isinstance(episode, CollectedEpisode):
            self.collecting.store.capture(episode, turn)
            return
        lineage = self.policies[turn.policy].ancestry.current
        self.ledger.capture_turn(episode.episode_id, episode.attempt, dump_noted_turn(episode, turn, lineage=lineage))

    def rebase(self, policy: str, highest: int) -> None:
        """A rollback: what running episodes sampled by abandoned versions counts as sampled by ``highest``."""
        self.book.rebase(policy, highest=highest)
        self.registry.rebase(policy, highest=highest)

    def operator_failed(self, fault: Fault) -> None:
        """Tell people; training of the policy ends where the configuration says so."""
        self.events.emit(
            "operator_stopped" if fault.stops else "operator_quarantined",
            policy=fault.policy,
            operator=fault.operator,
            hook=fault.hook,
            error=fault.error,
            text=fault.text,
        )
        if fault.stops:
            self.policies[fault.policy].halt(fault.text)
        self.changed.notify()

    # --- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        restore_run(self)
        self.snapshots.restore()
        for host in self.policies.values():
            self.health.restore(host)
        await self.collecting.restore()
        self.events.emit("started", run=self.config.run.name, seed=self.config.run.seed)
        self._tasks = asyncio.create_task(self._background(), name="control")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stopping = True
        if self.error is None and not is_orphaned():  # else the workers wait for control's successor
            self.hub.shutdown("control stops")
            await self.hub.flush(2.0)
        calls = [call for episode in self.registry.open_episodes() for call in episode.calls]
        background = [self._tasks] if self._tasks is not None else []
        for task in (*background, *calls):
            task.cancel()
        await asyncio.gather(*background, *calls, return_exceptions=True)
        await self.collecting.close()
        await self.teams.close()
        await self.deciders.close()
        self.events.emit("stopped")
        self.events.close()
        self._metrics_file.close()
        await asyncio.to_thread(self.ledger.close)

    def watch(self, write: Future[Any]) -> None:
        """A ledger write that nobody waits for: if it fails, the run must not go on as if it had not."""

        def check(done: Future[Any]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None:
                self._loop.call_soon_threadsafe(self._ledger_failed, error)

        write.add_done_callback(check)

    def _ledger_failed(self, error: BaseException) -> None:
        logger.error("a ledger write failed", exc_info=error)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End this process: the supervisor starts another, which continues from the ledger."""
        if self.error is None:
            self.error = error
            self.events.emit("control_failed", error=repr(error))
            self.request_stop()

    def announce_stop(self) -> None:
        """The process will end soon: whoever waits for work is told now, not cut off later."""
        self.stopping = True
        self.changed.notify()

    def request_stop(self) -> None:
        """Stop the server (the supervisor sees a clean exit and does not restart it)."""
        self.announce_stop()
        self.on_stop()

    async def _background(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for host in self.policies.values():
                    if host.config.trainable:
                        group.create_task(host.run(self._after_step), name=f"train-{host.name}")
                group.create_task(self._reap(), name="reap")
                group.create_task(self.director.run(), name="direct")
                group.create_task(self.snapshots.run(), name="snapshots")
                group.create_task(self.ledger_watch.run(), name="ledger-watch")
                group.create_task(self.collecting.run(), name="collect")
        except* Exception as errors:
            logger.exception("a background task of control failed")
            self._fail(errors.exceptions[0])

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            self.rollouts.reap()
            for episode in self.rollouts.overdue():
                limit = self.config.dataflow.episode_deadline_s
                self.finishing.break_off(episode, Cause.EPISODE_DEADLINE, f"dataflow.episode_deadline_s = {limit:g}")
            self.finishing.settle()
            self.teams.reap()
            self._tell_of_a_full_disk()
            self.keys.refresh()
            await self.hub.drop_unwelcome()

    def _tell_of_a_full_disk(self) -> None:
        """When the ledger's disk fills up, and when it takes writes again."""
        if bool(self.ledger.blocked) != self._disk_is_full:
            self._disk_is_full = not self._disk_is_full
            logger.warning("%s", self.ledger.blocked or "the ledger's disk has room again")
            self.events.emit("disk_full" if self._disk_is_full else "disk_has_room", reason=self.ledger.blocked)

    async def _after_step(self, host: PolicyHost, metrics: dict[str, float]) -> None:
        """Record a step everywhere people look."""
        rewards = self.finishing.rewards_seen.pop(host.name, [])
        values = {
            **metrics,
            **({"rollout/reward_mean": sum(rewards) / len(rewards)} if rewards else {}),
            "rollout/episodes": float(len(rewards)),
            "staleness/bound": float(self.config.dataflow.max_staleness),
            "perf/sampled_tokens": float(self.engines.generated_tokens),
            "perf/overlap_frac": self.overlap.fraction,
            **host.publish_metrics,
            "time/elapsed_s": self.clock() - self._started,
            **self.finishing.sources.step(host.name, host.last_batch, self.dealer.places()),
            **self.variants.meter.step(host.name),
            **self.evaluations.scores(host.name),
            **{f"discarded/{reason}": float(c.num_episodes) for reason, c in host.buffer.discards.items()},
            **host.buffer.token_metrics(),
            **host.chain.metrics(),
        }
        alarms = self.health.after_step(host, values)
        self.engines.weights.doubt(host.name, "alarm/mismatch" in alarms)
        values |= alarms
        self.metrics.step(host.name, host.version, values)
        line = {"policy": host.name, "step": host.version, **values}
        self._metrics_file.append(json.dumps(line))
        self.events.emit("step", **line)
        for reason, count in host.buffer.discards.items():
            self.metrics.set_discarded(host.name, reason, count.num_episodes)
        await self.snapshots.follow(host)
        await self.director.after_step(host)

    # --- workers ------------------------------------------------------------------------------

    def _admit_worker(
        self, register: Register, send: Callable[[ControlMessage], None]
    ) -> tuple[Welcome | Refused, WorkerSession | None]:
        if self.stopping:
            return Refused("the server is stopping"), None
        if register.role == "engine":
            if refusal := self.admission.refusal(register, self.engines.links):
                self.events.emit("engine_refused", worker_id=register.worker_id, reason=refusal.reason)
                return refusal, None
            specs = tuple(h.spec for n, h in self.policies.items() if not register.policies or n in register.policies)
            return self._welcome(register, specs), EngineSession(self._session_parts, register, send)
        hosts = [self.policies[name] for name in dict.fromkeys(register.policies) if name in self.policies]
        if not hosts or len(hosts) != len(register.policies):
            return Refused(f"a trainer hosts some of {', '.join(self.policies)}, got {register.policies}"), None
        for host in hosts:
            if not host.config.trainable or (host.has_trainer and host.trainer_id != register.worker_id):
                return Refused(f"policy {host.name!r} has a trainer already or is frozen"), None
        if refusal := self.admission.refusal_of_software(register):
            return refusal, None
        return self._welcome(register, tuple(host.spec for host in hosts)), TrainerSession(
            hosts, register, send, is_stopping=lambda: self.stopping
        )

    def _welcome(self, register: Register, specs: tuple[PolicySpec, ...]) -> Welcome:
        return Welcome(
            worker_id=register.worker_id,
            heartbeat_s=self.config.server.heartbeat_s,
            policies=specs,
            run_dir=str(self.run_dir),
            seed=self.config.run.seed,
            engine=self.config.engine.model_dump(mode="json"),
            total_steps=self.config.run.steps,
            host_id=self.weight_files.host_id,
            weights=self.config.weights.model_dump(mode="json"),
            relay_key=self.weight_files.relay_key,
        )

    @property
    def complete(self) -> bool:
        return self.director.complete

    def summary(self) -> dict[str, Any]:
        """The run in numbers (for the demo, tables and tests)."""
        hosts = [h for h in self.policies.values() if h.config.trainable]
        lost = (DropReason.STALE, DropReason.NO_TOKENS)  # not what rewards or operators decided
        stale = sum(c.num_episodes for h in hosts for r, c in h.buffer.discards.items() if r in lost)
        finished = self.finishing.num_finished_train
        return {
            "train_steps": max((h.version for h in hosts), default=0),
            "episodes": finished,
            "sampled_tokens": self.engines.generated_tokens,
            "staleness_max": max((h.staleness_max for h in hosts), default=0),
            "overlap_frac": round(self.overlap.fraction, 4),
            "discard_rate": round(stale / finished, 6) if finished else 0.0,
            "masked_tokens": sum(h.buffer.num_masked for h in hosts),
            "train_s": round(self.overlap.train_s, 3),
        }
