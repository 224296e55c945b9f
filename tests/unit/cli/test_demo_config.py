"""What the demo's controls change, and what they leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from wingbeat.cli.demo import demo_config
from wingbeat.core.errors import SetupError


def test_the_pair_of_controls_differs_in_the_advantages_only() -> None:
    shuffled, true = (
        demo_config(seed=3, control=control, directory=Path("runs")).model_dump()
        for control in ("shuffled-advantages", "true-advantages")
    )
    trainer = shuffled["policies"]["solver"]["trainer"]
    assert trainer["control"] == "shuffled_advantages"
    assert trainer["learning_rate"] > 0
    trainer["control"] = "none"
    assert shuffled == true


def test_without_a_learning_rate_nothing_else_changes_but_the_evaluation() -> None:
    plain = demo_config(seed=0, control="none", directory=Path("runs")).model_dump()
    frozen = demo_config(seed=0, control="lr0", directory=Path("runs")).model_dump()
    assert frozen["policies"]["solver"]["trainer"]["learning_rate"] == 0
    for settings in (plain, frozen):
        del settings["policies"]["solver"]["trainer"]["learning_rate"], settings["eval"]["samples_per_task"]
    assert plain == frozen


def test_an_unknown_control_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match="true-advantages"):
        demo_config(seed=0, control="lr1", directory=Path("runs"))
