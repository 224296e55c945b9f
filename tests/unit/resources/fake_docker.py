"""A Docker daemon for tests: the routes of Engine API 1.44 that boxes use, answered as its reference says.

Bodies are checked as strictly as the reference allows: unknown keys are refused, so that a client that asks for
something that does not exist fails here, too.  Exec streams are hijacked connections with 8-byte frame headers.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fake_container import FakeContainer, exit_code_of

API_VERSION = "1.44"
CREATE_KEYS = re.findall(
    r"\w+",
    """
    Hostname Domainname ExposedPorts User Tty OpenStdin StdinOnce AttachStdin AttachStdout AttachStderr Env Cmd Image
    Volumes NetworkDisabled Entrypoint WorkingDir HostConfig NetworkingConfig MacAddress Labels StopSignal Healthcheck
    StopTimeout Runtime
    """,
)
HOST_KEYS = re.findall(
    r"\w+",
    """
    ReadonlyRootfs Tmpfs Mounts NetworkMode CapDrop SecurityOpt Privileged LogConfig Memory MemorySwap NanoCpus
    PidsLimit Ulimits ShmSize
    """,
)
EXEC_KEYS = re.findall(r"\w+", "Container User Privileged Tty AttachStdin AttachStdout AttachStderr Cmd Env WorkingDir")


@dataclass
class Made:
    """A container as the daemon knows it."""

    name: str
    config: dict[str, Any]
    container: FakeContainer
    dead: bool = False


@dataclass
class Exec:
    owner: Made
    config: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None


@dataclass
class FakeDocker:
    """Its state, and what tests change of it."""

    images: set[str] = field(default_factory=lambda: {"python:3.12-slim"})
    registry: set[str] = field(default_factory=set[str])
    """What can be pulled."""
    containers: dict[str, Made] = field(default_factory=dict[str, Made])
    execs: dict[str, Exec] = field(default_factory=dict[str, Exec])
    pulls: list[str] = field(default_factory=list[str])
    fail_start: str = ""
    """Why no container can be started."""
    on_request: Callable[[str, str], None] = lambda method, path: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> FakeDocker:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for made in self.containers.values():
            made.container.kill()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self._server.server_address[1]}"

    def make(self, name: str, body: dict[str, Any]) -> Made:
        host = body["HostConfig"]
        mounts = host.get("Mounts") or []
        container = FakeContainer(
            command=[*body["Entrypoint"], *(body.get("Cmd") or [])],
            env=dict(pair.split("=", 1) for pair in body.get("Env") or []),
            tmpfs=list(host.get("Tmpfs") or {}),
            workdir=body["WorkingDir"],
            binds=[(mount["Source"], mount["Target"], mount.get("ReadOnly", False)) for mount in mounts],
        )
        return Made(name, body, container)


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    fake: FakeDocker
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        path = parts.path.removeprefix(f"/v{API_VERSION}")
        self.fake.on_request(self.command, path)
        try:
            self._route(self.command, path.strip("/").split("/"), query, body)
        except _Refused as refused:
            self._json(refused.status, {"message": str(refused)})

    def _route(self, method: str, path: list[str], query: dict[str, str], body: dict[str, Any]) -> None:
        match method, path:
            case "GET", ["version"]:
                self._json(200, {"ApiVersion": API_VERSION, "MinAPIVersion": "1.24", "Version": "25.0"})
            case "POST", ["containers", "create"]:
                self._create(query["name"], body)
            case "POST", ["containers", name, "start"]:
                self._start(self._made(name))
            case "POST", ["containers", name, "restart"]:
                made = self._made(name)
                made.container.kill()
                self._start(made)
            case "GET", ["containers", name, "json"]:
                self._json(200, self._inspected(self._made(name)))
            case "DELETE", ["containers", name]:
                self._remove(self._made(name), force=query.get("force") in ("1", "True", "true"))
            case "POST", ["containers", name, "exec"]:
                self._make_exec(self._made(name), body)
            case "POST", ["exec", exec_id, "start"]:
                self._run_exec(self.fake.execs[exec_id], body)
            case "GET", ["exec", exec_id, "json"]:
                made = self.fake.execs[exec_id]
                is_running = made.process is not None and made.exit_code is None
                self._json(200, {"ID": exec_id, "Running": is_running, "ExitCode": made.exit_code})
            case "GET", ["images", *name, "json"]:
                if "/".join(name) not in self.fake.images:
                    raise _Refused(404, f"No such image: {'/'.join(name)}")
                self._json(200, {"Id": "sha256:1"})
            case "POST", ["images", "create"]:
                self._pull(f"{query['fromImage']}:{query['tag']}")
            case _:
                raise _Refused(404, f"page not found: {method} /{'/'.join(path)}")

    def _made(self, name: str) -> Made:
        made = self.fake.containers.get(name)
        if made is None:
            raise _Refused(404, f"No such container: {name}")
        return made

    def _create(self, name: str, body: dict[str, Any]) -> None:
        unknown = sorted((set(body) - set(CREATE_KEYS)) | (set(body["HostConfig"]) - set(HOST_KEYS)))
        if unknown:
            raise _Refused(400, f"unknown fields: {unknown}")
        if body["Image"] not in self.fake.images:
            raise _Refused(404, f"No such image: {body['Image']}")
        with self.fake.lock:
            if name in self.fake.containers:
                raise _Refused(409, f'Conflict. The container name "/{name}" is already in use')
            self.fake.containers[name] = self.fake.make(name, body)
        self._json(201, {"Id": name, "Warnings": []})

    def _start(self, made: Made) -> None:
        if self.fake.fail_start:
            raise _Refused(500, self.fake.fail_start)
        made.container.oom_killed = False
        made.container.start()
        self._empty(204)

    def _remove(self, made: Made, *, force: bool) -> None:
        if made.container.running and not force:
            raise _Refused(409, "cannot remove a running container")
        made.container.kill()
        del self.fake.containers[made.name]
        self._empty(204)

    def _inspected(self, made: Made) -> dict[str, Any]:
        running = made.container.running
        state = {
            "Status": "running" if running else "exited",
            "Running": running,
            "OOMKilled": made.container.oom_killed,
            "ExitCode": 0 if running else 137,
        }
        return {"Id": made.name, "Name": f"/{made.name}", "State": state, "Config": made.config}

    def _make_exec(self, made: Made, body: dict[str, Any]) -> None:
        unknown = sorted(set(body) - set(EXEC_KEYS))
        if unknown:
            raise _Refused(400, f"unknown fields: {unknown}")
        if not made.container.running:
            raise _Refused(409, f"Container {made.name} is not running")
        with self.fake.lock:
            exec_id = f"e{len(self.fake.execs)}"
            self.fake.execs[exec_id] = Exec(made, body)
        self._json(201, {"Id": exec_id})

    def _run_exec(self, made: Exec, body: dict[str, Any]) -> None:
        """Both outputs and the input on one hijacked connection."""
        assert body == {"Tty": False, "Detach": False}
        assert self.headers["Upgrade"] == "tcp"
        made.process = made.owner.container.exec(made.config["Cmd"], stdin=made.config["AttachStdin"])
        self.connection.sendall(
            b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.multiplexed-stream\r\n"
            b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        self.close_connection = True
        lock = threading.Lock()
        process = made.process
        if process.stdin is not None:
            threading.Thread(target=self._feed, args=(process,), daemon=True).start()
        streams = [(1, process.stdout), (2, process.stderr)]
        copiers = [threading.Thread(target=self._copy, args=(n, pipe, lock), daemon=True) for n, pipe in streams]
        for copier in copiers:
            copier.start()
        for copier in copiers:
            copier.join()
        made.exit_code = exit_code_of(process)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _feed(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError), process.stdin:  # the connection may be closed meanwhile
            while data := self.rfile.read1(65536):
                process.stdin.write(data)
                process.stdin.flush()

    def _copy(self, stream: int, pipe: Any, lock: threading.Lock) -> None:
        with pipe:
            while data := pipe.read1(65536):
                frame = struct.pack(">BxxxL", stream, len(data)) + data
                try:
                    with lock:
                        self.connection.sendall(frame)
                except OSError:
                    return

    def _pull(self, image: str) -> None:
        self.fake.pulls.append(image)
        events: list[dict[str, Any]] = [{"status": f"Pulling from {image}"}]
        if image in self.fake.registry:
            self.fake.images.add(image)
            events.append({"status": "Download complete"})
        else:
            events.append({"error": f"manifest for {image} not found", "errorDetail": {"message": "not found"}})
        data = b"".join(json.dumps(event).encode() + b"\r\n" for event in events)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))

    def _json(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
