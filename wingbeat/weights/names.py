"""What weight files are called: ``POLICY-00000007-0123456789abcdef.safetensors``, and ``.delta`` for a difference.

Version, and the first digits of the checksum: a version that is made anew after a rollback has another name.
"""

from __future__ import annotations

import re

WHOLE, DELTA = ".safetensors", ".delta"


def shown(checksum: str) -> str:
    """The part of a checksum that is in names."""
    return checksum[:16]


def file_name(policy: str, version: int, checksum: str, *, suffix: str = WHOLE) -> str:
    return f"{policy}-{version:08d}-{shown(checksum)}{suffix}"


def names_of(policy: str, *, endings: str = "") -> re.Pattern[str]:
    """Of all files of a policy, with their ``version``; ``endings``: what may follow, as a regular expression."""
    return re.compile(
        rf"{re.escape(policy)}-(?P<version>[0-9]{{8,}})-[0-9a-f]{{16}}(?:{re.escape(WHOLE)}|{re.escape(DELTA)}){endings}"
    )
