"""Speaks to one vLLM server: HTTP on a thread of its own, so that whoever drives the engine never waits for a stream.

driver ──▶ generate, cancel ──▶ loop ──▶ HTTP          HTTP ──▶ loop ──▶ pieces ──▶ driver
           call (waits for the answer)                            (thread-safe queue)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import aiohttp
import orjson

from wingbeat.core.errors import UnavailableError
from wingbeat.engines.vllm.wire import PATH, EventSplitter, NotFinite, Piece, Submission, read_piece

CALL_S = 600.0
"""Longer than any step of any model; a call that lasts longer will not return."""
JSON = {"Content-Type": "application/json"}
MAX_PIECES = 4096
"""Taken at once: the driver has messages to read, too.  While so many wait for it, streams are not read on."""

T = TypeVar("T")


class CallFailed(UnavailableError):
    """The server answered that it cannot, or did not answer."""

    code = "vllm_call_failed"

    def __init__(self, message: str, *, answer: int = 0) -> None:
        super().__init__(message)
        self.answer = answer
        """HTTP status; 0: there was none."""


class VllmClient:
    """Open until :meth:`close`; ``address`` is a URL or the path of a socket."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._url = address if address.startswith("http") else "http://vllm"
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Event()
        self._is_behind = False
        """Streams wait for the event, which is set by the next call of :meth:`pieces`."""
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._run, name="vllm-client", daemon=True)
        self._thread.start()
        self._wait(self._open(), timeout_s=CALL_S)

    # --- the driver's side ------------------------------------------------------------------

    def generate(self, submission: Submission) -> None:
        """Send a request; its pieces come by :meth:`pieces`, the last of them in any case."""
        self._loop.call_soon_threadsafe(self._begin, submission)

    def cancel(self, stream: int) -> None:
        """Hang up: the server frees the request.  Its pieces may still come."""
        self._loop.call_soon_threadsafe(self._cancel, stream)

    def pieces(self, *, wait_s: float) -> list[Piece]:
        """What came since the last call; waits so long for the first."""
        found: list[Piece] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._pieces.get(timeout=wait_s) if wait_s else self._pieces.get_nowait())
            while len(found) < MAX_PIECES:
                found.append(self._pieces.get_nowait())
        if self._is_behind:
            self._is_behind = False
            self._loop.call_soon_threadsafe(self._room.set)
        return found

    def call(self, path: str, body: Any = None, *, method: str = "POST", timeout_s: float = CALL_S) -> Any:
        """The answer of a command.  Raises CallFailed."""
        return self._wait(self._call(method, path, body), timeout_s=timeout_s)

    def close(self) -> None:
        with contextlib.suppress(CallFailed):
            self._wait(self._shut(), timeout_s=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _wait(self, work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise CallFailed(f"vLLM at {self._address} did not answer within {timeout_s:.0f} s") from error

    # --- the loop's side --------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _open(self) -> None:
        local = None if self._address.startswith("http") else self._address
        connector = aiohttp.TCPConnector(limit=0) if local is None else aiohttp.UnixConnector(local, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
        )

    async def _shut(self) -> None:
        tasks = list(self._streams.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _begin(self, submission: Submission) -> None:
        task = self._loop.create_task(self._stream(submission), name=f"vllm-stream-{submission.stream}")
        self._streams[submission.stream] = task
        task.add_done_callback(lambda _: self._streams.pop(submission.stream, None))

    def _cancel(self, stream: int) -> None:
        task = self._streams.get(stream)
        if task is not None:
            task.cancel()

    async def _stream(self, submission: Submission) -> None:
        """One request to its end; whatever happens, the last piece ends it."""
        number = submission.stream
        try:
            ended = await self._read(submission)
        except (aiohttp.ClientError, OSError) as error:
            self._pieces.put(Piece(number, lost=f"{type(error).__name__}: {error}"))
        except NotFinite as error:
            self._pieces.put(Piece(number, error=f"vLLM sent {error}", overflow=True))
        except (KeyError, TypeError, ValueError) as error:
            self._pieces.put(Piece(number, error=f"vLLM sent what cannot be understood: {error!r}"))
        else:
            if not ended:
                self._pieces.put(Piece(number, lost="the stream broke off"))

    async def _read(self, submission: Submission) -> bool:
        assert self._session is not None, "opened with the thread"
        splitter, ended = EventSplitter(), False
        async with self._session.post(self._url + PATH, data=submission.body(), headers=JSON) as response:
            if response.status != 200:
                self._pieces.put(_refusal(submission.stream, response.status, await response.read()))
                return True
            async for data in response.content.iter_any():
                for event in splitter.feed(data):
                    piece = read_piece(submission.stream, event, candidates=submission.candidates)
                    piece = _without_server_faults(piece)
                    ended = ended or piece.ends
                    self._pieces.put(piece)
                    while self._pieces.qsize() >= MAX_PIECES:
                        self._room.clear()
                        self._is_behind = True
                        await self._room.wait()
        return ended

    async def _call(self, method: str, path: str, body: Any) -> Any:
        assert self._session is not None, "opened with the thread"
        try:
            data = None if body is None else orjson.dumps(body)
            async with self._session.request(method, self._url + path, data=data, headers=JSON) as response:
                content = await response.read()
                if response.status != 200:
                    raise CallFailed(
                        f"vLLM refused {path} with {response.status}: {_message(content)}", answer=response.status
                    )
                return orjson.loads(content) if response.content_type == "application/json" else content.decode()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise CallFailed(
                f"vLLM at {self._address} did not answer {path}: {type(error).__name__}: {error}"
            ) from error


def _refusal(stream: int, status: int, content: bytes) -> Piece:
    """A request that is refused is at fault itself; where the server fails, another one may serve it."""
    message = _message(content)
    return Piece(stream, lost=message) if status >= 500 else Piece(stream, error=message)


def _without_server_faults(piece: Piece) -> Piece:
    """Of a stream, too, only the text tells the engine's death from a fault of the request."""
    return Piece(piece.stream, lost=piece.error) if "EngineCore encountered an issue" in piece.error else piece


def _message(content: bytes) -> str:
    try:
        answer = orjson.loads(content)
        found = answer["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        return content[:300].decode(errors="replace")
