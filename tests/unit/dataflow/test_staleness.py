"""The staleness gate: hand-made cases, and simulations that try to break the bound or to lock it up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.dataflow.buffer import PolicyBuffer
from wingbeat.dataflow.records import DropReason
from wingbeat.dataflow.staleness import StalenessGate


@pytest.mark.parametrize(("max_staleness", "groups_per_step"), [(0, 1), (0, 4), (1, 2), (3, 1), (2, 3)])
def test_capacity_is_what_admission_reaches(max_staleness, groups_per_step):
    gate = StalenessGate(max_staleness, groups_per_step)
    floors: list[int] = []
    while gate.may_admit(floors, version=5, floor=5):
        floors.append(5)
    assert len(floors) == gate.capacity == (max_staleness + 1) * groups_per_step


def test_synchronous_training_admits_nothing_during_a_step():
    gate = StalenessGate(0, 2)
    assert not gate.may_admit([], version=1, floor=0)
    assert gate.may_admit([], version=1, floor=1)


def test_engines_that_lag_shrink_the_capacity():
    gate = StalenessGate(2, 1)
    assert gate.may_admit([3], version=5, floor=4)
    assert gate.may_admit([4], version=5, floor=4)
    assert not gate.may_admit([3, 4], version=5, floor=4)
    assert not gate.may_admit([], version=7, floor=4)


def test_counterexample_of_the_module_waits_for_the_older_groups():
    gate = StalenessGate(2, 1)
    assert gate.may_step(0, in_flight=[0, 0], buffered=[0])
    # Version 1: b and c (floor 0) run, the newer d (floor 1) is done.  Training d would leave c too old.
    assert not gate.may_step(1, in_flight=[0, 0], buffered=[1])
    assert gate.may_step(1, in_flight=[0], buffered=[0, 1])


def test_step_needs_a_whole_batch():
    assert not StalenessGate(1, 2).may_step(0, in_flight=[], buffered=[0])


def test_lost_feasibility_does_not_lock_up():
    gate = StalenessGate(1, 1)
    assert gate.may_step(3, in_flight=[], buffered=[2, 2, 2])
    assert gate.may_step(3, in_flight=[1], buffered=[3])
    assert gate.may_admit([0, 0, 0], version=3, floor=3)


@pytest.mark.parametrize("arguments", [(-1, 1), (0, 0)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match="expected max_staleness"):
        StalenessGate(*arguments)


class Simulation:
    """One policy: groups start, finish in any order or vanish, steps overlap generation, engines lag."""

    def __init__(self, make, *, max_staleness: int, groups_per_step: int, rng: random.Random) -> None:
        self.make = make
        self.rng = rng
        self.gate = StalenessGate(max_staleness, groups_per_step)
        self.buffer = PolicyBuffer("solver", groups_per_step=groups_per_step, max_staleness=max_staleness)
        self.trained_version = 0
        self.served_version = 0
        self.is_training = False
        self.running: dict[str, int] = {}
        self.num_groups = 0
        self.worst_staleness = 0

    @property
    def next_version(self) -> int:
        return self.trained_version + self.is_training

    def admit(self) -> bool:
        floors = [*self.running.values(), *self.buffer.floors()]
        if not self.gate.may_admit(floors, version=self.next_version, floor=self.served_version):
            return False
        self.running[f"g{self.num_groups}"] = self.served_version
        self.num_groups += 1
        assert len(self.running) + len(self.buffer) <= self.gate.capacity
        return True

    def finish(self, *, lost: bool) -> bool:
        if not self.running:
            return False
        group_id = self.rng.choice(sorted(self.running))
        floor = self.running.pop(group_id)
        rewards = self.rng.choice([(0.0, 1.0), (1.0, 1.0)])
        if not lost:
            self.buffer.add(self.make.ready(group_id, rewards=rewards, floor=floor))
        return True

    def start_step(self) -> bool:
        in_flight, buffered = list(self.running.values()), self.buffer.floors()
        if self.is_training or not self.gate.may_step(self.trained_version, in_flight=in_flight, buffered=buffered):
            return False
        draft = self.buffer.take(self.trained_version)
        if draft is None:
            return True  # groups without any variance were discarded
        self.is_training = True
        oldest = min(e.min_version for e in draft.episodes)
        self.worst_staleness = max(self.worst_staleness, self.trained_version - oldest)
        return True

    def end_step(self) -> bool:
        was_training, self.is_training = self.is_training, False
        self.trained_version += was_training
        return was_training

    def serve(self) -> bool:
        lags = self.served_version < self.trained_version
        self.served_version += lags
        return lags

    def check(self) -> None:
        assert self.worst_staleness <= self.gate.max_staleness
        assert DropReason.STALE not in self.buffer.discards
        system = [*self.running.values(), *self.buffer.floors()]
        assert self.gate.is_feasible(self.next_version, system)


@given(st.integers(0, 4), st.integers(1, 4), st.randoms(use_true_random=False), st.floats(0, 0.5))
def test_no_order_of_events_breaks_the_bound_or_locks_up(make, max_staleness, groups_per_step, rng, loss):
    sim = Simulation(make, max_staleness=max_staleness, groups_per_step=groups_per_step, rng=rng)
    moves = [sim.admit, lambda: sim.finish(lost=rng.random() < loss), sim.start_step, sim.end_step, sim.serve]
    for _ in range(150):
        rng.choice(moves)()
        sim.check()
    # From any state: once running groups end and versions arrive, training goes on.
    for _ in range(3):
        before = sim.trained_version + sim.is_training
        for _ in range(1000):
            progressed = [sim.end_step(), sim.serve(), sim.start_step(), sim.admit(), sim.finish(lost=False)]
            sim.check()
            assert any(progressed)
            if sim.trained_version > before:
                break
        assert sim.trained_version > before


@given(st.integers(1, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_everything_that_was_admitted_trains(make, max_staleness, groups_per_step, rng):
    """Without losses and zero variance, a full drain leaves less than one batch behind."""
    sim = Simulation(make, max_staleness=max_staleness, groups_per_step=groups_per_step, rng=rng)
    for _ in range(100):
        rng.choice([sim.admit, lambda: sim.finish(lost=False), sim.start_step, sim.end_step, sim.serve])()
    while sim.finish(lost=False):
        sim.check()
    while sim.end_step() or sim.start_step():
        sim.check()
    assert len(sim.buffer) < groups_per_step
