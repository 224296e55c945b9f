"""Settings on the command line."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from wingbeat.core.config.dataflow import DataflowConfig
from wingbeat.core.config.load import parse_overrides
from wingbeat.core.errors import ConfigError


def test_dashes_stand_for_underscores_but_not_in_a_policy_s_name() -> None:
    overrides = parse_overrides(["--policies.my-solver.context-tokens=64", "--server.admin-key=a-b"])
    assert overrides == [(("policies", "my-solver", "context_tokens"), 64), (("server", "admin_key"), "a-b")]


@pytest.mark.parametrize("argument", ["server.port=1", "--server.port", "--server..port=1", "--=1"])
def test_what_is_no_override_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"overrides look like --section\.key=value"):
        parse_overrides([argument])


def test_groups_of_one_cannot_be_sampled_dynamically() -> None:
    with pytest.raises(ValidationError, match="no batch would ever fill"):
        DataflowConfig(group_size=1, dynamic_sampling=True)
