"""A Kubernetes API server for tests: pods, their watch, exec over WebSocket (v4 and v5) and network policies.

Answers are as the API reference says; a pod's container is a real one of :mod:`fake_container`, whose emptyDir volumes
outlast its restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web
from fake_container import FakeContainer, exit_code_of

V4, V5 = "v4.channel.k8s.io", "v5.channel.k8s.io"


@dataclass
class Pod:
    """A pod as the cluster knows it."""

    manifest: dict[str, Any]
    container: FakeContainer
    folders: tempfile.TemporaryDirectory[str]
    restarts: int = 0
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    last: dict[str, Any] = field(default_factory=dict[str, Any])
    phase: str = "Pending"

    def json(self) -> dict[str, Any]:
        name = self.manifest["spec"]["containers"][0]["name"]
        image = self.manifest["spec"]["containers"][0]["image"]
        status = {
            "name": name,
            "image": image,
            "imageID": "",
            "ready": "running" in self.state,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last,
        }
        return {**self.manifest, "status": {"phase": self.phase, "containerStatuses": [status]}}


@dataclass
class FakeKubernetes:
    """Its state, and what tests change of it."""

    subprotocols: tuple[str, ...] = (V5, V4)
    images: set[str] = field(default_factory=lambda: {"python:3.12-slim"})
    pods: dict[str, Pod] = field(default_factory=dict[str, Pod])
    policies: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    evicted: set[str] = field(default_factory=set[str])
    before_create: Callable[[], None] = lambda: None
    """Called, in a thread, before a pod is made."""
    hold_start: bool = False
    """Pods stay pending."""
    watch_s: float = 3600.0
    """After so long a watch is ended, as load balancers do."""
    num_watches: int = 0
    used: list[str] = field(default_factory=list[str])
    """The subprotocol of each exec."""

    def __enter__(self) -> FakeKubernetes:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.pods):
            self._call(self._end(name))
        self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def kill(self, name: str) -> None:
        """As if the node was lost."""
        self._call(self._end(name))

    def out_of_memory(self, name: str) -> None:
        """The kernel ends the container; the kubelet starts it again."""
        self._call(self._restart(name, {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}))

    def release(self, name: str) -> None:
        """A pod that is held runs at last."""
        self._call(self._run(self.pods[name]))

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _open(self) -> None:
        self._changed = asyncio.Condition()
        pods = "/api/v1/namespaces/{namespace}/pods"
        app = web.Application()
        app.add_routes(
            [
                web.post(pods, self._create),
                web.get(pods, self._list),
                web.get(pods + "/{name}", self._read),
                web.delete(pods + "/{name}", self._delete),
                web.get(pods + "/{name}/exec", self._exec),
                web.post("/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies", self._policy),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _create(self, request: web.Request) -> web.Response:
        manifest = await request.json()
        await asyncio.to_thread(self.before_create)
        name = manifest["metadata"]["name"]
        if name in self.pods:
            return _status(409, "AlreadyExists", f'pods "{name}" already exists')
        manifest["metadata"] |= {"namespace": request.match_info["namespace"], "uid": f"u-{name}"}
        spec = manifest["spec"]["containers"][0]
        folders = tempfile.TemporaryDirectory()
        binds = _volumes(folders.name, spec["volumeMounts"])
        env = {pair["name"]: pair["value"] for pair in spec["env"]}
        container = FakeContainer(spec["command"], env, tmpfs=(), workdir=spec["workingDir"], binds=binds)
        pod = self.pods[name] = Pod(manifest, container, folders)
        if self.hold_start:
            pod.state = {"waiting": {"reason": "ContainerCreating"}}
        elif spec["image"] not in self.images:
            pod.state = {"waiting": {"reason": "ErrImagePull", "message": f"{spec['image']}: not found"}}
        else:
            await self._run(pod)
        await self._tell()
        return web.json_response(pod.json(), status=201)

    async def _run(self, pod: Pod) -> None:
        await asyncio.to_thread(pod.container.start)
        pod.phase, pod.state = "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        await self._tell()

    async def _restart(self, name: str, ended: dict[str, Any]) -> None:
        pod = self.pods[name]
        await asyncio.to_thread(pod.container.kill)
        pod.state = ended
        await self._tell()
        await asyncio.to_thread(pod.container.start)
        pod.restarts += 1
        pod.last, pod.state = ended, {"running": {"startedAt": "2026-01-01T00:00:01Z"}}
        await self._tell()

    async def _end(self, name: str) -> None:
        pod = self.pods.pop(name)
        await asyncio.to_thread(pod.container.kill)
        pod.folders.cleanup()
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _list(self, request: web.Request) -> web.StreamResponse:
        wanted = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
        label, _, value = request.query.get("labelSelector", "").partition("=")
        if "watch" not in request.query:
            found = [p.json() for p in self.pods.values() if p.manifest["metadata"]["labels"].get(label) == value]
            return web.json_response({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": found})
        response = web.StreamResponse()
        await response.prepare(request)
        told: str = ""
        try:
            self.num_watches += 1
            async with asyncio.timeout(min(self.watch_s, float(request.query["timeoutSeconds"]))):
                while True:
                    pod = self.pods.get(wanted)
                    now = json.dumps(pod.json()) if pod else ""
                    if now != told:
                        kind = "ADDED" if not told else "MODIFIED" if pod else "DELETED"
                        await response.write(f'{{"type":"{kind}","object":{now or told}}}\n'.encode())
                        told = now
                    async with self._changed:
                        await self._changed.wait()
        except (TimeoutError, ConnectionResetError):
            return response

    async def _read(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return web.json_response(pod.json()) if pod else _status(404, "NotFound", "no such pod")

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "NotFound", "no such pod")
        await self._end(request.match_info["name"])
        return web.json_response(pod.json())

    async def _policy(self, request: web.Request) -> web.Response:
        policy = await request.json()
        if policy["metadata"]["name"] in self.policies:
            return _status(409, "AlreadyExists", "there is one")
        self.policies[policy["metadata"]["name"]] = policy
        return web.json_response(policy, status=201)

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "NotFound", "no such pod")
        if not pod.container.running:
            return _status(500, "InternalError", "container not running")
        assert request.query["container"] == "box" and request.query["tty"] == "false"
        has_stdin = request.query["stdin"] == "true"
        socket = web.WebSocketResponse(protocols=self.subprotocols)
        await socket.prepare(request)
        self.used.append(socket.ws_protocol or "")
        process = await asyncio.to_thread(pod.container.exec, request.query.getall("command"), stdin=has_stdin)
        feeding = asyncio.create_task(self._feed(socket, process))
        await asyncio.gather(*(self._copy(socket, n, pipe) for n, pipe in ((1, process.stdout), (2, process.stderr))))
        code = await asyncio.to_thread(exit_code_of, process)
        if pod.container.running and not socket.closed:
            if socket.ws_protocol == V5:
                await socket.send_bytes(b"\xff\x01")
            await socket.send_bytes(b"\x03" + json.dumps(_ended(code)).encode())
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        await socket.close()
        return socket

    async def _feed(self, socket: web.WebSocketResponse, process: Any) -> None:
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[:1] == b"\x00" and process.stdin is not None:
                try:
                    await asyncio.to_thread(_write, process.stdin, message.data[1:])
                except OSError:
                    return

    async def _copy(self, socket: web.WebSocketResponse, channel: int, pipe: Any) -> None:
        with pipe:
            while data := await asyncio.to_thread(pipe.read1, 32768):
                try:
                    await socket.send_bytes(bytes([channel]) + data)
                except ConnectionResetError:
                    return


def _volumes(root: str, mounts: list[dict[str, str]]) -> list[tuple[str, str, bool]]:
    """A folder for each emptyDir."""
    for mount in mounts:
        Path(root, mount["name"]).mkdir(mode=0o777)
    return [(str(Path(root, mount["name"])), mount["mountPath"], False) for mount in mounts]


def _write(pipe: Any, data: bytes) -> None:
    pipe.write(data)
    pipe.flush()


def _ended(code: int) -> dict[str, Any]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": causes},
    }


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return web.json_response({**body, "message": message, "reason": reason, "code": code}, status=code)
