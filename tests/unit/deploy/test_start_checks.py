"""What a dry run and a start refuse before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wingbeat.core.config import Config
from wingbeat.core.errors import ConfigError
from wingbeat.deploy.checks import check_sources, check_trains


def config(*, policy: dict[str, Any] | None = None, **sections: Any) -> Config:
    solver = {"model": "builtin:calculator", **(policy or {})}
    return Config.model_validate({"policies": {"solver": solver}, **sections})


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (config(policy={"model": "./nowhere"}), "policies.solver.model: .* got './nowhere'"),
        (config(policy={"model": "models/small.gguf"}), "policies.solver.model: .* got 'models/small.gguf'"),
        (config(policy={"model": "pypi:no-such-model"}), "'no-such-model' is not installed"),
        (config(policy={"trainer": {"kl_coef": 0.1, "reference": "/no/m"}}), r"solver\.trainer\.reference: "),
        (
            config(policy={"trainer": {"algorithm": "distill", "teacher": "nobody"}}),
            r"solver\.trainer\.teacher: ",
        ),
        (config(tasks={"environment": "calculater"}), "calculater"),
        (config(tasks={"file": "none.py"}), r"tasks\.file: no file .*none\.py"),
        (config(tasks={"sources": {"sums": {"file": "none.py"}}}), r"tasks\.sources\.sums\.file: no file"),
    ],
)
def test_what_does_not_exist_is_refused_by_its_key(tmp_path: Path, made: Config, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_sources(made, tmp_path)


def test_what_exists_or_may_lie_on_the_hub_passes(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("raise RuntimeError('it is not run')")
    (tmp_path / "teacher").mkdir()
    trainer = {"algorithm": "distill", "teacher": "teacher"}
    check_sources(config(policy={"model": "owner/name", "trainer": trainer}, tasks={"file": "tasks.py"}), tmp_path)


def test_training_needs_a_policy_that_trains() -> None:
    check_trains(config())
    with pytest.raises(ConfigError, match=r"no policy trains: .* use `wingbeat serve`"):
        check_trains(config(policy={"trainable": False}))


def test_training_needs_steps_or_an_evaluation() -> None:
    check_trains(config(run={"steps": 0}, eval={"at_start": True}))
    with pytest.raises(ConfigError, match=r"nothing to do: run\.steps is 0"):
        check_trains(config(run={"steps": 0}, eval={"at_start": False}))
