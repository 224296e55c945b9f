"""What the chaos benchmark does to a run, decided before it begins: a plan follows from its seed and length alone.

Faults that stop training for a while (``heavy``) have a beat of their own, so that a run has time to come back from
one before the next; the others fall anywhere between.  No process is killed so often that its supervisor gives it up.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """What happens."""

    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"
    """SIGSTOP, and SIGCONT when it ends."""
    RESET = "connection_reset"
    """Every connection of a proxy is reset."""
    PARTITION = "partition"
    """A proxy swallows all bytes both ways, silently; connections that lost some are reset when it ends."""
    SLOW = "slow_response"
    """Each piece of data through a proxy takes longer."""
    TRUNCATE = "truncated_response"
    """Answers through a proxy break off in their middle."""
    FULL_DISK = "full_disk"
    CLOCK = "clock_jump"
    """Control's clocks jump ahead, as after a suspended machine, or only its wall clock, any way."""


CONTROL, TRAINER, SUPERVISOR = "control", "trainer-solver", "supervisor"
ENGINES = ("engine-0", "engine-1")
NUM_CLIENTS = 8
CLIENTS = tuple(f"client-{index}" for index in range(NUM_CLIENTS))
CLIENTS_PROXY, ENGINE_PROXY = "clients", "engine"
DISK, CLOCKS, WALL_CLOCK = "disk", "clocks", "wall clock"

HEAVY = frozenset({CONTROL, TRAINER, SUPERVISOR, DISK, CLOCKS})
ROOM = {SUPERVISOR: 2.0, TRAINER: 1.4, DISK: 0.7, CLOCKS: 0.5}
"""How much time a fault gets for itself, where that is not as much as the others of its beat."""
FULL_FAULTS_S = 220.0
"""Seconds of faults for which the table below is meant; others get a share, and something of all that it has more
than once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    """Seconds after the calm part."""
    kind: Kind
    target: str
    duration_s: float = 0.0
    amount: float = 0.0
    """CLOCK: seconds of the jump.  SLOW: seconds added to each piece of data."""

    @property
    def is_heavy(self) -> bool:
        return self.target in HEAVY


@dataclass(frozen=True, slots=True)
class _Line:
    """How often something happens in FULL_FAULTS_S, and to whom in turn."""

    count: int
    kind: Kind
    targets: Sequence[str]
    duration_s: tuple[float, float] = (0.0, 0.0)
    amounts: Sequence[float] = (0.0,)


_LINES = (
    _Line(4, Kind.SIGKILL, (CONTROL,)),
    _Line(4, Kind.SIGKILL, (TRAINER,)),
    _Line(6, Kind.SIGKILL, ENGINES),
    _Line(10, Kind.SIGKILL, CLIENTS),
    _Line(1, Kind.SIGKILL, (SUPERVISOR,)),
    _Line(3, Kind.SIGSTOP, CLIENTS, (2.0, 12.0)),
    _Line(2, Kind.SIGSTOP, ENGINES, (1.0, 6.0)),
    _Line(2, Kind.SIGSTOP, (CONTROL, TRAINER), (1.0, 4.0)),
    _Line(8, Kind.RESET, (CLIENTS_PROXY, ENGINE_PROXY)),
    _Line(4, Kind.PARTITION, (CLIENTS_PROXY, ENGINE_PROXY), (2.0, 6.0)),
    _Line(5, Kind.SLOW, (CLIENTS_PROXY, ENGINE_PROXY), (3.0, 6.0), (0.2, 0.5)),
    _Line(6, Kind.TRUNCATE, (CLIENTS_PROXY, ENGINE_PROXY), (1.0, 2.0)),
    _Line(3, Kind.FULL_DISK, (DISK,), (2.0, 4.0)),
    _Line(2, Kind.CLOCK, (CLOCKS,), amounts=(90.0, 300.0)),
    _Line(3, Kind.CLOCK, (WALL_CLOCK,), amounts=(-86_400.0, 3_600.0, 86_400.0)),
)


def make_plan(seed: int, *, faults_s: float) -> list[Fault]:
    """All faults within ``faults_s`` seconds, in order."""
    rng = random.Random(seed)
    faults = [fault for line in _LINES for fault in _draw(line, rng, faults_s / FULL_FAULTS_S)]
    beats = [_spread([fault for fault in faults if fault.is_heavy is heavy], rng) for heavy in (True, False)]
    placed = [fault for beat in beats for fault in _place(beat, rng, faults_s)]
    return sorted(placed, key=lambda fault: fault.at_s)


def _draw(line: _Line, rng: random.Random, share: float) -> list[Fault]:
    count = max(min(1, line.count - 1), round(line.count * share))
    first = rng.randrange(len(line.targets))
    amounts = rng.sample(line.amounts, len(line.amounts))
    return [
        Fault(
            0.0,
            line.kind,
            line.targets[(first + index) % len(line.targets)],
            round(rng.uniform(*line.duration_s), 2),
            amounts[index % len(amounts)],
        )
        for index in range(count)
    ]


def _place(order: Sequence[Fault], rng: random.Random, faults_s: float) -> list[Fault]:
    """Give each its time, one after another: somewhere in the first half of a slot of its own."""
    slots = [ROOM.get(fault.target, 1.0) for fault in order]
    slot_s, begin_s, placed = faults_s / sum(slots), 0.0, list[Fault]()
    for fault, room in zip(order, slots, strict=True):
        at_s = round(begin_s + slot_s * room * rng.uniform(0.1, 0.4), 2)
        placed.append(replace(fault, at_s=at_s, duration_s=min(fault.duration_s, round(faults_s / 5, 2))))
        begin_s += slot_s * room
    return placed


def _spread(faults: Sequence[Fault], rng: random.Random) -> list[Fault]:
    """What is done to each target all over the time, so that none is killed again and again while it starts."""
    counts = Counter((fault.kind, fault.target) for fault in faults)
    seen: Counter[tuple[Kind, str]] = Counter()
    keyed: list[tuple[float, Fault]] = []
    for fault in rng.sample(faults, len(faults)):
        what = (fault.kind, fault.target)
        keyed.append(((seen[what] + rng.uniform(0.2, 0.8)) / counts[what], fault))
        seen[what] += 1
    return [fault for _, fault in sorted(keyed, key=lambda pair: pair[0])]


def count_kinds(faults: Sequence[Fault]) -> dict[str, int]:
    """How often each kind occurs; all kinds are named."""
    found = Counter(fault.kind for fault in faults)
    return {kind.value: found[kind] for kind in Kind}


def count_kills(faults: Sequence[Fault]) -> dict[str, int]:
    """How often each role is sent SIGKILL."""
    roles = Counter(role_of(fault.target) for fault in faults if fault.kind is Kind.SIGKILL)
    return {role: roles[role] for role in ("control", "trainer", "engine", "client", "supervisor")}


def role_of(target: str) -> str:
    """``trainer-solver`` is a trainer."""
    return target.partition("-")[0]
