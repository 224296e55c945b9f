"""Resources servers that begin anew at another address, and clients that find them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lending import lender

from wingbeat.core.errors import ConfigError, WingbeatError
from wingbeat.resources import ResourceFailed, SubprocessSpec, remote_servers
from wingbeat.resources.remote import RemotePool, RemoteResources
from wingbeat.resources.remote_servers import Servers

BOX = SubprocessSpec(network=True)
NOBODY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


async def test_a_server_that_begins_anew_elsewhere_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_servers, "LOOK_SOON_S", 0.0)
    now = [NOBODY]

    async def find() -> Sequence[str]:
        return now

    async with lender() as server, RemoteResources(NOBODY, find=find, retry_budget_s=0.0) as pool:
        with pytest.raises(ResourceFailed):
            async with pool.lease(BOX, owner="the same"):
                pass
        now[:] = [f"{server.url}/"]
        async with pool.lease(BOX, owner="the same") as lease:
            assert (await lease.value.run("true")).ok
        assert [one.url for one in pool.pools] == [server.url], "what went and held nothing is forgotten"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def servers(found: Sequence[str] | WingbeatError, clock: Clock, *, asked: list[float]) -> Servers:
    async def find() -> Sequence[str]:
        asked.append(clock())
        if isinstance(found, WingbeatError):
            raise found
        return found

    return Servers(["http://a"], make=lambda url: RemotePool(url, retry_budget_s=0.0), find=find, clock=clock)


async def test_it_asks_now_and_then_while_all_answer_and_soon_while_one_does_not() -> None:
    clock, asked = Clock(), list[float]()
    known = servers(["http://a", "http://b"], clock, asked=asked)
    for clock.now in (0.0, 59.0, 60.0, 61.0):
        await known.look()
    assert asked == [60.0] and [pool.url for pool in known.pools] == ["http://a", "http://b"]
    known.pools[0]._away_until = float("inf")  # pyright: ignore[reportPrivateUsage]
    for clock.now in (61.5, 62.0, 63.0, 64.0):
        await known.look()
    assert asked == [60.0, 62.0, 64.0]
    await known.close()


async def test_nobody_is_sent_to_one_that_is_gone_and_that_nobody_asked_since() -> None:
    clock = Clock()
    known = servers(["http://b"], clock, asked=[])
    clock.now = 60.0
    await known.look()
    assert known.of("owner").url == "http://b"
    await known.close()


@pytest.mark.parametrize("found", [[], WingbeatError("the server is away")])
async def test_those_that_are_known_stay_where_nobody_can_tell(found: Sequence[str] | WingbeatError) -> None:
    clock, asked = Clock(), list[float]()
    known = servers(found, clock, asked=asked)
    known.pools[0]._away_until = float("inf")  # pyright: ignore[reportPrivateUsage]
    clock.now = 60.0
    await known.look()
    assert asked == [60.0] and known.of("owner").url == "http://a"
    await known.close()


def test_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="address of a resources server"):
        RemoteResources([])
