"""What clients wrote does not steer the terminal that shows it."""

from __future__ import annotations

import io

from rich.table import Table
from rich.text import Text

from wingbeat.cli.terminal import PlainConsole

EVIL = "a\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b2Jb [bold]ü\tc"


def test_control_characters_are_shown_and_not_obeyed() -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, width=200)
    table = Table()
    table.add_column(EVIL)
    table.add_row(Text(EVIL))
    for shown in (EVIL, Text(EVIL, style="bold"), table):
        console.print(shown)
    text = out.getvalue()
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in text)
    assert text.startswith("a�]52;") and "b [bold]ü" in text


def test_styles_of_our_own_remain() -> None:
    out = io.StringIO()
    PlainConsole(file=out, force_terminal=True, color_system="standard").print(Text("x\x1b[2Jy", style="red"))
    assert "\x1b[31mx�[2Jy\x1b[0m" in out.getvalue()
