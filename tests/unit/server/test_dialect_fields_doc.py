"""The published tables of message and response fields are those that the server obeys."""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path

import pytest

from wingbeat.server.calls.dialects.messages import parse as messages
from wingbeat.server.calls.dialects.responses import parse as responses

FOLDER = Path(__file__).parents[3] / "docs" / "reference"
PAGES: dict[str, dict[str, Set[str]]] = {
    page: {
        "Honoured": parse.HONOURED,
        "Accepted without effect": parse.NO_EFFECT,
        "Refused by name": frozenset(parse.REFUSED_UNLESS),
    }
    for page, parse in (("messages-fields.md", messages), ("responses-fields.md", responses))
}
SECTIONS = [(page, title) for page, sections in PAGES.items() for title in sections]


def _section(page: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    text = (FOLDER / page).read_text(encoding="utf-8")
    return re.split(r"^## ", text.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


@pytest.mark.parametrize(("page", "title"), SECTIONS)
def test_every_field_of_a_table_is_documented_under_its_heading(page: str, title: str) -> None:
    documented = set(re.findall(r"`([a-z_]+)`", _section(page, title)))
    missing = sorted(PAGES[page][title] - documented)
    assert not missing, f"docs/reference/{page}, section {title!r}, lacks {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES)
def test_no_field_is_in_two_tables(page: str) -> None:
    tables = list(PAGES[page].values())
    assert len(frozenset[str]().union(*tables)) == sum(map(len, tables))


@pytest.mark.parametrize(("page", "title"), SECTIONS)
def test_first_column_names_only_fields_the_server_knows(page: str, title: str) -> None:
    known = frozenset[str]().union(*PAGES[page].values())
    rows = re.findall(r"^\| (`[^|]*) \|", _section(page, title), flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert named <= known, f"docs/reference/{page}, section {title!r}, names {sorted(named - known)}"


def _fields_of_the_sdks() -> list[tuple[str, str]]:
    from anthropic.types import message_create_params
    from anthropic.types.beta import message_create_params as beta_create_params
    from openai.types.responses import response_create_params

    found = {("responses-fields.md", name) for name in response_create_params.ResponseCreateParamsBase.__annotations__}
    for module in (message_create_params, beta_create_params):
        found |= {("messages-fields.md", name) for name in module.MessageCreateParamsBase.__annotations__}
    return sorted(found - {("messages-fields.md", "betas")})  # a header


@pytest.mark.parametrize(("page", "field"), _fields_of_the_sdks())
def test_every_field_of_the_official_sdk_is_in_a_table(page: str, field: str) -> None:
    assert any(field in table for table in PAGES[page].values())
