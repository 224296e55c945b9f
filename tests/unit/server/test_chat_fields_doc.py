"""The published table of chat fields is the one that the server obeys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wingbeat.server.chat import HONOURED, NO_EFFECT, REFUSED_UNLESS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "chat-fields.md"
SECTIONS = {
    "Honoured": HONOURED,
    "Accepted without effect": NO_EFFECT,
    "Refused by name": frozenset(REFUSED_UNLESS),
}


def _section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return re.split(r"^## ", PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


@pytest.mark.parametrize("title", SECTIONS)
def test_every_field_of_a_table_is_documented_under_its_heading(title: str) -> None:
    documented = set(re.findall(r"`([a-z_]+)`", _section(title)))
    missing = sorted(SECTIONS[title] - documented)
    assert not missing, f"docs/reference/chat-fields.md, section {title!r}, lacks {', '.join(missing)}"


def test_no_field_is_in_two_tables() -> None:
    tables = list(SECTIONS.values())
    assert len(frozenset().union(*tables)) == sum(map(len, tables))


def test_first_column_names_only_fields_the_server_knows() -> None:
    known = frozenset().union(*SECTIONS.values())
    for title in SECTIONS:
        rows = re.findall(r"^\| (`[^|]*) \|", _section(title), flags=re.MULTILINE)
        named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
        assert named <= known, f"docs/reference/chat-fields.md, section {title!r}, names {sorted(named - known)}"
