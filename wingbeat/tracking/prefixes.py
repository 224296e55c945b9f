"""Finds the earlier plain turn that a text or a row of token ids continues: a radix tree over characters.

Edges carry the text between two branchings or turn ends, so a search compares each character of the given
text once, in blocks, and looks up one edge per branching, however many turns there are; what turns share is
stored once. Token ids take part as characters (:func:`as_text`), which every vocabulary in use fits into.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wingbeat.tracking.excerpts import common_length
from wingbeat.tracking.turns import Turn

MAX_TOKEN_ID = 0x10FFFF


def as_text(token_ids: NDArray[np.int32]) -> str:
    """One character per token id. Raises ValueError for ids beyond ``MAX_TOKEN_ID`` or below 0."""
    return token_ids.astype("<i4").tobytes().decode("utf-32-le", "surrogatepass")


@dataclass(slots=True)
class _Branch:
    label: str
    """The text from the branch before."""
    children: dict[str, _Branch] = field(default_factory=dict[str, "_Branch"])
    """By the first character of their labels."""
    turns: list[Turn] = field(default_factory=list[Turn])
    """Turns that end here, oldest first."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """How far an earlier turn reaches into a given text."""

    turn: Turn | None
    """The deepest turn that ends within it; the latest of several."""
    length: int
    """Where that turn ends."""
    several: bool
    """Whether other turns have the same text."""
    parts_at: int
    """Where the text parts from everything known; its own length where it is all known."""
    known: str
    """What an earlier turn has there instead."""
    branches: bool
    """Whether something else continues ``turn`` already."""


class PrefixIndex:
    """Turns by the whole of their text, sampled text included."""

    def __init__(self) -> None:
        self._root = _Branch("")
        self._places: dict[str, _Branch] = {}

    def add(self, turn: Turn, *, text: str) -> None:
        """Make a turn findable; ``text`` is what it adds to its parent, which must be known already."""
        branch = self._root if turn.parent_id is None else self._places[turn.parent_id]
        at = 0
        while at < len(text):
            child = branch.children.get(text[at])
            if child is None:
                child = branch.children[text[at]] = _Branch(text[at:])
            common = common_length(child.label, text, at=at)
            if common < len(child.label):
                upper = _Branch(child.label[:common])
                child.label = child.label[common:]
                upper.children[child.label[0]] = child
                branch.children[text[at]] = upper
                child = upper
            branch, at = child, at + common
        branch.turns.append(turn)
        self._places[turn.turn_id] = branch

    def find(self, text: str) -> Prefix:
        """The deepest turn that ``text`` continues, and where the text parts from what is known."""
        branch, at = self._root, 0
        deepest, length = branch, 0
        known = ""
        while at < len(text):
            child = branch.children.get(text[at])
            if child is None:
                known = next(reversed(branch.children.values())).label if branch.children else ""
                break
            common = common_length(child.label, text, at=at)
            at += common
            if common < len(child.label):
                known = child.label[common:]
                break
            branch = child
            if branch.turns:
                deepest, length = branch, at
        return Prefix(
            turn=deepest.turns[-1] if deepest.turns else None,
            length=length,
            several=len(deepest.turns) > 1,
            parts_at=at,
            known=known,
            branches=bool(deepest.children),
        )
