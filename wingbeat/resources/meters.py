"""Meters: requests, tokens and money that are drawn while a resource is in use, each caller in turn."""

from __future__ import annotations

import time

from wingbeat.core.ports import Clock
from wingbeat.resources.admission import Admission
from wingbeat.resources.budgets import BudgetPots, Budgets
from wingbeat.resources.pots import DrawPot
from wingbeat.resources.turns import Request, Turns


class Meters:
    """The drawn budgets of a pool, for its back-ends; of one event loop."""

    def __init__(self, turns: Turns, pots: BudgetPots, *, wait_s: float | None) -> None:
        self._turns = turns
        self._pots = pots
        self._wait_s = wait_s

    def check(self, name: str) -> None:
        """Raises ConfigError for a budget that this pool does not have; "" is none."""
        if name:
            self._pots.check_name(name)

    async def take(
        self, name: str, *, requests: float = 1.0, tokens: float = 0.0, cost: float = 0.0, wait_s: float | None = None
    ) -> float:
        """Wait for one's turn and draw; returns the tokens that were drawn.  "" draws from nothing.

        More tokens than the budget has in a minute count as a minute's: an estimate must not wait for ever.
        Raises ResourceWait after ``wait_s`` (None: the pool's), ResourceFailed where the money does not suffice.
        """
        if not name:
            return 0.0
        self._pots.check_name(name)
        drawn = _draws(self._pots, name, requests=requests, tokens=tokens, cost=cost)
        request = Request((), list(drawn.items()), what=f"budget {name!r}")
        await self._turns.draw(request, wait_s=self._wait_s if wait_s is None else wait_s)
        pot = self._pots.tokens.get(name)
        return tokens if pot is None else drawn.get(pot, 0.0)

    def settle(self, name: str, *, requests: float = 0.0, tokens: float = 0.0, cost: float = 0.0) -> None:
        """Correct what was drawn by the real figures, once they are known; negative amounts are given back."""
        now = self._turns.clock()
        amounts = (
            (self._pots.requests.get(name), requests),
            (self._pots.tokens.get(name), tokens),
            (self._pots.costs.get(name), cost),
        )
        touched = [(pot, amount) for pot, amount in amounts if pot is not None and amount]
        for pot, amount in touched:
            pot.take(amount, now)
        self._turns.look([pot for pot, _ in touched])


class RateLimiter:
    """Requests and tokens a minute of one thing, first come first served; None: not limited."""

    def __init__(
        self,
        *,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        budgets = Budgets(
            requests_per_minute={} if requests_per_minute is None else {"": requests_per_minute},
            tokens_per_minute={} if tokens_per_minute is None else {"": tokens_per_minute},
        )
        pots = BudgetPots(budgets, clock())
        admission = Admission()
        admission.rate_pots = [*pots.requests.values(), *pots.tokens.values()]
        self._pots = pots
        self._turns = Turns(admission, clock)

    async def take(self, *, requests: float = 1.0, tokens: float = 0.0, wait_s: float | None = None) -> float:
        """Wait for one's turn and draw; returns the tokens that were drawn: at most a minute's.

        Raises ResourceWait after ``wait_s``; None waits for as long as it takes.
        """
        drawn = _draws(self._pots, "", requests=requests, tokens=tokens, cost=0.0)
        await self._turns.draw(Request((), list(drawn.items()), what="the rate limit"), wait_s=wait_s)
        pot = self._pots.tokens.get("")
        return tokens if pot is None else drawn.get(pot, 0.0)

    def settle(self, *, tokens: float) -> None:
        """Correct what was drawn by the real figure; negative amounts are given back."""
        for pot in self._pots.tokens.values():
            pot.take(tokens, self._turns.clock())
        self._turns.look(list(self._pots.tokens.values()))

    def close(self) -> None:
        self._turns.close()


def _draws(pots: BudgetPots, name: str, *, requests: float, tokens: float, cost: float) -> dict[DrawPot, float]:
    """What there is of a budget, at most a minute's of its rates."""
    drawn: dict[DrawPot, float] = {}
    for rates, amount in ((pots.requests, requests), (pots.tokens, tokens)):
        rate = rates.get(name)
        if rate is not None and amount > 0:
            drawn[rate] = min(amount, rate.capacity)
    money = pots.costs.get(name)
    if money is not None:
        drawn[money] = cost
    return drawn
