"""Versions of an agent in one run: groups and evaluations that are not mixed, versions that go, shares by weight."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wingbeat.core.config import Config
from wingbeat.core.errors import ConflictError, EpisodeClosed, SetupError
from wingbeat.core.events import EventLog
from wingbeat.core.protocol import AbortRequest, BeginRequest, EvaluationRequest, FinishRequest, LeaseRequest
from wingbeat.core.signals import Changed
from wingbeat.core.types import Outcome, Split, Task, Variant
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.groups import GroupBook, ReleaseReason
from wingbeat.dataflow.records import EpisodeRecord, GroupSpec
from wingbeat.dataflow.variants import Asker
from wingbeat.server.episodes.registry import EpisodeState
from wingbeat.server.variants.metrics import SHOWN, VariantMeter
from wingbeat.server.variants.variants import VariantParts, Variants

OLD, NEW = Variant("", "aa"), Variant("", "bb")


async def lease(desk: Any, variant: Variant = OLD, count: int = 1, *, splits: Any = ("train",)) -> list[Any]:
    request = LeaseRequest(
        max_leases=count,
        wait_s=0,
        client_id=f"client of {variant}",
        label=variant.label,
        code=variant.code,
        splits=list(splits),
    )
    return (await desk.rollouts.lease(request)).leases


_keys = itertools.count()


async def begin(desk: Any, **fields: Any) -> Any:
    request = BeginRequest(idempotency_key=f"key-{next(_keys)}", **fields)
    reply = await desk.rollouts.begin(request, base_url="http://test/v1")
    return desk.episode(reply.episode_id)


async def finish(desk: Any, episode: Any, reward: float = 1.0) -> None:
    await desk.finishing.finish(episode, FinishRequest(rewards=reward))


@pytest.fixture
def desk(open_desk: Any, make_manifest: Any) -> Any:
    desk = open_desk(group_size=2, max_staleness=8, variant_wait_s=30.0)
    desk.solver.adopt(make_manifest(0))
    return desk


async def test_a_group_belongs_to_the_version_that_takes_its_first_slot(desk: Any) -> None:
    (first,) = await lease(desk, OLD)
    (second,) = await lease(desk, NEW)
    (third,) = await lease(desk, OLD)
    assert first.group.id == third.group.id != second.group.id


async def test_versions_share_groups_where_the_configuration_says_so(open_desk: Any) -> None:
    desk = open_desk(group_size=2, mix_agent_versions=True)
    (first,), (second,) = await lease(desk, OLD), await lease(desk, NEW)
    assert first.group.id == second.group.id


async def test_members_of_a_declared_group_must_have_the_same_code(desk: Any) -> None:
    task, group = {"source": "own", "id": "1"}, {"id": "mine", "size": 2}
    await begin(desk, task=task, group=group, code="aa", label="one")
    with pytest.raises(ConflictError, match="agent version aa"):
        await begin(desk, task=task, group=group, code="bb")
    await begin(desk, task=task, group=group, code="aa", label="two")


async def test_the_group_of_a_version_that_is_gone_closes_with_half_of_its_members(open_desk: Any) -> None:
    desk = open_desk(group_size=2, groups_per_step=4)
    episode = await begin(desk, lease_id=(await lease(desk, OLD))[0].lease_id)
    await finish(desk, episode)
    group_id = episode.group.id
    desk.clock.now += 31
    desk.rollouts.reap()
    assert desk.book.owner(group_id) == OLD, "nobody else is here: whoever comes back goes on"
    await lease(desk, NEW)
    desk.rollouts.reap()
    desk.finishing.settle()
    assert desk.book.owner(group_id) is None, "it has closed"
    assert not [e for e in desk.log if e["event"] == "group_dropped" and "version_left" in e["reason"]]


async def test_a_group_with_too_few_members_is_dropped_and_its_task_is_dealt_again(open_desk: Any) -> None:
    desk = open_desk(group_size=4, groups_per_step=4)
    leases = await lease(desk, OLD, 4)
    done, running = [await begin(desk, lease_id=one.lease_id) for one in leases[:2]]
    await finish(desk, done)
    assert desk.rollouts.release([], client=f"client of {OLD}", leaver=Asker(f"client of {OLD}", OLD)) == 2
    desk.variants.left(Asker(f"client of {OLD}", OLD))
    assert desk.book.owner(done.group.id) == OLD, "what runs may finish, and nobody else asks yet"
    (other,) = await lease(desk, NEW)
    desk.rollouts.reap()
    assert [e["group_id"] for e in desk.log if e["event"] == "group_recalled"] == [done.group.id]
    desk.finishing.abort(running, AbortRequest())
    desk.rollouts.reap()
    desk.finishing.settle()
    (dropped,) = [e for e in desk.log if e["event"] == "group_dropped"]
    assert dropped["reason"] == "agent_version_left: 1 of 4 episodes had finished"
    again = (await lease(desk, NEW, 4))[-1]
    assert again.task == leases[0].task and again.group.id not in (leases[0].group.id, other.group.id)
    desk.check_writes()
    (sample,) = [s for s in desk.ledger.summary().samples if s.reason] or [None]
    assert sample is None or sample.reason == "agent_version_left"


async def test_a_late_finish_does_not_count_once_its_group_has_another_version(desk: Any) -> None:
    episode = await begin(desk, lease_id=(await lease(desk, OLD))[0].lease_id, idle_timeout_s=5)
    desk.clock.now += 10
    desk.rollouts.reap()
    assert episode.state is EpisodeState.LOST
    (taken,) = await lease(desk, NEW)
    assert taken.group.id == episode.group.id, "nobody works in it: it is anybody's"
    with pytest.raises(EpisodeClosed, match="went to the agent version bb"):
        await finish(desk, episode)


async def test_an_evaluation_is_run_by_one_version_and_begins_anew_with_the_next(desk: Any) -> None:
    evaluation_id = desk.evaluations.start(EvaluationRequest(samples_per_task=1))
    (first,) = await lease(desk, OLD, splits=("eval",))
    assert await lease(desk, NEW, splits=("eval",)) == []
    await finish(desk, await begin(desk, lease_id=first.lease_id), 0.25)
    desk.clock.now += 31
    await lease(desk, NEW, splits=("eval",))
    desk.rollouts.reap()
    assert [e["agent"] for e in desk.log if e["event"] == "evaluation_begins_anew"] == ["aa"]
    for one in await lease(desk, NEW, 4, splits=("eval",)):
        await finish(desk, await begin(desk, lease_id=one.lease_id), 0.75)
    reply = desk.evaluations.reply(evaluation_id)
    assert (reply.state, reply.mean_reward, reply.num_finished, reply.agents) == ("done", 0.75, 2, {"bb": 2})
    desk.check_writes()
    assert desk.ledger.evaluations()[0].agents == {"bb": 2}


async def test_an_evaluation_of_which_the_code_is_edited_all_the_time_ends_all_the_same(desk: Any) -> None:
    evaluation_id = desk.evaluations.start(EvaluationRequest(samples_per_task=1))
    for number in range(8):
        variant = Variant("", f"{number:02x}")
        leases = await lease(desk, variant, splits=("eval",))
        if leases:
            await finish(desk, await begin(desk, lease_id=leases[0].lease_id))
        desk.variants.left(Asker(f"client of {variant}", variant))
        desk.variants.presence.ask(Asker("next", Variant("", "ff")), trains=False)
        desk.rollouts.reap()
    reply = desk.evaluations.reply(evaluation_id)
    assert reply.state == "done" and len(reply.agents) == 2
    assert [e["event"] for e in desk.log if e["event"].startswith("evaluation_")].count("evaluation_mixes_agents") == 1


async def test_leases_that_are_given_back_are_others_at_once_and_only_their_holder_can(desk: Any) -> None:
    (held,) = await lease(desk, OLD)
    assert desk.rollouts.release([held.lease_id, "nonsense"], client="a stranger") == 0
    assert desk.rollouts.release([held.lease_id], client=f"client of {OLD}") == 1
    (again,) = await lease(desk, NEW)
    assert (again.group.id, again.task) == (held.group.id, held.task)


async def test_weights_deal_new_groups_and_outlast_a_restart(open_desk: Any) -> None:
    desk = open_desk(group_size=2, max_staleness=80, steps=200)
    one, two = Variant("one", "aa"), Variant("two", "bb")
    desk.variants.mix.set_weights({"one": 0.75, "two": 0.25})
    dealt: Counter[str] = Counter()
    for _ in range(40):
        for variant in (two, one):
            for _ in await lease(desk, variant, 2):
                dealt[variant.label] += 1
    assert sum(dealt.values()) > 90 and dealt["one"] / sum(dealt.values()) == pytest.approx(0.75, abs=0.05)
    desk.variants.save()
    again = Variants(VariantParts(**{**vars_of(desk), "run_dir": desk.folder}))
    assert again.mix.weights == {"one": 0.75, "two": 0.25}


def vars_of(desk: Any) -> dict[str, Any]:
    parts = desk.variants._parts
    return {name: getattr(parts, name) for name in VariantParts.__dataclass_fields__}


def test_the_meter_is_bounded_and_tells_names_apart() -> None:
    meter = VariantMeter()
    for number in range(SHOWN + 5):
        meter.ended(Variant("", f"{number:02x}".ljust(64, "0")), Split.TRAIN, Outcome.AGENT, {"solver": 1.0})
    meter.ended(Variant("named", "aa"), Split.TRAIN, "lost")
    endings, rewards = meter.collect()
    labels = [(s.labels["label"], s.labels["code"], s.value) for s in endings.samples]
    assert len(labels) == SHOWN + 1 and labels[-1] == ("other", "other", 6.0)
    assert sum(s.value for s in rewards.samples if s.name.endswith("_count")) == SHOWN + 5
    values = meter.step("solver")
    assert len(values) == 2 * SHOWN and meter.step("solver") == {}


# --- any clients, coming and going ------------------------------------------------------------------------------------


@dataclass
class Client:
    """A process with one version of the agent; it may vanish, leave, or come back with other code."""

    asker: Asker
    is_here: bool = True
    held: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Attempts that it runs."""


class Crowd:
    """Groups, dealer and versions without a server around them; time passes when a test says so."""

    def __init__(self, *, weights: dict[str, float], num_tasks: int = 5) -> None:
        self.now = 0.0
        config = Config.model_validate(
            {"policies": {"solver": {"model": "m"}}, "dataflow": {"group_size": 3, "variant_wait_s": 30}}
        )
        self.book = GroupBook(max_attempts=3, group_floor=None, group_deadline_s=1e9, clock=lambda: self.now)
        self.dealer = TaskDealer(seed=1, epochs=1)
        self.dealer.add_source("t", Split.TRAIN, [Task("t", str(number)) for number in range(num_tasks)])
        evaluations: Any = SimpleNamespace(
            running=[], admits=lambda group, variant: True, taken=lambda group, variant: None
        )
        self.variants = Variants(
            VariantParts(
                config=config,
                run_dir=Path("/nonexistent"),
                book=self.book,
                evaluations=evaluations,
                events=EventLog(None),
                changed=Changed(),
                meter=VariantMeter(),
                open_episodes=self._open_episodes,
                clock=lambda: self.now,
            )
        )
        self.variants.mix.set_weights(weights)
        self.clients: list[Client] = []
        self.numbers = itertools.count()
        self.trained: Counter[str] = Counter()
        """By task: groups that counted."""

    def _open_episodes(self) -> list[Any]:
        return [
            SimpleNamespace(
                episode_id=episode_id,
                attempt=attempt,
                state=EpisodeState.OPEN,
                client=client.asker.process,
                label=client.asker.variant.label,
                code=client.asker.variant.code,
            )
            for client in self.clients
            for episode_id, attempt in client.held
        ]

    def join(self, variant: Variant) -> None:
        self.clients.append(Client(Asker(f"p{len(self.clients)}", variant)))

    def lease(self, client: Client) -> bool:
        variant = client.asker.variant
        request = LeaseRequest(client_id=client.asker.process, label=variant.label, code=variant.code)
        with self.variants.asking(request):
            group_id = next((group.id for group in self.variants.free_groups(variant)), None)
            if group_id is None:
                group_id = self._open(variant)
            if group_id is None:
                return False
            ticket = self.book.take(group_id, variant)
            self.variants.taken(ticket, request)
        self.book.begin(ticket.episode_id, ticket.attempt)
        client.held.append((ticket.episode_id, ticket.attempt))
        return True

    def _open(self, variant: Variant) -> str | None:
        if self.book.counts().num_groups >= 4 or not self.variants.may_open(variant):
            return None
        task = self.dealer.next_task()
        if task is None:
            self.variants.mix.empty_handed(variant.label)
            return None
        spec = GroupSpec(f"g{next(self.numbers)}", task, Split.TRAIN, 3, ("solver",), {"solver": 0})
        self.book.open_group(spec)
        self.variants.opened(spec, variant)
        return spec.id

    def finish(self, client: Client, *, well: bool) -> None:
        if client.held:
            episode_id, attempt = client.held.pop(0)
            outcome = Outcome.AGENT if well else Outcome.CLIENT
            group_id = episode_id.rpartition("-")[0]
            label, code = client.asker.variant
            record = EpisodeRecord(episode_id, attempt, group_id, outcome, "digest", label=label, code=code)
            self.book.finish(episode_id, attempt, record)
            self.settle()

    def vanish(self, client: Client) -> None:
        """Without a word: its attempts are lost."""
        client.is_here = False
        for episode_id, attempt in client.held:
            self.book.release(episode_id, attempt, ReleaseReason.LOST)
        client.held.clear()
        self.settle()

    def leave(self, client: Client) -> None:
        """It ends what it runs, and leases no more."""
        client.is_here = False
        self.variants.left(client.asker)
        self.settle()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.variants.reap()
        self.settle()

    def settle(self) -> None:
        for group in self.book.closed():
            assert len({(record.label, record.code) for record in group.finished}) <= 1, "versions are never mixed"
            counts = group.drop_reason is None
            self.variants.settled(group.spec, counts)
            if group.is_recalled:
                self.dealer.take_back(group.spec.task)
            elif counts or not group.finished:  # else nobody could solve it
                self.trained[group.spec.task.id] += 1


VERSIONS = [Variant("a", "01"), Variant("a", "02"), Variant("b", "03"), Variant("", "04"), Variant("", "")]
STEPS = st.tuples(
    st.sampled_from(["join", "lease", "lease", "finish", "fail", "vanish", "leave", "tick"]), st.integers(0, 99)
)


@given(
    st.lists(STEPS, max_size=80),
    st.sampled_from([{}, {"a": 0.5}, {"a": 0.7, "b": 0.3}, {"b": 1.0}]),
    st.sampled_from(VERSIONS),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whoever_comes_and_goes_every_task_is_trained_by_one_version_in_the_end(
    steps: list[tuple[str, int]], weights: dict[str, float], last: Variant
) -> None:
    crowd = Crowd(weights=weights)
    for kind, number in steps:
        here = [client for client in crowd.clients if client.is_here or client.held]
        client = here[number % len(here)] if here else None
        if kind == "join":
            crowd.join(VERSIONS[number % len(VERSIONS)])
        elif kind == "tick":
            crowd.tick(number / 5)
        elif client is not None and (kind != "lease" or client.is_here):
            act: dict[str, Callable[[], Any]] = {
                "lease": lambda client=client: crowd.lease(client),
                "finish": lambda client=client: crowd.finish(client, well=True),
                "fail": lambda client=client: crowd.finish(client, well=False),
                "vanish": lambda client=client: crowd.vanish(client),
                "leave": lambda client=client: crowd.leave(client),
            }
            act[kind]()
    crowd.join(last)  # then one is left, whatever it is, and goes on
    for client in crowd.clients[:-1]:
        (crowd.vanish if len(client.held) % 2 else crowd.leave)(client)
        while client.held:
            crowd.finish(client, well=True)
    survivor = crowd.clients[-1]
    for _ in range(40):
        while crowd.lease(survivor):
            crowd.finish(survivor, well=True)
        crowd.tick(10)
    assert crowd.book.counts().num_groups == 0, "no group waits for a version that is gone"
    assert sorted(crowd.trained) == [str(number) for number in range(5)], "no task is skipped"
    assert set(crowd.trained.values()) == {1}, "and none is trained twice"


def test_damaged_weights_are_told_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "variants.json").write_text('{"weights": {')
    with pytest.raises(SetupError, match=r"variants\.json are damaged"):
        Variants(replace(Crowd(weights={}).variants._parts, run_dir=tmp_path))


def test_a_recalled_group_ends_when_its_last_attempt_is_lost() -> None:
    crowd = Crowd(weights={})
    crowd.join(Variant("a", "01"))
    crowd.join(Variant("a", "02"))
    leaves, stays = crowd.clients
    assert crowd.lease(leaves) and crowd.lease(stays)
    crowd.leave(leaves)
    crowd.vanish(leaves)
    crowd.tick(1)
    assert crowd.book.counts().num_groups == 1


async def test_who_asks_for_training_alone_claims_no_evaluation(desk: Any) -> None:
    desk.evaluations.start(EvaluationRequest(samples_per_task=1))
    await lease(desk, OLD, splits=("eval",))
    desk.rollouts.release([], client=f"client of {OLD}", leaver=Asker(f"client of {OLD}", OLD))
    (evaluation,) = desk.evaluations.running
    evaluation.variant = None  # as after its last beginning, with which it mixes versions
    await lease(desk, OLD, splits=("train",))
    assert len(await lease(desk, NEW, splits=("eval",))) == 1
