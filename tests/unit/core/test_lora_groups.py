"""Which policies may share a base model, and which trainer processes that makes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from wingbeat.core.config import Config
from wingbeat.core.config.lora_groups import trainer_processes


def config(*, engine: dict[str, Any] | None = None, **policies: dict[str, Any]) -> Config:
    full = {name: {"model": "m"} | policy for name, policy in policies.items()}
    return Config.model_validate({"policies": full, "engine": engine or {}})


def lora(group: str | None = "g", **more: Any) -> dict[str, Any]:
    return {"lora": {"group": group} | more}


def test_a_group_has_one_trainer_and_everybody_else_one_of_its_own() -> None:
    found = config(
        a=lora(rank=4), alone={}, b=lora(rank=8), apart=lora(None), c=lora("h"), judge=lora() | {"trainable": False}
    )
    assert trainer_processes(found.policies) == {
        "trainers-g": ("a", "b"),
        "trainer-alone": ("alone",),
        "trainer-apart": ("apart",),
        "trainers-h": ("c",),
    }


@pytest.mark.parametrize(
    ("policies", "engine", "named"),
    [
        ({"a": lora(), "b": lora() | {"model": "n"}}, {}, r"policies\.b\.model: .*'a' is 'm'; got 'n'"),
        ({"a": lora(), "b": lora() | {"dtype": "bfloat16"}}, {}, r"policies\.b\.dtype"),
        ({"a": lora(), "b": lora() | {"trainer": {"device": "cpu"}}}, {}, r"policies\.b\.trainer\.device"),
        ({"a": lora() | {"trainer": {"threads": 2}}, "b": lora()}, {}, r"policies\.b\.trainer\.threads"),
        ({"a": lora() | {"trainer": {"processes": 2}}}, {}, r"trainer\.processes = 2"),
        ({"a": lora()}, {"tensor_parallel": 2}, r"engine\.tensor_parallel = 2"),
        ({"a": {}, "b": lora() | {"trainable": False, "snapshot_of": "a"}}, {}, r"'a', of which this is a snapshot"),
        ({"a": lora(), "b": {"trainable": False, "lora": {"group": "g", "rank": 4}}}, {}, r"policies\.b\.lora\.rank"),
        ({"a": lora("no/path")}, {}, "group"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(policies: Any, engine: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        config(engine=engine, **policies)
