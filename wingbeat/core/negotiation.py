"""Which version of the episode contract (``/api``) client and server speak: the newest that both know.

A client sends the range that it speaks in ``PROTOCOL_HEADER``, the server answers with the version that it chose.
Without the header (curl) the newest is meant.
"""

from __future__ import annotations

import re

from wingbeat.core.errors import RequestError, UnsupportedProtocol
from wingbeat.core.protocol import PROTOCOL_HEADER, PROTOCOL_VERSIONS

Range = tuple[int, int]
"""The oldest and the newest version."""

_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def write_range(versions: Range = PROTOCOL_VERSIONS) -> str:
    """``"1"``, or ``"1-2"``."""
    oldest, newest = versions
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


def read_range(text: str) -> Range:
    """Raises RequestError for what is no range."""
    found = _RANGE.fullmatch(text.strip())
    oldest, newest = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if oldest > newest:
        raise RequestError(
            f'{PROTOCOL_HEADER}: expected a version like "1" or a range like "1-2", got {text[:40]!r}',
            param=PROTOCOL_HEADER,
        )
    return oldest, newest


def choose_version(text: str, *, own: Range = PROTOCOL_VERSIONS) -> int:
    """What a server answers in to a client that sent ``text`` ("" for none).

    Raises UnsupportedProtocol, naming what both sides speak, RequestError for what is no range.
    """
    theirs = read_range(text) if text else own
    newest = min(own[1], theirs[1])
    if newest < max(own[0], theirs[0]):
        behind = "client" if theirs[1] < own[0] else "server"
        raise UnsupportedProtocol(
            f"this server speaks version {write_range(own)} of the episode contract, the client version"
            f" {write_range(theirs)}: install a newer wingbeat on the {behind}",
            param=PROTOCOL_HEADER,
        )
    return newest


def check_answer(text: str, *, own: Range = PROTOCOL_VERSIONS, where: str) -> None:
    """A client's look at the version that the server ``where`` answers in; "" passes (a proxy may have cut it off).

    Raises UnsupportedProtocol.
    """
    answered = text.strip()
    if answered and not (answered.isdecimal() and own[0] <= int(answered) <= own[1]):
        raise UnsupportedProtocol(
            f"{where} answers in version {answered[:40]} of the episode contract, and this client speaks version"
            f" {write_range(own)}: install the same wingbeat release on both",
            param=PROTOCOL_HEADER,
        )
