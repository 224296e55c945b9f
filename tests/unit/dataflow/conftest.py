"""Builders for episodes of given rewards and versions, and a clock that tests move."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from wingbeat.core.samples import EpisodeSamples, TrainingSample
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.groups import GroupBook
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.records import EpisodeRecord, GroupSpec, ReadyGroup

sys.path.insert(0, str(Path(__file__).parent))  # `simulated_run`: test folders are no packages

RUN = RunMeta("run-1", seed=7, config='{"run":{}}')


@dataclass
class ManualClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Make:
    """The smallest valid values; tests name only what they are about."""

    run = RUN

    @staticmethod
    def spec(group_id: str = "g", *, size: int = 2, floor: int = 0, split: Split = Split.TRAIN) -> GroupSpec:
        floors = {"solver": floor} if split is Split.TRAIN else {}
        return GroupSpec(group_id, Task("src", "t1", {"x": 1}), split, size, ("solver",), floor_version=floors)

    @staticmethod
    def samples(
        episode_id: str = "g-0",
        *,
        attempt: int = 1,
        group_id: str = "g",
        reward: float = 1.0,
        versions: tuple[int, ...] = (0, 0),
        policy: str = "solver",
        agent: str = "",
    ) -> EpisodeSamples:
        """A prompt token, then one sampled token per version."""
        length = 1 + len(versions)
        sample = TrainingSample.build(
            f"{episode_id}/{policy}/{agent}",
            token_ids=np.arange(length, dtype=np.int32),
            sampled=np.array([0, *(1 for _ in versions)], np.uint8),
            sampling_logprobs=np.array([0, *(-0.5 for _ in versions)], np.float32),
            versions=np.array([-1, *versions], np.int32),
        )
        return EpisodeSamples(episode_id, attempt, group_id, policy, agent, reward, (sample,))

    @classmethod
    def record(
        cls,
        episode_id: str = "g-0",
        attempt: int = 1,
        *,
        group_id: str = "g",
        outcome: Outcome = Outcome.AGENT,
        reward: float = 1.0,
        digest: str = "digest",
        versions: tuple[int, ...] = (0, 0),
    ) -> EpisodeRecord:
        samples = cls.samples(episode_id, attempt=attempt, group_id=group_id, reward=reward, versions=versions)
        rewards = {"solver": reward}
        return EpisodeRecord(episode_id, attempt, group_id, outcome, digest, rewards=rewards, samples=(samples,))

    @classmethod
    def ready(cls, group_id: str, *, rewards: tuple[float, ...] = (0.0, 1.0), floor: int = 0) -> ReadyGroup:
        members = tuple(
            cls.samples(f"{group_id}-{i}", group_id=group_id, reward=reward, versions=(floor, floor))
            for i, reward in enumerate(rewards)
        )
        return ReadyGroup(group_id, "solver", floor_version=floor, size=len(rewards), members=members)


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_book(clock: ManualClock) -> Callable[..., GroupBook]:
    def build(*, max_attempts: int = 3, group_floor: int | None = None) -> GroupBook:
        return GroupBook(max_attempts=max_attempts, group_floor=group_floor, group_deadline_s=60.0, clock=clock)

    return build


@pytest.fixture
def open_ledger(tmp_path: Path):
    """Opens (again) the test's ledger; whatever is open at the end is closed."""
    opened: list[Ledger] = []

    def build() -> Ledger:
        ledger = Ledger.open(tmp_path / "ledger.sqlite", run=RUN)
        opened.append(ledger)
        return ledger

    yield build
    for ledger in opened:
        ledger.close()
