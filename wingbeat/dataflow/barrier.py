"""The optional barrier between policies: all of them step together.

Without it each policy has its own clock, and a fast one trains on while a slow one still gathers episodes.
With it no policy starts step n + 1 before every other one has finished step n: co-adapting policies never
drift apart by more than one version.  The price is that all wait for the slowest.

Groups yield unequally: an episode need not call every policy, and operators drop more of one policy than of
another.  So a policy that is held back may have all the groups its staleness bound admits while the one it
waits for has not enough of them, and then neither would ever go on.  There the first one's bound must not
close admission (:meth:`Barrier.starves`).  What it then gets beyond its bound becomes over-age: that loss is the
price of equal steps from unequal yields, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class Stepping(Protocol):
    """A policy as the barrier sees it."""

    @property
    def name(self) -> str: ...

    @property
    def complete(self) -> bool:
        """It trains no more: frozen, at its last step, or halted."""
        ...

    version: int

    @property
    def lacks_groups(self) -> bool:
        """It is called, and yet all groups of it that run or wait make no batch for its next step."""
        ...


class Barrier:
    """Holds policies back until the others have caught up."""

    def __init__(self, policies: Callable[[], Iterable[Stepping]], *, is_set: bool) -> None:
        """``policies`` gives all policies; where ``is_set`` is False nothing is ever held back."""
        self._policies = policies
        self._is_set = is_set

    def waits_for(self, policy: str, version: int) -> tuple[str, ...]:
        """The policies that must finish a step before ``policy``, at ``version``, may start its next one."""
        return tuple(other.name for other in self._behind(policy, version))

    def may_pass(self, policy: str, version: int) -> bool:
        return not self.waits_for(policy, version)

    def starves(self, policy: str, version: int) -> bool:
        """Whether some policy that ``policy`` waits for needs groups that are not there yet."""
        return any(other.lacks_groups for other in self._behind(policy, version))

    def _behind(self, policy: str, version: int) -> list[Stepping]:
        if not self._is_set:
            return []
        return [p for p in self._policies() if p.name != policy and not p.complete and p.version < version]
