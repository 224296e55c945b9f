"""The staleness rules attacked by whole simulated runs (simulated_run.py), and what they do to long episodes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import Policy, Setting, World, exponential

from wingbeat.dataflow.records import DropReason
from wingbeat.dataflow.staleness import StalenessGate
from wingbeat.dataflow.step_rule import StepRule

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

WAIT, MASK, DROP = ("wait", math.inf), ("mask", 60.0), ("drop", 60.0)


def heavy_tailed(rng: random.Random) -> float:
    return rng.paretovariate(1.1)


def short_or_long(rng: random.Random) -> float:
    return rng.choice([0.1, 20.0])


GATES = st.builds(StalenessGate, st.integers(0, 3), st.integers(1, 3))
TROUBLE = {
    "seed": st.integers(0, 2**32),
    "group_size": st.integers(1, 3),
    "num_agents": st.integers(1, 12),
    "step_s": st.sampled_from([0.01, 0.3, 3.0]),
    "serve_lag_s": st.sampled_from([0.0, 0.1, 2.0]),
    "durations": st.sampled_from(
        [exponential, lambda rng: rng.paretovariate(1.1), lambda rng: rng.choice([0.1, 20.0])]
    ),
    "p_death": st.sampled_from([0.0, 0.1, 0.4]),
    "p_filter": st.sampled_from([0.0, 0.2, 0.6]),
    "restart_every_s": st.sampled_from([math.inf, 50.0]),
    "group_deadline_s": st.sampled_from([math.inf, 10.0]),
}


@settings(max_examples=30, deadline=None)
@given(st.builds(Setting, st.builds(StepRule, GATES, st.just("wait"), st.just(math.inf)), **TROUBLE), st.data())
def test_waiting_without_limit_loses_nothing_and_never_exceeds_the_bound(setting, data):
    policies = data.draw(st.sampled_from([("solver",), ("solver", "verifier"), ("a", "b", "c")]))
    world = World(replace(setting, policies=policies, p_called=data.draw(st.sampled_from([0.5, 1.0]))), steps=12)
    world.run(world.check_feasible)
    world.check_tokens()
    for policy in world.policies.values():
        assert policy.staleness_max <= setting.rule.gate.max_staleness
        assert not any(policy.masked.values())
        assert set(policy.dropped.values()) <= {"filtered", DropReason.ZERO_VARIANCE}


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([("wait", 0.0), ("wait", 2.0), MASK, DROP]), GATES, st.fixed_dictionaries(TROUBLE))
def test_no_rule_trains_an_over_age_token_loses_count_or_locks_up(mode, gate, trouble):
    world = World(Setting(StepRule(gate, *mode), policies=("solver", "verifier"), p_called=0.7, **trouble), steps=12)
    world.run()
    world.check_tokens()
    for policy in world.policies.values():
        assert policy.staleness_max <= gate.max_staleness
        if mode == DROP:
            assert not any(policy.masked.values())


@settings(max_examples=15, deadline=None)
@given(GATES, st.integers(0, 2**32), st.integers(1, 12))
def test_policies_behind_a_barrier_step_together_and_lose_nothing(gate, seed, num_agents):
    rule = StepRule(gate, *WAIT)
    world = World(Setting(rule, seed, ("a", "b"), num_agents=num_agents, barrier=True, p_death=0.1), steps=12)

    def together() -> None:
        world.check_feasible()
        versions = [policy.version for policy in world.policies.values()]
        assert max(versions) - min(versions) <= 1
        assert all(p.version == min(versions) for p in world.policies.values() if p.is_training)

    world.run(together)
    world.check_tokens()


@settings(max_examples=15, deadline=None)
@given(GATES, st.integers(0, 2**32), st.floats(0.1, 0.9), st.sampled_from([WAIT, MASK, DROP]))
def test_a_barrier_locks_nobody_up_however_unequal_the_yields(gate, seed, p_called, mode):
    setting = Setting(StepRule(gate, *mode), seed, ("a", "b"), barrier=True, p_called=p_called, p_filter=0.4)
    world = World(setting, steps=8)
    world.run()
    world.check_tokens()
    assert all(policy.staleness_max <= gate.max_staleness for policy in world.policies.values())


class ObviousGate(StalenessGate):
    """Bounds the number of groups, and steps not past the oldest one's bound."""

    def may_admit(self, floors, *, version, floor):
        return len(floors) < self.capacity and version <= floor + self.max_staleness

    def may_step(self, version, *, in_flight, buffered):
        in_time = all(version <= floor + self.max_staleness for floor in [*in_flight, *buffered])
        return in_time and len(buffered) >= self.groups_per_step


def test_the_simulation_tells_the_obvious_rules_from_ours():
    world = World(Setting(StepRule(ObviousGate(2, 1), *WAIT), seed=0, num_agents=6), steps=30)
    with pytest.raises(AssertionError, match="locked up"):
        world.run()


# --- long episodes --------------------------------------------------------------------------------

SHORT_S, STEP_S = 0.5, 1.0
LONG_STALENESS = 2
LONG_S = 3 * LONG_STALENESS * STEP_S
"""As long as 3 x max_staleness steps, where steps do not wait."""


def one_in_ten_is_long(rng: random.Random) -> float:
    return LONG_S if rng.random() < 0.1 else SHORT_S * rng.uniform(0.5, 1.5)


def long_run(mode: tuple[str, float]) -> tuple[World, Policy]:
    setting = Setting(
        StepRule(StalenessGate(LONG_STALENESS, 4), *mode),
        seed=3,
        group_size=2,
        num_agents=200,
        durations=one_in_ten_is_long,
        tokens_per_s=10.0,
        step_s=STEP_S,
    )
    world = World(setting, steps=100)
    world.run()
    return world, world.policies["solver"]


def long_shares(world: World, policy: Policy) -> tuple[float, float]:
    """Share of the long episodes in the tokens sampled, and in those trained."""
    world.drain()
    world.check_tokens()
    sampled = world.sampled["solver"]
    long = {episode_id for episode_id, count in sampled.items() if count == LONG_S * 10}
    assert 0.08 < len(long) / len(sampled) < 0.12
    trained = policy.trained
    return (
        sum(sampled[e] for e in long) / sum(sampled.values()),
        sum(trained[e] for e in long) / sum(trained.values()),
    )


def test_long_episodes_keep_their_share_where_steps_wait():
    world, policy = long_run(WAIT)
    sampled, trained = long_shares(world, policy)
    assert trained == pytest.approx(sampled, rel=0.05)
    assert sum(policy.masked.values()) == 0 and not policy.dropped and lost_of_the_longest(policy) == 0


def lost_of_the_longest(policy: Policy) -> float:
    """Share of the tokens of the tenth decile that did not train."""
    metrics = policy.buffer.token_metrics()
    trained = metrics["tokens/trained/decile_10"]
    kinds = ("masked", "discarded/stale")
    return 1 - trained / (trained + sum(metrics.get(f"tokens/{kind}/decile_10", 0.0) for kind in kinds))


def test_dropping_takes_the_share_of_long_episodes_and_the_deciles_show_it():
    world, policy = long_run(DROP)
    assert world.now / world.steps == pytest.approx(STEP_S, rel=0.1), "steps do not wait: long is as long as said"
    assert lost_of_the_longest(policy) > 0.9
    sampled, trained = long_shares(world, policy)
    assert trained < 0.05 * sampled


def test_masking_keeps_part_of_the_share_of_long_episodes():
    world, policy = long_run(MASK)
    assert world.now / world.steps == pytest.approx(STEP_S, rel=0.1)
    assert 0.3 < lost_of_the_longest(policy) < 0.9
    sampled, trained = long_shares(world, policy)
    assert 0.3 * sampled < trained < 0.8 * sampled
