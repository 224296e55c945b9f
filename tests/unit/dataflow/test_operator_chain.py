"""Chains: no operator may lose, repeat or invent an episode, and none that fails may harm the run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.core.config import Config
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.types import Task
from wingbeat.dataflow.buffer import BatchDraft
from wingbeat.dataflow.operators import (
    MAX_REFUSALS,
    BatchView,
    ChainOutcome,
    Decision,
    Drop,
    EpisodeKey,
    EpisodeView,
    Fault,
    GroupView,
    Link,
    Operator,
    OperatorChain,
    OperatorContext,
    OperatorOptions,
    Shape,
    build_chain,
)
from wingbeat.dataflow.records import ReadyGroup

pytestmark = pytest.mark.unit

CONTEXT = OperatorContext("op", "solver", seed=1, group_size=4, groups_per_step=2, max_staleness=2)


def member(
    episode: str, reward: float, *, group: str, agent: str = "", tokens: int = 2, version: int = 0
) -> EpisodeSamples:
    sample = TrainingSample.build(
        f"{episode}/{agent}",
        token_ids=np.arange(1 + tokens, dtype=np.int32),
        sampled=np.array([0, *[1] * tokens], np.uint8),
        sampling_logprobs=np.array([0, *[-0.5] * tokens], np.float32),
        versions=np.array([-1, *[version] * tokens], np.int32),
    )
    return EpisodeSamples(episode, 1, group, "solver", agent, reward, (sample,))


def group_of(group_id: str, rewards: Iterable[float], *, version: int = 0, task: str = "t0") -> ReadyGroup:
    members = tuple(
        member(f"{group_id}-{i}", reward, group=group_id, version=version) for i, reward in enumerate(rewards)
    )
    return ReadyGroup(
        group_id, "solver", floor_version=version, size=len(members), members=members, task=Task("src", task)
    )


# --- random groups through random chains ------------------------------------------------------------

OPERATORS: tuple[Mapping[str, Any], ...] = (
    {"use": "failure_filter"},
    {"use": "length_filter", "min_tokens": 2, "max_tokens": 4},
    {"use": "reward_filter", "min": 0.0},
    {"use": "zero_variance_filter"},
    {"use": "dynamic_sampling", "success": 0.5},
    {"use": "group_floor", "members": 2},
    {"use": "deduplicate", "task_versions": 1},
    {"use": "overlong_shaping", "max_tokens": 5, "buffer_tokens": 3},
    {"use": "reward_clip", "min": -0.5, "max": 0.5},
    {"use": "reward_scale", "factor": 2.0},
    {"use": "reward_shaping", "metrics": {"steps": -0.1}, "per_token": 0.01},
    {"use": "curriculum_solved", "threshold": 0.6, "recheck": 0.3},
    {"use": "difficulty_target", "width": 0.2},
    {"use": "greso", "step": 0.1},
    {"use": "replay", "ratio": 0.5},
)


@st.composite
def groups(draw: st.DrawFn) -> ReadyGroup:
    group_id = f"g{draw(st.integers(0, 10**9))}"
    members: list[EpisodeSamples] = []
    metrics: dict[tuple[str, int], Mapping[str, float]] = {}
    for index in range(draw(st.integers(1, 4))):
        episode = f"{group_id}-{index}"
        metrics[episode, 1] = draw(st.sampled_from([{}, {"steps": 3.0}]))
        for agent in draw(st.sampled_from([("",), ("a", "b"), ("b",)])):
            built = member(
                episode,
                draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0])),
                group=group_id,
                agent=agent,
                tokens=draw(st.integers(0, 6)),
            )
            members.append(msgspec.structs.replace(built, truncated=draw(st.booleans())))
    return ReadyGroup(
        group_id,
        "solver",
        floor_version=0,
        size=draw(st.integers(1, 4)),
        members=tuple(members),
        task=Task("src", f"t{draw(st.integers(0, 3))}"),
        metrics=metrics,
    )


chains = st.lists(st.sampled_from(OPERATORS), max_size=5)
Event = ReadyGroup | int | Task
events = st.lists(
    st.one_of(groups(), st.just(1), st.integers(0, 3).map(lambda i: Task("src", f"t{i}"))), max_size=12
).map(lambda found: list(unique(found)))


def unique(found: list[Event]) -> Iterable[Event]:
    seen: set[str] = set()
    for event in found:
        if isinstance(event, ReadyGroup):
            if event.group_id in seen:
                continue
            seen.add(event.group_id)
        yield event


def make_chain(operators: list[Mapping[str, Any]], seed: int = 3) -> OperatorChain:
    config = Config.model_validate(
        {
            "run": {"seed": seed},
            "policies": {"solver": {"model": "m"}},
            "dataflow": {"group_size": 4, "groups_per_step": 2, "max_staleness": 2, "operators": operators},
        }
    )
    return build_chain(config, "solver")


def play(chain: OperatorChain, script: list[Event], *, version: int = 0) -> list[object]:
    """Everything the chain answers; an int of a script is one more version."""
    said: list[object] = []
    for event in script:
        if isinstance(event, ReadyGroup):
            said.append(chain.on_group(event))
        elif isinstance(event, Task):
            said.append(chain.should_issue(event))
        else:
            version += 1
            chain.on_version(version)
    return said


def check_partition(group: ReadyGroup, outcome: ChainOutcome) -> None:
    """Every episode stays or leaves, once, and what stays is what came but for its shaping."""
    before = list(dict.fromkeys((m.episode_id, m.attempt) for m in group.members))
    after = list(outcome.group.members) if outcome.group is not None else []
    left = [(dropped.episode_id, dropped.attempt) for dropped in outcome.dropped]
    assert Counter(left + list(dict.fromkeys((m.episode_id, m.attempt) for m in after))) == Counter(before)
    unshaped = [msgspec.structs.replace(m, shaping=0.0) for m in after]
    assert unshaped == [m for m in group.members if (m.episode_id, m.attempt) not in left]
    if outcome.group is not None:
        assert replace(outcome.group, members=group.members, metrics=group.metrics) == group
        assert outcome.group.metrics == {key: value for key, value in group.metrics.items() if key not in left}


@given(chains, events)
def test_no_chain_loses_repeats_invents_or_changes_an_episode(
    operators: list[Mapping[str, Any]], script: list[Event]
) -> None:
    chain = make_chain(operators)
    asked = [event for event in script if not isinstance(event, int)]
    for event, answer in zip(asked, play(chain, script), strict=True):
        if isinstance(event, ReadyGroup):
            assert isinstance(answer, ChainOutcome)
            check_partition(event, answer)
    assert chain.quarantined == ()


@given(chains, events)
def test_chains_are_deterministic(operators: list[Mapping[str, Any]], script: list[Event]) -> None:
    one, other = make_chain(operators), make_chain(operators)
    assert play(one, script) == play(other, script)
    assert one.state_dict() == other.state_dict()
    assert one.metrics() == other.metrics()


@given(chains, events, st.integers(0, 12))
def test_a_restored_chain_goes_on_as_if_never_interrupted(
    operators: list[Mapping[str, Any]], script: list[Event], cut: int
) -> None:
    uninterrupted, first, second = make_chain(operators), make_chain(operators), make_chain(operators)
    expected = play(uninterrupted, script)
    begin = play(first, script[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    version = sum(event == 1 for event in script[:cut])
    second.on_version(version)
    assert begin + play(second, script[cut:], version=version) == expected
    assert second.state_dict() == uninterrupted.state_dict()


def test_decisions_depend_on_the_seed() -> None:
    def asked(seed: int) -> list[bool]:
        chain = make_chain([{"use": "curriculum_solved", "threshold": 0.5, "recheck": 0.5}], seed)
        chain.on_group(group_of("g", (1.0, 1.0)))
        return [chain.should_issue(Task("src", "t0")) for _ in range(40)]

    assert asked(1) == asked(1) != asked(2)


# --- operators that fail ----------------------------------------------------------------------------


class Scripted(Operator[OperatorOptions]):
    """Answers what a test tells it to."""

    def __init__(
        self,
        *,
        group: Callable[[GroupView], Any] = lambda group: (),
        episode: Callable[[EpisodeView], Any] = lambda episode: None,
        issue: Callable[[Task], Any] = lambda task: True,
        compose: Callable[[BatchView], Any] = lambda batch: (),
        state: Callable[[], Any] = dict,
        numbers: Callable[[], Any] = dict,
    ) -> None:
        super().__init__(OperatorOptions(), CONTEXT)
        self._group, self._episode, self._issue, self._compose = group, episode, issue, compose
        self._state, self._numbers = state, numbers

    def on_group(self, group: GroupView) -> Iterable[Decision]:
        return self._group(group)

    def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
        return self._episode(episode)

    def should_issue(self, task: Task) -> bool:
        return self._issue(task)

    def compose(self, batch: BatchView) -> Iterable[str]:
        return self._compose(batch)

    def state_dict(self) -> Mapping[str, Any]:
        return self._state()

    def metrics(self) -> Mapping[str, float]:
        return self._numbers()


@dataclass
class Watched:
    chain: OperatorChain
    faults: list[Fault]


def watched(*operators: Operator[Any], on_error: Any = "quarantine") -> Watched:
    faults: list[Fault] = []
    links = [Link(f"op{i}", operator, on_error=on_error, fingerprint="f") for i, operator in enumerate(operators)]
    return Watched(OperatorChain("solver", links, max_staleness=2, on_fault=faults.append), faults)


def fail(*_: object) -> Any:
    raise RuntimeError("boom")


def raise_late(group: GroupView) -> Iterable[Decision]:
    yield group.episodes[0].drop("first")
    raise RuntimeError("boom")


def mutate(group: GroupView) -> Any:
    group.task.payload["x"] = 2
    return ()


def twice(group: GroupView) -> Any:
    return [group.episodes[0].drop("a"), group.episodes[0].shape(1.0)]


def invent(group: GroupView) -> Any:
    return [Drop(EpisodeKey("stranger", 1), "a")]


WRONG: dict[str, tuple[Callable[[GroupView], Any], str]] = {
    "raises": (fail, "RuntimeError: boom"),
    "raises after a decision": (raise_late, "RuntimeError: boom"),
    "decides twice": (twice, "two decisions about episode g-0 attempt 1"),
    "shapes twice": (lambda g: [g.episodes[0].shape(1.0)] * 2, "two decisions about episode g-0 attempt 1"),
    "invents an episode": (invent, "episode stranger attempt 1, which is no episode of group g"),
    "another attempt": (lambda g: [Drop(EpisodeKey("g-0", 2), "a")], "episode g-0 attempt 2, which is no"),
    "unknown agent": (lambda g: [g.episodes[0].shape({"nobody": 1.0})], "has no agent 'nobody'"),
    "not a number": (lambda g: [g.episodes[0].shape(float("nan"))], "the reward of 'solver', got nan"),
    "text for a number": (lambda g: [Shape(g.episodes[0].key, {"": "1"})], "the reward of 'solver', got '1'"),  # pyright: ignore[reportArgumentType]
    "not finite together": (lambda g: [g.episodes[0].shape(1e308), g.episodes[1].shape(1e308)], "not a finite number"),
    "no reason": (lambda g: [g.episodes[0].drop("")], "expected a reason"),
    "episodes for decisions": (lambda g: g.episodes, "expected episode.drop"),
    "None": (lambda g: None, "TypeError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_operator_is_quarantined_and_the_group_goes_on_as_it_came(name: str) -> None:
    behave, says = WRONG[name]
    drops_last = Scripted(group=lambda group: [group.episodes[-1].drop("last")])
    made = watched(Scripted(group=behave), drops_last)
    rewards = (1e308, 1e308, 0.0) if name == "not finite together" else (0.0, 1.0, 2.0)
    group = group_of("g", rewards)
    outcome = made.chain.on_group(group)
    check_partition(group, outcome)
    assert [d.reason for d in outcome.dropped] == ["op1:last"]
    assert outcome.shaping == ()
    assert [(f.operator, f.hook, f.stops) for f in made.faults] == [("op0", "on_group", False)]
    assert says in made.faults[0].error
    assert made.chain.quarantined == ("op0",)
    made.chain.on_group(group_of("h", (0.0, 1.0)))
    assert len(made.faults) == 1  # it is not asked again
    assert made.chain.metrics()["operator/op0/quarantined"] == 1.0
    assert made.chain.stopped == ""


def test_on_episode_may_only_decide_about_the_episode_it_was_asked_about() -> None:
    made = watched(Scripted(episode=lambda episode: Drop(EpisodeKey("g-1", 1), "other")))
    group = group_of("g", (0.0, 1.0))
    assert made.chain.on_group(group) == ChainOutcome(group)
    assert "decided about another one" in made.faults[0].error


def test_an_operator_cannot_reach_the_run_through_what_it_sees() -> None:
    made = watched(Scripted(group=mutate))
    group = replace(group_of("g", (0.0, 1.0)), task=Task("src", "t", {"x": 1}))
    outcome = made.chain.on_group(group)
    assert group.task.payload == {"x": 1}
    assert outcome.group == group


def test_on_error_stop_says_why_training_must_end() -> None:
    made = watched(Scripted(group=fail), on_error="stop")
    group = group_of("g", (0.0, 1.0))
    assert made.chain.on_group(group).group == group
    assert made.faults[0].stops
    assert made.chain.stopped == "operator 'op0' of 'solver' failed in on_group: RuntimeError: boom; training stopped"


@pytest.mark.parametrize(
    ("operator", "hook", "says"),
    [
        (Scripted(issue=fail), "should_issue", "boom"),
        (Scripted(issue=lambda task: None), "should_issue", "true or false"),
        (Scripted(state=lambda: {"x": object()}), "state_dict", "TypeError"),
        (Scripted(state=lambda: {"x": float("nan")}), "state_dict", "ValueError"),
        (Scripted(numbers=lambda: {"x": float("inf")}), "metrics", "finite"),
        (Scripted(numbers=lambda: {"x": "many"}), "metrics", "ValueError"),
    ],
)
def test_failures_elsewhere_are_faults_too(operator: Operator[Any], hook: str, says: str) -> None:
    made = watched(operator)
    assert made.chain.should_issue(Task("src", "t"))
    made.chain.on_group(group_of("g", (0.0, 1.0)))
    json.dumps(made.chain.state_dict())
    made.chain.metrics()
    assert [fault.hook for fault in made.faults] == [hook]
    assert says in made.faults[0].error


def test_a_quarantine_outlives_a_restart_until_the_code_changes() -> None:
    made = watched(Scripted(group=fail))
    made.chain.on_group(group_of("g", (0.0, 1.0)))
    state = made.chain.state_dict()
    again = watched(Scripted(group=fail))
    again.chain.load_state_dict(state)
    assert again.chain.quarantined == ("op0",)
    assert [fault.error for fault in again.faults] == ["RuntimeError: boom"]
    repaired = OperatorChain("solver", [Link("op0", Scripted(), fingerprint="other")])
    repaired.load_state_dict(state)
    assert repaired.quarantined == ()


def test_a_repaired_operator_goes_on_from_its_last_good_state() -> None:
    counted = {"n": 0}

    def count(group: GroupView) -> list[Any]:
        counted["n"] += 1
        return fail() if counted["n"] == 3 else []

    made = watched(Scripted(group=count, state=lambda: dict(counted)))
    state: dict[str, Any] = {}
    for index in range(4):
        made.chain.on_group(group_of(f"g{index}", (0.0, 1.0)))
        state = made.chain.state_dict()
    for _ in range(2):  # left out over restarts, too
        again = watched(Scripted(group=count))
        again.chain.load_state_dict(state)
        assert again.chain.quarantined == ("op0",)
        state = again.chain.state_dict()
    told: list[Any] = []

    class Repaired(Operator[OperatorOptions]):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            told.append(state)

    OperatorChain("solver", [Link("op0", Repaired(OperatorOptions(), CONTEXT), fingerprint="other")]).load_state_dict(
        state
    )
    assert told == [{"n": 2}]


def test_versions_that_a_restart_missed_are_told_once_and_in_order() -> None:
    heard: list[int] = []

    class Listener(Operator[OperatorOptions]):
        def on_version(self, version: int) -> None:
            heard.append(version)

    chain = OperatorChain("solver", [Link("op", Listener(OperatorOptions(), CONTEXT))])
    chain.on_version(2)
    chain.on_version(2)
    saved = chain.state_dict()
    restored = OperatorChain("solver", [Link("op", Listener(OperatorOptions(), CONTEXT))])
    restored.load_state_dict(saved)
    restored.on_version(4)
    assert heard == [1, 2, 3, 4]
    restored.on_version(3)  # a rollback
    restored.on_version(4)
    assert heard == [1, 2, 3, 4, 4]


def test_people_are_told_when_operators_leave_nothing() -> None:
    made = watched(Scripted(group=lambda g: [e.drop("no") for e in g.episodes] if g.size == 2 else []))
    for index in range(5):
        assert made.chain.blocker == ""
        made.chain.on_group(group_of(f"g{index}", (0.0, 1.0)))
    assert "the last 5 groups of 'solver' (op0:no)" in made.chain.blocker
    counted = made.chain.metrics()
    assert (counted["operator/op0/dropped"], counted["operator/op0/dropped_tokens"]) == (10, 20)
    made.chain.on_group(group_of("h", (0.0, 1.0, 2.0)))
    assert made.chain.blocker == ""


def test_no_curriculum_starves_the_run_not_even_over_a_restart() -> None:
    made = watched(Scripted(issue=lambda task: False))
    told = [made.chain.should_issue(Task("src", "t")) for _ in range(100)]
    restored = watched(Scripted(issue=lambda task: False))
    restored.chain.load_state_dict(made.chain.state_dict())
    told += [restored.chain.should_issue(Task("src", "t")) for _ in range(500)]
    assert [index for index, issued in enumerate(told) if issued] == [MAX_REFUSALS, 2 * MAX_REFUSALS + 1]
    assert restored.chain.metrics()["operator/op0/refused"] == 598


def test_later_operators_see_what_earlier_ones_did() -> None:
    seen: list[GroupView] = []
    made = watched(
        Scripted(
            episode=lambda e: e.shape(0.5),
            group=lambda g: [g.episodes[0].drop("first")],
        ),
        Scripted(group=lambda g: seen.append(g) or ()),
    )
    made.chain.on_version(3)
    made.chain.on_group(group_of("g", (0.0, 1.0, 2.0)))
    (view,) = seen
    assert view.rewards == (1.5, 2.5)
    assert (view.size, view.num_missing, view.version) == (3, 1, 3)
    assert [e.reported for e in view.episodes] == [1.0, 2.0]


# --- batches ----------------------------------------------------------------------------------------


def draft_of(*parts: ReadyGroup) -> BatchDraft:
    members = tuple(m for part in parts for m in part.members)
    return BatchDraft(members, group_ids=tuple(part.group_id for part in parts), dropped=())


@pytest.mark.parametrize(
    ("compose", "says"),
    [
        (fail, "boom"),
        (lambda batch: ["stranger"], "out of `batch.past`"),
        (lambda batch: [batch.past[0].id] * 2 if batch.past else [], "each once"),
    ],
)
def test_compose_cannot_invent_or_repeat(compose: Callable[[BatchView], Any], says: str) -> None:
    made = watched(Scripted(compose=compose))
    made.chain.compose(draft_of(group_of("a", (0.0, 1.0))), version=0)
    draft = draft_of(group_of("b", (0.0, 1.0), version=1))
    composed = made.chain.compose(draft, version=1)
    assert says in made.faults[0].error
    assert composed == draft


def test_replay_adds_whole_young_groups_least_used_then_newest() -> None:
    chain = make_chain([{"use": "replay", "ratio": 0.5, "max_uses": 2}])
    batches = [
        chain.compose(
            draft_of(
                group_of(f"a{v}", (0.0, 1.0), version=v),
                group_of(f"b{v}", (0.0, 1.0), version=v),
            ),
            version=v,
        )
        for v in range(5)
    ]
    # room for one group of two in each batch of four; what is three versions old is too old
    assert [[key for key, _ in batch.replayed] for batch in batches] == [
        [],
        ["a0-0", "a0-1"],
        ["a1-0", "a1-1"],
        ["a2-0", "a2-1"],
        ["a3-0", "a3-1"],
    ]
    assert (
        batches[1].episodes[:4]
        == draft_of(group_of("a1", (0, 1), version=1), group_of("b1", (0, 1), version=1)).episodes
    )
    assert batches[1].group_ids == ("a1", "b1")
    assert chain.metrics()["operator/replay/replayed"] == 8.0


def test_two_replays_never_add_one_group_to_one_batch() -> None:
    chain = make_chain([{"use": "replay", "ratio": 1.0, "max_uses": 9}] * 2)
    for version in range(4):
        composed = chain.compose(draft_of(group_of(f"g{version}", (0.0, 1.0), version=version)), version=version)
        keys = [m.episode_id for m in composed.episodes]
        assert len(set(keys)) == len(keys)
        assert len(set(composed.replayed)) == len(composed.replayed) <= 4


def test_what_is_offered_for_a_batch_is_within_the_staleness_bound() -> None:
    offered: list[list[int]] = []
    made = watched(Scripted(compose=lambda batch: offered.append([past.staleness for past in batch.past]) or ()))
    assert CONTEXT.max_staleness == 2
    for version in range(5):
        made.chain.compose(draft_of(group_of(f"g{version}", (0.0, 1.0), version=version)), version=version)
    assert offered == [[], [1], [2, 1], [2, 1], [2, 1]]


def test_replay_takes_shaping_along_and_no_attempt_twice() -> None:
    chain = make_chain([{"use": "replay", "ratio": 1.0, "max_uses": 9}])
    shaped = tuple(msgspec.structs.replace(m, shaping=0.25) for m in group_of("a", (0.0, 1.0)).members)
    first = replace(draft_of(group_of("a", (0.0, 1.0))), episodes=shaped)
    chain.compose(first, version=0)
    again = chain.compose(draft_of(group_of("b", (0.0, 1.0), version=1)), version=1)
    assert [m.shaping for m in again.episodes] == [0.0, 0.0, 0.25, 0.25]
    # group a came back to the buffer (a rollback): it must not be there twice
    rolled_back = chain.compose(draft_of(group_of("a", (0.0, 1.0))), version=1)
    assert "a-0" not in [key for key, _ in rolled_back.replayed]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 3), st.data())
def test_replay_keeps_its_bounds_and_survives_a_restart(lags: list[int], max_uses: int, data: st.DataObject) -> None:
    operators: list[Mapping[str, Any]] = [{"use": "replay", "ratio": 0.5, "max_uses": max_uses}]
    chain, logged = make_chain(operators), list[TrainingBatch]()
    uses: Counter[str] = Counter()
    for version, lag in enumerate(lags):
        draft = draft_of(*(group_of(f"{part}{version}", (0.0, 1.0), version=max(0, version - lag)) for part in "ab"))
        if data.draw(st.booleans()):  # control was killed: the pool comes back from the logged batches
            chain = make_chain(operators)
            chain.recall([batch for batch in logged if batch.step > version - 2])
        composed = chain.compose(draft, version=version)
        assert composed.episodes[: len(draft.episodes)] == draft.episodes
        keys = [(m.episode_id, m.attempt) for m in composed.episodes]
        assert len(set(keys)) == len(keys)
        assert tuple(keys[len(draft.episodes) :]) == composed.replayed
        assert len(composed.replayed) <= 0.5 * len(draft.episodes)
        for m in composed.episodes:
            assert m.min_version is not None
            assert version - m.min_version <= 2
        uses.update(episode_id for episode_id, _ in composed.replayed)
        logged.append(
            TrainingBatch(f"b{version}", "solver", version + 1, composed.episodes, 0, replayed=composed.replayed)
        )
    assert max(uses.values(), default=0) <= max_uses


def test_restarts_do_not_change_what_is_replayed() -> None:
    operators: list[Mapping[str, Any]] = [{"use": "replay", "ratio": 0.5, "max_uses": 1}]

    def run(*, restarts: bool, erases: bool = False) -> list[tuple[tuple[str, int], ...]]:
        chain, logged = make_chain(operators), list[TrainingBatch]()
        erased = frozenset[tuple[str, int]]()
        for version in range(6):
            if erases and version == 2:  # "a1" was trained, and would be replayed next
                erased = frozenset({("a1-0", 1), ("a1-1", 1)})
                chain.forget("a1")
            if restarts:
                chain = make_chain(operators)
                chain.recall([batch for batch in logged if batch.step > version - 2], erased=erased)
            parts = (group_of(f"{part}{version}", (0.0, 1.0), version=version) for part in "ab")
            done = chain.compose(draft_of(*parts), version=version)
            logged.append(TrainingBatch("b", "solver", version + 1, done.episodes, 0, replayed=done.replayed))
        return [batch.replayed for batch in logged]

    calm = run(restarts=False)
    assert run(restarts=True) == calm and ("a1-0", 1) in calm[2]
    without = run(restarts=False, erases=True)
    assert run(restarts=True, erases=True) == without
    assert not any(key[0].startswith("a1-") for keys in without for key in keys)
