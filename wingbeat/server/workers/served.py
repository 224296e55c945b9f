"""Which weights which engine serves: what it was told, what it said, and whether that fits.

An engine is given generations of a policy while it is in ``link.served``: it has acknowledged weights, and they are not
more than ``max_lag`` versions behind the freshest engine's.  Groups that are admitted have the lowest version among
these as their floor, and no generation of a group goes to an engine below its floor: what joins late, or falls behind,
samples for younger groups only::

    told ──▶ loading ──▶ acknowledged ──▶ served ──▶ lagging ─┐
      ▲                        │             ▲                │
      │                        ▼             └── caught up ◀──┘
      └─── again, later ── quarantined

An engine is told one version at a time.  One behind a slow link is told the newest when it has the last, and loads
none of those between.
"""

from __future__ import annotations

from collections.abc import Callable

from wingbeat.core.weight_protocol import Manifest, PinVersion, Place, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import TokenChunk
from wingbeat.dataflow.lineages import Ancestry
from wingbeat.server.calls.flights import EngineLink, Flight, Served

RETRY_S = 30.0
"""How long an engine that could not load a version, or is quarantined, has before it is told to load again."""
REMEMBERED = 1024
"""Versions per policy whose checksums are known."""
SourcesFor = Callable[[EngineLink, Manifest], tuple[str, ...]]


class ServedWeights:
    """Runs on control's event loop."""

    def __init__(self, *, max_lag: int | None, clock: Callable[[], float]) -> None:
        """``max_lag``: versions that an engine may be behind the freshest one and still get generations; None: any."""
        self.links: list[EngineLink] = []
        self.max_lag = max_lag
        self.sources_for: SourcesFor = lambda link, manifest: ()
        self._clock = clock
        self._live: dict[str, Manifest] = {}
        self._pins: dict[tuple[str, int], Manifest] = {}
        self._published: dict[str, dict[Place, str]] = {}
        """Per policy, the checksums of the versions that were live."""
        self._ancestries: dict[str, Ancestry] = {}
        self._doubted: set[str] = set()
        """Policies whose engines were told to load anew, while the reason lasts."""
        self._retry_at: dict[tuple[str, str], float] = {}
        """By worker and policy: when an engine that failed is told again."""
        self._pin_again_at: dict[tuple[str, str], float] = {}
        """The same of pinned versions."""

    # --- telling ------------------------------------------------------------------------------

    def join(self, link: EngineLink) -> None:
        """A new engine: tell it everything it should serve."""
        self.links.append(link)
        for manifest in self._live.values():
            self._tell(link, manifest)
        for manifest in self._pins.values():
            self._tell_pin(link, manifest)

    def leave(self, link: EngineLink) -> None:
        self.links.remove(link)
        self._retry_at = {key: at for key, at in self._retry_at.items() if key[0] != link.worker_id}
        self._pin_again_at = {key: at for key, at in self._pin_again_at.items() if key[0] != link.worker_id}
        for policy in link.acknowledged:
            self._sort_out_laggards(policy)

    def stop_sending(self, link: EngineLink) -> None:
        """It leaves: nothing is asked of it any more."""
        link.leaving = True
        link.served.clear()
        link.pinned.clear()
        for policy in link.acknowledged:
            self._sort_out_laggards(policy)

    def publish(self, manifest: Manifest) -> None:
        """Have every engine serve this version live."""
        self._live[manifest.policy] = manifest
        known = self._published.setdefault(manifest.policy, {})
        known[manifest.place] = manifest.checksum
        while len(known) > REMEMBERED:
            del known[next(iter(known))]
        for link in self.links:
            self._tell(link, manifest)

    def pin(self, manifest: Manifest) -> None:
        """Have every engine also keep this version."""
        self._pins[(manifest.policy, manifest.version)] = manifest
        for link in self.links:
            self._tell_pin(link, manifest)

    def unpin(self, policy: str, version: int) -> None:
        self._pins.pop((policy, version), None)

    def rolled_back(self, policy: str, ancestry: Ancestry) -> None:
        self._ancestries[policy] = ancestry

    def ancestry(self, policy: str) -> Ancestry | None:
        """Of a policy that was rolled back or restored."""
        return self._ancestries.get(policy)

    def beat(self, link: EngineLink) -> None:
        """An engine lives: where it lacks what is live and loads nothing, it is told again when its time has come."""
        for policy, manifest in self._live.items():
            has = link.acknowledged.get(policy)
            is_due = self._clock() >= self._retry_at.get((link.worker_id, policy), 0.0)
            if is_due and (policy in link.quarantined or has is None or has[:2] != manifest.place):
                self._tell(link, manifest)
        for key in [key for key, at in self._pin_again_at.items() if key[0] == link.worker_id and self._clock() >= at]:
            del self._pin_again_at[key]
            for pin, manifest in self._pins.items():
                if pin[0] == key[1] and pin not in link.pinned:
                    self._tell_pin(link, manifest)

    def doubt(self, policy: str, is_doubted: bool) -> None:
        """Whether what engines sample does not fit what they should serve: at first they are all told to load it anew.

        That does no harm where the reason is another one, and mends an engine whose memory holds something else.
        """
        is_new = is_doubted and policy not in self._doubted
        (self._doubted.add if is_doubted else self._doubted.discard)(policy)
        live = self._live.get(policy)
        if is_new and live is not None:
            for link in self.links:
                self._tell(link, live)

    def _tell(self, link: EngineLink, manifest: Manifest) -> None:
        if link.hosts(manifest.policy) and not link.leaving and manifest.policy not in link.loading:
            link.loading[manifest.policy] = manifest
            link.send(UpdateWeights(manifest=manifest, sources=self.sources_for(link, manifest)))

    def _tell_pin(self, link: EngineLink, manifest: Manifest) -> None:
        if link.hosts(manifest.policy) and not link.leaving:
            link.send(PinVersion(manifest=manifest, sources=self.sources_for(link, manifest)))

    # --- answers ------------------------------------------------------------------------------

    def acknowledged(self, link: EngineLink, message: WeightsServed) -> str:
        """An engine says what it now serves; why it is quarantined for that, "" where it is believed."""
        policy = message.policy
        if message.pinned:
            pin = self._pins.get((policy, message.version))
            if pin is not None and pin.checksum == message.checksum:  # else it was unpinned meanwhile
                link.pinned.add((policy, message.version))
            return ""
        served = Served(message.lineage, message.version, message.checksum)
        fault, loading = self._fault(link, policy, served), link.loading.get(policy)
        if loading is not None and served[:2] >= loading.place:
            del link.loading[policy]
        link.acknowledged[policy] = served
        if fault:
            self.quarantine(link, policy, fault)
            return fault
        link.quarantined.pop(policy, None)
        if not link.leaving:
            link.served[policy] = served
            self._sort_out_laggards(policy)
        if (live := self._live.get(policy)) is not None and served[:2] < live.place:
            self._tell(link, live)
        return ""

    def failed(self, link: EngineLink, policy: str) -> None:
        """It could not load what it was told last; it goes on with what it has."""
        loading = link.loading.pop(policy, None)
        self._retry_at[(link.worker_id, policy)] = self._clock() + RETRY_S
        live = self._live.get(policy)
        if live is not None and loading is not None and loading.place != live.place:
            self._tell(link, live)  # others have come meanwhile

    def pin_failed(self, link: EngineLink, policy: str) -> None:
        """It could not load a version of the policy that it was told to pin: it is told again later."""
        self._pin_again_at[(link.worker_id, policy)] = self._clock() + RETRY_S

    def quarantine(self, link: EngineLink, policy: str, reason: str) -> None:
        """Nothing of the policy is asked of this engine until it acknowledges the right weights."""
        link.quarantined[policy] = reason
        link.served.pop(policy, None)
        self._retry_at[(link.worker_id, policy)] = self._clock() + RETRY_S
        self._sort_out_laggards(policy)

    def _fault(self, link: EngineLink, policy: str, served: Served) -> str:
        known, loading, at = self._published.get(policy), link.loading.get(policy), (served.lineage, served.version)
        if not known:
            return ""
        place = f"version {served.version}" + (f" of lineage {served.lineage}" if served.lineage else "")
        was_told = loading is not None and loading.place == at  # long ago, perhaps
        checksum = loading.checksum if was_told and loading is not None else known.get(at)
        if checksum is None:
            return f"it says that it serves {place}, which was not published"
        if checksum != served.checksum:
            return f"it serves {place} with checksum {served.checksum[:16]}, and {checksum[:16]} was published"
        return ""

    def misfit(self, link: EngineLink, flight: Flight, chunk: TokenChunk) -> str:
        """Why a chunk's tokens cannot be what they are said to be, "" where they may."""
        if not chunk.token_ids:
            return ""
        if flight.version is not None:
            if chunk.version == flight.version:
                return ""
            return f"it sampled with version {chunk.version} where version {flight.version} was asked for"
        place, newest = (chunk.lineage, chunk.version), link.acknowledged.get(flight.policy)
        if place < flight.sent_with:
            return f"it sampled with version {chunk.version}, and had acknowledged version {flight.sent_with[1]} before"
        if newest is None or place > newest[:2]:
            said = "none" if newest is None else f"version {newest.version}"
            return f"it sampled with version {chunk.version}, and has acknowledged {said}"
        return ""

    def may_take(self, link: EngineLink, flight: Flight) -> bool:
        """Whether an engine may sample a generation: not with weights older than its group was admitted with."""
        if not link.serves(flight.policy, flight.version):
            return False
        if flight.version is not None or not flight.floor:
            return True
        return self._effective(flight.policy, link.served[flight.policy]) >= flight.floor

    # --- who serves what ----------------------------------------------------------------------

    def holds(self, manifest: Manifest) -> bool:
        """Whether an engine may still open the files of this version."""
        held = (self._live.get(manifest.policy), self._pins.get((manifest.policy, manifest.version)))
        loading = (link.loading.get(manifest.policy) for link in self.links)
        return any(other is not None and other.path == manifest.path for other in (*held, *loading))

    def lowest(self, policy: str) -> Served | None:
        """The oldest live version with which a new generation may be sampled."""
        return min(self.all(policy), default=None)

    def all(self, policy: str) -> list[Served]:
        """What each engine that is given generations of the policy has live."""
        return [link.served[policy] for link in self.links if policy in link.served]

    def lag(self, link: EngineLink, policy: str) -> int:
        """Versions that an engine's weights are behind those of the freshest engine."""
        freshest, own = self._freshest(policy), link.acknowledged.get(policy)
        return 0 if freshest is None or own is None else max(0, freshest - self._effective(policy, own))

    def _sort_out_laggards(self, policy: str) -> None:
        """Engines too far behind are given nothing until they have caught up, or the fresher ones are gone; what they
        run they end.
        """
        for link in self._believed(policy):
            if self.max_lag is not None and self.lag(link, policy) > self.max_lag:
                link.served.pop(policy, None)
            else:
                link.served[policy] = link.acknowledged[policy]

    def _believed(self, policy: str) -> list[EngineLink]:
        """Engines that have weights of the policy, and stay."""
        return [
            link
            for link in self.links
            if policy in link.acknowledged and policy not in link.quarantined and not link.leaving
        ]

    def _freshest(self, policy: str) -> int | None:
        believed = self._believed(policy)
        return max((self._effective(policy, link.acknowledged[policy]) for link in believed), default=None)

    def _effective(self, policy: str, served: Served) -> int:
        ancestry = self._ancestries.get(policy)
        if ancestry is None:
            return served.version
        return ancestry.effective(served.version, lineage=min(served.lineage, ancestry.current))


def lag_limit(configured: int | None, *, max_staleness: int) -> int:
    """``engine.max_lag``.  Unset, it leaves admission room for two batches, one that trains and one that is sampled."""
    return max(0, max_staleness - 1) if configured is None else configured
