"""What somebody probably meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def did_you_mean(name: str, known: Collection[str], *, quote: str = "'") -> str:
    """``did you mean 'max_tokens'?``, or "" where nothing known looks like it."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"did you mean {quote}{near[0]}{quote}?" if near else ""
