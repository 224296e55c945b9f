"""What agents may return as a reward."""

from __future__ import annotations

from typing import Any

import pytest

from wingbeat.client.rewards import to_metrics, to_rewards
from wingbeat.core.errors import InvalidReward
from wingbeat.core.protocol import Rewards


class Scalar:
    """Like a numpy or torch scalar: a number by ``__float__`` only."""

    def __float__(self) -> float:
        return 0.25


@pytest.mark.parametrize(("given", "number"), [(1, 1.0), (0.5, 0.5), (True, 1.0), (-2, -2.0), (Scalar(), 0.25)])
def test_numbers(given: Any, number: float) -> None:
    result = to_rewards(given)
    assert isinstance(result, float)
    assert result == number


def test_mapping_by_policy_and_agent() -> None:
    assert to_rewards({"solver": 1, "solver:planner": 0.5}) == Rewards(
        policies={"solver": 1.0}, agents={"solver:planner": 0.5}
    )


def test_mapping_with_the_sections_of_rewards() -> None:
    given = {"policies": {"solver": 1}, "turns": {"turn-1": 0.1}}
    assert to_rewards(given) == Rewards(policies={"solver": 1.0}, turns={"turn-1": 0.1})
    ready = Rewards(policies={"solver": 1.0})
    assert to_rewards(ready) is ready


@pytest.mark.parametrize(
    "given",
    [float("nan"), float("inf"), "1.0", b"1", None, [1.0], {}, {"solver": "high"}, {"policies": {"solver": "high"}}],
)
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(InvalidReward, match=r"expected|valid number"):
        to_rewards(given)


def test_metrics() -> None:
    assert to_metrics({"turns": 3, "hit": True}) == {"turns": 3.0, "hit": 1.0}
    assert to_metrics(None) == {}
    with pytest.raises(InvalidReward, match="'turns'"):
        to_metrics({"turns": float("nan")})
