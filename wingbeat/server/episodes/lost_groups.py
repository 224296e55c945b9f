"""Training groups of which nothing can train: sampling goes on, and people must hear why no step comes.

What operators drop and groups of equal rewards are told of elsewhere (``status``); this is about groups in which
nobody finished, and about those whose tokens cannot train.
"""

from __future__ import annotations

IN_A_ROW = 3
"""Groups; each of them used up all attempts of all its members, or closed at its deadline."""
NO_TOKENS = "no token of theirs can train: `wingbeat inspect RUN_DIR EPISODE` says why"


class LostGroups:
    """The newest run of such groups."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._reason = ""

    def note(self, reason: str | None) -> None:
        """A training group closed; ``reason`` says why nothing of it can train, if so."""
        self._in_a_row = 0 if reason is None else self._in_a_row + 1
        self._reason = reason or ""

    @property
    def blocker(self) -> str:
        """What to tell once it is no accident, else ""."""
        if self._in_a_row < IN_A_ROW:
            return ""
        return (
            f"nothing of the last {self._in_a_row} training groups can train: {self._reason}; other tasks are dealt in"
            " their place"
        )
