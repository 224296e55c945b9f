"""What a runner tells of its episodes: how each ended, and counts of all."""

from __future__ import annotations

from dataclasses import dataclass

from wingbeat.core.types import Split


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """How one episode ended, as this client saw it."""

    task_id: str
    split: Split
    seconds: float
    episode_id: str = ""
    """Empty where it ended before it had begun."""
    reward: float | None = None
    """None where it failed, or where the agent gave more than one number."""
    error: str = ""
    """One line; the server got the traceback."""
    lease_id: str = ""
    """Which attempt it was: the same client may begin another one of the same episode while it still runs."""


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """Counts since the start."""

    num_finished: int = 0
    num_failed: int = 0
    """The agent raised, or returned what is no reward."""
    num_refused: int = 0
    """The server was away or did not want the episode: a lapsed lease, a finish that came too late."""
    num_cancelled: int = 0
    num_timed_out: int = 0
    """The agent ran longer than ``RunnerOptions.episode_timeout_s``."""
    num_rewards: int = 0
    reward_sum: float = 0.0

    @property
    def mean_reward(self) -> float | None:
        return self.reward_sum / self.num_rewards if self.num_rewards else None

    def __add__(self, other: RunnerStats) -> RunnerStats:
        return RunnerStats(
            num_finished=self.num_finished + other.num_finished,
            num_failed=self.num_failed + other.num_failed,
            num_refused=self.num_refused + other.num_refused,
            num_cancelled=self.num_cancelled + other.num_cancelled,
            num_timed_out=self.num_timed_out + other.num_timed_out,
            num_rewards=self.num_rewards + other.num_rewards,
            reward_sum=self.reward_sum + other.reward_sum,
        )
