"""What limits of boxes this machine can hold: tests of other things must not fail where it holds none."""

from __future__ import annotations

from wingbeat.resources.backends.limits_homes import CONTROLLERS, MEMORY, find_homes

HOMES = find_homes()
HOLDS_ALL = set(HOMES.folders) == set(CONTROLLERS)


def held(megabytes: int) -> int | None:
    """A limit of memory; none where no control group can be made, and a limit is refused."""
    return megabytes if MEMORY in HOMES else None
