"""A running episode of a team: one attempt on each of its servers, which count together or not at all."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

from wingbeat.client.blame import explain_failure
from wingbeat.client.episode import Episode, EpisodeState
from wingbeat.client.rewards import RewardLike, to_rewards
from wingbeat.client.team_commit import TeamCommit
from wingbeat.core.errors import ConflictError, EpisodeClosed, InvalidReward, RequestError, WingbeatError
from wingbeat.core.ports import ResourceLease
from wingbeat.core.protocol import FinishReply, TransactionModel
from wingbeat.core.types import OUTCOME_OF, Cause, Group, Outcome, Split, Task

if TYPE_CHECKING:
    from wingbeat.client.team import AsyncTeam

logger = logging.getLogger("wingbeat.client")

NOT_COUNTED = "another server of its team does not count it"
TELL_S = 10.0
"""How long a finish waits for the other servers once the lead has committed; they are told in the background."""


class TeamEpisode:
    """Made by ``team.episode(...)``; of one event loop.

    ``episode["east"]`` is the attempt on that server: its ``base_url`` and ``api_key`` take model calls.  Only the
    team's episode finishes and aborts.
    """

    def __init__(self, team: AsyncTeam, episodes: Mapping[str, Episode]) -> None:
        self._team = team
        self._episodes = dict(episodes)
        for episode in self._episodes.values():
            episode.is_part = True
        self._commit: TeamCommit | None = None
        self._ending: asyncio.Task[None] | None = None
        self._finished_with: object = None
        self._finishing = asyncio.Lock()
        """Held until there is the one transaction of this episode."""
        self._pid = os.getpid()

    def __getitem__(self, server: str) -> Episode:
        try:
            return self._episodes[server]
        except KeyError:
            raise RequestError(
                f"expected one of the team's servers {', '.join(self._episodes)}, got {server!r}", param="server"
            ) from None

    @property
    def servers(self) -> tuple[str, ...]:
        """Names, the leading server's first."""
        return tuple(self._episodes)

    @property
    def lead(self) -> Episode:
        return self._episodes[self._team.lead]

    @property
    def id(self) -> str:
        """As on the leading server."""
        return self.lead.id

    @property
    def attempt(self) -> int:
        return self.lead.attempt

    @property
    def task(self) -> Task:
        return self.lead.task

    @property
    def group(self) -> Group:
        return self.lead.group

    @property
    def split(self) -> Split:
        return self.lead.split

    @property
    def state(self) -> EpisodeState:
        """The worst of all servers: an episode that one of them lost cannot count on the others."""
        states = {episode.state for episode in self._episodes.values()}
        for state in (EpisodeState.ABORTED, EpisodeState.LOST, EpisodeState.OPEN):
            if state in states:
                return state
        return EpisodeState.FINISHED

    @property
    def closed(self) -> bool:
        return all(episode.closed for episode in self._episodes.values())

    async def wait_closed(self) -> EpisodeState:
        """Wait until one server has ended the episode: then none will count it."""
        waits = [asyncio.ensure_future(episode.wait_closed()) for episode in self._episodes.values()]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self.state

    def lease(
        self, spec: Any, *, name: str = "", wait_s: float | None = None
    ) -> AbstractAsyncContextManager[ResourceLease]:
        """As :meth:`Episode.lease`, with the resources of the leading server's swarm."""
        return self.lead.lease(spec, name=name, wait_s=wait_s)

    def lease_all(
        self, specs: Mapping[str, Any], *, wait_s: float | None = None
    ) -> AbstractAsyncContextManager[Mapping[str, ResourceLease]]:
        """As :meth:`Episode.lease_all`, likewise."""
        return self.lead.lease_all(specs, wait_s=wait_s)

    def prefetch(self, specs: Any) -> None:
        """As :meth:`Episode.prefetch`, likewise."""
        self.lead.prefetch(specs)

    async def finish(
        self,
        reward: RewardLike,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        outcome: Outcome = Outcome.AGENT,
        message: str = "",
    ) -> dict[str, FinishReply]:
        """Report the reward: a number for all, or one reward (of any kind) per server, by name.

        Returns once it is decided that the episode counts, on all servers.  Raises InvalidReward, or ConflictError
        where one server refuses: then none counts it.  After any other error of the lead's (a key that was revoked)
        nobody here knows; the same finish again asks it again.
        """
        rewards = self._by_server(reward)
        if outcome is not Outcome.AGENT or self.split is Split.EVAL:
            return await self._finish_alone(rewards, metrics=metrics, outcome=outcome, message=message)
        said = (rewards, None if metrics is None else dict(metrics), message)
        async with self._finishing:
            if self._commit is None:
                if self.state is EpisodeState.ABORTED:
                    raise EpisodeClosed(f"episode {self.id} was aborted by this client; it cannot finish any more")
                self._commit = await self._new_commit(rewards, metrics, message)
                self._finished_with = said
        if said != self._finished_with:
            raise ConflictError(f"episode {self.id} was finished with another reward before")
        return await self._await_end(self._commit)

    async def _new_commit(
        self, rewards: Mapping[str, Any], metrics: Mapping[str, SupportsFloat] | None, message: str
    ) -> TeamCommit:
        return await self._team.new_commit(
            lambda name, transaction_id, decider: self._episodes[name].prepare(
                rewards[name],
                transaction=TransactionModel(id=transaction_id, decider=decider),
                metrics=metrics,
                message=message,
                budget_s=self._team.prepare_budget_s,
            ),
            on_ended=self._conclude,
        )

    async def _await_end(self, commit: TeamCommit) -> dict[str, FinishReply]:
        if self._ending is None or self._ending.done():  # a new one, or one that ended in doubt
            self._ending = self._team.run_in_background(commit)
        decided = asyncio.ensure_future(commit.decided.wait())
        try:
            await asyncio.wait({decided, self._ending}, return_when=asyncio.FIRST_COMPLETED)
            if not commit.decided.is_set():
                await asyncio.shield(self._ending)  # raises what kept it from the decision
            await asyncio.wait({self._ending}, timeout=TELL_S)
        finally:
            decided.cancel()
        if commit.coordinator.committed:
            return self._replies(commit)
        raise self._refusal(commit)

    async def _conclude(self, committed: bool) -> None:
        """An attempt that its server had not prepared still runs there: it is aborted like any other."""
        parts = [episode for episode in self._episodes.values() if not episode.closed]
        if committed:
            await asyncio.gather(*(episode.conclude() for episode in parts))
            return
        aborts = (episode.abort(NOT_COUNTED, cause=Cause.CLIENT_ABORTED) for episode in parts)
        for result in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(result, BaseException):
                logger.warning("episode %s could not be aborted everywhere: %s", self.id, result)

    def _replies(self, commit: TeamCommit) -> dict[str, FinishReply]:
        for name, warning in commit.warnings.items():
            if warning:
                logger.warning("episode %s on %s: %s", self._episodes[name].id, name, warning)
        return {
            name: reply.model_copy(
                update={"state": EpisodeState.FINISHED.value, "warning": commit.warnings.get(name, "")}
            )
            for name, reply in commit.replies.items()
        }

    def _refusal(self, commit: TeamCommit) -> WingbeatError:
        """The first server's reason, as the kind of error that it is to an agent."""
        name, error = next(iter(commit.errors.items()))
        text = f"server {name!r} does not count episode {self._episodes[name].id}, so none does: {error.message}"
        if isinstance(error, RequestError):
            return type(error)(text, param=error.param)
        return ConflictError(text)

    async def _finish_alone(
        self,
        rewards: Mapping[str, Any],
        *,
        metrics: Mapping[str, SupportsFloat] | None,
        outcome: Outcome,
        message: str,
    ) -> dict[str, FinishReply]:
        """Other outcomes count nowhere, and evaluations train nothing: the servers need not agree on them."""
        replies = await asyncio.gather(
            *(
                episode.finish_alone(rewards[name], metrics=metrics, outcome=outcome, message=message)
                for name, episode in self._episodes.items()
            )
        )
        return dict(zip(self._episodes, replies, strict=True))

    def _by_server(self, reward: RewardLike) -> dict[str, Any]:
        """The reward of each server, in the wire's form.  Raises InvalidReward."""
        if isinstance(reward, Mapping):
            names = set(map(str, reward))
            if names != set(self._episodes):
                raise InvalidReward(
                    f"expected a number, or the reward of each server of the team ({', '.join(self._episodes)}), got"
                    f" {', '.join(sorted(names)) or 'nothing'}",
                    param="rewards",
                )
            return {name: to_rewards(reward[name]) for name in self._episodes}
        number = to_rewards(reward)
        if not isinstance(number, float):
            raise InvalidReward("expected the reward of each server, by its name, got `Rewards`", param="rewards")
        return dict.fromkeys(self._episodes, number)

    async def abort(self, message: str = "", *, outcome: Outcome = Outcome.CLIENT, cause: Cause | None = None) -> None:
        """End the episode without a reward, on all servers.  Harmless once it is over, or being finished."""
        if self._commit is not None:
            return
        aborts = (episode.abort(message, outcome=outcome, cause=cause) for episode in self._episodes.values())
        for result in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(result, WingbeatError):
                logger.warning("episode %s could not be aborted everywhere: %s", self.id, result.message)
            elif isinstance(result, BaseException):
                raise result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if not self.closed and os.getpid() == self._pid:  # a forked child does not end its parent's episode
            cause, message = self._explain(error)
            await self.abort(message, outcome=OUTCOME_OF[cause], cause=cause)

    def _explain(self, error: BaseException | None) -> tuple[Cause, str]:
        """The agent is to blame only where no server is."""
        found = [explain_failure(error, server=episode.base_url) for episode in self._episodes.values()]
        return next((one for one in found if one[0] is Cause.INFRASTRUCTURE_ERROR), found[0])
