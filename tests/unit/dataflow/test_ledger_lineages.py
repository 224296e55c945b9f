"""Rollbacks in the ledger: what is abandoned comes back, what survives does not, and no history trains twice."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.core.errors import ConflictError
from wingbeat.core.samples import TrainingBatch
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import SampleState
from wingbeat.dataflow.lineages import Ancestry, Lineage


def batch(make, *episodes: str, step: int, lineage: int = 0, replayed: tuple[str, ...] = ()) -> TrainingBatch:
    members = tuple(make.samples(e, group_id=e.partition("-")[0]) for e in (*episodes, *replayed))
    return TrainingBatch(
        f"b{lineage}.{step}", "solver", step, members, 0, lineage=lineage, replayed=tuple((e, 1) for e in replayed)
    )


@pytest.fixture
def grown(open_ledger, make) -> Ledger:
    """Four closed groups of one, sampled by versions 0 to 3; three are trained in steps 1 to 3."""
    ledger = open_ledger()
    for i in range(4):
        ledger.record_group(make.spec(f"g{i}", size=1, floor=i), episode_ids=[f"g{i}-0"])
        ledger.record_finish(make.record(f"g{i}-0", group_id=f"g{i}", versions=(i, i)))
        ledger.close_group(f"g{i}").result()
    for step in (1, 2, 3):
        ledger.log_batch(batch(make, f"g{step - 1}-0", step=step), group_ids=[f"g{step - 1}"])
        ledger.mark_trained("solver", step=step, metrics={}, advantages={}).result()
        ledger.record_checkpoint("solver", step=step, path=f"/c/{step}").result()
    return ledger


def waiting(ledger: Ledger) -> dict[str, tuple[int, list[int]]]:
    """Episode to its group's floor and its versions, of what a buffer would be filled with."""
    return {
        member.episode_id: (group.floor_version, member.samples[0].versions_T[1:].tolist())
        for group in ledger.unconsumed("solver")
        for member in group.members
    }


def test_lost_steps_give_their_samples_back(grown, make):
    lineage = grown.begin_lineage("solver", base_lineage=0, base_step=1, reason="replay is off").result()
    assert (lineage.lineage, lineage.base_lineage, lineage.base_step) == (1, 0, 1)
    assert waiting(grown) == {"g1-0": (1, [1, 1]), "g2-0": (1, [1, 1]), "g3-0": (1, [1, 1])}
    assert [b.step for b in grown.batches_after("solver", 0)] == [1]
    assert grown.summary().trained_step == {"solver": 1} and grown.lineages() == (lineage,)
    assert [c.step for c in grown.checkpoints("solver")] == [1]
    assert grown.verify() == []


def test_the_next_batch_is_of_the_new_lineage(grown, make):
    grown.begin_lineage("solver", base_lineage=0, base_step=1, reason="lost").result()
    with pytest.raises(ConflictError, match="expected a batch of lineage 1, got lineage 0"):
        grown.log_batch(batch(make, "g3-0", step=4), group_ids=[]).result()
    with pytest.raises(ConflictError, match="expected a batch of step 2, got step 4"):
        grown.log_batch(batch(make, "g3-0", step=4, lineage=1), group_ids=[]).result()
    assert grown.log_batch(batch(make, "g3-0", "g1-0", step=2, lineage=1), group_ids=[]).result()
    grown.mark_trained("solver", step=2, metrics={}, advantages={}).result()
    assert [(b.lineage, b.step) for b in grown.batches_after("solver", 0)] == [(0, 1), (1, 2)]
    assert grown.verify() == []


def test_a_logged_step_that_was_not_taken_is_given_up_too(grown, make):
    grown.log_batch(batch(make, "g3-0", step=4), group_ids=[]).result()
    grown.begin_lineage("solver", base_lineage=0, base_step=3, reason="inexact").result()
    assert set(waiting(grown)) == {"g3-0"} and grown.verify() == []


def test_a_checkpoint_with_abandoned_steps_takes_their_samples_back(grown, make):
    grown.begin_lineage("solver", base_lineage=0, base_step=1, reason="lost").result()
    grown.log_batch(batch(make, "g2-0", step=2, lineage=1), group_ids=[])
    grown.mark_trained("solver", step=2, metrics={}, advantages={}).result()
    grown.begin_lineage("solver", base_lineage=0, base_step=2, reason="a checkpoint of old").result()
    assert set(waiting(grown)) == {"g2-0", "g3-0"}  # 0 and 1 are in steps 1 and 2 of lineage 0
    assert [(b.lineage, b.step) for b in grown.batches_after("solver", 0)] == [(0, 1), (0, 2)]
    assert grown.summary().trained_step == {"solver": 2} and grown.verify() == []


def test_a_step_that_control_never_heard_of_counts_as_trained_where_the_trainer_holds_it(grown, make):
    grown.log_batch(batch(make, "g3-0", step=4), group_ids=[]).result()
    grown.begin_lineage("solver", base_lineage=0, base_step=4, reason="inexact").result()
    assert waiting(grown) == {} and grown.summary().trained_step == {"solver": 4} and grown.verify() == []


def test_a_base_beyond_the_log_is_the_trainers_step(grown):
    grown.begin_lineage("solver", base_lineage=0, base_step=9, reason="batches are missing").result()
    assert grown.summary().trained_step == {"solver": 9} and grown.verify() == []
    with pytest.raises(ConflictError, match="no lineage 7"):
        grown.begin_lineage("solver", base_lineage=7, base_step=1, reason="?").result()


def test_members_of_open_groups_are_rebased_and_floors_lowered(grown, make):
    grown.record_group(make.spec("h", floor=3), episode_ids=["h-0", "h-1"])
    grown.record_finish(make.record("h-0", group_id="h", versions=(0, 3))).result()
    grown.begin_lineage("solver", base_lineage=0, base_step=1, reason="lost").result()
    grown.record_finish(make.record("h-1", group_id="h", versions=(1, 2))).result()  # of the new lineage
    (opened,) = grown.open_groups()
    assert opened.spec.floor_version == {"solver": 1}
    versions = [slot.record.samples[0].samples[0].versions_T[1:].tolist() for slot in opened.slots]
    assert versions == [[0, 1], [1, 2]]
    assert grown.episode("h-0")[0].record.samples[0].samples[0].versions_T[1:].tolist() == [0, 3]


def test_replayed_members_of_an_abandoned_batch_stay_trained(grown, make):
    grown.log_batch(batch(make, "g3-0", step=4, replayed=("g0-0",)), group_ids=[])
    grown.mark_trained("solver", step=4, metrics={}, advantages={}).result()
    grown.begin_lineage("solver", base_lineage=0, base_step=3, reason="lost").result()
    assert set(waiting(grown)) == {"g3-0"}
    assert grown.episode("g0-0")[0].samples[0].state is SampleState.TRAINED and grown.verify() == []


def test_versions_count_as_the_last_common_one():
    ancestry = Ancestry.of([Lineage("p", 1, 0, 4, ""), Lineage("p", 2, 1, 6, ""), Lineage("p", 3, 0, 3, "")])
    assert ancestry.current == 3
    assert [ancestry.normal(3, step) for step in (3, 4)] == [(0, 3), (3, 4)]
    assert [ancestry.effective(v, lineage=0) for v in (2, 3, 9)] == [2, 3, 3]
    assert [ancestry.effective(v, lineage=2) for v in (2, 5, 7)] == [2, 3, 3]
    assert ancestry.effective(9, lineage=3) == 9
    assert [ancestry.ceiling(lineage=lineage) for lineage in range(4)] == [3, 3, 3, None]
    assert ancestry.contains(0, 3) and ancestry.contains(1, 2) and ancestry.contains(3, 8)
    assert not ancestry.contains(0, 4) and not ancestry.contains(1, 5) and not ancestry.contains(9, 1)
    resumed = Ancestry.of([Lineage("p", 1, 0, 4, ""), Lineage("p", 2, 0, 8, "")])  # from a checkpoint of lineage 0
    assert [resumed.effective(6, lineage=x) for x in (0, 1, 2)] == [6, 4, 6]
    assert Ancestry().effective(7, lineage=0) == 7 and Ancestry().contains(0, 7)


# --- histories against a model --------------------------------------------------------------------------


@dataclass
class Model:
    """What a trainer's weights hold, as a list of steps per (lineage, step) that ever was."""

    path: list[tuple[int, set[str]]] = field(default_factory=list)
    """(lineage, own members) of the surviving steps, trained or logged."""
    ever: dict[tuple[int, int], list[tuple[int, set[str]]]] = field(default_factory=lambda: {(0, 0): []})
    """(lineage, step) to the whole path up to it."""
    lineage: int = 0
    num_trained: int = 0

    @property
    def step(self) -> int:
        return len(self.path)

    def used(self) -> set[str]:
        return set().union(*(members for _, members in self.path))


OPERATIONS = st.one_of(
    st.tuples(st.just("log"), st.integers(1, 3)),
    st.tuples(st.just("train"), st.just(0)),
    st.tuples(st.just("crash"), st.just(0)),
    st.tuples(st.just("rollback"), st.integers(0, 1000)),
)
NUM_EPISODES = 12


def check_against(ledger: Ledger, model: Model) -> None:
    assert ledger.verify() == []
    used = model.used()
    assert set(waiting(ledger)) == {f"g{i}-0" for i in range(NUM_EPISODES)} - used
    trained = set().union(*(members for _, members in model.path[: model.num_trained]))
    states = {f"g{i}-0": ledger.episode(f"g{i}-0")[0].samples[0].state for i in range(NUM_EPISODES)}
    for episode_id, state in states.items():
        expected = SampleState.TRAINED if episode_id in trained else SampleState.BATCHED
        assert state is (expected if episode_id in used else SampleState.FINISHED)
    assert ledger.summary().trained_step.get("solver", 0) == model.num_trained
    batches = [(b.lineage, b.step, {e.episode_id for e in b.episodes}) for b in ledger.batches_after("solver", 0)]
    assert batches == [(lineage, i + 1, members) for i, (lineage, members) in enumerate(model.path)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, min_size=5, max_size=25))
def test_no_history_trains_twice_or_loses_a_sample(make, operations):
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder) / "ledger.sqlite", Model()
        ledger = Ledger.open(path, run=make.run)
        for i in range(NUM_EPISODES):
            ledger.record_group(make.spec(f"g{i}", size=1), episode_ids=[f"g{i}-0"])
            ledger.record_finish(make.record(f"g{i}-0", group_id=f"g{i}"))
            ledger.close_group(f"g{i}").result()
        for operation, number in operations:
            match operation:
                case "log" if model.step == model.num_trained:
                    members = sorted(waiting(ledger))[:number]
                    if members:
                        step = model.step + 1
                        ledger.log_batch(batch(make, *members, step=step, lineage=model.lineage), group_ids=[]).result()
                        model.path.append((model.lineage, set(members)))
                        model.ever[model.lineage, step] = list(model.path)
                case "train" if model.step > model.num_trained:
                    ledger.mark_trained("solver", step=model.step, metrics={}, advantages={}).result()
                    model.num_trained = model.step
                case "crash":
                    ledger.close()
                    ledger = Ledger.open(path, run=make.run)
                case "rollback":  # to any step that any trainer ever stood at
                    lineage, step = sorted(model.ever)[number % len(model.ever)]
                    ledger.begin_lineage("solver", base_lineage=lineage, base_step=step, reason="test").result()
                    model.path = list(model.ever[lineage, step])
                    model.lineage, model.num_trained = model.lineage + 1, step
                    model.ever[model.lineage, step] = list(model.path)
                case _:
                    pass
            check_against(ledger, model)
        ledger.close()
