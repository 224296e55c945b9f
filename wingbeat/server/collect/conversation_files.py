"""Open conversations on disk: what a restart needs to go on with them.

One file for each, ``RUN/collected/*.turns``, in the format of captured turns
(:mod:`wingbeat.dataflow.ledger_captures`).  Its frames say, in order: whose conversation it is, each turn before its
answer leaves, and, when it is let go from memory, which replies nobody received.  The file goes when the ledger has
the conversation, or when it is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from wingbeat.dataflow.ledger_captures import Captures

FOLDER = "collected"
"""In the run directory."""
ATTEMPT = 1
"""A conversation has one attempt."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The first frame."""

    key_id: str
    key_name: str
    conversation_id: str
    """As the application calls it; "" where it does not say."""
    train: bool
    policies: tuple[str, ...]
    """That its key may call."""
    opened_s: float
    """Wall clock, as all times here."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """A turn."""

    turn: bytes
    """``tracking.serialize.dump_turn``."""
    at_s: float
    lineage: int
    """Of the policy, to which the turn's versions belong."""
    meaning: bytes = b""
    """``PrefixKey`` of the conversation with this reply; b"" of a turn without messages."""
    call_ids: bytes = b""
    tools: bytes = b""
    """JSON, where this turn is the first with these tools."""
    instructed: bool = False
    """Its system message holds for this turn alone."""
    undelivered: tuple[str, ...] = ()
    """Other turns whose replies nobody had received by then."""
    resampled: tuple[str, ...] = ()
    in_doubt: tuple[str, ...] = ()


class Marks(msgspec.Struct, frozen=True, tag="marks"):
    """Which replies nobody received, where nothing is under way: when the conversation is let go from memory."""

    undelivered: tuple[str, ...]
    resampled: tuple[str, ...]
    in_doubt: tuple[str, ...] = ()
    """Of which nobody knows whether they were received, since the server was killed about then."""


NO_MARKS = Marks((), ())
Piece = Opened | Taken | Marks

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Piece] = msgspec.msgpack.Decoder(Piece)


@dataclass(slots=True)
class StoredConversation:
    """All that a file says."""

    opened: Opened
    turns: list[Taken] = field(default_factory=list[Taken])
    marks: Marks = NO_MARKS
    """As the last piece says."""
    is_cut_off: bool = False
    """The last piece is a turn: the process ended, and nobody knows whether its reply arrived."""
    num_bytes: int = 0


class ConversationFiles:
    """The files of one run.  Appends come from one thread, everything else from any."""

    def __init__(self, folder: Path) -> None:
        """``folder`` need not exist for reading."""
        self._captures = Captures(folder)

    def prepare(self) -> None:
        """Make the folder."""
        self._captures.prepare()

    def append(self, episode_id: str, piece: Piece) -> int:
        """Hand a piece to the operating system; returns its size.  Raises UnavailableError where it is not taken."""
        data = _encode(piece)
        self._captures.append(episode_id, ATTEMPT, data)
        return len(data)

    def read(self, episode_id: str) -> StoredConversation | None:
        """None where there is none, or where it is damaged from its beginning.

        What follows a damaged piece is lost; the pieces before it stand.
        """
        found: StoredConversation | None = None
        for data in self._captures.read(episode_id, ATTEMPT):
            try:
                piece = _decoder.decode(data)
            except msgspec.MsgspecError:
                return found
            if isinstance(piece, Opened):
                found = found or StoredConversation(piece)
            elif found is None:
                return None
            elif isinstance(piece, Taken):
                found.turns.append(piece)
                found.marks, found.is_cut_off = Marks(piece.undelivered, piece.resampled, piece.in_doubt), True
            else:
                found.marks, found.is_cut_off = piece, False
            if found is not None:
                found.num_bytes += len(data)
        return found

    def take_up(self, episode_id: str) -> tuple[StoredConversation | None, bool]:
        """To go on with: what is damaged is cut off.  True where more is lost than what a kill left half written."""
        is_damaged = self._captures.cut_damage(episode_id, ATTEMPT)
        return self.read(episode_id), is_damaged

    def names(self) -> Iterator[str]:
        """Every episode id."""
        for episode_id, _ in self._captures.attempts():
            yield episode_id

    def unreadable(self) -> tuple[Path, ...]:
        """Files of which nobody knows whose they are."""
        return self._captures.unreadable()

    def remove(self, episode_id: str) -> None:
        """Harmless where there is none."""
        self._captures.remove(episode_id, ATTEMPT)
