"""Keys of ``[weights]`` that contradict each other are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from wingbeat.core.config.load import validate_config
from wingbeat.core.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"encoding": "full", "delta_chain": 3}, '`delta_chain` is of `encoding = "auto"`'),
        ({"stall_s": 60.0, "give_up_s": 30.0}, "`give_up_s` must not be below `stall_s`"),
        ({"fan_out": 0}, "weights.fan_out"),
        ({"encoding": "xor"}, "weights.encoding"),
    ],
)
def test_contradictions_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_config({"policies": {"solver": {"model": "m"}}, "weights": keys})
