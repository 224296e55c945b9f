"""Budgets: how much all instances of a pool may hold at once, and how much their users may draw.

Held: processors, memory, GPUs.  Drawn, by name: requests and tokens a minute, and money.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from wingbeat.core.errors import ConfigError
from wingbeat.resources.pots import AmountPot, CostPot, DrawPot, RatePot, TicketState
from wingbeat.resources.specs import Count, Draw, Needs, Positive, Share, Spec
from wingbeat.resources.stats import BudgetStats

_MILLI = 1000
"""Processors are counted in thousandths, so that sums of shares are exact."""
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED_MEMORY = 1 << 60
"""cgroups without a limit say a number beyond this."""


class Budgets(BaseModel, frozen=True):
    """What is there for all.  None: not limited."""

    model_config = ConfigDict(extra="forbid")

    cpus: Share | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    requests_per_minute: dict[str, Positive] = {}
    tokens_per_minute: dict[str, Positive] = {}
    cost: dict[str, Positive] = {}
    """In all, by name, in whatever money the specs' prices are in."""
    max_idle: Count | None = 256
    """Unused instances, of all specs together; more are closed, those unused for longest first."""

    @classmethod
    def of_machine(cls, *, processes: int = 1) -> Self:
        """This machine's, or the part of one of several processes that share it.

        A process gets a whole processor at least: several may wait for one, but none could run without.
        """
        return cls(
            cpus=max(1.0, num_cpus() / processes),
            memory_mb=memory_mb() // processes,
            gpus=num_gpus() // processes,
        )


def num_cpus() -> float:
    """Processors that this process may use: a container's share of them where that is less."""
    there = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min([there, *_quotas()])


def _quotas() -> Iterator[float]:
    """What the control group allows, in processors: microseconds of one, in so many of time."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((_CGROUPS / name).read_text(encoding="ascii") for name in names).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # another version of cgroups, or "max"
            continue
        if quota > 0 and period > 0:
            yield quota / period


def memory_mb() -> int:
    """Of the machine, or of the container where that is less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            sizes.append(int((_CGROUPS / name).read_text(encoding="ascii")))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return min(size for size in sizes if size < _UNLIMITED_MEMORY) >> 20


def num_gpus() -> int:
    """NVIDIA devices that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


class BudgetPots:
    """A pool's budgets, as pots."""

    def __init__(self, budgets: Budgets, now: float) -> None:
        self.max_idle = budgets.max_idle
        self.held: dict[str, AmountPot] = {}
        if budgets.cpus is not None:
            self.held["cpus"] = AmountPot("cpus", round(budgets.cpus * _MILLI), unit=1 / _MILLI)
        if budgets.memory_mb is not None:
            self.held["memory_mb"] = AmountPot("memory_mb", budgets.memory_mb)
        if budgets.gpus is not None:
            self.held["gpus"] = AmountPot("gpus", budgets.gpus)
        self.requests = {k: RatePot(f"requests_per_minute.{k}", v, now) for k, v in budgets.requests_per_minute.items()}
        self.tokens = {k: RatePot(f"tokens_per_minute.{k}", v, now) for k, v in budgets.tokens_per_minute.items()}
        self.costs = {k: CostPot(f"cost.{k}", v) for k, v in budgets.cost.items()}

    @property
    def all(self) -> tuple[AmountPot | RatePot | CostPot, ...]:
        return (*self.held.values(), *self.requests.values(), *self.tokens.values(), *self.costs.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Of the budgets that are drawn from."""
        return tuple(sorted(self.requests.keys() | self.tokens.keys() | self.costs.keys()))

    def holds_of(self, spec: Spec) -> list[tuple[AmountPot, int]]:
        """What an instance takes.  Raises ConfigError for more than there is: waiting would never help."""
        needs = spec.holds
        holds: list[tuple[AmountPot, int]] = []
        if spec.limit is not None:
            holds.append((AmountPot(f"limit of {spec.title}", spec.limit), 1))
        for name, pot in self.held.items():
            amount = _units(needs, name)
            if amount:
                check_fits(spec, pot, amount)
                holds.append((pot, amount))
        return holds

    def draws_of(self, draws: Iterable[Draw]) -> list[tuple[DrawPot, float]]:
        """Of several together.  Raises ConfigError for an unknown budget, or for more than it ever holds."""
        total: dict[DrawPot, float] = {}
        for draw in draws:
            for pot, amount in self._draws_of_one(draw):
                total[pot] = total.get(pot, 0.0) + amount
        for pot, amount in total.items():
            if amount > pot.capacity:
                raise ConfigError(f"{pot.name}: expected draws of at most {pot.capacity:g} together, got {amount:g}")
        return list(total.items())

    def _draws_of_one(self, draw: Draw) -> list[tuple[DrawPot, float]]:
        self.check_name(draw.budget)
        wanted: Sequence[tuple[DrawPot | None, float]] = (
            (self.requests.get(draw.budget), draw.requests),
            (self.tokens.get(draw.budget), draw.tokens),
            (self.costs.get(draw.budget), draw.cost),
        )
        draws: list[tuple[DrawPot, float]] = []
        for pot, amount in wanted:
            if pot is None:
                continue
            if amount > pot.capacity:
                raise ConfigError(
                    f"{pot.name}: expected a draw of at most {pot.capacity:g} (the pool's budget), got {amount:g}"
                )
            if amount or isinstance(pot, CostPot):
                draws.append((pot, amount))
        return draws

    def snapshot(self, now: float) -> list[BudgetStats]:
        """How much of each is in use."""
        return [_stats_of(pot, now) for pot in self.all]

    def check_name(self, name: str) -> None:
        """Raises ConfigError for a budget that this pool does not have."""
        if name not in self.names:
            known = ", ".join(self.names) or "none: pass Resources(Budgets(requests_per_minute={...}))"
            raise ConfigError(f"budget: expected one of the pool's ({known}), got {name!r}", param="budget")


def check_fits(spec: Spec, pot: AmountPot, amount: int) -> None:
    """Raises ConfigError for more than a pot ever holds."""
    if amount > pot.capacity:
        needed, there = amount * pot.unit, pot.capacity * pot.unit
        raise ConfigError(
            f"{pot.name}: expected at most {there:g}, which is all that this pool has, got {needed:g} for {spec.title};"
            " it would wait for ever. Ask for less, or raise Resources(Budgets(...)) (of a server: [resources])",
            param=pot.name,
        )


def check_together(wanted: Iterable[tuple[Spec, Sequence[tuple[AmountPot, int]], int]]) -> None:
    """Specs, what one instance of each holds, and how many: raises ConfigError where they fit alone, never together."""
    total: dict[AmountPot, int] = {}
    for spec, holds, count in wanted:
        for pot, amount in holds:
            total[pot] = total.get(pot, 0) + amount * count
            check_fits(spec, pot, total[pot])


def _stats_of(pot: AmountPot | RatePot | CostPot, now: float) -> BudgetStats:
    waiting = sum(ticket.state is TicketState.WAITING for ticket in pot.line)
    if isinstance(pot, AmountPot):
        return BudgetStats(pot.name, pot.capacity * pot.unit, (pot.capacity - pot.free) * pot.unit, waiting)
    used = pot.spent if isinstance(pot, CostPot) else pot.capacity - pot.level(now)
    return BudgetStats(pot.name, pot.capacity, used, waiting)


def _units(needs: Needs, name: str) -> int:
    value = getattr(needs, name)
    return round(value * _MILLI) if name == "cpus" else int(value)
