"""Cases that went wrong elsewhere, "Dataflow": each test is named after the report, which says what is right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.buffer import PolicyBuffer
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.groups import GroupBook, ReleaseReason, SlotState
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.records import BeginRecord, EpisodeRecord, GroupSpec


def train(source: str, count: int) -> list[Task]:
    return [Task(source, str(i)) for i in range(count)]


def spec(group_id: str, task: Task, *, size: int = 2) -> GroupSpec:
    return GroupSpec(group_id, task, Split.TRAIN, size=size, policies=("solver",), floor_version={"solver": 0})


def new_book(max_attempts: int = 2) -> GroupBook:
    return GroupBook(max_attempts=max_attempts, group_floor=None, group_deadline_s=60.0, clock=lambda: 0.0)


def test_resume_exactly_at_the_end_of_an_epoch_runs_the_next_one_verl_5725():
    dealer = TaskDealer(0, epochs=3)
    dealer.add_source("a", Split.TRAIN, train("a", 5))
    first = [dealer.next_task() for _ in range(5)]
    resumed = TaskDealer(0, epochs=3)
    resumed.add_source("a", Split.TRAIN, train("a", 5))
    resumed.load_state_dict(dealer.state_dict())
    assert not resumed.is_exhausted
    second = [resumed.next_task() for _ in range(5)]
    assert None not in second and Counter(map(str, second)) == Counter(map(str, first)) and second != first
    assert resumed.places()["a"].epoch == 1
    third = [resumed.next_task() for _ in range(6)]
    assert third[-1] is None and resumed.is_exhausted, "and the last epoch is the last one"


def test_the_cursor_advances_past_a_group_that_was_dropped_trl_7274():
    """Its source is dealt again, with another task; nothing comes twice and nothing is skipped, also over a restart."""
    dealer = TaskDealer(0, ratios={"a": 0.5, "b": 0.5})
    for source in ("a", "b"):
        dealer.add_source(source, Split.TRAIN, train(source, 4))
    dealt: list[Task] = []
    for number in range(8):
        task = dealer.next_task()
        assert task is not None
        dealt.append(task)
        if number == 2:
            dealer.refund(task.source)  # its group was dropped as stale
            state = dealer.state_dict()
            dealer = TaskDealer(0, ratios={"a": 0.5, "b": 0.5})
            dealer.load_state_dict(state)
            for source in ("a", "b"):
                dealer.add_source(source, Split.TRAIN, train(source, 4))
        else:
            dealer.counted(task.source)
    for source in ("a", "b"):
        own = [task.id for task in dealt if task.source == source]
        assert len(set(own[:4])) == len(own[:4])
    assert abs(sum(task.source == "a" for task in dealt) - 4) <= 1


def test_a_rollout_that_fails_before_any_turn_makes_no_row_and_no_zero_nemo_rl_3470():
    """As agentcore-rl-toolkit#122: the slot reopens, and what is given up is no member of the group."""
    book = new_book(max_attempts=2)
    episode_ids = book.open_group(spec("g", Task("a", "1")))
    ticket = book.take("g")
    book.begin(ticket.episode_id, ticket.attempt)
    failed = EpisodeRecord(ticket.episode_id, 1, "g", Outcome.INFRASTRUCTURE, "digest", rewards={"solver": 0.0})
    assert book.finish(ticket.episode_id, 1, failed) is SlotState.FREE
    again = book.take("g")
    assert (again.episode_id, again.attempt) == (ticket.episode_id, 2)
    book.begin(again.episode_id, 2)
    book.release(again.episode_id, 2, ReleaseReason.ABORTED)
    other = book.take("g")
    book.begin(other.episode_id, 1)
    book.finish(other.episode_id, 1, EpisodeRecord(other.episode_id, 1, "g", Outcome.AGENT, "d", {"solver": 1.0}))
    (closed,) = book.closed()
    assert [record.episode_id for record in closed.finished] == [episode_ids[1]]
    assert [missing.episode_id for missing in closed.given_up] == [episode_ids[0]]


def test_what_was_generated_and_not_trained_is_restored_openrlhf_1322(tmp_path: Path, make: Any):
    """Finished groups come back to the buffer; groups in flight come back to the book with what had finished."""
    meta = RunMeta("run", seed=0)
    ledger = Ledger.open(tmp_path / "ledger.sqlite", run=meta)
    book = new_book()
    for group_id in ("whole", "half"):
        group = spec(group_id, Task("a", group_id))
        ledger.record_group(group, episode_ids=book.open_group(group))
        for _ in range(2 if group_id == "whole" else 1):
            ticket = book.take(group_id)
            book.begin(ticket.episode_id, 1)
            ledger.record_begin(BeginRecord(ticket.episode_id, 1, group_id=group_id))
            samples = make.samples(ticket.episode_id, group_id=group_id)
            record = EpisodeRecord(
                ticket.episode_id, 1, group_id, Outcome.AGENT, "digest", {"solver": 1.0}, samples=(samples,)
            )
            ledger.record_finish(record)
            book.finish(ticket.episode_id, 1, record)
    ledger.close_group("whole").result()
    ledger.close()
    with Ledger.open(tmp_path / "ledger.sqlite", run=meta) as reopened:
        buffer = PolicyBuffer("solver", groups_per_step=1, max_staleness=1, drop_zero_variance=False)
        for ready in reopened.unconsumed("solver"):
            buffer.add(ready)
        draft = buffer.take(0)
        (open_group,) = reopened.open_groups()
    assert draft is not None and draft.group_ids == ("whole",) and len(draft.episodes) == 2
    assert open_group.spec.id == "half"
    assert [slot.record is not None for slot in open_group.slots] == [True, False]
