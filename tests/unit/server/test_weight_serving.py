"""Control as a server of weight files: who pulls from whom, what may be asked for, and what trainers bring."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from wingbeat.core.errors import WingbeatError
from wingbeat.core.weight_protocol import CONTROL, Manifest, WeightFile
from wingbeat.server.calls.flights import EngineLink
from wingbeat.server.http.error_answers import error_response
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.weights.files import Part, WeightFiles, WrongOffset
from wingbeat.server.weights.relay_plan import PullingHost, plan_sources, sources_for
from wingbeat.server.weights.routes import weight_routes
from wingbeat.weights import upload

HOSTS = st.lists(
    st.builds(
        PullingHost,
        host_id=st.uuids().map(str),
        relays=st.booleans().map(lambda relays: ("http://relay",) if relays else ()),
        receive_s=st.one_of(st.just(float("inf")), st.floats(0.01, 100)),
    ),
    max_size=40,
    unique_by=lambda host: host.host_id,
).map(lambda hosts: [PullingHost(h.host_id, (f"http://{h.host_id}",) if h.relays else (), h.receive_s) for h in hosts])


@settings(max_examples=40)
@given(hosts=HOSTS, fan_out=st.integers(1, 4))
def test_every_host_has_a_way_up_to_control(hosts: list[PullingHost], fan_out: int) -> None:
    plan = plan_sources(hosts, fan_out=fan_out)
    assert plan.keys() == {host.host_id for host in hosts}
    parents = Counter(sources[0] for sources in plan.values())
    relaying = {f"http://{host.host_id}": host for host in hosts if host.relays}
    num_relays = len(relaying)
    for host in hosts:
        *way, last = plan[host.host_id]
        assert last == CONTROL and f"http://{host.host_id}" not in way and len(way) <= num_relays
        if way:  # the way is the parent's, and the parent
            assert plan[relaying[way[0]].host_id] == tuple(plan[host.host_id][1:])
    assert all(number <= fan_out for parent, number in parents.items() if parent != CONTROL)
    places = fan_out + num_relays * (fan_out - 1)  # that are free once all relays are placed
    without = len(hosts) - num_relays
    assert parents[CONTROL] <= fan_out + max(0, without - places)


def test_the_fastest_are_nearest() -> None:
    names = "abcde"
    hosts = [PullingHost(name, (f"http://{name}",), 5.0 - index) for index, name in enumerate(names)]
    plan = plan_sources([*hosts, PullingHost("new", ("http://new",)), PullingHost("mute", (), 0.1)], fan_out=2)
    assert plan["e"] == plan["d"] == (CONTROL,)
    assert plan["c"] == plan["b"] == ("http://e", CONTROL) and plan["a"] == ("http://d", CONTROL)
    assert plan["new"] == ("http://d", CONTROL)
    assert plan["mute"] == ("http://c", "http://e", CONTROL)


def whole(name: str, data: bytes) -> WeightFile:
    return WeightFile(name, len(data), hashlib.sha256(data).hexdigest(), "full")


def test_an_engine_on_the_publishers_host_maps_and_a_busy_relay_is_nobodys_parent() -> None:
    manifest = Manifest("solver", 2, "full", "/w/2", "here", "sum", 1, (), "base", files=(whole("f", b"x"),))
    older = msgspec.structs.replace(manifest, version=1)
    links = [EngineLink(name, name, print) for name in ("here", "near", "far")]
    for link in links:
        link.relay_url = f"http://{link.host_id}"
    links[1].receive_s = 1.0
    ways = [sources_for(link, manifest, links, fan_out=1) for link in links]
    assert ways == [(), (CONTROL,), ("http://near", CONTROL)]
    links[1].loading["solver"] = older
    assert sources_for(links[2], manifest, links, fan_out=1) == (CONTROL,)
    assert sources_for(links[2], msgspec.structs.replace(manifest, files=()), links, fan_out=1) == ()


# --- the routes -----------------------------------------------------------------------------------

DATA = bytes(range(256)) * 40
NAME = "solver-00000003-0123456789abcdef.safetensors"


@dataclass(frozen=True)
class Got:
    status: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class Site:
    """A server with nothing but these routes."""

    url: str
    session: aiohttp.ClientSession
    files: WeightFiles
    held: list[Manifest]
    faults: set[int] = field(default_factory=set[int])
    """Which uploads are answered by ``fault``."""
    fault: int = 500
    num_puts: int = 0
    max_body_bytes: int = 2**30

    async def ask(self, method: str, name: str, headers: dict[str, str], data: bytes | None = None) -> Got:
        url = URL(f"{self.url}/weights/v1/solver/{name}", encoded=True)
        async with self.session.request(method, url, data=data, headers=headers) as answer:
            return Got(answer.status, answer.headers, await answer.read())

    async def get(self, name: str = NAME, *, key: str = "worker-key", **headers: str) -> Got:
        return await self.ask("GET", name, {"Authorization": f"Bearer {key}", **headers})

    async def put(self, data: bytes, start: int, **more: str) -> Got:
        headers = {
            "Authorization": "Bearer worker-key",
            "Content-Range": f"bytes {start}-{start + len(data) - 1}/{len(DATA)}",
            "X-Weights-SHA256": hashlib.sha256(DATA).hexdigest(),
            **{name.replace("_", "-"): value for name, value in more.items() if name != "name"},
        }
        return await self.ask("PUT", more.get("name", NAME), headers, data)


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr("wingbeat.server.weights.files.run_weights_dir", lambda run_dir: tmp_path / "weights")
    held: list[Manifest] = []
    policies: Any = {"solver": SimpleNamespace(versions=SimpleNamespace(held=held))}
    files = WeightFiles(policies, run_dir=tmp_path, host_id="here")
    control: Any = SimpleNamespace(weight_files=files)
    app = FastAPI()
    app.include_router(weight_routes(control, KeyRing.of("admin-key", "worker-key")))

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, WingbeatError)
        return error_response(error)

    @app.middleware("http")
    async def break_some(request: Request, call_next: Any) -> Response:
        found.num_puts += request.method == "PUT"
        if int(request.headers.get("content-length", 0)) > found.max_body_bytes:
            return Response(status_code=413)
        return Response(status_code=found.fault) if found.num_puts in found.faults else await call_next(request)

    app.add_exception_handler(WingbeatError, answer)
    server = uvicorn.Server(uvicorn.Config(app, loop="none", lifespan="off", log_level="warning"))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.startup([listener])  # and not its `serve`, which looks around ten times a second only
        async with aiohttp.ClientSession() as session:
            found = Site(f"http://127.0.0.1:{listener.getsockname()[1]}", session, files, held)
            yield found
        for listening in server.servers:  # its `shutdown` sleeps a tenth of a second
            listening.close()
        while server.server_state.connections:  # noqa: ASYNC110, of the session, which is closed
            await asyncio.sleep(0)


def published(folder: Path, *, host_id: str = "here") -> Manifest:
    folder.mkdir(exist_ok=True)
    path = folder / NAME
    path.write_bytes(DATA)
    return Manifest("solver", 3, "full", str(path), host_id, "sum", len(DATA), (), "base", files=(whole(NAME, DATA),))


async def test_files_are_given_whole_and_from_where_they_broke_off(site: Site, tmp_path: Path) -> None:
    site.held.append(published(tmp_path / "snapshots"))
    answer = await site.get()
    tag = f'"{hashlib.sha256(DATA).hexdigest()}"'
    assert (answer.status, answer.content, answer.headers["ETag"]) == (200, DATA, tag)
    rest = await site.get(Range="bytes=10000-")
    assert (rest.status, rest.content, rest.headers["ETag"]) == (206, DATA[10_000:], tag)
    assert rest.headers["Content-Range"] == f"bytes 10000-{len(DATA) - 1}/{len(DATA)}"
    assert (await site.get(Range="bytes=5-9")).content == DATA[5:10]
    beyond = await site.get(Range=f"bytes={len(DATA)}-")
    assert (beyond.status, beyond.headers["Content-Range"]) == (416, f"bytes */{len(DATA)}")
    for other in ("bytes=-5", f"bytes={'9' * 5000}-", "bytes=0-1,5-6"):  # kinds that nobody needs
        assert (await site.get(Range=other)).content == DATA


async def test_nothing_is_given_but_what_a_held_manifest_names(site: Site, tmp_path: Path) -> None:
    manifest = published(tmp_path / "snapshots")
    (tmp_path / "snapshots" / "secret").write_bytes(b"s")
    assert (await site.get()).status == 404
    site.held.append(manifest)
    for name in ("secret", "..%2Fsnapshots%2Fsecret", "%2e%2e%2fsecret", "..%5csecret", f"{NAME}%00"):
        assert (await site.get(name)).status == 404
    assert (await site.get(key="")).status == 401
    assert (await site.get(key="admin-key")).status == 403  # for workers alone
    (tmp_path / "snapshots" / NAME).unlink()
    assert (await site.get()).status == 404
    for away in ("here", "elsewhere"):  # a path that is none of this run's, or a name that is no weight file's
        made_up = published(tmp_path / "home", host_id=away)
        site.held[:] = [made_up]
        assert (await site.get()).status == 404
        secret = str(tmp_path / "snapshots" / "secret")
        site.held[:] = [
            msgspec.structs.replace(made_up, path=secret, files=(whole(secret, b"s"), whole("secret", b"s")))
        ]
        assert (await site.get("secret")).status == 404
    for away in ("here", "elsewhere"):
        with pytest.raises(FileNotFoundError):
            site.files.path_of(msgspec.structs.replace(made_up, host_id=away, files=(whole("/etc/passwd", b""),)))


async def test_a_trainer_of_another_host_brings_its_files_part_by_part(site: Site, tmp_path: Path) -> None:
    wrong = await site.put(DATA[:10], 7)
    assert (wrong.status, wrong.headers["Upload-Offset"]) == (409, "0")
    first = await site.put(DATA[:4000], 0)
    assert (first.json(), first.headers["Upload-Offset"]) == ({"offset": 4000, "complete": False}, "4000")
    again = await site.put(DATA[:4000], 0)
    assert (again.status, again.headers["Upload-Offset"]) == (409, "4000")
    last = await site.put(DATA[4000:], 4000)
    assert last.json() == {"offset": len(DATA), "complete": True}
    there = await site.put(DATA[:4000], 0)
    assert (there.status, there.headers["Upload-Offset"]) == (409, str(len(DATA)))
    manifest = published(tmp_path / "trainer", host_id="elsewhere")
    assert (await site.get()).status == 404  # no manifest names it yet
    site.held.append(manifest)
    assert (await site.get()).content == DATA
    assert site.files.path_of(manifest).read_bytes() == DATA


async def test_a_damaged_upload_begins_anew_and_uploads_of_released_versions_go(site: Site, tmp_path: Path) -> None:
    await site.put(b"\0" * 100, 0)
    damaged = await site.put(DATA[100:], 100)
    assert damaged.status == 503 and "bring it again" in damaged.json()["error"]["message"]
    await site.put(DATA, 0)
    manifest = published(tmp_path / "trainer", host_id="elsewhere")
    site.held.append(manifest)
    path = site.files.path_of(manifest)
    names = [f"solver-0000000{n}-0123456789abcdef.safetensors" for n in (4, 5)]
    await site.put(DATA, 0, name=names[0])
    assert path.exists()
    site.held[:] = [
        msgspec.structs.replace(manifest, version=4, files=(msgspec.structs.replace(manifest.files[0], name=names[0]),))
    ]
    await site.put(DATA, 0, name=names[1])
    assert sorted(file.name for file in path.parent.iterdir()) == names


async def test_an_upload_whose_control_died_over_its_last_part_is_looked_at_by_the_next(
    site: Site, tmp_path: Path
) -> None:
    partial = tmp_path / "weights" / "uploads" / (NAME + ".partial")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(DATA[:-1] + b"?")
    assert (await site.put(DATA[:10], 0)).status == 503 and not partial.exists()
    partial.write_bytes(DATA)
    there = await site.put(DATA[:10], 0)
    assert (there.status, there.headers["Upload-Offset"]) == (409, str(len(DATA)))
    assert partial.with_name(NAME).read_bytes() == DATA and not partial.exists()


async def test_a_part_that_is_sent_twice_at_once_is_taken_once(site: Site) -> None:
    """An uploader that hears nothing sends it again while the first one is being written."""
    part = Part("solver", NAME, "0" * 64, 0, 2**26, bytes(2**25))

    def take() -> int | str:
        try:
            return site.files.take(part)
        except WrongOffset as error:
            return f"from {error.offset} on"

    answers = await asyncio.gather(*(asyncio.to_thread(take) for _ in range(4)))
    assert Counter(answers) == {2**25: 1, f"from {2**25} on": 3}


async def test_what_dead_trainers_and_earlier_controls_left_goes(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "weights" / "uploads"
    folder.mkdir(parents=True)
    old, part = NAME.replace("3-", "1-"), NAME.replace("3-", "9-") + ".partial"
    others = ("critic-00000001-0123456789abcdef.safetensors", "notes.txt")
    for name in (old, part, *others):
        (folder / name).write_bytes(b"x")
    site.held.append(published(tmp_path / "trainer", host_id="elsewhere"))
    await site.put(DATA, 0)
    assert sorted(path.name for path in folder.iterdir()) == sorted((*others, NAME))


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"Content_Range": f"bytes 0-{'9' * 5000}/{'9' * 5000}"}, 400),
        ({"name": "other-00000003-0123456789abcdef.safetensors"}, 400),
        ({"name": "solver-3-0123456789abcdef.pkl"}, 400),
        ({"name": "..%2Fsolver-00000003-0123456789abcdef.safetensors"}, 404),
        ({"Content_Range": "bytes 0-9/5"}, 413),
        ({"Content_Range": "bytes 0-8/100"}, 400),
        ({"Content_Range": "all of it"}, 400),
        ({"X_Weights_SHA256": "abc"}, 400),
        ({"Authorization": "Bearer admin-key"}, 403),
        ({"Authorization": ""}, 401),
    ],
)
async def test_an_upload_that_cannot_be_is_refused(
    site: Site, tmp_path: Path, change: dict[str, str], status: int
) -> None:
    assert (await site.put(DATA[:10], 0, **change)).status == status
    assert not (tmp_path / "weights").exists()


async def test_an_uploader_goes_on_where_control_lacks_bytes(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", 1000)
    monkeypatch.setattr(upload, "RETRY_S", (0.01,))
    monkeypatch.setattr("wingbeat.weights.wanted.POLL_S", 0.02)
    manifest = published(tmp_path / "trainer", host_id="elsewhere")
    await site.put(DATA[:3000], 0)  # an earlier trainer got so far
    site.faults, site.max_body_bytes = {3, 6}, 600
    uploads = upload.Uploads(site.url, "worker-key")
    until = time.monotonic() + 20.0
    assert await asyncio.to_thread(uploads.carry, manifest, lambda: time.monotonic() < until)
    site.held.append(manifest)
    assert site.files.path_of(manifest).read_bytes() == DATA
    assert await asyncio.to_thread(uploads.carry, manifest, lambda: True)  # all there
    site.faults = set(range(10**4))
    wanted = iter([True, True, False])
    name = "solver-00000008-0123456789abcdef.safetensors"
    other = msgspec.structs.replace(manifest, files=(msgspec.structs.replace(manifest.files[0], name=name),))
    (tmp_path / "trainer" / name).write_bytes(DATA)
    assert not await asyncio.to_thread(uploads.carry, other, lambda: next(wanted))


async def test_people_are_told_of_an_upload_that_does_not_move_and_it_goes_on(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "RETRY_S", (0.01,))
    manifest = published(tmp_path / "trainer", host_id="elsewhere")
    site.faults = {1, 2, 3, 4, 5}
    times = iter(range(0, 1000, 20))  # of each failure and each part that came
    uploads = upload.Uploads(site.url, "worker-key", trouble_s=60.0, clock=lambda: float(next(times)))
    told: list[str] = []
    assert await asyncio.to_thread(uploads.carry, manifest, lambda: True, told.append)
    (said,) = told
    assert said == f"cannot bring {NAME} to {site.url} for 60 s, and goes on trying: it answers 500"


async def test_people_are_told_of_a_file_that_comes_damaged_each_time(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first part arrives again and again."""
    monkeypatch.setattr(upload, "RETRY_S", (0.01,))
    monkeypatch.setattr(upload, "PART_BYTES", len(DATA) // 2)
    manifest = published(tmp_path / "trainer", host_id="elsewhere")
    (tmp_path / "trainer" / NAME).write_bytes(DATA[::-1])
    times = iter(range(0, 10**6, 5))
    uploads = upload.Uploads(site.url, "worker-key", clock=lambda: float(next(times)))
    told: list[str] = []
    assert not await asyncio.to_thread(uploads.carry, manifest, lambda: not told, told.append)
    assert len(told) == 1 and "goes on trying" in told[0]


@pytest.mark.parametrize(("key", "limit", "said"), [("admin-key", 2**30, "403 "), ("worker-key", 100, "413")])
async def test_what_control_never_takes_is_not_tried_for_ever(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, limit: int, said: str
) -> None:
    monkeypatch.setattr(upload, "RETRY_S", (0.01,))
    site.max_body_bytes = limit
    manifest = published(tmp_path / "trainer", host_id="elsewhere")
    times = iter(range(0, 1000, 10))
    uploads = upload.Uploads(site.url, key, clock=lambda: float(next(times)))
    with pytest.raises(upload.UploadRefused, match=f"it answers {said}"):
        await asyncio.to_thread(uploads.carry, manifest, lambda: True)
    assert 2 <= site.num_puts <= 3 + 6, "a few of them, and those of parts that were halved"


async def test_who_says_no_for_a_while_only_is_asked_again(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a proxy does while control starts again."""
    monkeypatch.setattr(upload, "RETRY_S", (0.01,))
    monkeypatch.setattr(upload, "PART_BYTES", len(DATA) // 2)
    site.faults, site.fault = {1, 2, 3, 5, 6, 7}, 404
    manifest = published(tmp_path / "trainer", host_id="elsewhere")
    times = iter(range(0, 1000, 4))
    uploads = upload.Uploads(site.url, "worker-key", clock=lambda: float(next(times)))
    assert await asyncio.to_thread(uploads.carry, manifest, lambda: True)


async def test_weights_that_are_gone_end_the_upload(site: Site, tmp_path: Path) -> None:
    manifest = published(tmp_path / "trainer", host_id="elsewhere")
    gone = msgspec.structs.replace(manifest, path=f"{manifest.path}.gone", files=(whole("gone", DATA),))
    with pytest.raises(FileNotFoundError):
        await asyncio.to_thread(upload.Uploads(site.url, "worker-key").carry, gone, lambda: True)
