"""Several versions of an agent at work: whose turn it is, whose groups nobody can complete any more, what they achieve.

Labels and weights are of :mod:`wingbeat.dataflow.variants`; groups know their version by themselves.  This module
brings both together with leases, evaluations, the ledger and what people read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from wingbeat.core.config import Config
from wingbeat.core.errors import SetupError
from wingbeat.core.events import EventLog
from wingbeat.core.files import write_atomically
from wingbeat.core.protocol import LeaseRequest
from wingbeat.core.protocol_variants import LabelReply, VariantReply, VariantsReply
from wingbeat.core.signals import Changed
from wingbeat.core.types import Split, Variant
from wingbeat.dataflow.groups import GroupBook, RestoredSlot, SlotTicket
from wingbeat.dataflow.records import GroupSpec
from wingbeat.dataflow.variants import Asker, Presence, VariantMix
from wingbeat.server.episodes.client_groups import is_client_group
from wingbeat.server.episodes.evaluations import Evaluations
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode
from wingbeat.server.variants.metrics import VariantMeter, VariantStats

WEIGHTS_FILE = "variants.json"
REMEMBERED = 10_000
"""Attempts that ended and whose takers are still known; then they are forgotten."""


class _Saved(msgspec.Struct, frozen=True):
    weights: dict[str, float]
    configured: dict[str, float]
    """The weights of the configuration at that time: where it has other ones since, they win."""


@dataclass(frozen=True, slots=True)
class VariantParts:
    """What this needs of control."""

    config: Config
    run_dir: Path
    book: GroupBook
    evaluations: Evaluations
    events: EventLog
    changed: Changed
    meter: VariantMeter
    open_episodes: Callable[[], list[OpenEpisode]]
    clock: Callable[[], float]


class Variants:
    """Runs on control's event loop."""

    def __init__(self, parts: VariantParts) -> None:
        self._parts = parts
        self.meter = parts.meter
        self.mixes = parts.config.dataflow.mix_agent_versions
        self.presence = Presence(wait_s=parts.config.dataflow.variant_wait_s, clock=parts.clock)
        self._configured = configured_weights(parts.config)
        self.mix = VariantMix(self._restored())
        self._labels: dict[str, str] = {}
        """Of the training groups that were dealt since this process began."""
        self._takers: dict[tuple[str, int], Asker] = {}
        """Who leased an attempt."""

    def _restored(self) -> dict[str, float]:
        """What was set while the run went on stays in force, unless the configuration has changed since.

        Raises SetupError where it cannot be read.
        """
        path = self._parts.run_dir / WEIGHTS_FILE
        if not path.is_file():
            return dict(self._configured)
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
        except msgspec.MsgspecError as error:
            raise SetupError(
                f"the weights of agent versions in {path} are damaged ({error}): delete the file, and set them anew"
            ) from error
        return dict(saved.weights if saved.configured == self._configured else self._configured)

    def save(self) -> None:
        """Make the weights durable; blocks.  Raises UnavailableError where the disk is full."""
        saved = _Saved(self.mix.weights, self._configured)
        write_atomically(self._parts.run_dir / WEIGHTS_FILE, msgspec.json.encode(saved))

    # --- dealing ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def asking(self, request: LeaseRequest) -> Iterator[None]:
        """While a client waits for leases."""
        asker, trains = asker_of(request), Split.TRAIN in request.splits
        sources = None if request.sources is None else frozenset(request.sources)
        self.presence.ask(asker, trains=trains, sources=sources)
        try:
            yield
        finally:
            self.presence.answered(asker, trains=trains)

    def left(self, asker: Asker) -> None:
        """A client says that it asks no more."""
        self.presence.leave(asker)
        self.reap()

    def free_groups(self, variant: Variant) -> Iterable[GroupSpec]:
        """Dealt groups of which this version may take a slot, oldest first."""
        for spec in self._parts.book.groups_with_free_slots(variant):
            if is_client_group(spec.id):
                continue
            if spec.split is Split.EVAL and not self._parts.evaluations.admits(spec, self._of(variant)):
                continue
            yield spec

    def next_evaluation(self, sources: Collection[str] | None, variant: Variant) -> GroupSpec | None:
        """The next group of an evaluation that this version of the agent may run."""
        return self._parts.evaluations.next_group(sources, variant=self._of(variant))

    def _of(self, variant: Variant) -> Variant | None:
        return None if self.mixes else variant

    def may_open(self, variant: Variant) -> bool:
        """Whether it is this label's turn to have a new training group."""
        return self.mix.may_deal(variant.label, self._competing())

    def _competing(self) -> frozenset[str]:
        """Who takes part; nobody waits for anybody where there are no weights."""
        return self.presence.competing() if self.mix.weights else frozenset()

    def taken(self, ticket: SlotTicket, request: LeaseRequest) -> None:
        """A slot was leased."""
        self._takers[(ticket.episode_id, ticket.attempt)] = asker_of(request)
        self._parts.evaluations.taken(ticket.group, self._of(Variant(request.label, request.code)))

    def taker(self, ticket: SlotTicket) -> Asker | None:
        """Who leased it; None where an earlier process of control knows."""
        return self._takers.get((ticket.episode_id, ticket.attempt))

    def opened(self, group: GroupSpec, variant: Variant) -> None:
        """A new training group was dealt to it."""
        self._labels[group.id] = variant.label
        self.mix.dealt(variant.label, self._competing())
        if self.mix.weights:  # others may have waited for their turn, which comes now
            self._parts.changed.notify()

    def settled(self, group: GroupSpec, counts: bool) -> None:
        """A training group closed."""
        label = self._labels.pop(group.id, None)
        if label is not None:
            self.mix.settled(label, counts, self._competing())

    def ended(self, episode: OpenEpisode, outcome: str, rewards: Mapping[str, float] | None = None) -> None:
        """An attempt is over; ``rewards`` by policy, where it counts."""
        self._takers.pop((episode.episode_id, episode.attempt), None)
        self.meter.ended(variant_of(episode), episode.split, outcome, rewards)

    # --- those that are gone ------------------------------------------------------------------

    def reap(self) -> None:
        """Give up free slots of versions that are gone, and let evaluations that they had begun begin anew.

        Only where others are here who could do that work: whoever comes back while nobody else asks goes on.
        """
        self.presence.observe(self._at_work())
        if self.mixes:
            return
        replaced = functools.cache(self._is_replaced)  # many groups, few versions and sources
        for group, _ in self._parts.book.progress():
            if self._parts.book.is_recalled(group.id):  # by now an attempt that ran then may have been lost
                if self._parts.book.recall(group.id):
                    self._parts.changed.notify()
                continue
            owner = self._parts.book.owner(group.id)
            if owner is None or is_client_group(group.id) or not replaced(owner, group.task.source):
                continue
            if self._parts.book.recall(group.id):
                self._parts.events.emit("group_recalled", group_id=group.id, label=owner.label, code=owner.code)
                self._parts.changed.notify()
        for evaluation in self._parts.evaluations.running:
            owner = evaluation.variant
            if owner is not None and any(replaced(owner, source) for source in evaluation.sources):
                for group_id in self._parts.evaluations.replace_variant(evaluation):
                    self._parts.book.recall(group_id)

    def _is_replaced(self, variant: Variant, source: str) -> bool:
        """It is gone, and another one is here that could run what is open of this source."""
        return self.presence.is_gone(variant) and bool(self.presence.could_run(source))

    def _at_work(self) -> list[Asker]:
        """Who runs an episode; an attempt that was leased before this process began tells its client only."""
        episodes = [e for e in self._parts.open_episodes() if e.state is EpisodeState.OPEN]
        if len(self._takers) > 2 * len(episodes) + REMEMBERED:
            still = {(episode.episode_id, episode.attempt) for episode in episodes}
            self._takers = {key: asker for key, asker in self._takers.items() if key in still}
        default = ((e, Asker(e.client, variant_of(e))) for e in episodes)
        return [self._takers.get((e.episode_id, e.attempt), asker) for e, asker in default]

    def reason(self, label: str) -> str:
        """Why a client of this label gets no new group, or "" where that has other reasons."""
        competing = self._competing()
        if self.mix.may_deal(label, competing):
            return ""
        if self.mix.weights.get(label) == 0.0:
            return f"the weight of label {label!r} is 0"
        others = ", ".join(sorted(other for other in competing if other != label)) or "others"
        return f"label {label!r} is ahead of its share and waits for {others}"

    def blockers(self) -> list[str]:
        """What weights keep from being dealt."""
        if not self.presence.num_waiting or not self.mix.weights:
            return []
        competing = self.presence.competing()
        barred = sorted(label for label in competing if self.mix.weights.get(label) == 0.0)
        if competing and len(barred) == len(competing):
            return [f"no group is dealt: the weight of {', '.join(barred)} is 0; give weights with PUT /api/variants"]
        return []

    # --- what people read ---------------------------------------------------------------------

    def reply(self) -> VariantsReply:
        """For ``GET /api/variants``."""
        here, stats = self.presence.here(), self.meter.stats()
        newest = [*stats, *sorted(variant for variant in here if variant not in stats)]
        labels = {
            label: LabelReply(
                weight=place.weight,
                groups_dealt=place.dealt,
                groups_counted=place.counted,
                share=place.share,
                ahead=place.ahead,
            )
            for label, place in self.mix.places().items()
        }
        return VariantsReply(
            weights=self.mix.weights,
            labels=labels,
            variants=[_reply(variant, variant in here, stats.get(variant, VariantStats())) for variant in newest],
        )


def _reply(variant: Variant, here: bool, stats: VariantStats) -> VariantReply:
    means = {
        policy: stats.reward_sums[(split, policy)] / count
        for (split, policy), count in stats.rewards.items()
        if split == Split.TRAIN
    }
    return VariantReply(
        label=variant.label,
        code=variant.code,
        here=here,
        episodes={f"{split}/{outcome}": count for (split, outcome), count in sorted(stats.endings.items())},
        reward_mean=means,
    )


def told_apart(group: GroupSpec, slots: Sequence[RestoredSlot]) -> Sequence[RestoredSlot]:
    """The slots of a group after a restart: who declared a group may label its members as he likes."""
    if not is_client_group(group.id):
        return slots
    return [slot if slot.variant is None else replace(slot, variant=Variant(code=slot.variant.code)) for slot in slots]


def configured_weights(config: Config) -> dict[str, float]:
    """The weights of the agents that the configuration runs, by label."""
    return {
        agent.label or name: agent.weight for name, agent in config.running_agents.items() if agent.weight is not None
    }


def asker_of(request: LeaseRequest) -> Asker:
    return Asker(request.instance or request.client_id, Variant(request.label, request.code))


def variant_of(episode: OpenEpisode) -> Variant:
    return Variant(episode.label, episode.code)
