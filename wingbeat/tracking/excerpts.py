"""Where two texts part, told in a few words: why a prompt was not continued."""

from __future__ import annotations

MAX_EXCERPT = 40
LEAD_IN = 8
"""Equal characters shown before the first different one."""


def common_length(one: str, other: str, *, at: int = 0) -> int:
    """How many characters ``one`` shares with what ``other`` has from ``at`` on.

    Bisection over block comparisons: linear time, without a step per character.
    """
    low, high = 0, min(len(one), len(other) - at)
    if other.startswith(one[:high], at):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if other.startswith(one[low:middle], at + low):
            low = middle
        else:
            high = middle
    return low


def difference(known: str, given: str, *, at: int | None = None) -> str:
    """``'Sure, 5' -> 'Sure,5'``: both texts around the first difference, 40 characters of each at most."""
    place = common_length(known, given) if at is None else at
    start = 0 if max(len(known), len(given)) <= MAX_EXCERPT else max(0, place - LEAD_IN)
    return f"{_excerpt(known, start)} -> {_excerpt(given, start)}"


def _excerpt(text: str, start: int) -> str:
    """The text from ``start``, quoted; an ellipsis stands for what is left out on either side."""
    head = "…" if start else ""
    room = MAX_EXCERPT - len(head)
    body = text[start:]
    return repr(head + (body if len(body) <= room else body[: room - 1] + "…"))
