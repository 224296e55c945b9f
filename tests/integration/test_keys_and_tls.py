"""A real server with keys and TLS: nobody comes in without, and faults say what they are."""

from __future__ import annotations

import asyncio
import datetime
import gc
import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import trustme
from harness import cli, eventually, eventually_now

from bench.scripted_server import OPENER, ScriptedServer, scripted_server
from wingbeat.client import AsyncSwarm
from wingbeat.core.errors import AuthenticationError, SetupError, UnavailableError, WingbeatError
from wingbeat.core.tls import check_certificate, client_context
from wingbeat.core.types import Split, Task
from wingbeat.core.worker_protocol import PROTOCOL_VERSION, Register
from wingbeat.server.keys.file import KeyFile, NewKey
from wingbeat.server.keys.principals import Role
from wingbeat.workers.link import WorkerLink

ADMIN_KEY = "an-admin-key-of-the-tls-test"
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pki:
    """An authority, a certificate of it for the name localhost alone, and one that has expired."""

    ca: Path
    cert: Path
    key: Path
    old_cert: Path
    old_key: Path


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    folder = tmp_path_factory.mktemp("pki")
    authority = trustme.CA()
    made = Pki(*(folder / f"{name}.pem" for name in ("ca", "cert", "key", "old-cert", "old-key")))
    authority.cert_pem.write_to_path(str(made.ca))
    now = datetime.datetime.now(datetime.UTC)
    good = authority.issue_cert("localhost")
    old = authority.issue_cert("localhost", not_before=now - 3 * DAY, not_after=now - DAY)
    for issued, cert, key in ((good, made.cert, made.key), (old, made.old_cert, made.old_key)):
        issued.cert_chain_pems[0].write_to_path(str(cert))
        issued.private_key_pem.write_to_path(str(key))
    return made


@pytest.fixture(scope="module")
def server(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    settings = {
        "server.admin_key": ADMIN_KEY,
        "server.tls_cert": str(pki.cert),
        "server.tls_key": str(pki.key),
        "server.heartbeat_s": 0.2,
        "server.open_metrics": True,
        "server.allowed_hosts": ["train.example"],
    }
    with scripted_server(tmp_path_factory.mktemp("tls"), ["hello"], settings=settings) as running:
        yield running


def outer(server: ScriptedServer, host: str = "localhost", scheme: str = "https") -> str:
    return f"{scheme}://{host}:{server.url.rpartition(':')[2]}"


async def test_an_episode_goes_through_tls(server: ScriptedServer, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.url.startswith("https://") and server.local_url.startswith("http://127.0.0.1:")
    async with (
        AsyncSwarm(outer(server), ADMIN_KEY, ca=pki.ca, retry_budget_s=0) as swarm,
        swarm.episode(task=Task("default", "1", {}), split=Split.EVAL) as episode,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client_context(pki.ca))) as session,
    ):
        assert episode.base_url == f"{outer(server)}/v1"
        body = {"model": "solver", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        async with session.post(f"{episode.base_url}/chat/completions", json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
        finished = await episode.finish(1.0)
    assert finished.num_turns == 1
    monkeypatch.setenv("WINGBEAT_CA_FILE", str(pki.ca))
    async with AsyncSwarm(outer(server), ADMIN_KEY) as swarm:
        assert (await swarm.status()).state == "running"
    there = ("--server", outer(server), "--key", ADMIN_KEY)
    made = cli("keys", "create", "client", "--name", "a team", "--expires", "1h", "--json", *there)
    key = json.loads(made.stdout)
    assert key["key"].startswith("wb-client-") and key["role"] == "client", made.stderr
    gone = cli("keys", "revoke", key["id"], *there)
    assert gone.stdout.startswith(f"revoked {key['id']}: client key (a team), valid until"), gone.stderr
    monkeypatch.setenv("WINGBEAT_CA_FILE", str(pki.key))
    with pytest.raises(SetupError, match="cannot read the certificates in"):
        AsyncSwarm(outer(server), ADMIN_KEY)


async def fault_of(url: str, ca: Path | None) -> WingbeatError:
    async with AsyncSwarm(url, ADMIN_KEY, ca=ca, retry_budget_s=0) as swarm:
        with pytest.raises(WingbeatError) as caught:
            await swarm.status()
    return caught.value


async def test_faults_are_told_as_what_they_are(server: ScriptedServer, pki: Pki) -> None:
    unknown = await fault_of(outer(server), None)
    assert "is not accepted: unable to get local issuer certificate" in unknown.message
    assert "Swarm(url, ca=FILE) or WINGBEAT_CA_FILE=FILE" in unknown.message and not unknown.retryable
    other_name = await fault_of(outer(server, host="127.0.0.1"), pki.ca)
    assert "call it by a name that the certificate has" in other_name.message and not other_name.retryable
    without = await fault_of(outer(server, scheme="http"), None)
    assert isinstance(without, UnavailableError) and "its address begins with https://" in without.message
    plain = await fault_of(server.local_url.replace("http:", "https:"), pki.ca)
    assert "a server without TLS has an address that begins with http://" in plain.message
    itself = await fault_of(outer(server, host="127.0.0.1"), pki.cert)
    assert "mismatch" in itself.message, "a certificate may vouch for itself, not for another name"


# A loop that ends right after a refused TLS handshake may leave asyncio's transport to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_dials_in_through_tls_until_its_key_is_revoked(
    server: ScriptedServer, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINGBEAT_CA_FILE", str(pki.ca))
    register = Register(PROTOCOL_VERSION, "engine", "over-tls", "elsewhere", 1, ())
    file = KeyFile(server.run_dir.parent / "keys.json")
    record, key = file.create(NewKey(Role.WORKER, name="elsewhere"))
    link = WorkerLink(outer(server), key, register)
    received: list[str] = []

    def hears(kind: str) -> bool:
        received.extend(type(message).__name__ for message in link.receive(block=False))
        return kind in received

    eventually_now(lambda: key_is_known(server, key), what="the server to see the key")
    link.start()
    eventually_now(lambda: hears("Connected"), what="the welcome")
    assert not hears("Disconnected")
    file.revoke(record.id)
    eventually_now(lambda: hears("Shutdown"), what="the server to close the link", timeout_s=10)
    assert received[-2:] == ["Disconnected", "Shutdown"] and link.failed, "it does not try for ever"
    for host, wrong in (("127.0.0.1", server.worker_key), ("localhost", "wrong")):
        refused = WorkerLink(outer(server, host), wrong, register)
        refused.start()
        assert type(refused.receive(block=True)[0]).__name__ == "Shutdown", "it gives up at once"
        assert refused.failed
    gc.collect()  # here, and not in the middle of another test


def key_is_known(server: ScriptedServer, key: str) -> bool:
    """A worker's key may not read the status (403); an unknown one is no key (401)."""
    request = urllib.request.Request(f"{server.local_url}/api/status", headers={"Authorization": f"Bearer {key}"})
    try:
        OPENER.open(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 403
    return False


async def test_a_reader_of_events_leaves_with_its_key(server: ScriptedServer) -> None:
    file = KeyFile(server.run_dir.parent / "keys.json")
    record, key = file.create(NewKey(Role.ADMIN))
    async with AsyncSwarm(server.local_url, key, retry_budget_s=10) as swarm:

        async def known() -> bool:
            try:
                return bool(await swarm.status())
            except AuthenticationError:
                return False

        await eventually(known, what="the server to see the key")

        heard: list[str] = []

        async def follow() -> None:
            async for event in swarm.events():
                heard.append(event["event"])

        async def hears() -> bool:
            await swarm.set_mixing({})
            return "mixing" in heard

        reader = asyncio.create_task(follow())
        await eventually(hears, what="the reader to hear of something")
        file.revoke(record.id)
        async with asyncio.timeout(15):
            await reader


OPEN = {
    ("GET", "/healthz"): 200,
    ("GET", "/metrics"): 200,  # server.open_metrics
    ("GET", "/api/transactions/{transaction_id}"): 200,  # the id is random: whoever knows it may ask
}


async def test_no_other_route_answers_without_a_key(server: ScriptedServer) -> None:
    wrong = ({}, {"Authorization": "Bearer wb-client-unknown"}, {"x-api-key": "wb-ep-forged"})
    async with aiohttp.ClientSession(server.local_url) as session:
        async with session.get("/openapi.json") as reply:
            paths = (await reply.json())["paths"]
        routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
        assert len(routes) > 25
        for (method, path), headers in itertools.product(routes, wrong):
            concrete = re.sub(r"{\w+}", "t" * 32, path)
            async with session.request(method, concrete, json={}, headers=headers) as reply:
                assert reply.status == OPEN.get((method, path), 401), (method, path, await reply.text())


async def test_metrics_may_be_open_while_the_rest_is_not(server: ScriptedServer) -> None:
    async with aiohttp.ClientSession() as session:
        for path, status in (("/metrics", 200), ("/healthz", 200), ("/api/status", 401)):
            async with session.get(server.local_url + path) as reply:
                assert reply.status == status
        async with session.get(f"{server.local_url}/healthz", headers={"Host": "elsewhere.example"}) as reply:
            assert reply.status == 421, "server.allowed_hosts is set"


def test_certificates_that_no_client_accepts_are_refused_at_the_start(pki: Pki, tmp_path: Path) -> None:
    check_certificate(pki.cert, pki.key)
    for cert, key, told in (
        (pki.old_cert, pki.old_key, "certificate has expired"),
        (pki.cert, pki.old_key, "KEY_VALUES_MISMATCH"),
        (tmp_path / "none.pem", pki.key, "No such file"),
        (pki.key, pki.key, "expected a certificate"),
    ):
        with pytest.raises(SetupError, match=told):
            check_certificate(cert, key)
    config = tmp_path / "config.toml"
    tls = f'[server]\ntls_cert = "{pki.old_cert}"\ntls_key = "{pki.old_key}"\n'
    config.write_text(f'[policies.solver]\nmodel = "builtin:calculator"\n{tls}')
    refused = cli("serve", str(config), "--dry-run")
    assert refused.returncode == 2 and "certificate has expired" in refused.stderr
