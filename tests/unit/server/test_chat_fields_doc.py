"""The published tables of fields are the ones that the server obeys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from wingbeat.server.calls.dialects import chat, completions

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
TITLES = ("Honoured", "Accepted without effect", "Refused by name")
PAGES: Mapping[str, tuple[frozenset[str], ...]] = {
    "chat-fields.md": (chat.HONOURED, chat.NO_EFFECT, frozenset(chat.REFUSED_UNLESS)),
    "completions-fields.md": (completions.HONOURED, completions.NO_EFFECT, frozenset(completions.REFUSED_UNLESS)),
}
SECTIONS = [(page, title, table) for page, tables in PAGES.items() for title, table in zip(TITLES, tables, strict=True)]


def _section(page: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return re.split(r"^## ", text.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


@pytest.mark.parametrize(("page", "title", "table"), SECTIONS)
def test_every_field_of_a_table_is_documented_under_its_heading(page: str, title: str, table: frozenset[str]) -> None:
    documented = set(re.findall(r"`([a-z_]+)`", _section(page, title)))
    missing = sorted(table - documented)
    assert not missing, f"docs/reference/{page}, section {title!r}, lacks {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES)
def test_no_field_is_in_two_tables(page: str) -> None:
    tables = PAGES[page]
    assert len(frozenset().union(*tables)) == sum(map(len, tables))


@pytest.mark.parametrize(("page", "title", "table"), SECTIONS)
def test_first_column_names_only_fields_the_server_knows(page: str, title: str, table: frozenset[str]) -> None:
    known = frozenset().union(*PAGES[page])
    rows = re.findall(r"^\| (`[^|]*) \|", _section(page, title), flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert named <= known, f"docs/reference/{page}, section {title!r}, names {sorted(named - known)}"
