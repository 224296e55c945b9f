"""An episode of a team over servers that a test plays: rewards, refusals, doubt, and who hears what."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wingbeat.client.episode import EpisodeState
from wingbeat.client.team import AsyncTeam
from wingbeat.client.team_episode import TeamEpisode
from wingbeat.client.team_sync import SyncTeamEpisode, synchronous
from wingbeat.core.errors import (
    AuthenticationError,
    ConflictError,
    EpisodeClosed,
    InvalidReward,
    NotFoundError,
    RequestError,
    UnavailableError,
)
from wingbeat.core.loop_thread import LoopPort
from wingbeat.core.protocol import FinishReply, Rewards, TransactionReply
from wingbeat.core.types import Cause, Group, Outcome, Split, Task


class Server:
    """Answers as the test says, and notes what it was told."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log
        self.url = f"http://{name}:1"
        self.refuses: Exception | None = None
        self.decision_fails: list[Exception] = []

    async def decide(self, transaction_id: str, *, commit: bool, budget_s: float | None = None) -> TransactionReply:
        self.log.append((self.name, "commit" if commit else "abort"))
        if self.decision_fails:
            raise self.decision_fails.pop(0)
        return TransactionReply(transaction_id=transaction_id, state="committed" if commit else "aborted")

    async def close(self) -> None: ...


class Part:
    """What the team holds of one server."""

    def __init__(self, server: Server, split: Split = Split.TRAIN) -> None:
        self.server, self.split = server, split
        self.id, self.attempt = f"ep-{server.name}", 1
        self.task, self.group = Task("s", "1"), Group("g", 1)
        self.base_url = f"{server.url}/v1"
        self.state = EpisodeState.OPEN
        self.reported: Any = None
        self.transaction: Any = None
        self.aborts: list[tuple[str, Any]] = []

    @property
    def closed(self) -> bool:
        return self.state in (EpisodeState.FINISHED, EpisodeState.ABORTED)

    async def prepare(self, reward: Any, *, transaction: Any, **more: Any) -> FinishReply:
        self.server.log.append((self.server.name, "prepare"))
        self.reported, self.transaction = reward, transaction
        if self.server.refuses is not None:
            raise self.server.refuses
        return self.reply("prepared")

    async def finish_alone(self, reward: Any, **more: Any) -> FinishReply:
        self.reported = (reward, more["outcome"])
        self.state = EpisodeState.FINISHED
        return self.reply("finished")

    def reply(self, state: str) -> FinishReply:
        return FinishReply(episode_id=self.id, attempt=1, state=state, num_turns=1, num_sampled_tokens=2)

    async def conclude(self) -> None:
        self.state = EpisodeState.FINISHED

    async def abort(self, message: str = "", **how: Any) -> None:
        self.aborts.append((message, how.get("cause")))
        self.state = EpisodeState.ABORTED


class Table:
    def __init__(self, *, journal: Path | None = None, split: Split = Split.TRAIN) -> None:
        self.log: list[tuple[str, str]] = []
        self.east, self.west = Server("east", self.log), Server("west", self.log)
        servers: Any = {"east": self.east, "west": self.west}
        self.team = AsyncTeam(servers, journal=journal)
        self.parts: Any = {"east": Part(self.east, split), "west": Part(self.west, split)}
        self.episode = TeamEpisode(self.team, self.parts)


def read(path: Path) -> str:
    return path.read_text()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not come true")


async def test_the_lead_prepares_and_commits_first() -> None:
    table = Table()
    replies = await table.episode.finish({"east": 1, "west": {"solver": 0.5}})
    assert table.log == [("east", "prepare"), ("west", "prepare"), ("east", "commit"), ("west", "commit")]
    assert {name: reply.state for name, reply in replies.items()} == {"east": "finished", "west": "finished"}
    east, west = table.parts["east"], table.parts["west"]
    assert (east.reported, west.reported) == (1.0, Rewards(policies={"solver": 0.5}))
    assert (east.transaction.decider, west.transaction.decider) == ("", "http://east:1")
    assert east.transaction.id == west.transaction.id and len(east.transaction.id) == 32
    assert table.episode.state is EpisodeState.FINISHED
    assert await table.episode.finish({"east": 1.0, "west": {"solver": 0.5}}) == replies
    with pytest.raises(ConflictError, match="finished with another reward"):
        await table.episode.finish(0.0)


@pytest.mark.parametrize(
    "reward",
    [{"east": 1.0}, {"east": 1.0, "west": 1.0, "north": 1.0}, {}, Rewards(policies={"solver": 1.0}), float("nan"), "1"],
)
async def test_every_server_has_a_reward(reward: Any) -> None:
    table = Table()
    with pytest.raises(InvalidReward):
        await table.episode.finish(reward)
    assert table.log == []
    await table.episode.finish(0.5)
    assert [part.reported for part in table.parts.values()] == [0.5, 0.5]


@pytest.mark.parametrize("refuser", ["east", "west"])
async def test_a_refusal_ends_it_everywhere(refuser: str) -> None:
    table = Table()
    server: Server = getattr(table, refuser)
    server.refuses = EpisodeClosed("a successor attempt has begun")
    with pytest.raises(ConflictError, match=f"server '{refuser}' does not count episode ep-{refuser}, so none does: a"):
        await table.episode.finish(1.0)
    assert set(table.log[-2:]) == {("east", "abort"), ("west", "abort")}
    assert ("west", "prepare") in table.log or refuser == "east"  # the lead first
    assert all(part.aborts for part in table.parts.values())
    assert table.episode.state is EpisodeState.ABORTED
    server.refuses = InvalidReward("no agent 'x'", param="rewards")
    other = TeamEpisode(table.team, {name: Part(getattr(table, name)) for name in table.parts})  # pyright: ignore
    with pytest.raises(RequestError, match="no agent 'x'"):
        await other.finish(1.0)


async def test_a_lead_that_had_aborted_ends_it_everywhere() -> None:
    table = Table()
    table.east.decision_fails = [ConflictError("aborted here")]
    with pytest.raises(ConflictError, match="so none does: aborted here"):
        await table.episode.finish(1.0)
    assert table.log[2:] == [("east", "commit"), ("east", "abort"), ("west", "abort")]


async def test_a_lead_that_knows_nothing_of_it_any_more_ends_it_everywhere() -> None:
    table = Table()
    table.east.decision_fails = [NotFoundError("nothing is prepared under it")]
    with pytest.raises(ConflictError, match="nothing is prepared under it"):
        await table.episode.finish(1.0)


async def test_in_doubt_nobody_is_told_anything_and_the_same_finish_asks_again(tmp_path: Path) -> None:
    table = Table(journal=tmp_path)
    table.east.decision_fails = [AuthenticationError("your key was revoked")]
    with pytest.raises(AuthenticationError):
        await table.episode.finish(1.0)
    assert table.log[2:] == [("east", "commit")]
    assert table.episode.state is EpisodeState.OPEN and len(os.listdir(tmp_path)) == 1
    await table.episode.abort("the agent gives up")  # too late: it may count
    assert not any(part.aborts for part in table.parts.values())
    assert (await table.episode.finish(1.0))["west"].state == "finished"
    assert table.log[3:] == [("east", "commit"), ("west", "commit")]
    assert os.listdir(tmp_path) == []


async def test_an_abort_that_a_server_does_not_hear_stays_in_the_journal(tmp_path: Path) -> None:
    table = Table(journal=tmp_path)
    table.west.refuses = UnavailableError("west is away")
    table.west.decision_fails = [UnavailableError("west is away")]
    with pytest.raises(ConflictError, match="west is away"):
        await table.episode.finish(1.0)
    (left,) = os.listdir(tmp_path)
    assert '"committing": false' in read(tmp_path / left)
    successor = Table(journal=tmp_path)
    async with successor.team:
        await until(lambda: not os.listdir(tmp_path))
    assert set(successor.log) == {("east", "abort"), ("west", "abort")}


async def test_a_journal_of_other_servers_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = Table(journal=tmp_path)
    table.west.refuses = table.west.decision_fails = UnavailableError("away")  # type: ignore[assignment]
    table.west.decision_fails = [UnavailableError("away")]
    with pytest.raises(ConflictError):
        await table.episode.finish(1.0)
    async with AsyncTeam({"east": "http://east:1", "north": "http://north:1"}, journal=tmp_path):
        assert "http://west:1, no server of this team" in caplog.text
    assert len(os.listdir(tmp_path)) == 1


async def test_a_cancelled_agent_does_not_stop_what_it_began_to_finish() -> None:
    table = Table()
    hold, real = asyncio.Event(), table.east.decide

    async def slow(*given: Any, **more: Any) -> Any:
        await hold.wait()
        return await real(*given, **more)

    table.east.decide = slow
    async with table.episode:
        finishing = asyncio.create_task(table.episode.finish(1.0))
        await until(lambda: ("west", "prepare") in table.log)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
    hold.set()
    await table.team.close()
    assert table.episode.state is EpisodeState.FINISHED
    assert not any(part.aborts for part in table.parts.values())


async def test_two_threads_that_finish_at_once_make_one_transaction(tmp_path: Path) -> None:
    table = Table(journal=tmp_path)
    first, second, other = await asyncio.gather(
        table.episode.finish(1.0), table.episode.finish(1.0), table.episode.finish(0.0), return_exceptions=True
    )
    assert first == second and isinstance(other, ConflictError)
    assert table.log == [("east", "prepare"), ("west", "prepare"), ("east", "commit"), ("west", "commit")]
    await table.team.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("split", "outcome"), [(Split.EVAL, Outcome.AGENT), (Split.TRAIN, Outcome.ENVIRONMENT)], ids=["eval", "failure"]
)
async def test_what_trains_nothing_needs_no_transaction(split: Split, outcome: Outcome) -> None:
    table = Table(split=split)
    await table.episode.finish({"east": 1.0, "west": 0.0}, outcome=outcome)
    assert table.log == []
    assert [part.reported for part in table.parts.values()] == [(1.0, outcome), (0.0, outcome)]


async def test_leaving_the_block_aborts_everywhere() -> None:
    table = Table()
    with pytest.raises(ZeroDivisionError):
        async with table.episode as episode:
            assert episode["west"] is table.parts["west"] and episode.lead is table.parts["east"]
            assert (episode.servers, episode.id) == (("east", "west"), "ep-east")
            with pytest.raises(RequestError, match="expected one of the team's servers east, west, got 'north'"):
                episode["north"]
            raise ZeroDivisionError
    for part in table.parts.values():
        ((message, cause),) = part.aborts
        assert "ZeroDivisionError" in message and cause is Cause.AGENT_RAISED
    with pytest.raises(EpisodeClosed, match="aborted by this client"):
        await table.episode.finish(1.0)


async def test_an_agent_that_blocks_gets_the_same_episode() -> None:
    table = Table()
    twin = synchronous(table.episode, LoopPort(asyncio.get_running_loop()))
    assert isinstance(twin, SyncTeamEpisode)

    def solve() -> Any:
        assert (twin.servers, twin.id, twin["west"].id) == (("east", "west"), "ep-east", "ep-west")
        return twin.finish({"east": 1.0, "west": 0.0})

    replies = await asyncio.to_thread(solve)
    assert replies["west"].state == "finished" and twin.closed
