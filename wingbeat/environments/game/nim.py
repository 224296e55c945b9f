"""Nim: heaps of matches; in turn, each player takes at least one from one heap; who takes the last match wins.

Perfect play is known (Bouton, "Nim, a game with a complete mathematical theory", 1901): whoever leaves heaps whose
binary exclusive-or is zero wins.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import reduce
from operator import xor

Heaps = tuple[int, ...]

RULES = (
    "There are heaps of matches. Two players move in turn. A move takes one match or more from one heap."
    " Who takes the last match of all wins. Say your move as: take COUNT from HEAP."
)

_MOVE = re.compile(r"take (\d{1,3}) from (?:heap )?(\d{1,3})\b", re.IGNORECASE)


class IllegalMove(ValueError):
    """A reply that is no move here; the message says why, for the player."""


@dataclass(frozen=True, slots=True)
class Move:
    """So many from one heap; heaps count from 1."""

    heap: int
    count: int

    def __str__(self) -> str:
        return f"take {self.count} from {self.heap}"


def read_move(reply: str, heaps: Heaps) -> Move:
    """The move of a reply.  Raises IllegalMove where it names none, several, or one that the heaps do not allow."""
    found = {Move(int(heap), int(count)) for count, heap in _MOVE.findall(reply)}
    if len(found) != 1:
        raise IllegalMove("say one move, as: take COUNT from HEAP")
    move = found.pop()
    if not 1 <= move.heap <= len(heaps):
        raise IllegalMove(f"there is no heap {move.heap}")
    if not 1 <= move.count <= heaps[move.heap - 1]:
        raise IllegalMove(f"heap {move.heap} has {heaps[move.heap - 1]}")
    return move


def after(heaps: Heaps, move: Move) -> Heaps:
    """The heaps that a legal move leaves."""
    return tuple(left - move.count if heap == move.heap else left for heap, left in enumerate(heaps, start=1))


def legal_moves(heaps: Heaps) -> list[Move]:
    """In order of heaps, then counts."""
    return [Move(heap, count) for heap, left in enumerate(heaps, start=1) for count in range(1, left + 1)]


def random_move(heaps: Heaps, rng: random.Random) -> Move:
    """Any legal move, each as likely."""
    return rng.choice(legal_moves(heaps))


def perfect_move(heaps: Heaps) -> Move:
    """A move that wins if any does, else one match of the largest heap."""
    return next((move for move in legal_moves(heaps) if not is_won(after(heaps, move))), _delaying(heaps))


def is_won(heaps: Heaps) -> bool:
    """Whether the player who moves next wins with perfect play."""
    return reduce(xor, heaps, 0) != 0


def _delaying(heaps: Heaps) -> Move:
    return Move(heaps.index(max(heaps)) + 1, 1)
