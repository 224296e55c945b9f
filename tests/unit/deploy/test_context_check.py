"""A context that the model cannot have is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wingbeat.core.config import PolicyConfig
from wingbeat.core.errors import ConfigError
from wingbeat.deploy.local import check_context


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 256}, {"text_config": {"max_position_embeddings": 256}}]
)
def test_more_context_than_positions_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_context("solver", PolicyConfig(model="m", context_tokens=256), tmp_path)
    with pytest.raises(ConfigError, match=r"policies\.solver\.context_tokens is 257.*only 256"):
        check_context("solver", PolicyConfig(model="m", context_tokens=257), tmp_path)


def test_a_model_without_a_limit_takes_any(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_context("solver", PolicyConfig(model="m", context_tokens=10**6), tmp_path)
