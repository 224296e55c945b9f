"""The three ways to the mock engine that the gateway benchmark compares: past all, through us, through LiteLLM."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.conversations import MODEL, replies, write_word_model
from bench.http_load import Connection, http_request
from bench.machine import free_port
from bench.scripted_server import OPENER, WITH_LIFELINE, WORKER_KEY_VARIABLE, ScriptedServer, scripted_config
from wingbeat.dataflow.ledger_reader import open_read_only

LITELLM = "1.106.12"
"""Pinned: the newest release whose proxy installs from the package index alone."""
LITELLM_START_S = 120.0
CONTEXT_TOKENS = 200_000


@dataclass(slots=True)
class Session:
    """One conversation that is being held."""

    headers: str
    episode_id: str = ""
    turn: int = 0
    """The next one."""


class Target(Protocol):
    """One way to the engine."""

    @property
    def name(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def pid(self) -> int | None:
        """The proxy in between."""
        ...

    async def begin(self, connection: Connection) -> Session: ...
    async def end(self, connection: Connection, session: Session) -> None: ...
    def check_kept(self, session: Session) -> None:
        """Raises RuntimeError where a session's answered turns would not survive the proxy's death, if they should."""
        ...


@dataclass(frozen=True, slots=True)
class PlainTarget:
    """A chat endpoint that knows no episodes, so that a conversation may begin in its middle."""

    name: str
    port: int
    pid: int | None
    headers: str = ""

    async def begin(self, connection: Connection) -> Session:
        return Session(self.headers, turn=1)

    async def end(self, connection: Connection, session: Session) -> None:
        return

    def check_kept(self, session: Session) -> None:
        return


@dataclass(frozen=True, slots=True)
class OurTarget:
    """Control: every conversation is a training episode, finished with a reward."""

    name: str
    port: int
    pid: int | None
    run_dir: Path

    async def begin(self, connection: Connection) -> Session:
        task = {"source": "bench", "id": "1", "payload": {}}
        body = {"idempotency_key": uuid.uuid4().hex, "task": task, "policies": [MODEL]}
        answer = await connection.send(http_request("POST", "/api/episodes", json.dumps(body).encode()))
        if answer.status != 200:
            raise RuntimeError(f"cannot begin an episode: {answer.body!r}")
        begun = json.loads(answer.body)
        return Session(f"Authorization: Bearer {begun['api_key']}\r\n", begun["episode_id"])

    async def end(self, connection: Connection, session: Session) -> None:
        path = f"/api/episodes/{session.episode_id}/finish"
        answer = await connection.send(http_request("POST", path, b'{"rewards": 1.0}', headers=session.headers))
        if answer.status != 200:
            raise RuntimeError(f"cannot finish an episode: {answer.body!r}")

    def check_kept(self, session: Session) -> None:
        with open_read_only(self.run_dir / "ledger.sqlite") as ledger:
            kept = len(ledger.captured_turns(session.episode_id, 1))
        if kept != session.turn:
            raise RuntimeError(f"expected {session.turn} captured turns of {session.episode_id}, found {kept}")


@contextlib.contextmanager
def our_targets(folder: Path) -> Iterator[tuple[PlainTarget, OurTarget]]:
    """The engine's own endpoint and control in front of the same engine; both are processes of their own."""
    model = write_word_model(folder / "model")
    config = scripted_config(folder, {}, model=model, context_tokens=CONTEXT_TOKENS)
    script = folder / "script.json"
    script.write_text(json.dumps(replies()))
    server = ScriptedServer(folder, config, model)
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        server.start()
        command = [sys.executable, "-m", "bench.scripted_engine", "--server", server.url]
        engine = subprocess.Popen(
            [*command, "--script", str(script), "--trainer", MODEL, "--direct"],
            env={**os.environ, **WITH_LIFELINE, WORKER_KEY_VARIABLE: server.worker_key},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert engine.stdin is not None and engine.stdout is not None
        stack.enter_context(engine.stdin)
        stack.enter_context(engine.stdout)
        stack.callback(_end, engine)
        direct = json.loads(engine.stdout.readline())["direct_url"]
        server.until_served()
        ours = OurTarget("ours", _port(server.url), server.pid, server.run_dir)
        yield PlainTarget("direct", _port(direct), None), ours


@contextlib.contextmanager
def litellm_target(folder: Path, direct: PlainTarget) -> Iterator[PlainTarget]:
    """LiteLLM's proxy in front of the same engine's endpoint, one worker process, nothing logged or looked up."""
    python = litellm_environment()
    port, key = free_port(), f"sk-{secrets.token_hex(32)}"
    config = folder / "litellm.yaml"
    params = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{direct.port}/v1", "api_key": "unused"}
    settings = {"telemetry": False, "num_retries": 0, "request_timeout": 300}
    config.write_text(
        json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": params}], "litellm_settings": settings})
    )
    environment = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        "LITELLM_MASTER_KEY": key,
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOG": "ERROR",
        "DISABLE_ADMIN_UI": "True",
        "NO_PROXY": "127.0.0.1",
    }
    command = [str(python.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "litellm.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--num_workers", "1", "--telemetry", "False"],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        _until_up(f"http://127.0.0.1:{port}/health/liveliness", process, log)
        yield PlainTarget("litellm", port, process.pid, f"Authorization: Bearer {key}\r\n")
    finally:
        _end(process)


def litellm_environment() -> Path:
    """The Python of a virtual environment with LiteLLM's proxy, made once per user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wingbeat" / "bench"
    folder = cache / f"litellm-{LITELLM}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists():
        sys.stderr.write(f"installing litellm {LITELLM} into {folder}\n")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", f"litellm[proxy]=={LITELLM}"],
            check=True,
            stdout=sys.stderr,
        )
        stamp.touch()
    return python


def _until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + LITELLM_START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), OPENER.open(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"LiteLLM's proxy did not start: {log.read_text(errors='replace')[-4000:]}")


def _end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _port(url: str) -> int:
    return int(url.removesuffix("/v1").rpartition(":")[2])
