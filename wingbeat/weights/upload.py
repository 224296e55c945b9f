"""A trainer on another host than control brings it what it publishes, once: control gives it to whoever pulls.

Parts of a file go one after the other; control says from which byte it lacks the file, so that one that was cut off,
by either side's death, goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import aiohttp

from wingbeat.core.tls import client_context
from wingbeat.core.weight_protocol import Manifest, WeightFile
from wingbeat.weights.ranges import OFFSET_HEADER, SHA256_HEADER, content_range
from wingbeat.weights.wanted import Wanted, while_wanted

logger = logging.getLogger(__name__)

PART_BYTES = 4 * 2**20
"""At first; less where ``server.max_body_bytes`` is."""
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
STALL_S = 60.0
TOO_LARGE = 413


class Uploads:
    """Brings files to one control."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"}
        self._part_bytes = PART_BYTES
        self._tls: ssl.SSLContext | bool = client_context() if url.startswith("https://") else True

    def carry(self, manifest: Manifest, is_wanted: Wanted) -> bool:
        """Bring a version's files; tries until they are there (True), or until they are not wanted (False)."""
        return asyncio.run(while_wanted(self._bring_all(manifest), is_wanted))

    async def _bring_all(self, manifest: Manifest) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=STALL_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            for file in manifest.files:
                await self._bring(session, manifest, file)

    async def _bring(self, session: aiohttp.ClientSession, manifest: Manifest, file: WeightFile) -> None:
        path = Path(manifest.path).with_name(file.name)
        offset = failures = 0
        while True:
            try:
                found = await self._part(session, manifest.policy, file, path, offset)
                if found >= file.size_bytes:
                    return
                failures = 0 if found > offset else failures + 1
                offset = found
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                logger.warning("cannot bring %s to %s: %s", file.name, self._url, error)
                failures += 1
            if failures:
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S)) - 1])

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
            if answer.status == TOO_LARGE:
                self._part_bytes = max(1, len(data) // 2)
            raise aiohttp.ClientPayloadError(f"it answers {answer.status}: {(await answer.text())[:500]}")
