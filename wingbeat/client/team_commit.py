"""Ends an episode on several servers: says what the coordinator wants said, and keeps the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from wingbeat.client.swarm import AsyncSwarm
from wingbeat.client.team_journal import OpenEntry
from wingbeat.client.team_protocol import Answer, Coordinator, Phase, Verb
from wingbeat.core.errors import ConflictError, NotFoundError, WingbeatError
from wingbeat.core.protocol import FinishReply

logger = logging.getLogger("wingbeat.client")

ABORT_BUDGET_S = 30.0
"""How long a server is told of an abort; afterwards it learns from the decider, or from a successor."""
PREPARED = "prepared"


class TeamCommit:
    """One transaction; :meth:`run` may be called again where it ended in doubt."""

    def __init__(
        self,
        coordinator: Coordinator,
        transaction_id: str,
        *,
        swarms: Mapping[str, AsyncSwarm],
        prepare: Callable[[str], Awaitable[FinishReply]] | None = None,
        entry: OpenEntry | None = None,
        on_ended: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        """``prepare`` reports the reward to a server; a successor needs none.  ``on_ended`` hears once whether the
        episode counts."""
        self.coordinator = coordinator
        self.transaction_id = transaction_id
        self.replies: dict[str, FinishReply] = {}
        self.errors: dict[str, WingbeatError] = {}
        """Why servers did not prepare."""
        self.warnings: dict[str, str] = {}
        self._untold: set[str] = set()
        self._swarms = swarms
        self._prepare = prepare
        self._entry = entry
        self._on_ended = on_ended
        self.decided = asyncio.Event()
        """The decider has committed, or everybody was told that it never will."""

    async def run(self) -> None:
        """Until every server knows the end; one that is away is asked until it answers.

        Raises WingbeatError where the decider says neither (it refuses the client's key, say): then nobody here knows
        the end; run it again, or leave it to the servers.
        """
        try:
            while todo := self.coordinator.todo():
                if self.coordinator.phase is Phase.COMMITTING and self._entry is not None:
                    await asyncio.to_thread(self._entry.commit)
                await self._tell_all(todo)
                if self.coordinator.committed and not self.decided.is_set():
                    await self._end(committed=True)
            if not self.coordinator.committed:
                await self._end(committed=False)
            self._note_the_end()
        finally:
            if self.coordinator.phase is not Phase.COMMITTING:
                self.let_go()

    def let_go(self) -> None:
        """Leave what is not done to a successor with the same journal, and to the servers."""
        if self._entry is not None:
            self._entry.release()

    async def _end(self, *, committed: bool) -> None:
        """As soon as the episodes count, or else once the servers that prepared were told that they do not."""
        if self._on_ended is not None:
            await self._on_ended(committed)
        self.decided.set()

    def _note_the_end(self) -> None:
        if self.coordinator.contrary:
            logger.error(
                "transaction %s: %s, and %s stand otherwise: an admin must have decided there",
                self.transaction_id,
                "committed" if self.coordinator.committed else "aborted",
                ", ".join(sorted(self.coordinator.contrary)),
            )
        if self._entry is not None and not self._untold:
            self._entry.remove()

    async def _tell_all(self, todo: tuple[tuple[str, Verb], ...]) -> None:
        """Hear what the servers say, until the phase is over."""
        phase = self.coordinator.phase
        tasks = {asyncio.create_task(self._tell(server, verb)): server for server, verb in todo}
        pending = set(tasks)
        try:
            while pending and self.coordinator.phase is phase:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    answer = task.result()
                    if self.coordinator.phase is phase:
                        self.coordinator = self.coordinator.after(tasks[task], answer)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell(self, server: str, verb: Verb) -> Answer:
        if verb is Verb.PREPARE:
            return await self._ask_to_prepare(server)
        return await (self._commit(server) if verb is Verb.COMMIT else self._abort(server))

    async def _ask_to_prepare(self, server: str) -> Answer:
        assert self._prepare is not None
        try:
            reply = await self._prepare(server)
        except WingbeatError as error:
            self.errors[server] = error
            return Answer.REFUSED
        if reply.state != PREPARED:
            self.errors[server] = ConflictError(f"episode {reply.episode_id} is {reply.state}")
            return Answer.REFUSED
        self.replies[server] = reply
        return Answer.DONE

    async def _commit(self, server: str) -> Answer:
        try:
            reply = await self._swarms[server].decide(self.transaction_id, commit=True)
        except (ConflictError, NotFoundError) as error:
            self.errors[server] = error
            return Answer.REFUSED
        self.warnings[server] = reply.warning
        return Answer.DONE

    async def _abort(self, server: str) -> Answer:
        try:
            await self._swarms[server].decide(self.transaction_id, commit=False, budget_s=ABORT_BUDGET_S)
        except ConflictError as error:
            self.errors[server] = error
            return Answer.REFUSED
        except WingbeatError as error:
            self._untold.add(server)
            logger.warning(
                "transaction %s: %s was not told of its abort: %s", self.transaction_id, server, error.message
            )
        return Answer.DONE
