"""Tokens that trained, were masked or were discarded, by the length of their episode.

A system that loses its long episodes looks fast: it trains more steps of what is left, and the policy
learns to be brief.  A total hides that; the same numbers by length decile show it, because each decile
holds a tenth of the episodes, and all of them should keep the same share of their tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable

from wingbeat.core.samples import EpisodeSamples
from wingbeat.dataflow.aging import by_attempt

NUM_DECILES = 10
WINDOW = 1000
"""Finished episodes whose lengths make the deciles: lengths drift while a policy learns."""


class LengthDeciles:
    """Which tenth of the recent episodes one belongs to, by its length in sampled tokens."""

    def __init__(self, window: int = WINDOW) -> None:
        if window < 1:
            raise ValueError(f"expected a window of at least one episode, got {window}")
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._window = window

    def observe(self, length: int) -> None:
        """One more episode finished."""
        if len(self._recent) == self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(length)
        insort(self._sorted, length)

    def of(self, length: int) -> int:
        """1 (shortest) to 10, by mid-rank: equal lengths share the decile in the middle of their ranks."""
        if not self._sorted:
            return 1
        rank = (bisect_left(self._sorted, length) + bisect_right(self._sorted, length)) / 2
        return min(int(NUM_DECILES * rank / len(self._sorted)), NUM_DECILES - 1) + 1


class TokenCounts:
    """Totals of one policy since the start of this process.

    An episode's length is the number of tokens it sampled from this policy and could have trained, over all
    its agents.  Its decile is that at the moment it is counted, once: when it enters a batch or leaves.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._deciles = LengthDeciles(window)
        self._totals: dict[str, list[int]] = {"trained": [0] * NUM_DECILES, "masked": [0] * NUM_DECILES}

    def observe(self, members: Iterable[EpisodeSamples]) -> None:
        """Training episodes finished, whatever becomes of them."""
        for agents in by_attempt(members).values():
            self._deciles.observe(_length(agents))

    def trained(self, members: Iterable[EpisodeSamples]) -> None:
        """Members entered a batch: their tokens train, but for those that were masked."""
        for agents in by_attempt(members).values():
            masked, length = sum(member.masked for member in agents), _length(agents)
            self._add("trained", length - masked, length=length)
            self._add("masked", masked, length=length)

    def discarded(self, members: Iterable[EpisodeSamples], reason: str) -> int:
        """Members left without training; returns their number of tokens, masked ones included."""
        lengths = [_length(agents) for agents in by_attempt(members).values()]
        for length in lengths:
            self._add(f"discarded/{reason}", length, length=length)
        return sum(lengths)

    def _add(self, kind: str, num_tokens: int, *, length: int) -> None:
        self._totals.setdefault(kind, [0] * NUM_DECILES)[self._deciles.of(length) - 1] += num_tokens

    @property
    def num_masked(self) -> int:
        return sum(self._totals["masked"])

    def metrics(self) -> dict[str, float]:
        """``tokens/trained/decile_1`` and so on; of reasons only those that occurred."""
        return {
            f"tokens/{kind}/decile_{index}": float(total)
            for kind, totals in self._totals.items()
            for index, total in enumerate(totals, start=1)
        }


def _length(agents: Iterable[EpisodeSamples]) -> int:
    return sum(member.num_sampled + member.masked for member in agents)
