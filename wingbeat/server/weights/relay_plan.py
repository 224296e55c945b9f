"""Who pulls weights from whom: a tree of hosts, so that control sends each byte to few of them.

    control ──▶ a ──▶ c, d        fan_out = 2; a, b, c relay, d and e do not
           └──▶ b ──▶ e

Hosts are placed in order, each under the first server that has a place left; the fastest come first.  One that does
not relay has nobody under it.  Where there are too few relays, control serves the rest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wingbeat.core.weight_protocol import CONTROL, Manifest
from wingbeat.server.calls.flights import EngineLink


@dataclass(frozen=True, slots=True)
class PullingHost:
    """A host whose engines pull: each file comes there once."""

    host_id: str
    relays: tuple[str, ...] = ()
    """Base URLs at which it passes on what it has; () where it does not."""
    receive_s: float = math.inf
    """How long it took to receive a version lately; inf where nobody knows."""


def plan_sources(hosts: Iterable[PullingHost], *, fan_out: int) -> dict[str, tuple[str, ...]]:
    """Per host, where it pulls from: the relays of its parent, of that one's parent, and so on; control last."""
    order = sorted(hosts, key=lambda host: (not host.relays, host.receive_s, host.host_id))
    root: tuple[str, ...] = (CONTROL,)
    places: deque[tuple[str, ...]] = deque([root] * fan_out)
    """The way up from each place that is free, nearest first."""
    sources: dict[str, tuple[str, ...]] = {}
    for host in order:
        way = places.popleft() if places else root
        sources[host.host_id] = way
        if host.relays:
            places.extend([(*host.relays, *way)] * fan_out)
    return sources


def sources_for(link: EngineLink, manifest: Manifest, links: Sequence[EngineLink], *, fan_out: int) -> tuple[str, ...]:
    """Where an engine gets the files of a version; () where it maps them, or there are none."""
    if link.host_id == manifest.host_id or not manifest.files:
        return ()
    by_host: dict[str, list[EngineLink]] = {}
    for other in (*links, link):
        if other.host_id != manifest.host_id:
            by_host.setdefault(other.host_id, []).append(other)
    hosts = [_pulling(host_id, members, manifest) for host_id, members in by_host.items()]
    return plan_sources(hosts, fan_out=fan_out)[link.host_id]


def _pulling(host_id: str, links: Sequence[EngineLink], manifest: Manifest) -> PullingHost:
    """One whose engines still load an older version cannot pass this one on soon."""
    relays = {
        link.relay_url: None
        for link in links
        if link.relay_url and not link.leaving and link.loading.get(manifest.policy, manifest) is manifest
    }
    known = [link.receive_s for link in links if link.receive_s]
    return PullingHost(host_id, tuple(relays), min(known, default=math.inf))
