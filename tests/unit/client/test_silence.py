"""When a client process counts as standing still: by signs of life, and by time that its parent saw pass."""

from __future__ import annotations

from wingbeat.client import RolloutPlan, RunnerOptions, silence
from wingbeat.client.silence import Silence, silence_limit_s


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def watched(limit_s: float = 5.0) -> tuple[Time, Silence]:
    time = Time()
    return time, Silence(limit_s, clock=time)


def looks(time: Time, silence: Silence, count: int, *, every_s: float = 1.0) -> list[bool]:
    found: list[bool] = []
    for _ in range(count):
        time.now += every_s
        found.append(silence.look())
    return found


def test_the_limit_is_beyond_that_of_episodes_and_there_is_none_without_it() -> None:
    assert silence_limit_s(RolloutPlan("agent.py", options=RunnerOptions(episode_timeout_s=60))) == 65
    assert silence_limit_s(RolloutPlan("agent.py", processes=2)) is None


def test_silence_grows_from_the_last_sign_of_life_on() -> None:
    time, child = watched()
    child.heard()
    assert looks(time, child, 4) == [False] * 4
    child.heard()
    assert looks(time, child, 5) == [False] * 4 + [True]
    assert child.seconds == 5


def test_before_the_first_sign_and_after_the_end_nothing_is_expected() -> None:
    time, child = watched()
    assert not any(looks(time, child, 100))
    child.heard()
    looks(time, child, 4)
    child.end()
    assert not any(looks(time, child, 100))


def test_a_parent_that_stood_still_itself_accuses_nobody() -> None:
    """Both were stopped for an hour; the child's next sign of life lies in the pipe."""
    time, child = watched()
    child.heard()
    assert looks(time, child, 1, every_s=3600) == [False]
    assert child.seconds == 2 * silence.ALIVE_EVERY_S
