"""The owner's end of the socket to a box's first process: requests out, answers to whom they belong.

The box may have been taken over, so nothing that comes in is believed: sizes are bounded, and whatever is no
message ends the box.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Sequence

from wingbeat.resources.specs import ResourceLost

MAX_HEADER_BYTES = 4096
MAX_MESSAGE_BYTES = 2**30
MAX_FIELDS = 16
READY = b"0"
"""The number of the first message, which no request asked for."""


class Channel:
    """Of one box, on one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._waiting: dict[bytes, asyncio.Future[list[bytes]]] = {}
        self.lost: str | None = None
        """Why the box is gone."""
        self.ready = self._expect(READY)
        self._reading = asyncio.get_running_loop().create_task(self._read(), name="wingbeat-box")

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        """A channel that owns this end of a socket pair."""
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end, limit=MAX_HEADER_BYTES))

    def post(self, verb: bytes, *fields: bytes) -> tuple[bytes, asyncio.Future[list[bytes]]]:
        """Send a request; its number, and the future that gets the answer's fields.  Raises ResourceLost."""
        self.raise_if_lost()
        number = b"%d" % next(self._numbers)
        message = (number, verb, *fields)
        body = b"".join(message)  # before anything is sent: half a request would end the box
        self._writer.write(b" ".join(b"%d" % len(field) for field in message) + b"\n")
        self._writer.write(body)
        return number, self._expect(number)

    async def call(self, verb: bytes, *fields: bytes, within_s: float) -> list[bytes]:
        """The answer's fields.

        Raises ResourceLost if the box is gone or does not answer in time, ValueError for a path that it refuses,
        OSError as the system call did.
        """
        number, answer = self.post(verb, *fields)
        try:
            async with asyncio.timeout(within_s):
                await self._writer.drain()
                return await answer
        except TimeoutError:
            self.lose(f"it did not answer within {within_s:g} s")
        except ConnectionError as error:
            self.lose(f"it hung up: {error}")
        finally:
            self.forget(number)
        raise ResourceLost(f"a box is gone: {self.lost}")

    def forget(self, number: bytes) -> None:
        """Nobody waits for this answer any more."""
        answer = self._waiting.pop(number, None)
        if answer is not None:
            answer.cancel()

    def raise_if_lost(self) -> None:
        """Raises ResourceLost, saying why."""
        if self.lost is not None:
            raise ResourceLost(f"a box is gone: {self.lost}")

    def lose(self, reason: str) -> None:
        """The box is gone; whoever waits for it is told.  Once."""
        if self.lost is not None:
            return
        self.lost = reason
        self._writer.transport.abort()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(ResourceLost(f"a box is gone: {reason}"))
                answer.exception()  # one that nobody awaits is no news

    async def close(self) -> None:
        """Hang up."""
        self.lose("it was closed")
        self._reading.cancel()
        await asyncio.wait([self._reading])
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def _expect(self, number: bytes) -> asyncio.Future[list[bytes]]:
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        return answer

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # by close, which has told everybody
            try:
                while True:
                    self._settle(await self._next())
            except (asyncio.IncompleteReadError, ConnectionError):
                self.lose("its first process ended")
            except (asyncio.LimitOverrunError, ValueError, IndexError) as error:
                self.lose(f"what it sent is no message: {error}")

    async def _next(self) -> list[bytes]:
        header = await self._reader.readuntil(b"\n")
        lengths = [int(word) for word in header.split()]
        if not 2 <= len(lengths) <= MAX_FIELDS or min(lengths) < 0 or sum(lengths) > MAX_MESSAGE_BYTES:
            raise ValueError(f"expected 2 to {MAX_FIELDS} lengths, got {header[:80]!r}")
        return [await self._reader.readexactly(length) for length in lengths]

    def _settle(self, fields: Sequence[bytes]) -> None:
        answer = self._waiting.get(fields[0])
        if answer is None or answer.done():
            return  # a command that was given up
        verdict, rest = fields[1], list(fields[2:])
        if verdict == b"ok":
            answer.set_result(rest)
        elif verdict == b"refused":
            answer.set_exception(ValueError(os.fsdecode(rest[0])))
        elif verdict == b"error":
            answer.set_exception(OSError(int(rest[0]), os.fsdecode(rest[1])))
        elif verdict == b"failed":
            answer.set_exception(ResourceLost(f"a command could not be held to its limits: {os.fsdecode(rest[0])}"))
        else:
            raise ValueError(f"expected a verdict, got {verdict[:80]!r}")
        del self._waiting[fields[0]]
