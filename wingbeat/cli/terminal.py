"""How moments are shown, and a console for words of others: clients name things and say why episodes ended, and a
terminal obeys what it reads."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_CONTROLS = {code: "�" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def local_time(seconds: float) -> str:
    """A moment, in seconds since 1970, as the clock beside this terminal shows it."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


class PlainConsole(Console):
    """Without markup; characters that would steer the terminal are shown as �."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(segment.text.translate(_CONTROLS), segment.style)
