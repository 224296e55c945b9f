"""Teams that need the same small servers, in virtual time: nobody waits with a part in hand, and all get through."""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.client.team import AsyncTeam
from wingbeat.client.team_begin import ANSWER_S, TENTATIVE_S, begin_everywhere
from wingbeat.core.errors import AuthenticationError, ConflictError, OverloadedError, RequestError, UnavailableError
from wingbeat.core.protocol import GroupModel, Lease, LeaseReply, TaskModel
from wingbeat.core.types import Split, Task


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time: the clock jumps to whatever is due next."""

    def __init__(self) -> None:
        loop, self.now = self, 0.0

        class Jump(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now += timeout or 0.0
                return super().select(0)

        super().__init__(Jump())

    def time(self) -> float:
        return self.now


class Server:
    """Room for so many attempts; what is begun on trial lapses."""

    def __init__(self, name: str, room: int, rng: random.Random, *, flaky: bool = False) -> None:
        self.url = f"http://{name}:1"
        self.room = room
        self.rng = rng
        self.flaky = flaky
        self.forgets: list[Exception] = []
        """What it says of the next trials that are to be confirmed."""
        self.held: Counter[str] = Counter()
        self.confirmed = 0
        self.used_up = 0

    def of(self, team: str) -> Swarm:
        return Swarm(self, team)


class Swarm:
    """A team's connection."""

    def __init__(self, server: Server, team: str) -> None:
        self.server, self.team = server, team
        self.url = server.url

    async def begin(self, **options: Any) -> Trial:
        server = self.server
        assert options["tentative_s"] == TENTATIVE_S
        await asyncio.sleep(server.rng.uniform(0.01, 0.5))
        if server.held.total() >= server.room:
            raise OverloadedError("full", retry_after_s=server.rng.choice((0.1, 2.0)))
        trial = Trial(server, self.team)
        try:
            await asyncio.sleep(server.rng.uniform(0.01, 0.5))
        except asyncio.CancelledError:
            trial.give_up()  # its answer is lost: it lapses
            raise
        return trial

    async def close(self) -> None: ...


class Trial:
    def __init__(self, server: Server, team: str) -> None:
        self.server, self.team, self.is_held, self.is_confirmed = server, team, True, False
        server.held[team] += 1
        self.closed = False

    async def confirm(self) -> None:
        await asyncio.sleep(self.server.rng.uniform(0.01, 0.2))
        if self.server.flaky and self.server.rng.random() < 0.2:
            raise ConflictError("it lapsed")
        if self.server.forgets:
            raise self.server.forgets.pop()
        self.is_confirmed = True
        self.server.confirmed += 1

    async def abort(self, message: str = "", **how: Any) -> None:
        await asyncio.sleep(self.server.rng.uniform(0.01, 0.2))
        self.server.used_up += self.is_confirmed
        self.give_up()

    def give_up(self) -> None:
        if self.is_held:
            self.is_held = False
            self.server.held[self.team] -= 1


class Watched(random.Random):
    """Drawn from just before a team waits: it holds nothing then."""

    def __init__(self, seed: int, team: str, servers: list[Server]) -> None:
        super().__init__(seed)
        self.team, self.servers = team, servers

    def random(self) -> float:
        assert not any(server.held[self.team] for server in self.servers), "it waits with a part in hand"
        return super().random()


async def play(servers: list[Server], *, num_teams: int, episodes: int, seed: int) -> None:
    async def work(index: int) -> None:
        team = f"team-{index}"
        order = servers[index % len(servers) :] + servers[: index % len(servers)]  # each has another lead
        mine = {server.url: server.of(team) for server in order}
        swarm: Any = AsyncTeam(mine, rng=Watched(seed + index, team, servers))  # pyright: ignore[reportArgumentType]
        done = 0
        while done < episodes:
            episode = await swarm.begin(task=Task("s", str(done)))
            assert all(server.held[team] == 1 for server in servers)
            await asyncio.sleep(random.Random(seed + done).uniform(0.1, 3.0))
            for part in episode._episodes.values():
                part.give_up()
            done += 1

    await asyncio.gather(*(work(index) for index in range(num_teams)))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rooms=st.lists(st.integers(1, 2), min_size=2, max_size=3),
    num_teams=st.integers(2, 4),
    flaky=st.booleans(),
)
def test_teams_that_need_the_same_servers_all_get_through(
    seed: int, rooms: list[int], num_teams: int, flaky: bool
) -> None:
    rng = random.Random(seed)
    servers = [Server(f"s{index}", room, rng, flaky=flaky) for index, room in enumerate(rooms)]
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play(servers, num_teams=num_teams, episodes=3, seed=seed))
        assert runner.get_loop().time() < 2000.0, "it took longer than chance explains"
    assert all(not server.held.total() for server in servers)


def run(coroutine: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def lease() -> Lease:
    return Lease(
        lease_id="l",
        task=TaskModel(id="1"),
        group=GroupModel(id="g", size=2),
        split=Split.TRAIN,
        policies=["solver"],
        expires_s=60,
    )


@pytest.mark.parametrize("ended", [ConflictError("it lapsed"), AuthenticationError("no episode of this server")])
def test_a_trial_that_a_restart_forgot_is_begun_anew(ended: Exception) -> None:
    """The servers let it begin a moment ago: that is no refusal for good, and uses up no try of a lease."""
    rng = random.Random(0)
    east, west = Server("east", 1, rng), Server("west", 1, rng)
    west.forgets = [ended, ended]
    team = AsyncTeam({"east": east.of("t"), "west": west.of("t")}, rng=rng)  # pyright: ignore
    run(team.begin(task=Task("s", "1")))
    assert (east.held.total(), west.held.total(), west.forgets) == (1, 1, [])
    west.forgets, east.held["t"], west.held["t"] = [ended], 0, 0
    with pytest.raises(OverloadedError, match="its trial ended before it was confirmed"):
        run(team.begin(lease=lease()))


class Refusing(Swarm):
    def __init__(self, server: Server, error: Exception) -> None:
        super().__init__(server, "t")
        self.error = error

    async def begin(self, **options: Any) -> Trial:
        raise self.error


def a_team(error: Exception) -> tuple[Server, Any]:
    rng = random.Random(0)
    east, west = Server("east", 1, rng), Server("west", 1, rng)
    return east, AsyncTeam({"east": east.of("t"), "west": Refusing(west, error)}, rng=rng)  # pyright: ignore


def test_a_lease_whose_other_servers_are_full_is_given_back_unused() -> None:
    east, team = a_team(OverloadedError("full"))
    with pytest.raises(OverloadedError, match="not all servers of the team have room: full"):
        run(team.begin(lease=lease()))
    assert (east.held.total(), east.used_up) == (0, 0)


async def refused_in_a_row(count: int) -> tuple[list[float], list[int]]:
    """When a team asked for leases of which nothing came, and for how many."""
    east, team = a_team(UnavailableError("west is away"))
    asked: list[tuple[float, int]] = []

    async def deal(max_leases: int, **options: Any) -> LeaseReply:
        asked.append((asyncio.get_running_loop().time(), max_leases))
        return LeaseReply(leases=[lease()] * max_leases)

    team.swarms["east"].lease = deal
    for _ in range(count):
        leases = (await team.lease(8)).leases
        begins = [team.begin(lease=one) for one in leases]
        results = await asyncio.gather(*begins, return_exceptions=True)
        assert all(isinstance(result, OverloadedError) for result in results)
    assert east.used_up == 0
    return [at for at, _ in asked], [number for _, number in asked]


def test_while_another_server_is_away_the_team_asks_seldom_and_for_one_lease() -> None:
    at, number = run(refused_in_a_row(40))
    assert number == [8, *[1] * 39]
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert 1.0 < sum(pauses[10:]) / len(pauses[10:]) < 5.0  # of up to 5 s, at random


def test_all_servers_hear_of_the_version_that_a_lease_was_dealt_to(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    said: list[tuple[str, str, str]] = []
    real = Swarm.begin

    async def begin(self: Swarm, **options: Any) -> Trial:
        said.append((self.url, options["label"], options["code"]))
        return await real(self, **options)

    async def deal(max_leases: int, **options: Any) -> LeaseReply:
        assert options == {"sources": ["s"], "label": "mine", "code": "ab" * 32, "instance": "1"}
        return LeaseReply(leases=[lease()])

    monkeypatch.setattr(Swarm, "begin", begin)
    team: Any = AsyncTeam({n: Server(n, 1, rng).of("t") for n in ("east", "west")}, rng=rng)  # pyright: ignore
    team.swarms["east"].lease = deal

    async def work() -> None:
        (one,) = (await team.lease(sources=["s"], label="mine", code="ab" * 32, instance="1")).leases
        await team.begin(lease=one)

    run(work())
    assert sorted(said) == [(f"http://{name}:1", "mine", "ab" * 32) for name in ("east", "west")]


def test_a_lease_that_another_server_will_never_take_uses_up_a_try() -> None:
    """Its group has closed there: the lead's slot must not be dealt for ever."""
    east, team = a_team(ConflictError("group g has closed"))
    with pytest.raises(ConflictError, match="group g has closed"):
        run(team.begin(lease=lease()))
    assert (east.held.total(), east.used_up) == (0, 1)


def test_a_client_that_is_cancelled_gives_back_what_it_has() -> None:
    rng = random.Random(0)
    servers = [Server("east", 1, rng), Server("west", 1, rng)]
    team = AsyncTeam({s.url: s.of("t") for s in servers}, rng=rng)  # pyright: ignore[reportArgumentType]

    async def cancel(after_s: float) -> None:
        task = asyncio.create_task(team.begin(task=Task("s", "1")))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(server.held.total() for server in servers)

    for after_s in (0.005, 0.2, 0.5, 0.7, 0.9):
        run(cancel(after_s))


def test_a_server_that_does_not_answer_counts_as_away() -> None:
    given: list[str] = []

    async def never() -> Any:
        await asyncio.sleep(1e6)

    async def give_back(granted: Any, error: BaseException) -> None:
        given.extend(granted)

    server = Server("east", 1, random.Random(0))

    async def begin() -> None:
        begins = {"east": lambda: server.of("t").begin(tentative_s=TENTATIVE_S), "west": never}
        with pytest.raises(UnavailableError, match=f"'west' took longer than {ANSWER_S:g} s"):
            await begin_everywhere(begins, give_back=give_back)

    run(begin())
    assert given == ["east"]


def test_what_a_team_is_made_of() -> None:
    with pytest.raises(RequestError, match="expected the servers of a team, got none"):
        AsyncTeam({})
    with pytest.raises(RequestError, match="expected one of a as lead, got 'b'"):
        AsyncTeam({"a": "http://127.0.0.1:1"}, lead="b")
    with pytest.raises(RequestError, match="leave the path out"):
        AsyncTeam({"a": "http://127.0.0.1:1/somewhere"})
    team = AsyncTeam({"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"}, lead="b")
    assert tuple(team.swarms) == ("b", "a")
    with pytest.raises(RequestError, match="a lease or a task"):
        asyncio.run(team.begin())
