"""Records: what identifies a finish, and what is refused."""

from __future__ import annotations

import math

import pytest

from wingbeat.core.errors import InvalidReward, RequestError
from wingbeat.core.protocol import FinishRequest, Rewards
from wingbeat.core.types import Outcome
from wingbeat.dataflow.records import EpisodeRecord, finish_digest


def test_digest_ignores_spelling_and_sees_content():
    first = FinishRequest.model_validate({"rewards": {"policies": {"a": 1, "b": 2}}, "metrics": {"x": 1}})
    same = FinishRequest.model_validate({"metrics": {"x": 1.0}, "rewards": {"policies": {"b": 2.0, "a": 1.0}}})
    other = FinishRequest(rewards=Rewards(policies={"a": 1.0, "b": 2.5}), metrics={"x": 1.0})
    assert finish_digest(first) == finish_digest(same) != finish_digest(other)
    assert finish_digest(FinishRequest(outcome=Outcome.TIMEOUT)) != finish_digest(FinishRequest())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(make, value):
    with pytest.raises(InvalidReward, match="finite reward for 'solver'"):
        EpisodeRecord("e", 1, "g", Outcome.AGENT, "d", rewards={"solver": value})
    with pytest.raises(InvalidReward, match="'solver:a'"):
        EpisodeRecord("e", 1, "g", Outcome.AGENT, "d", samples=(make.samples("e", agent="a", reward=value),))
    with pytest.raises(RequestError, match="finite metric 'x'"):
        EpisodeRecord("e", 1, "g", Outcome.AGENT, "d", metrics={"x": value})
