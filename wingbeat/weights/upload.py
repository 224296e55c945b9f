"""A trainer on another host than control brings it what it publishes, once: control gives it to whoever pulls.

Parts of a file go one after the other; control says from which byte it lacks the file, so that one that was cut off,
by either side's death, goes on where it was.

What fails is tried again for as long as the version is wanted, and people are told once nothing has moved for a while.
An answer that the same bytes will get again is the end of it: :class:`UploadRefused`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp

from wingbeat.core.errors import WingbeatError
from wingbeat.core.tls import client_context
from wingbeat.core.weight_protocol import Manifest, WeightFile
from wingbeat.weights.ranges import OFFSET_HEADER, SHA256_HEADER, content_range
from wingbeat.weights.wanted import Wanted, while_wanted

logger = logging.getLogger(__name__)

PART_BYTES = 4 * 2**20
"""At first; less where ``server.max_body_bytes`` is."""
LEAST_PART_BYTES = 256
"""Who refuses so little as too large takes nothing."""
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
STALL_S = 60.0
TROUBLE_S = 60.0
"""Without a byte that control takes, after which people are told."""
FINAL_S = 30.0
"""Refusals in a row for so long are the last word: while control starts again, a proxy before it may say no, too."""
TOO_LARGE = 413
LATER = (408, 425, 429)
"""Of the answers that blame the request, those that another time may get another one."""

Trouble = Callable[[str], None]
"""Told once per file why it does not arrive."""


class UploadRefused(WingbeatError):
    """Control takes these weights neither now nor later: nobody on another host will receive them."""

    code = "upload_refused"


class Uploads:
    """Brings files to one control."""

    def __init__(
        self, url: str, key: str, *, trouble_s: float = TROUBLE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"}
        self._part_bytes = PART_BYTES
        self._tls: ssl.SSLContext | bool = client_context() if url.startswith("https://") else True
        self._trouble_s = trouble_s
        self._clock = clock

    def carry(self, manifest: Manifest, is_wanted: Wanted, on_trouble: Trouble = lambda text: None) -> bool:
        """Bring a version's files; tries until they are there (True), or until they are not wanted (False).

        Raises UploadRefused where control will never take them, FileNotFoundError where they are gone.
        """
        return asyncio.run(while_wanted(self._bring_all(manifest, on_trouble), is_wanted))

    async def _bring_all(self, manifest: Manifest, on_trouble: Trouble) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=STALL_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            for file in manifest.files:
                patience = _Patience(f"{file.name} to {self._url}", self._trouble_s, on_trouble, clock=self._clock)
                await self._bring(session, manifest, file, patience)

    async def _bring(
        self, session: aiohttp.ClientSession, manifest: Manifest, file: WeightFile, patience: _Patience
    ) -> None:
        path = Path(manifest.path).with_name(file.name)
        offset = 0
        while True:
            pause_s = 0.0
            try:
                found = await self._part(session, manifest.policy, file, path, offset)
                if found >= file.size_bytes:
                    return
                if found > offset:
                    patience.moved(found)
                else:
                    pause_s = patience.failed("it lacks what it was sent")
                offset = found
            except _TooLarge:
                logger.info("%s takes no part of %d bytes: sending half as much", self._url, 2 * self._part_bytes)
            except _Refusal as error:
                pause_s = patience.refused(str(error))
            except FileNotFoundError:
                raise
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                pause_s = patience.failed(str(error) or type(error).__name__)
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _part(
        self, session: aiohttp.ClientSession, policy: str, file: WeightFile, path: Path, offset: int
    ) -> int:
        """Send the part from ``offset`` on; from which byte control lacks the file then."""
        with path.open("rb") as source:
            source.seek(offset)
            data = source.read(self._part_bytes)
        headers = {
            "Content-Range": content_range(offset, offset + len(data), size=file.size_bytes),
            SHA256_HEADER: file.sha256,
        }
        url = f"{self._url}/weights/v1/{policy}/{file.name}"
        async with session.put(url, data=data, headers=headers, ssl=self._tls) as answer:
            if OFFSET_HEADER in answer.headers:
                return int(answer.headers[OFFSET_HEADER])
            said = f"it answers {answer.status} {_words(await answer.text())}".rstrip()
            if answer.status == TOO_LARGE and len(data) > LEAST_PART_BYTES:
                self._part_bytes = len(data) // 2
                raise _TooLarge
            if 400 <= answer.status < 500 and answer.status not in LATER:
                raise _Refusal(said)
            raise aiohttp.ClientPayloadError(said)


def _words(body: str) -> str:
    """What an answer says to people: control's own message, or whatever a proxy wrote."""
    try:
        found = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        found = body
    return " ".join(str(found).split())[:300]


class _TooLarge(Exception):
    """A smaller part may be taken."""


class _Refusal(Exception):
    """An answer that blames what was sent."""


class _Patience:
    """Of one file: when it is tried again, when people are told, when it is given up."""

    def __init__(self, what: str, trouble_s: float, on_trouble: Trouble, *, clock: Callable[[], float]) -> None:
        self._what = what
        self._trouble_s = trouble_s
        self._on_trouble = on_trouble
        self._clock = clock
        self._moved_s = clock()
        self._furthest = 0
        """Bytes that control had at most."""
        self._failures = 0
        """In a row."""
        self._refused_s: float | None = None
        """When the first of the refusals in a row came; None: the last answer was none."""
        self._is_told = False

    def moved(self, offset: int) -> None:
        """Control took some of it; what it takes again, as it came damaged, brings the file no nearer."""
        self._failures, self._refused_s = 0, None
        if offset > self._furthest:
            self._furthest, self._moved_s = offset, self._clock()

    def failed(self, why: str) -> float:
        """Seconds until the next try."""
        self._refused_s = None
        return self._pause(why)

    def refused(self, why: str) -> float:
        """Seconds until the next try; raises UploadRefused where there is none."""
        now = self._clock()
        if self._refused_s is None:
            self._refused_s = now
        elif now - self._refused_s >= FINAL_S:
            raise UploadRefused(f"cannot bring {self._what}: {why}")
        return self._pause(why)

    def _pause(self, why: str) -> float:
        logger.warning("cannot bring %s: %s", self._what, why)
        waited_s = self._clock() - self._moved_s
        if waited_s >= self._trouble_s and not self._is_told:
            self._is_told = True
            self._on_trouble(f"cannot bring {self._what} for {waited_s:.0f} s, and goes on trying: {why}")
        self._failures += 1
        return RETRY_S[min(self._failures, len(RETRY_S)) - 1]
