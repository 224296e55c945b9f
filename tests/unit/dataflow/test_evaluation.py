"""Evaluations: statistics by hand, and failures that are reported instead of scored."""

from __future__ import annotations

import math

import pytest

from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.evaluation import Evaluation, EvaluationSpec, paired_difference

SPEC = EvaluationSpec("e1", "solver", 4, samples_per_task=2, team=("judge",))
TASKS = [Task("src", "t0"), Task("src", "t1")]


def run(evaluation, book, make, rewards):
    """Give the episodes of each task these rewards in turn; None fails every attempt."""
    while (spec := evaluation.next_group()) is not None:
        book.open_group(spec)
        for reward in rewards[spec.task.id]:
            finished = False
            while not finished and (free := [g for g in book.groups_with_free_slots() if g.id == spec.id]):
                ticket = book.take(free[0].id)
                book.begin(ticket.episode_id, ticket.attempt)
                outcome = Outcome.AGENT if reward is not None else Outcome.ENVIRONMENT
                record = make.record(ticket.episode_id, ticket.attempt, outcome=outcome, reward=reward or 0.0)
                book.finish(ticket.episode_id, ticket.attempt, record)
                finished = reward is not None
        for closed in book.closed():
            evaluation.collect(closed)


def test_mean_and_stderr_are_over_task_means(open_book, make):
    evaluation = Evaluation(SPEC, TASKS)
    run(evaluation, open_book(), make, {"t0": (1.0, 0.0), "t1": (1.0, 1.0)})
    result = evaluation.result()
    assert result.done and (result.num_expected, result.num_finished, result.num_missing) == (4, 4, 0)
    # task means 0.5 and 1: mean 0.75, sd sqrt(2 * 0.25^2 / 1), stderr sd / sqrt(2) = 0.25
    assert result.mean == 0.75
    assert math.isclose(result.stderr, 0.25)
    assert result.rewards == {"t0": (1.0, 0.0), "t1": (1.0, 1.0)}


def test_failures_are_missing_and_never_zero(open_book, make):
    evaluation = Evaluation(SPEC, TASKS)
    run(evaluation, open_book(max_attempts=2), make, {"t0": (1.0, 1.0), "t1": (None, None)})
    result = evaluation.result()
    assert result.done and result.mean == 1.0 and result.stderr is None
    assert dict(result.missing) == {"failed": 2} and result.num_finished == 2


def test_groups_are_pinned_eval_groups_of_the_sample_count():
    evaluation = Evaluation(SPEC, TASKS)
    spec = evaluation.next_group()
    assert (spec.id, spec.size, spec.split) == ("e1-0", 2, Split.EVAL)
    assert (spec.policies, spec.evaluation_id) == (("solver@4", "judge"), "e1")
    assert not evaluation.done and evaluation.result().mean is None
    evaluation.next_group()
    assert evaluation.next_group() is None and not evaluation.done


def test_tasks_of_several_sources_are_told_apart(open_book, make):
    evaluation = Evaluation(EvaluationSpec("e", "solver", 0), [Task("a", "x"), Task("b", "x")])
    run(evaluation, open_book(), make, {"x": (1.0,)})
    assert set(evaluation.result().rewards) == {"a/x", "b/x"}


def test_reward_for_another_policy_is_missing(open_book, make):
    evaluation = Evaluation(EvaluationSpec("e", "other", 0), TASKS[:1])
    run(evaluation, open_book(), make, {"t0": (1.0,)})
    assert dict(evaluation.result().missing) == {"no reward for policy other": 1}


def test_foreign_groups_and_empty_evaluations_are_refused(open_book, make):
    book = open_book()
    evaluation = Evaluation(SPEC, TASKS)
    book.open_group(make.spec(size=1, split=Split.EVAL))
    book.take("g")
    book.begin("g-0", 1)
    book.finish("g-0", 1, make.record())
    with pytest.raises(ValueError, match="not pending"):
        evaluation.collect(book.closed()[0])
    with pytest.raises(ValueError, match="expected tasks"):
        Evaluation(SPEC, [])
    with pytest.raises(ValueError, match="come once"):
        Evaluation(SPEC, [TASKS[0], TASKS[0]])


def test_sources_with_slashes_and_ids_with_slashes_are_told_apart(open_book, make):
    evaluation = Evaluation(EvaluationSpec("e", "solver", 0), [Task("a", "b/x"), Task("a/b", "x")])
    run(evaluation, open_book(), make, {"b/x": (1.0,), "x": (0.0,)})
    assert evaluation.result().rewards == {"a/b/x": (1.0,), "a%2Fb/x": (0.0,)}


@pytest.mark.parametrize("is_before", [True, False])
def test_pairs_are_found_although_a_source_came_or_went(open_book, make, is_before):
    rewards = {"t0": (0.25,), "t1": (0.5,), "more": (1.0,)}
    alone = Evaluation(EvaluationSpec("e", "solver", 0), TASKS)
    beside = Evaluation(EvaluationSpec("f", "solver", 0), [*TASKS, Task("new", "more"), Task("new", "t0")])
    run(alone, open_book(), make, rewards)
    run(beside, open_book(), make, {**rewards, "t0": (0.75,)})
    pair = (alone.result(), beside.result())
    found = paired_difference(*(pair if is_before else pair[::-1]))
    assert found is not None and found.num_tasks == 2
    assert found.mean == (0.25 if is_before else -0.25)


def test_what_was_not_handed_out_of_a_removed_source_is_missing(open_book, make):
    evaluation = Evaluation(EvaluationSpec("e", "solver", 0, samples_per_task=2), [*TASKS, Task("other", "x")])
    first = evaluation.next_group()
    evaluation.withdraw("src")
    evaluation.withdraw("src")
    assert dict(evaluation.result().missing) == {"source src was removed": 2} and first.task.id == "t0"
    assert evaluation.next_group().task.source == "other" and not evaluation.done
