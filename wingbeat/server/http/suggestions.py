"""What a caller probably meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``did you mean `max_tokens`?``, or "" where nothing known looks like it."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"did you mean `{near[0]}`?" if near else ""
