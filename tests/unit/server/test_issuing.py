"""Which task a client of some sources gets, and what others are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from wingbeat.core.protocol import (
    BeginRequest,
    EvaluationRequest,
    FinishRequest,
    GroupModel,
    LeaseReply,
    LeaseRequest,
    TaskModel,
)
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.records import EpisodeRecord
from wingbeat.server.episodes.issuing import MAX_SKIPS, AtWork, Issuer
from wingbeat.server.episodes.source_metrics import SourceMeter


@pytest.fixture
def desk(open_desk: Callable[..., Any]) -> Any:
    """Room for many groups; source src has 4 training and 2 eval tasks, other has 3 and 3."""
    desk = open_desk(groups_per_step=16, group_size=1)
    desk.dealer.add_source("other", Split.TRAIN, [Task("other", f"t{i}") for i in range(3)])
    desk.dealer.add_source("other", Split.EVAL, [Task("other", f"e{i}") for i in range(3)])
    return desk


async def lease(desk: Any, *sources: str, count: int = 1, split: Split = Split.TRAIN) -> LeaseReply:
    request = LeaseRequest(max_leases=count, wait_s=0, splits=[split], sources=list(sources) or None)
    return await desk.rollouts.lease(request)


async def finish(desk: Any, lease_id: str, outcome: Outcome = Outcome.AGENT) -> None:
    begun = await desk.rollouts.begin(BeginRequest(idempotency_key=lease_id, lease_id=lease_id), base_url="http://x/v1")
    await desk.finishing.finish(desk.episode(begun.episode_id), FinishRequest(rewards=1.0, outcome=outcome))


NOBODY = AtWork(frozenset(), {})


def issuer(
    dealer: TaskDealer,
    desk: Any,
    wants: Callable[[Task], bool] = lambda task: True,
    at_work: Callable[[], AtWork] = lambda: NOBODY,
) -> Issuer:
    return Issuer(
        dealer,
        ledger=desk.ledger,
        watch=desk.writes.append,
        should_issue=wants,
        at_work=at_work,
        clock=desk.clock,
    )


async def test_a_client_gets_tasks_of_its_sources_only(desk: Any) -> None:
    others = (await lease(desk, "other", count=4)).leases
    assert {found.task.source for found in others} == {"other"}
    assert {found.task.source for found in (await lease(desk, "src", "other", count=8)).leases} == {"src", "other"}
    assert (await lease(desk, "nothing")).reason == "no tasks of source nothing; sources are: other, src"


async def test_a_slot_that_reopens_goes_to_a_client_of_its_source(desk: Any) -> None:
    (found,) = (await lease(desk, "other")).leases
    await finish(desk, found.lease_id, Outcome.ENVIRONMENT)
    assert found.group.id not in {again.group.id for again in (await lease(desk, "src", count=3)).leases}
    assert (await lease(desk, "other")).leases[0].group == found.group


async def test_evaluation_groups_go_to_clients_of_their_source(desk: Any, make_manifest: Any) -> None:
    desk.solver.adopt(make_manifest(0))
    desk.evaluations.start(EvaluationRequest(max_tasks=4))
    assert desk.evaluations.waiting_sources == {"src", "other"}
    found = (await lease(desk, "src", count=9, split=Split.EVAL)).leases
    assert [task.task.id for task in found] == ["e0", "e1"]
    assert desk.evaluations.waiting_sources == {"other"}
    for one in (*found, *(await lease(desk, count=9, split=Split.EVAL)).leases):
        await finish(desk, one.lease_id)
    assert desk.evaluations.scores("solver") == {"eval/src/mean": 1.0, "eval/other/mean": 1.0}
    (done,) = [record for record in desk.log if record["event"] == "evaluation_done"]
    assert done["sources"] == {"src": 1.0, "other": 1.0}


async def test_a_group_that_counts_for_nobody_is_refunded_and_one_of_a_client_is_not_dealt(desk: Any) -> None:
    for found in (await lease(desk, "src", count=2)).leases:
        await finish(desk, found.lease_id)  # without a turn: no policy trains it
    assert desk.dealer.places()["src"].counted == 0
    before = desk.dealer.state_dict()
    request = BeginRequest(
        idempotency_key="mine", task=TaskModel(source="src", id="own"), group=GroupModel(id="g", size=1)
    )
    begun = await desk.rollouts.begin(request, base_url="http://x/v1")
    await desk.finishing.finish(desk.episode(begun.episode_id), FinishRequest(rewards=1.0))
    assert desk.dealer.state_dict() == before
    desk.check_writes()
    assert desk.ledger.load_dealer_state() == before


async def test_an_open_group_of_a_removed_source_goes_on_to_its_end(open_desk: Callable[..., Any]) -> None:
    desk = open_desk(groups_per_step=8, group_size=2)
    desk.dealer.add_source("other", Split.TRAIN, [Task("other", "1")])
    (first,) = (await lease(desk, "src")).leases
    desk.dealer.remove("src")
    (second, *others) = (await lease(desk, count=4)).leases
    assert second.group == first.group and {found.task.source for found in others} == {"other"}
    for found in (first, second):
        await finish(desk, found.lease_id)
    assert first.group.id not in {spec.id for spec, _ in desk.book.progress()}


def test_tasks_that_no_operator_wants_are_passed_over(desk: Any) -> None:
    dealer = TaskDealer(0, ratios={"a": 0.5, "b": 0.5})
    for source in ("a", "b"):
        dealer.add_source(source, Split.TRAIN, [Task(source, str(i)) for i in range(10)])
    issuing = issuer(dealer, desk, lambda task: task.source == "b" or int(task.id) % 5 == 0)
    issued = [issuing.next_task(None) for _ in range(20)]
    assert Counter(task.source for task in issued if task is not None) == {"a": 10, "b": 10}
    assert {task.id for task in issued if task is not None and task.source == "a"} == {"0", "5"}


def test_a_run_of_refusals_ends(desk: Any) -> None:
    asked: list[Task] = []

    def never(task: Task) -> bool:
        asked.append(task)
        return False

    assert issuer(desk.dealer, desk, never).next_task(frozenset({"src"})) is not None
    assert len(asked) == MAX_SKIPS


def test_who_is_behind_is_named_with_the_reason(desk: Any) -> None:
    dealer = TaskDealer(0, ratios={"a": 0.5, "b": 0.5}, slack=1)
    issuing = issuer(dealer, desk)
    dealer.add_source("a", Split.TRAIN, [Task("a", "1")])
    assert issuing.blockers() == [
        "source 'b' has no training tasks yet, and dealing waits for it: PUT /api/tasks/b, or take it out with DELETE"
    ]
    dealer.add_source("b", Split.TRAIN, [Task("b", "1")])
    only_a = frozenset({"a"})
    issuing.ask(only_a)
    assert issuing.next_task(only_a) is not None and issuing.blockers() == []
    assert issuing.next_task(only_a) is not None and issuing.next_task(only_a) is None
    assert issuing.reason(only_a) == "a is ahead of its share and waits for b"
    absent = "source 'b' is behind its share: no client asks for it, and those of a wait"
    assert issuing.blockers() == [absent]
    issuing.ask(frozenset({"b"}))
    issuing.answered(frozenset({"b"}))
    desk.clock.now += 59
    assert issuing.blockers() == ["source 'b' is behind its share: its clients are slower than those of a"]
    desk.clock.now += 2
    assert issuing.blockers(["a", "b"]) == [absent, "an evaluation waits for a client of source 'b'"]
    issuing.answered(only_a)
    assert issuing.num_waiting == 0 and issuing.blockers(["a", "b"]) == []


def test_sources_without_any_share_are_told_of(desk: Any) -> None:
    dealer = TaskDealer(0, epochs=1)
    issuing = issuer(dealer, desk)
    for source in ("a", "b"):
        dealer.add_source(source, Split.TRAIN, [Task(source, "1")])
    dealer.set_ratios({"a": 0.0, "b": 1.0})
    assert issuing.blockers() == []
    dealer.remove("b")
    assert issuing.blockers() == ["nothing is dealt: the share of a is 0; give shares with PUT /api/mixing"]


def test_a_client_that_is_busy_with_a_source_is_no_absent_one(desk: Any) -> None:
    dealer = TaskDealer(0, ratios={"a": 0.5, "b": 0.5}, slack=1)
    for source in ("a", "b"):
        dealer.add_source(source, Split.TRAIN, [Task(source, "1")])
    work = [AtWork(frozenset({"b"}), {})]
    issuing = issuer(dealer, desk, at_work=lambda: work[0])
    only_a = frozenset({"a"})
    issuing.ask(only_a)
    while issuing.next_task(only_a) is not None:
        pass
    slow = "source 'b' is behind its share: its clients are slower than those of a"
    assert issuing.blockers(["b"]) == [slow], "its episodes last longer than a question counts"
    work[0] = AtWork(frozenset(), {"a": 1, "b": 2})
    assert issuing.absent_clients() == ["2 open groups of source 'b' wait for a client: none asks for it"]


def test_clients_that_ask_only_for_what_is_not_here_are_told_of_in_the_status(desk: Any) -> None:
    busy = [AtWork(frozenset(), {})]
    issuing = issuer(desk.dealer, desk, at_work=lambda: busy[0])
    issuing.ask(frozenset({"soruce"}))
    assert issuing.absent_clients() == [
        "clients ask only for what is not here: no tasks of source soruce; sources are: other, src"
    ]
    busy[0] = AtWork(frozenset({"src"}), {})
    assert issuing.absent_clients() == []
    busy[0] = AtWork(frozenset(), {})
    issuing.ask(frozenset({"src", "soruce"}))
    assert issuing.absent_clients() == []


async def test_a_client_that_fell_silent_is_absent_before_its_episodes_are_lost(desk: Any) -> None:
    (found,) = (await lease(desk, "src")).leases
    request = BeginRequest(idempotency_key="1", lease_id=found.lease_id)
    await desk.rollouts.begin(request, base_url="http://x/v1")
    desk.clock.now += 59
    desk.rollouts.issuer.ask(frozenset({"other"}))
    assert desk.rollouts.issuer.absent_clients() == []
    desk.clock.now += 2
    assert desk.rollouts.issuer.absent_clients() == [
        "1 open group of source 'src' waits for a client: none asks for it"
    ]


async def test_the_groups_of_a_removed_source_end_although_its_clients_have_left(
    open_desk: Callable[..., Any], make_manifest: Any
) -> None:
    desk = open_desk(groups_per_step=8, group_size=2)
    desk.solver.adopt(make_manifest(0))
    desk.dealer.add_source("other", Split.TRAIN, [Task("other", "1")])
    (left,) = (await lease(desk, "src")).leases
    await finish(desk, left.lease_id)
    (kept,) = (await lease(desk, "other")).leases
    await finish(desk, kept.lease_id)
    evaluation_id = desk.evaluations.start(EvaluationRequest(source="src", samples_per_task=2))
    (half,) = (await lease(desk, "src", split=Split.EVAL)).leases
    await finish(desk, half.lease_id)
    desk.dealer.remove("src")
    desk.evaluations.withdraw("src")
    assert not desk.evaluations.waiting_sources
    desk.clock.now += 1000
    desk.rollouts.reap()
    desk.finishing.settle()
    assert [spec.id for spec, _ in desk.book.progress()] == [kept.group.id], "other goes on when its clients are back"
    reply = desk.evaluations.reply(evaluation_id)
    assert (reply.state, reply.num_finished, reply.num_expected) == ("done", 1, 4)
    assert desk.dealer.removed == {"src"}


async def test_a_removed_source_ends_an_evaluation_that_waits_for_nothing_else(desk: Any, make_manifest: Any) -> None:
    desk.solver.adopt(make_manifest(0))
    evaluation_id = desk.evaluations.start(EvaluationRequest())
    for found in (await lease(desk, "src", count=9, split=Split.EVAL)).leases:
        await finish(desk, found.lease_id)
    desk.evaluations.withdraw("other")
    assert desk.evaluations.reply(evaluation_id).state == "done"
    (done,) = [record for record in desk.log if record["event"] == "evaluation_done"]
    assert done["sources"] == {"src": 1.0, "other": None} and done["num_missing"] == 3


async def test_names_of_evaluations_can_stand_in_paths(desk: Any, make_manifest: Any) -> None:
    desk.solver.adopt(make_manifest(0))
    evaluation_id = desk.evaluations.start(EvaluationRequest(name="client:a/b?c"))
    assert evaluation_id.startswith("client~3Aa~2Fb~3Fc-solver-0-")
    found = (await lease(desk, count=9, split=Split.EVAL)).leases
    assert len(found) == 5, "no group of a client"


def test_a_client_of_exhausted_sources_is_told_so(desk: Any) -> None:
    dealer = TaskDealer(0, epochs=1)
    dealer.add_source("a", Split.TRAIN, [Task("a", "1")])
    dealer.add_source("b", Split.TRAIN, [Task("b", "1")])
    issuing = issuer(dealer, desk)
    assert issuing.next_task(frozenset({"a"})) is not None
    assert issuing.reason({"a"}) == "the tasks of a are exhausted"
    assert issuing.reason({"a", "b"}) == "" and issuing.blockers() == []
    assert issuing.next_task(None) is not None
    assert issuing.blockers() == [
        "the tasks are exhausted (tasks.epochs): the run ends with the groups that are in flight"
    ]


def test_metrics_by_source(make_samples: Callable[..., Any]) -> None:
    meter = SourceMeter()
    for source, reward in (("a", 1.0), ("a", 0.0), ("b", 1.0)):
        samples = (make_samples(reward=reward),)
        record = EpisodeRecord("e", 1, "g", Outcome.AGENT, "d", {"solver": reward, "judge": 0.5}, samples=samples)
        meter.finished(record, source=source, policies=["solver"])
    members = tuple(
        make_samples(group_id=group, source=source) for group, source in (("1", "a"), ("1", "a"), ("2", "b"))
    )
    dealer = TaskDealer(0)
    dealer.add_source("a", Split.TRAIN, [Task("a", "1")])
    dealer.counted("a")
    values = meter.step("solver", TrainingBatch("b-1", "solver", 1, members, seed=0), dealer.places())
    assert values == {
        "rollout/reward_mean/a": 0.5,
        "rollout/reward_mean/b": 1.0,
        "rollout/episodes/a": 2.0,
        "rollout/episodes/b": 1.0,
        "rollout/sampled_tokens/a": 4.0,
        "rollout/sampled_tokens/b": 2.0,
        "groups/trained/a": 1.0,
        "groups/trained/b": 1.0,
        "groups/share/a": 1.0,
    }
    assert "rollout/reward_mean/a" not in meter.step("solver", None, {})


@pytest.fixture
def make_samples() -> Callable[..., Any]:
    import numpy as np

    from wingbeat.core.samples import EpisodeSamples, TrainingSample

    def build(*, group_id: str = "g", reward: float = 1.0, source: str = "") -> EpisodeSamples:
        sample = TrainingSample.build(
            "s",
            token_ids=np.array([1, 2, 3], np.int32),
            sampled=np.array([0, 1, 1], np.uint8),
            sampling_logprobs=np.array([0, -1, -1], np.float32),
            versions=np.array([-1, 0, 0], np.int32),
        )
        return EpisodeSamples("e", 1, group_id, "solver", "", reward, (sample,), source=source)

    return build
