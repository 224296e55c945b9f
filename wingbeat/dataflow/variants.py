"""Versions of an agent that work at the same time: who is here, and whose turn it is.

A *variant* is a label and a digest of code.  A group belongs to the first one that works in it
(:mod:`wingbeat.dataflow.groups`); what this module adds is time and shares, both without I/O:

* :class:`Presence` knows which variants still ask for work.  One that does not, for ``wait_s``, is gone, and its groups
  are recalled, so that no group waits for code that was edited away.
* :class:`VariantMix` gives labels their shares of the training groups, by deficit: each group dealt costs its label one
  group and gives every label that competes its share of one.  Only who asks for work competes, so that nobody waits
  for a label that is away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from wingbeat.core.errors import RequestError
from wingbeat.core.ports import Clock
from wingbeat.core.types import NO_VARIANT, Variant
from wingbeat.dataflow.mixing import SUM_TOLERANCE, may_lead

SLACK = 2.0
"""Groups that a label may be behind its share while all compete, or by one less than there are labels."""
MAX_OWED = 8.0
"""Groups that a label which was away may catch up on."""
MAX_REFUNDS = 64
"""Groups in a row that did not count and that their label may repeat: of a label that earns nothing there is an end."""
REMEMBERED = 10_000


class Asker(NamedTuple):
    """Who asks for work."""

    process: str = ""
    """One process of a client."""
    variant: Variant = NO_VARIANT


class Presence:
    """Which variants are here; clients ask, work, and say that they leave, or just fall silent."""

    def __init__(self, *, wait_s: float, clock: Clock) -> None:
        self._wait_s = wait_s
        self._clock = clock
        self._started = clock()
        self._waiting: Counter[Asker] = Counter()
        self._training: Counter[str] = Counter()
        """By label: those of them that ask for training episodes."""
        self._seen: dict[Asker, float] = {}
        self._sources: dict[Variant, frozenset[str] | None] = {}
        """What its processes ask for; None: any source."""
        self._asked: dict[str, float] = {}
        """By label: when the last question for training episodes was answered."""
        self._left: dict[Asker, None] = {}
        """They said so; what they still run does not bring them back, a question does.  Oldest first."""

    def ask(self, asker: Asker, *, trains: bool, sources: frozenset[str] | None = None) -> None:
        """A client asks for work of these task sources (None: of any) now; :meth:`answered` ends it."""
        self._left.pop(asker, None)
        known = self._sources.get(asker.variant, frozenset())
        self._sources[asker.variant] = None if known is None or sources is None else known | sources
        self._waiting[asker] += 1
        self._training[asker.variant.label] += trains
        self._seen[asker] = self._clock()

    def answered(self, asker: Asker, *, trains: bool) -> None:
        now = self._clock()
        self._waiting[asker] -= 1
        if not self._waiting[asker]:
            del self._waiting[asker]
        if trains:
            self._training[asker.variant.label] -= 1
            self._training += Counter()  # without those that are 0
            self._asked[asker.variant.label] = now
        if asker not in self._left:
            self._seen[asker] = now

    def leave(self, asker: Asker) -> None:
        """This process asks no more; others of its variant may."""
        self._seen.pop(asker, None)
        self._left[asker] = None
        while len(self._left) > REMEMBERED:
            del self._left[next(iter(self._left))]

    def observe(self, at_work: Iterable[Asker]) -> None:
        """Clients whose episodes run: they are here, unless they have said that they leave."""
        now = self._clock()
        self._seen |= {asker: now for asker in at_work if asker not in self._left}
        self._seen = {asker: at for asker, at in self._seen.items() if now - at <= self._wait_s}
        self._asked = {label: at for label, at in self._asked.items() if now - at <= self._wait_s}
        here = self.here()
        self._sources = {variant: sources for variant, sources in self._sources.items() if variant in here}

    def here(self) -> frozenset[Variant]:
        """Variants that may still take slots."""
        now = self._clock()
        lately = (asker for asker, at in self._seen.items() if now - at <= self._wait_s)
        return frozenset(asker.variant for asker in (*self._waiting, *lately))

    def could_run(self, source: str) -> frozenset[Variant]:
        """Those that are here and ask for tasks of this source."""
        return frozenset(
            variant
            for variant in self.here()
            if (sources := self._sources.get(variant, frozenset())) is None or source in sources
        )

    def is_gone(self, variant: Variant) -> bool:
        """Whether nobody of it is left: all said so, or have been silent for ``wait_s`` of this process's life."""
        if variant in self.here():
            return False
        return self._clock() - self._started > self._wait_s or any(asker.variant == variant for asker in self._left)

    @property
    def num_waiting(self) -> int:
        """Questions that are open now."""
        return self._waiting.total()

    def competing(self) -> frozenset[str]:
        """Labels that ask for training episodes, or did lately."""
        now, labels = self._clock(), {variant.label for variant in self.here()}
        waiting = {label for label, count in self._training.items() if count > 0}
        lately = {label for label, at in self._asked.items() if now - at <= self._wait_s}
        return frozenset((waiting | lately) & labels)


@dataclass(slots=True)
class _Account:
    """One label's groups."""

    ahead: float = 0.0
    dealt: int = 0
    counted: int = 0
    refunds: int = 0
    """Groups in a row that did not count."""
    is_empty_handed: bool = False
    """It was its turn, and there was no task that it can run: others need not wait for it."""


@dataclass(frozen=True, slots=True)
class LabelPlace:
    """Where one label stands."""

    weight: float | None
    """None where nobody set one: it shares what the others leave."""
    dealt: int
    counted: int
    share: float
    """Of all groups that counted."""
    ahead: float
    """Groups ahead of its share; negative: behind."""


class VariantMix:
    """Deals the training groups to labels by weight; without weights, to whoever asks."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """Raises RequestError for what are no shares."""
        self._weights: dict[str, float] = {}
        self._accounts: dict[str, _Account] = {}
        self._competed: frozenset[str] = frozenset()
        self.set_weights(weights or {})

    @property
    def weights(self) -> dict[str, float]:
        return dict(self._weights)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """From now on; {} deals to whoever asks.  Raises RequestError for what are no shares."""
        check_weights(weights)
        self._weights = dict(weights)
        for account in self._accounts.values():
            account.ahead, account.refunds = 0.0, 0

    def shares(self, competing: Collection[str]) -> dict[str, float]:
        """What each of these labels should get; they sum to 1, or all are 0 where none has a weight."""
        unlisted = [label for label in competing if label not in self._weights]
        left = max(0.0, 1.0 - math.fsum(self._weights.values()))
        raw = {label: self._weights.get(label, left / max(1, len(unlisted))) for label in competing}
        total = math.fsum(raw.values())
        return {label: weight / total if total > 0 else 0.0 for label, weight in raw.items()}

    def may_deal(self, label: str, competing: Collection[str]) -> bool:
        """Whether a new training group may go to this label now, others competing with it.

        Somebody always may who has a share: the labels' leads sum to 0, so one of them is not ahead.
        """
        if not self._weights:
            return True
        if self._weights.get(label) == 0.0:
            return False
        shares = self._enter(label, competing)
        if shares[label] == 0.0:  # only those with a share keep it waiting
            return not any(share > 0 for share in shares.values())
        total = math.fsum(self._accounts[name].ahead for name in shares)
        ahead = self._accounts[label].ahead - shares[label] * total
        return may_lead(ahead, share=shares[label], num_claims=len(shares), slack=SLACK)

    def _enter(self, asking: str, competing: Collection[str]) -> dict[str, float]:
        """The shares of those that compete with whoever asks; who was away may catch up on a few groups only."""
        for label in {asking, *competing}:
            account = self._accounts.setdefault(label, _Account())
            if label not in self._competed:
                account.ahead = max(account.ahead, -MAX_OWED)
        able = {label for label in competing if not self._accounts[label].is_empty_handed} | {asking}
        self._competed = frozenset(able)
        return self.shares(able)

    def dealt(self, label: str, competing: Collection[str]) -> None:
        """A new training group went to this label."""
        account = self._accounts.setdefault(label, _Account())
        if len(self._accounts) > REMEMBERED:
            self._forget(label, competing)
        account.dealt += 1
        account.is_empty_handed = False
        self._charge(label, 1.0, competing)

    def _forget(self, label: str, competing: Collection[str]) -> None:
        """Labels that come once and never again do not fill the memory."""
        kept = {label, *competing, *self._weights}
        self._accounts = {name: account for name, account in self._accounts.items() if name in kept}

    def empty_handed(self, label: str) -> None:
        """It was this label's turn, and no task could be dealt to it."""
        self._accounts.setdefault(label, _Account()).is_empty_handed = True

    def settled(self, label: str, counts: bool, competing: Collection[str]) -> None:
        """A training group of this label closed; where nothing of it counts, the label has another turn."""
        account = self._accounts.setdefault(label, _Account())
        if counts:
            account.counted += 1
            account.refunds = 0
            return
        account.refunds += 1
        if account.refunds <= MAX_REFUNDS:
            self._charge(label, -1.0, competing)

    def _charge(self, label: str, groups: float, competing: Collection[str]) -> None:
        if not self._weights:
            return
        self._accounts[label].ahead += groups
        for name, share in self.shares({label, *competing}).items():
            self._accounts.setdefault(name, _Account()).ahead -= share * groups

    def places(self) -> dict[str, LabelPlace]:
        """Every label that has a weight or was dealt a group."""
        total = sum(account.counted for account in self._accounts.values())
        places: dict[str, LabelPlace] = {}
        for label in sorted({*self._weights, *self._accounts}):
            account = self._accounts.get(label, _Account())
            places[label] = LabelPlace(
                weight=self._weights.get(label),
                dealt=account.dealt,
                counted=account.counted,
                share=account.counted / total if total else 0.0,
                ahead=account.ahead,
            )
        return places


def check_weights(weights: Mapping[str, float]) -> None:
    """Raises RequestError unless these are shares of labels, of which the rest may leave something."""
    for label, weight in weights.items():
        if not label:
            raise RequestError(
                "`weights` name labels, got an empty one: what has no label shares what is left", param="weights"
            )
        if not 0 <= weight <= 1:
            raise RequestError(f"the weight of {label!r}: expected 0 to 1, got {weight:g}", param="weights")
    total = math.fsum(weights.values())
    if total > 1 + SUM_TOLERANCE:
        shown = ", ".join(f"{label} = {weight:g}" for label, weight in weights.items())
        raise RequestError(f"`weights` must sum to 1 or less, got {shown}, which sums to {total:g}", param="weights")
