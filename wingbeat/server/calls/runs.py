"""One execution of a model call, apart from the connections that wait for its answer.

The caller of a call that takes long may hang up and ask again; its second connection then joins the
same run, or reads the answer that is already there.  So a run keeps its whole answer as frames, and any
number of readers send them on.  A turn counts as delivered once the frame that completes its reply was
handed to a connection that was still open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from wingbeat.core.errors import CallTimeout, EpisodeClosed, UnavailableError, WingbeatError
from wingbeat.server.calls.dialects.base import Dialect, EventWriter
from wingbeat.server.calls.gateway import Begun, Gateway
from wingbeat.server.calls.model_call import Choice, Prepared, TextDelta
from wingbeat.server.episodes.endings import fault_of_call
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode

logger = logging.getLogger(__name__)


FRAME_BYTES = 150
"""What a frame weighs beside its data."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A piece of the answer."""

    data: bytes
    completes: tuple[str, ...] = ()
    """The turns whose reply is complete with this piece."""
    last: bool = False


class Reader:
    """One connection's place in a run."""

    __slots__ = ("_waiting", "finished", "gone", "position")

    def __init__(self) -> None:
        self.position = 0
        self.gone = False
        self.finished = False
        self._waiting: asyncio.Future[None] | None = None

    def hung_up(self) -> None:
        self.gone = True
        self.wake()

    def wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self) -> None:
        """Until the run has news or the caller hangs up."""
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting


class Run:
    """Runs on control's event loop."""

    def __init__(
        self, episode: OpenEpisode, prepared: Prepared, dialect: Dialect, *, grace_s: float, life_s: float
    ) -> None:
        """``grace_s``: how long nobody may wait for the answer; ``life_s``: how long it may take in all."""
        self.episode = episode
        self.stream = prepared.call.stream
        self.headers = prepared.enforced
        self.turn_ids = prepared.turn_ids
        self.frames: list[Frame] = []
        self.error: WingbeatError | None = None
        """Why there is no answer; None where the stream itself tells of an error."""
        self.done = False
        self.failed = False
        """It ended with an error, told in whichever way."""
        self._dialect = dialect
        self._grace_s = grace_s
        self._life_s = life_s
        self._death: asyncio.TimerHandle | None = None
        self._expired = False
        self._readers: set[Reader] = set()
        self._writer: EventWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._given_up = False
        self._let_go = False
        episode.undelivered.update(self.turn_ids)

    @property
    def num_bytes(self) -> int:
        return sum(len(frame.data) + FRAME_BYTES for frame in self.frames)

    @property
    def answered(self) -> bool:
        """Whether the whole answer is there."""
        return bool(self.frames) and self.frames[-1].last

    @property
    def is_orphan(self) -> bool:
        """Nobody waits for its answer, and nobody got it."""
        return not self._readers and not self.delivered

    @property
    def delivered(self) -> bool:
        return self.episode.undelivered.isdisjoint(self.turn_ids)

    @property
    def can_be_joined(self) -> bool:
        """Whether a retry gets its answer from here."""
        return not (self.failed or self._given_up or self._let_go)

    # --- the work -----------------------------------------------------------------------------

    def start(self, gateway: Gateway, prepared: Prepared, on_end: Callable[[Run], None]) -> None:
        """Begin; ``on_end`` is told when it is over, however it ends."""
        work = self._stream(gateway, prepared) if self.stream else self._complete(gateway, prepared)
        task = self._task = asyncio.create_task(work, name="call")
        self.episode.calls.add(task)
        self._death = asyncio.get_running_loop().call_later(self._life_s, self._expire)

        def ended(task: asyncio.Task[None]) -> None:
            self.episode.calls.discard(task)
            self._end(task)
            on_end(self)

        task.add_done_callback(ended)

    async def _complete(self, gateway: Gateway, prepared: Prepared) -> None:
        choices = await gateway.complete(self.episode, prepared)
        self._push(Frame(self._dialect.answer(prepared, choices), self.turn_ids, last=True))

    async def _stream(self, gateway: Gateway, prepared: Prepared) -> None:
        writer = self._writer = self._dialect.events(prepared)
        done: list[Choice] = []
        async with aclosing(gateway.stream(self.episode, prepared)) as items:
            async for item in items:
                if isinstance(item, Begun):
                    self._push(Frame(writer.begin(self.turn_ids[0])))
                elif isinstance(item, TextDelta):
                    self._push(Frame(writer.delta(item)))
                else:
                    done.append(item)
                    last = len(done) == len(self.turn_ids)
                    data = writer.choice(item) + (writer.end(done) if last else b"")
                    self._push(Frame(data, (item.turn_id,), last=last))

    def _expire(self) -> None:
        """The engine is told to end it; what it has sampled stays in the episode."""
        self._expired = True
        if self._task is not None:
            self._task.cancel()

    def _push(self, frame: Frame) -> None:
        self.frames.append(frame)
        self._wake()

    def _end(self, task: asyncio.Task[None]) -> None:
        """The task is over: whoever waits is told."""
        self.done = True
        if self._death is not None:
            self._death.cancel()
        error, self._task = self._error_of(task), None
        if not self._given_up:
            self.episode.call_fault = None if error is None else fault_of_call(error)
        if error is not None:
            self.failed = True
            if self._writer is not None and self.frames:
                self.frames.append(Frame(self._writer.error(error), last=True))
            else:
                self.error = _without_frames(error)
            self.let_go()  # nobody gets this for an answer again
        self._writer = None
        if self._grace is not None:
            self._grace.cancel()
        self._wake()

    def _error_of(self, task: asyncio.Task[None]) -> WingbeatError | None:
        if task.cancelled():
            if self._expired and self.episode.state is EpisodeState.OPEN:
                return CallTimeout(
                    f"this call lasted longer than limits.call_s = {self._life_s:g} s and was ended; ask for fewer"
                    " tokens, or raise it"
                )
            if self.episode.state is EpisodeState.OPEN:
                return UnavailableError("the caller hung up")
            return EpisodeClosed(f"episode {self.episode.episode_id} ended while this call ran")
        error = task.exception()
        if error is None or isinstance(error, WingbeatError):
            return error
        logger.error("a model call failed", exc_info=error)
        return WingbeatError(f"unexpected {type(error).__name__} in the server; its log has the details")

    def _wake(self) -> None:
        for reader in self._readers:
            reader.wake()

    # --- its readers --------------------------------------------------------------------------

    def join(self) -> Reader:
        """A connection that wants the answer, from its beginning."""
        reader = Reader()
        self._readers.add(reader)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        return reader

    def leave(self, reader: Reader) -> None:
        """The connection has the answer, or is gone.

        A stream that nobody reads ends at once; an answer that nobody waits for may yet be fetched by a
        retry, for a while.
        """
        self._readers.discard(reader)
        if self._let_go:
            self.let_go()
        if self._readers or self.done or self.answered:
            return
        if self.stream:
            self._give_up()
        else:
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self._give_up)

    def _give_up(self) -> None:
        if not (self._readers or self.done or self.answered) and self._task is not None:
            self._given_up = True
            self._task.cancel()

    def arrived(self, turn_ids: Sequence[str]) -> None:
        """The replies of these turns were handed to a connection that was still open."""
        self.episode.undelivered.difference_update(turn_ids)

    def let_go(self) -> None:
        """Drop the answer, once those who read it now have left: a retry must be sampled anew."""
        self._let_go = True
        if not self._readers:
            self.frames.clear()


def _without_frames(error: WingbeatError) -> WingbeatError:
    """Where it was raised holds on to the whole prompt, and a run is remembered for long."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
