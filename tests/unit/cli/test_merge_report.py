"""How the merge report groups reasons."""

from __future__ import annotations

import pytest

from wingbeat.cli.merge_report import general_reason


@pytest.mark.parametrize(
    ("reason", "general"),
    [
        ("message 3 differs: content ('Sure, 5' -> \"it's\")", "message N differs: content"),
        (
            "template rewrites history: text differs at character 91: 'a' -> 'b'",
            "template rewrites history: text differs at character N",
        ),
        (
            "message 2 differs: tool_call_id ('a' -> 'b') answers another call",
            "message N differs: tool_call_id answers another call",
        ),
        ("tools changed", "tools changed"),
        ("message 12 differs: role", "message N differs: role"),
    ],
)
def test_what_is_particular_to_an_episode_is_left_out(reason: str, general: str) -> None:
    assert general_reason(reason) == general
