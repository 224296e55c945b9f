"""docs/configuration.md is the schema's own words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from wingbeat.core.config import Config
from wingbeat.core.config.reference import reference_markdown

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of the schema by its dotted path, found through the models and not their JSON schema."""
    for key, field in model.model_fields.items():
        annotation: Any = field.annotation
        for part in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                name = f"{path}{key}" + (".NAME" if getattr(annotation, "__origin__", None) is dict else "")
                yield name, part
                yield from sections(part, f"{name}.")


SECTIONS = dict(sections(Config))


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_markdown(), "run `make docs`"


@pytest.mark.parametrize("path", SECTIONS)
def test_every_section_and_key_is_on_the_page(path: str) -> None:
    body = reference_markdown().split(f"## `[{path}]`\n")[1].split("\n## ")[0]
    inner = {p.removeprefix(f"{path}.").split(".")[0] for p in SECTIONS if p.startswith(f"{path}.")}
    keys = set(SECTIONS[path].model_fields) - inner
    assert {line.split("`")[1] for line in body.splitlines() if line.startswith("| `")} == keys


@pytest.mark.parametrize(
    "row",
    [
        "| `model` | string | required |",
        "| `learning_rate` | number (>= 0) | `1e-06` |",
        "| `clip_high` | number (>= 0) or unset | unset |",
        '| `schedule` | `"constant"`, `"linear"`, `"cosine"` | `"constant"` |',
        "| `betas` | [number, number] | `[0.9, 0.95]` |",
        "| `port` | integer (>= 0, <= 65535) | `8321` |",
        '| `targets` | list of string or `"all-linear"` | `"all-linear"` |',
    ],
)
def test_rows_show_type_bounds_and_default(row: str) -> None:
    assert row in reference_markdown()
