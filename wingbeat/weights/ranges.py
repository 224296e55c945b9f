"""Which bytes of a file a request asks for or brings (RFC 9110, section 14): the one range that resuming needs."""

from __future__ import annotations

import re

OFFSET_HEADER = "Upload-Offset"
"""From which byte control lacks a file that is brought to it."""
SHA256_HEADER = "X-Weights-SHA256"
"""Of the whole file that is brought."""
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")


class BadRange(ValueError):
    """There are no such bytes."""


def asked_bytes(header: str, *, size: int) -> tuple[int, int]:
    """First byte, and the one behind the last.  Raises BadRange where the file ends before.

    Without a ``Range``, and for kinds of ranges that nobody needs to resume, that is the whole file.
    """
    found = _RANGE.fullmatch(header.strip())
    if found is None:
        return 0, size
    start, end = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
    if start >= end:
        raise BadRange(f"the file has {size} bytes, asked were {header}")
    return start, end


def content_headers(asked: tuple[int, int], *, size: int, sha256: str) -> dict[str, str]:
    """Of an answer that holds these bytes; 206 where they are not all."""
    start, end = asked
    headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes", "Content-Length": str(end - start)}
    if (start, end) != (0, size):
        headers["Content-Range"] = content_range(start, end, size=size)
    return headers


def content_range(start: int, end: int, *, size: int) -> str:
    """The header's value for the bytes from ``start`` to before ``end`` of a file."""
    return f"bytes {start}-{end - 1}/{size}"
