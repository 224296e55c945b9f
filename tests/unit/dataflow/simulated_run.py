"""A whole run as a discrete-event simulation around the real group book, buffers, gates and step rule.

Only agents, engines and trainers are simulated: episodes last as long as a test says, their tokens carry the
version served at the moment they are sampled, clients die, control restarts, operators drop members, engines
take up weights late.  Time is a number; nothing sleeps.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from wingbeat.core.samples import EpisodeSamples, TrainingSample
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.barrier import Barrier
from wingbeat.dataflow.buffer import PolicyBuffer
from wingbeat.dataflow.groups import GroupBook, ReleaseReason, RestoredSlot, SlotTicket
from wingbeat.dataflow.records import Dropped, EpisodeRecord, GroupSpec, ReadyGroup
from wingbeat.dataflow.step_rule import StepRule

MAX_EVENTS = 10_000

Durations = Callable[[random.Random], float]


def exponential(rng: random.Random) -> float:
    return rng.expovariate(1.0)


@dataclass(frozen=True)
class Setting:
    """One world; times in seconds."""

    rule: StepRule
    seed: int = 0
    policies: tuple[str, ...] = ("solver",)
    group_size: int = 2
    num_agents: int = 8
    durations: Durations = exponential
    tokens_per_s: float = 4.0
    step_s: float = 0.5
    serve_lag_s: float = 0.1
    p_death: float = 0.0
    p_filter: float = 0.0
    p_called: float = 1.0
    restart_every_s: float = math.inf
    group_deadline_s: float = math.inf
    """Then groups close with what they have."""
    barrier: bool = False


@dataclass
class Policy:
    """One policy's trainer, engines and buffer."""

    name: str
    buffer: PolicyBuffer
    version: int = 0
    complete: bool = False
    is_training: bool = False
    lacks_groups: bool = False
    """Kept up to date by the world."""
    waiting_since: float | None = None
    served: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    unconsumed: dict[str, ReadyGroup] = field(default_factory=dict)
    """As the ledger would give them back after a restart."""
    trained: Counter[str] = field(default_factory=Counter)
    """Tokens by episode."""
    masked: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, str] = field(default_factory=dict)
    """Reason by episode."""
    staleness_max: int = 0

    @property
    def next_version(self) -> int:
        return self.version + self.is_training

    def version_at(self, time: float) -> int:
        return self.served[bisect_right(self.served, time, key=lambda entry: entry[0]) - 1][1]


@dataclass
class Slot:
    """What the ledger knows about a slot."""

    next_attempt: int = 1
    num_failures: int = 0
    record: EpisodeRecord | None = None


class World:
    """See the module."""

    def __init__(self, setting: Setting, *, steps: int) -> None:
        self.setting = setting
        self.gate = setting.rule.gate
        self.steps = steps
        self.rng = random.Random(setting.seed)
        self.now = 0.0
        self.epoch = 0
        """Grows with every restart: what ran before is gone."""
        self.num_groups = 0
        self.num_idle = setting.num_agents
        self.admits = True
        self.specs: dict[str, tuple[GroupSpec, dict[str, Slot]]] = {}
        self.sampled: dict[str, Counter[str]] = defaultdict(Counter)
        """Per policy, tokens of finished episodes that count."""
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events = 0
        self.book = self._new_book()
        self.policies = {name: Policy(name, self._new_buffer(name)) for name in setting.policies}
        self.barrier = Barrier(lambda: self.policies.values(), is_set=setting.barrier)
        if math.isfinite(setting.restart_every_s):
            self.after(setting.restart_every_s, self.restart)
        if math.isfinite(setting.group_deadline_s):
            self.after(1.0, self.reap)

    def _new_book(self) -> GroupBook:
        deadline = self.setting.group_deadline_s
        return GroupBook(max_attempts=3, group_floor=1, group_deadline_s=deadline, clock=lambda: self.now)

    def _new_buffer(self, name: str) -> PolicyBuffer:
        return PolicyBuffer(
            name,
            groups_per_step=self.gate.groups_per_step,
            max_staleness=self.gate.max_staleness,
            straggler=self.setting.rule.straggler,
        )

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (self.now + seconds, self.num_events, action))

    def run(self, check: Callable[[], None] = lambda: None) -> None:
        """Until every policy took its steps, or for ``MAX_EVENTS`` where groups seldom yield a batch.

        A world in which nobody works, and which stays so, is locked up.
        """
        self.work()
        num_quiet = 0
        while self.num_events < MAX_EVENTS and not all(policy.complete for policy in self.policies.values()):
            works = self.num_idle < self.setting.num_agents or any(p.is_training for p in self.policies.values())
            num_quiet = 0 if works else num_quiet + 1
            assert self.events and num_quiet < 50, f"locked up at {self.now}: {self.book.counts()}"
            self.now, _, action = heapq.heappop(self.events)
            action()
            check()

    def drain(self) -> None:
        """No new groups; let all that run end, and train what fills a batch."""
        self.admits = False
        for policy in self.policies.values():
            policy.complete = False
        self.steps = 10**9
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            action()

    # --- agents -------------------------------------------------------------------------------

    def work(self) -> None:
        """Idle agents take what there is."""
        while self.num_idle and (ticket := self._ticket()) is not None:
            self._begin(ticket)

    def _begin(self, ticket: SlotTicket) -> None:
        self.num_idle -= 1
        self.book.begin(ticket.episode_id, ticket.attempt)
        self.specs[ticket.group.id][1][ticket.episode_id].next_attempt = ticket.attempt + 1
        duration, epoch, began = self.setting.durations(self.rng), self.epoch, self.now
        dies = self.rng.random() < self.setting.p_death
        self.after(duration * self.rng.random() if dies else duration, lambda: self._end(ticket, epoch, began, dies))

    def _ticket(self) -> SlotTicket | None:
        for spec in self.book.groups_with_free_slots():
            return self.book.take(spec.id)
        is_over = all(policy.complete for policy in self.policies.values())
        for policy in self.policies.values():
            num_groups = len(self.book.floors(policy.name)) + len(policy.buffer)
            policy.lacks_groups = not policy.is_training and num_groups < self.gate.groups_per_step
        if not self.admits or is_over or not all(self._admits(policy) for policy in self.policies.values()):
            return None
        floors = {name: policy.served[-1][1] for name, policy in self.policies.items()}
        name, size = f"g{self.num_groups}", self.setting.group_size
        spec = GroupSpec(name, Task("src", "t"), Split.TRAIN, size, tuple(floors), floor_version=floors)
        self.num_groups += 1
        ids = self.book.open_group(spec)
        self.specs[spec.id] = (spec, {episode_id: Slot() for episode_id in ids})
        return self.book.take(spec.id)

    def _admits(self, policy: Policy) -> bool:
        if policy.complete or self.barrier.starves(policy.name, policy.version):
            return True  # it admits whatever the others need
        floors = [*self.book.floors(policy.name), *policy.buffer.floors()]
        return self.gate.may_admit(floors, version=policy.next_version, floor=policy.served[-1][1])

    def _end(self, ticket: SlotTicket, epoch: int, began: float, dies: bool) -> None:
        if epoch != self.epoch:
            return  # it ran on a server that is no more
        self.num_idle += 1
        if ticket.group.id in self.specs and self.book.state_of(ticket.episode_id)[1] == ticket.attempt:
            slot = self.specs[ticket.group.id][1][ticket.episode_id]
            if dies:
                slot.num_failures += 1
                self.book.release(ticket.episode_id, ticket.attempt, ReleaseReason.LOST)
            else:
                slot.record = self._record(ticket, began)
                self.book.finish(ticket.episode_id, ticket.attempt, slot.record)
        self.settle()

    def _record(self, ticket: SlotTicket, began: float) -> EpisodeRecord:
        called = [name for name in self.policies if self.rng.random() < self.setting.p_called] or [
            self.rng.choice(list(self.policies))
        ]
        count = max(1, round((self.now - began) * self.setting.tokens_per_s))
        times = began + (np.arange(count) + 0.5) / count * (self.now - began)
        samples = tuple(self._samples(ticket, self.policies[name], times) for name in called)
        return EpisodeRecord(
            ticket.episode_id, ticket.attempt, ticket.group.id, Outcome.AGENT, "digest", samples=samples
        )

    def _samples(self, ticket: SlotTicket, policy: Policy, times: np.ndarray) -> EpisodeSamples:
        length = 1 + len(times)
        sample = TrainingSample.build(
            ticket.episode_id,
            token_ids=np.zeros(length, np.int32),
            sampled=np.array([0] + [1] * len(times), np.uint8),
            sampling_logprobs=np.zeros(length, np.float32),
            versions=np.array([-1, *(policy.version_at(time) for time in times)], np.int32),
        )
        reward = self.rng.random()
        return EpisodeSamples(ticket.episode_id, ticket.attempt, ticket.group.id, policy.name, "", reward, (sample,))

    # --- control ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Closed groups go to the buffers, some members left out; then whoever may go on does."""
        for closed in self.book.closed():
            del self.specs[closed.spec.id]
            for policy in self.policies.values():
                ready = closed.ready(policy.name)
                if ready is None:
                    continue
                self.sampled[policy.name].update({m.episode_id: m.num_sampled for m in ready.members})
                gone = [m for m in ready.members if self.rng.random() < self.setting.p_filter]
                drops = [Dropped(m.episode_id, m.attempt, "filtered") for m in gone]
                policy.buffer.count_dropped(ready, drops)
                policy.dropped |= {drop.episode_id: drop.reason for drop in drops}
                kept = tuple(m for m in ready.members if m not in gone)
                if kept:
                    policy.unconsumed[ready.group_id] = replace(ready, members=kept)
                    policy.buffer.add(policy.unconsumed[ready.group_id])
        for policy in self.policies.values():
            self.try_step(policy)
        self.work()

    def try_step(self, policy: Policy) -> None:
        if policy.is_training or policy.complete or not self.barrier.may_pass(policy.name, policy.version):
            policy.waiting_since = None
            return
        floors = {"in_flight": self.book.floors(policy.name), "buffered": policy.buffer.floors()}
        if not self.setting.rule.waits(policy.version, **floors):
            policy.waiting_since = None
        elif policy.waiting_since is None:
            policy.waiting_since = self.now
            if math.isfinite(self.setting.rule.straggler_wait_s):
                self.after(self.setting.rule.straggler_wait_s + 1e-9, self.settle)
        waited_s = 0.0 if policy.waiting_since is None else self.now - policy.waiting_since
        if self.setting.rule.may_step(policy.version, **floors, waited_s=waited_s):
            self._take(policy)

    def _take(self, policy: Policy) -> None:
        draft = policy.buffer.take(policy.version)
        drops = policy.buffer.drain_dropped() if draft is None else draft.dropped
        policy.dropped |= {drop.episode_id: drop.reason for drop in drops}
        if draft is None:
            return
        assert draft.num_groups == self.gate.groups_per_step
        for member in draft.episodes:
            assert member.episode_id not in policy.trained, "trained twice"
            policy.trained[member.episode_id] = member.num_sampled
            policy.masked[member.episode_id] = member.masked
            if member.min_version is not None:  # else it is here for the baseline
                policy.staleness_max = max(policy.staleness_max, policy.version - member.min_version)
        gone = set(draft.group_ids) | {
            group_id for group_id in policy.unconsumed if self._is_consumed(policy, group_id)
        }
        for group_id in gone:
            policy.unconsumed.pop(group_id, None)
        policy.is_training, policy.waiting_since = True, None
        self.after(self.setting.step_s * self.rng.uniform(0.5, 1.5), lambda: self._step_done(policy))

    def _is_consumed(self, policy: Policy, group_id: str) -> bool:
        return all(m.episode_id in policy.dropped for m in policy.unconsumed[group_id].members)

    def _step_done(self, policy: Policy) -> None:
        policy.is_training = False
        policy.version += 1
        policy.complete = policy.version >= self.steps
        version = policy.version
        self.after(self.setting.serve_lag_s * self.rng.random(), lambda: self._serve(policy, version))
        self.settle()

    def _serve(self, policy: Policy, version: int) -> None:
        if version > policy.served[-1][1]:
            policy.served.append((self.now, version))
        self.settle()

    def reap(self) -> None:
        self.after(1.0, self.reap)
        self.settle()

    def restart(self) -> None:
        """Control dies and comes back: its running episodes are lost, groups and buffers come from the ledger."""
        self.after(self.setting.restart_every_s, self.restart)
        self.epoch += 1
        self.num_idle = self.setting.num_agents
        self.book = self._new_book()
        for spec, slots in self.specs.values():
            self.book.restore(
                spec,
                slots=[
                    RestoredSlot(episode_id, next_attempt=s.next_attempt, num_failures=s.num_failures, record=s.record)
                    for episode_id, s in slots.items()
                ],
            )
        for policy in self.policies.values():
            policy.buffer = self._new_buffer(policy.name)
            policy.waiting_since = None
            for group in policy.unconsumed.values():
                members = tuple(m for m in group.members if m.episode_id not in policy.dropped)
                policy.buffer.add(replace(group, members=members))
        self.settle()

    # --- what must hold -----------------------------------------------------------------------

    def check_feasible(self) -> None:
        for policy in (p for p in self.policies.values() if not p.complete):
            system = [*self.book.floors(policy.name), *policy.buffer.floors()]
            assert self.gate.is_feasible(policy.next_version, system)

    def check_tokens(self) -> None:
        """Every token of a finished episode trained, was masked, left with its episode, or waits: once."""
        for policy in self.policies.values():
            waiting = {m.episode_id for g in policy.unconsumed.values() for m in g.members} - set(policy.dropped)
            for episode_id, count in self.sampled[policy.name].items():
                places = [episode_id in policy.trained, episode_id in policy.dropped, episode_id in waiting]
                assert sum(places) == 1, (episode_id, places)
                if episode_id in policy.trained:
                    assert policy.trained[episode_id] + policy.masked[episode_id] == count
            assert set(policy.trained) <= set(self.sampled[policy.name])
