"""Per-token values as compact, read-only arrays and run lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.support import WHOLE_VOCABULARY


def int32(values: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """An own, read-only copy."""
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array


def float32(values: Sequence[float | None] | NDArray[np.float32]) -> NDArray[np.float32]:
    """An own, read-only copy; None and anything that is not finite become NaN."""
    array = np.array(values, np.float32)
    array[~np.isfinite(array)] = np.nan
    array.flags.writeable = False
    return array


def merge_runs(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Run lengths without empty runs and with equal neighbours joined. Raises ValueError for negative ones."""
    merged: list[tuple[int, int]] = []
    for version, count in runs:
        if version < 0 or count < 0:
            raise ValueError(f"versions must be (version >= 0, count >= 0), got ({version}, {count})")
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        elif count:
            merged.append((version, count))
    return tuple(merged)


NO_SUPPORTS = int32(())


def pack_supports(supports: Sequence[bytes]) -> tuple[tuple[bytes, ...], NDArray[np.int32]]:
    """([D] distinct blobs, [T] place of each token's blob in them, -1 for the whole vocabulary).

    Both are empty where every token was drawn from the whole vocabulary.
    """
    table: dict[bytes, int] = {}
    places = [-1 if blob == WHOLE_VOCABULARY else table.setdefault(blob, len(table)) for blob in supports]
    return tuple(table), (int32(places) if table else NO_SUPPORTS)
