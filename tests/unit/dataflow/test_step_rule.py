"""When a step is taken although older groups run, and the barrier between policies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from wingbeat.core.config.dataflow import DataflowConfig
from wingbeat.dataflow.barrier import Barrier
from wingbeat.dataflow.staleness import StalenessGate
from wingbeat.dataflow.step_rule import StepRule

GATE = StalenessGate(2, 1)
LATE = {"in_flight": [0, 0], "buffered": [1]}
"""At version 1, training the young group would make one of the two running ones late."""


def test_wait_holds_a_batch_back_for_its_time():
    rule = StepRule(GATE, "wait", 5.0)
    assert rule.waits(1, **LATE)
    assert not rule.may_step(1, **LATE, waited_s=4.9)
    assert rule.may_step(1, **LATE, waited_s=5.0)


def test_wait_without_limit_never_steps_past_an_older_group():
    rule = StepRule(GATE, "wait", math.inf)
    assert rule.waits(1, **LATE) and not rule.may_step(1, **LATE, waited_s=1e12)
    assert rule.may_step(1, in_flight=[0], buffered=[1], waited_s=0.0)


@pytest.mark.parametrize("straggler", ["mask", "drop"])
def test_mask_and_drop_never_wait(straggler):
    rule = StepRule(GATE, straggler, 5.0)
    assert not rule.waits(1, **LATE)
    assert rule.may_step(1, **LATE, waited_s=0.0)


@pytest.mark.parametrize("straggler", ["wait", "mask", "drop"])
def test_a_step_needs_a_whole_batch(straggler):
    rule = StepRule(StalenessGate(1, 2), straggler, 0.0)
    assert not rule.waits(0, in_flight=[0], buffered=[0])
    assert not rule.may_step(0, in_flight=[0], buffered=[0], waited_s=1e12)


def test_the_rule_of_a_configuration():
    rule = StepRule.of(DataflowConfig(max_staleness=3, groups_per_step=4, straggler_wait_s=7))
    assert rule == StepRule(StalenessGate(3, 4), "wait", 7.0)
    assert StepRule.of(DataflowConfig(straggler="mask")).straggler == "mask"
    assert StepRule.of(DataflowConfig(straggler_wait_s="unlimited")).straggler_wait_s == math.inf


@pytest.mark.parametrize("straggler", ["mask", "drop"])
def test_a_waiting_time_of_a_rule_that_never_waits_is_refused(straggler):
    with pytest.raises(ValidationError, match=f'"{straggler}" never waits: leave it out'):
        DataflowConfig(straggler=straggler, straggler_wait_s=7)
    DataflowConfig.model_validate(DataflowConfig(straggler=straggler).model_dump())  # a resolved configuration


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 9), st.integers(0, 3), st.integers(1, 3))
def test_as_many_groups_as_possible_are_kept_in_time(floors, version, bound, per_step):
    gate = StalenessGate(bound, per_step)
    kept = gate.in_time(version, floors)
    assert gate.is_feasible(version, kept)
    if gate.is_feasible(version, floors):
        assert kept == sorted(floors)
    best = max(
        chosen.bit_count()
        for chosen in range(2 ** len(floors))
        if gate.is_feasible(version, [f for i, f in enumerate(floors) if chosen >> i & 1])
    )
    assert len(kept) == best


def test_groups_that_must_be_late_do_not_close_admission():
    """Both run since version 0 and one of them can still train in time at 2; without a way out nothing would start."""
    assert StalenessGate(2, 1).may_admit([0, 0], version=2, floor=2)
    assert not StalenessGate(2, 1).may_admit([0, 1, 2], version=2, floor=2)


@dataclass
class Policy:
    name: str
    version: int
    complete: bool = False
    lacks_groups: bool = False


def test_barrier_holds_back_whoever_is_ahead():
    policies = [Policy("solver", 3), Policy("verifier", 2), Policy("judge", 0, complete=True)]
    barrier = Barrier(lambda: policies, is_set=True)
    assert barrier.waits_for("solver", 3) == ("verifier",)
    assert not barrier.may_pass("solver", 3) and barrier.may_pass("verifier", 2)
    policies[1].version = 3
    assert barrier.may_pass("solver", 3) and barrier.may_pass("verifier", 3)
    policies[1] = Policy("verifier", 2, complete=True)  # halted: waited for no more
    assert barrier.may_pass("solver", 9)


def test_barrier_opens_admission_where_others_lack_groups():
    policies = [Policy("solver", 3), Policy("verifier", 2), Policy("judge", 3, lacks_groups=True)]
    barrier = Barrier(lambda: policies, is_set=True)
    assert not barrier.starves("solver", 3), "only the verifier is waited for"
    policies[1].lacks_groups = True
    assert barrier.starves("solver", 3) and not barrier.starves("verifier", 2)


def test_without_a_barrier_every_policy_has_its_own_clock():
    barrier = Barrier(lambda: [Policy("solver", 7), Policy("verifier", 0)], is_set=False)
    assert barrier.may_pass("solver", 7)


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=60))
def test_no_two_policies_are_ever_more_than_a_version_apart(count, moves):
    policies = [Policy(f"p{i}", 0) for i in range(count)]
    barrier = Barrier(lambda: policies, is_set=True)
    for move in moves:
        policy = policies[move % count]
        policy.version += barrier.may_pass(policy.name, policy.version)
        versions = [p.version for p in policies]
        assert max(versions) - min(versions) <= 1
        assert any(barrier.may_pass(p.name, p.version) for p in policies)
