"""Asking another server for its decision: only allowed addresses, and nothing but a whole answer counts."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from wingbeat.core.addresses import server_address
from wingbeat.core.config.server import ServerConfig
from wingbeat.server.teams import deciders
from wingbeat.server.teams.deciders import Deciders
from wingbeat.server.teams.transactions import TransactionState

T = "t" * 22


class Peer:
    """Another server, or what poses as one."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = web.Response()
        self.url = ""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path_qs}")
        assert "authorization" not in request.headers
        return self.answer


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    peer = Peer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", peer.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    peer.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
    yield peer
    await runner.cleanup()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving() as peer:
        yield peer


@pytest.fixture
async def asking(peer: Peer) -> AsyncIterator[Deciders]:
    deciders = Deciders(frozenset({peer.url}))
    yield deciders
    await deciders.close()


def said(**fields: Any) -> web.Response:
    return web.json_response({"transaction_id": T, "state": "committed", "new_in_a_later_release": 1, **fields})


async def test_a_peer_is_believed(peer: Peer, asking: Deciders) -> None:
    peer.answer = said()
    assert await asking.ask(peer.url, T, False) is TransactionState.COMMITTED
    peer.answer = said(state="unknown")
    assert await asking.ask(peer.url, T, True) is TransactionState.UNKNOWN
    assert peer.asked == [f"GET /api/transactions/{T}", f"GET /api/transactions/{T}?presume=abort"]


@pytest.mark.parametrize(
    "answer",
    [
        lambda: said(transaction_id="x" * 22),
        lambda: said(state="perhaps"),
        lambda: web.Response(text="<html>"),
        lambda: web.json_response([]),
        lambda: web.Response(status=404, text="no such page"),
        lambda: web.Response(status=302, headers={"Location": "/api/transactions/elsewhere"}),
        lambda: said(warning="x" * 100_000),
    ],
    ids=["another", "no-state", "page", "list", "404", "redirect", "huge"],
)
async def test_anything_else_says_nothing(peer: Peer, asking: Deciders, answer: Any) -> None:
    peer.answer = answer()
    assert await asking.ask(peer.url, T, True) is None
    assert len(peer.asked) == 1  # no redirect is followed


async def test_the_authority_of_a_peers_certificate_is_named_as_for_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with serving(tls) as peer:
        peer.answer = said()
        for ca, says in ((None, None), (tmp_path / "ca.pem", TransactionState.COMMITTED)):
            if ca is not None:
                monkeypatch.setenv("WINGBEAT_CA_FILE", str(ca))
            asking = Deciders(frozenset({peer.url}))
            assert await asking.ask(peer.url, T, False) is says
            await asking.close()


async def test_a_stranger_is_not_called(peer: Peer) -> None:
    strangers = Deciders(frozenset({"http://127.0.0.1:1"}))
    assert await strangers.ask(peer.url, T, False) is None
    assert await strangers.ask(f"{peer.url}/", T, False) is None
    assert peer.asked == []
    await strangers.close()


async def test_a_peer_that_is_away_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciders, "TIMEOUT_S", 0.5)
    away = Deciders(frozenset({"http://127.0.0.1:1"}))
    assert await away.ask("http://127.0.0.1:1", T, False) is None
    await away.close()


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("https://West.Example:8321/", "https://west.example:8321"),
        ("http://10.0.0.1", "http://10.0.0.1:80"),
        ("https://[::1]", "https://[::1]:443"),
    ],
)
def test_addresses_have_a_normal_form(url: str, normal: str) -> None:
    assert server_address(url) == server_address(normal) == normal
    assert ServerConfig(peers=[url]).peers == [normal]


@pytest.mark.parametrize(
    "url",
    ["west", "ftp://west", "file:///etc/passwd", "http://", "http://a:b@west", "http://west/x", "http://west?x=1",
     "http://west#x", "http://west:99999", "http://[::1"],
)  # fmt: skip
def test_anything_else_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="expected the address of a server"):
        server_address(url)
    with pytest.raises(ValueError, match="expected the address of a server"):
        ServerConfig(peers=[url])
