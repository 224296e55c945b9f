"""One weight file over HTTP, from the nearest source that has it: resumed where it broke off, verified at its end.

    source    answers                                what the receiver does
    nearest   200, 206                               reads on; if it breaks off, goes on at the next source
              503 (it is receiving the file itself)  asks again soon
              404, 401, an error, silence            turns to the next source, this one rests
    last      404                                    the version was released, unless another source gives it

What breaks off stays in a ``.partial`` file, of which the next try asks for the rest.  A whole file whose SHA-256 is
another one is deleted, and whoever gave a part of it is asked last from then on.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from wingbeat.core.errors import UnavailableError, VersionGone
from wingbeat.core.files import sha256_of
from wingbeat.core.weight_protocol import WeightFile
from wingbeat.weights.wanted import Wanted, while_wanted

CHUNK_BYTES = 2**20
CONNECT_S = 10.0
SHORTEST_PAUSE_S = 0.1
WAIT_S = 0.2
"""Before a source that is receiving the file itself is asked again."""
LONGEST_REST_S = 5.0
DAMAGED_UNTIL_FAILED = 4
FAILURES_UNTIL_DEAD = 3
"""In a row: what is waited for no longer once the version is known to be released."""


class NoSource(UnavailableError):
    """No source gave a byte for too long."""

    code = "no_weight_source"


@dataclass(frozen=True, slots=True)
class Source:
    """A server that may have the file."""

    url: str
    key: str
    tls: ssl.SSLContext | bool = True


@dataclass(frozen=True, slots=True)
class PullLimits:
    """``weights.stall_s`` and ``weights.give_up_s``."""

    stall_s: float = 30.0
    give_up_s: float = 120.0


@dataclass(slots=True)
class _Place:
    """A source, and what is known of it."""

    source: Source
    fault: str = "not asked yet"
    failures: int = 0
    rests_until: float = 0.0
    waits_since: float | None = None
    is_gone: bool = False
    is_suspect: bool = False
    """It gave a part of a file that turned out damaged."""
    has_given: bool = False
    """A part of the file that is on its way."""


def pull(
    file: WeightFile,
    *,
    policy: str,
    sources: Sequence[Source],
    partial: Path,
    limits: PullLimits,
    is_wanted: Wanted = lambda: True,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fill ``partial`` with the file, whole and verified.

    Raises VersionGone where no source has it any more, NoSource where none gave a byte for ``give_up_s``, and
    UnavailableError where what comes is damaged again and again, or is not wanted any more.
    """
    asyncio.run(_Pull(file, policy, [_Place(source) for source in sources], partial, limits, clock).run(is_wanted))


@dataclass(slots=True)
class _Pull:
    file: WeightFile
    policy: str
    places: list[_Place]
    partial: Path
    limits: PullLimits
    clock: Callable[[], float]
    num_damaged: int = 0
    progressed_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.progressed_at = self.clock()

    async def run(self, is_wanted: Wanted) -> None:
        if not await while_wanted(self._rounds(), is_wanted):
            raise UnavailableError(f"{self.file.name} is not wanted any more")

    async def _rounds(self) -> None:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=min(CONNECT_S, self.limits.stall_s), sock_read=self.limits.stall_s
        )
        if self._size() > self.file.size_bytes:
            self.partial.unlink()
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            while not await self._round(session):
                if self._is_gone():
                    raise VersionGone(f"no source has {self.file.name} any more, the version was released")
                if self.clock() - self.progressed_at > self.limits.give_up_s:
                    faults = "; ".join(f"{place.source.url}: {place.fault}" for place in self.places)
                    raise NoSource(f"no source gave {self.file.name} for {self.limits.give_up_s:g} s: {faults}")
                await asyncio.sleep(self._pause())

    def _is_gone(self) -> bool:
        """Whether the last source, which knows what there is, has it no more, and no other one answers."""
        *others, last = self.places
        return last.is_gone and all(place.is_gone or place.failures >= FAILURES_UNTIL_DEAD for place in others)

    def _pause(self) -> float:
        soonest = min((place.rests_until for place in self.places if not place.is_gone), default=0.0)
        return min(LONGEST_REST_S, max(SHORTEST_PAUSE_S, soonest - self.clock()))

    async def _round(self, session: aiohttp.ClientSession) -> bool:
        """Ask the sources in turn; whether the file is here."""
        for place in sorted(self.places, key=lambda place: place.is_suspect):
            if place.is_gone or place.rests_until > self.clock():
                if self._is_coming(place):
                    return False
                continue
            if self._size() < self.file.size_bytes:
                await self._ask(session, place)
            if self._size() == self.file.size_bytes and self._is_good():
                return True
            if self._is_coming(place):
                return False
        return False

    def _is_coming(self, place: _Place) -> bool:
        """It is on its way there: the sources behind are spared, which have more to do."""
        return place.waits_since is not None and self.clock() - place.waits_since < self.limits.stall_s

    def _size(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    async def _ask(self, session: aiohttp.ClientSession, place: _Place) -> None:
        start = self._size()
        headers = {"Authorization": f"Bearer {place.source.key}"}
        if start:
            headers["Range"] = f"bytes={start}-"
        url = f"{place.source.url.rstrip('/')}/weights/v1/{self.policy}/{self.file.name}"
        try:
            async with session.get(url, headers=headers, ssl=place.source.tls, allow_redirects=False) as answer:
                await self._take(place, answer, start)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._fails(place, f"{type(error).__name__}: {error}")

    async def _take(self, place: _Place, answer: aiohttp.ClientResponse, start: int) -> None:
        if answer.status == 503:
            now = self.clock()
            place.waits_since = now if place.waits_since is None else place.waits_since
            place.fault, place.rests_until = "it is receiving the file itself", now + WAIT_S
            return
        place.waits_since = None
        if answer.status in (404, 410):
            place.is_gone, place.fault = True, "it has no such file"
            return
        if answer.status not in (200, 206):
            self._fails(place, f"it answers {answer.status} {answer.reason}")
            return
        if answer.headers.get("ETag") != f'"{self.file.sha256}"':
            self._fails(place, "it has another file under this name")
            return
        if answer.status == 200 or not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            if answer.status == 206:
                self._fails(place, "it gives another range than was asked for")
                return
            self.partial.unlink(missing_ok=True)
        place.has_given = True
        await self._write(place, answer)

    async def _write(self, place: _Place, answer: aiohttp.ClientResponse) -> None:
        with self.partial.open("ab") as out:
            async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                if out.tell() + len(chunk) > self.file.size_bytes:
                    self._fails(place, f"it gives more than {self.file.size_bytes} bytes")
                    break
                out.write(chunk)
                out.flush()  # others on this host may be reading along
                self.progressed_at = self.clock()
            else:
                place.failures = 0

    def _is_good(self) -> bool:
        """The whole file's checksum; a damaged one goes, and who gave it is not trusted."""
        if sha256_of(self.partial) == self.file.sha256:
            return True
        self.partial.unlink()
        self.num_damaged += 1
        for place in self.places:
            if place.has_given:
                place.has_given, place.is_suspect = False, True
                self._fails(place, "what it gave was damaged")
        if self.num_damaged >= DAMAGED_UNTIL_FAILED:
            raise UnavailableError(f"{self.file.name} came damaged {self.num_damaged} times; it is not loaded")
        return False

    def _fails(self, place: _Place, fault: str) -> None:
        place.fault, place.waits_since = fault, None
        place.rests_until = self.clock() + min(LONGEST_REST_S, WAIT_S * 2**place.failures)
        place.failures += 1
