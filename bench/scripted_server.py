"""A real control process with a scripted engine behind it: gateway, tracking and ledger without torch.

What runs is what ``wingbeat serve`` runs, ``python -m wingbeat.server``; in place of its supervisor stands
this module, in place of engine and trainer a :class:`~bench.scripted_engine.ScriptedEngine`.

    with scripted_server(folder, [TOOL_CALL, "The answer is 3"]) as server:
        server.url, server.run_dir, server.engine.calls
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.scripted_engine import ScriptedEngine
from bench.scripts import AnyScript
from wingbeat.core.config import Config
from wingbeat.core.config.load import apply_overrides, validate_config
from wingbeat.core.lifeline import LIFELINE_VARIABLE
from wingbeat.environments.calculator.tokenizer import write_tokenizer

WITH_LIFELINE: Mapping[str, str] = {LIFELINE_VARIABLE: "1", "TOKENIZERS_PARALLELISM": "false"}
"""The environment of processes that end when the pipe to their standard input is closed, so with us."""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks our own processes directly, whatever proxies this machine is told to use."""
START_S = 60.0
STOP_S = 15.0
WORKER_KEY_VARIABLE = "WINGBEAT_WORKER_KEY"
DEFAULTS: Mapping[str, Any] = {
    "run.name": "scripted",
    "run.steps": 1_000_000,
    "server.port": 0,
    "server.heartbeat_s": 2.0,
    "server.begin_wait_s": 2.0,
    "engine.count": 0,
    "eval.at_start": False,
    # Admission stays open for thousands of training episodes.
    "dataflow.groups_per_step": 2048,
    "dataflow.max_staleness": 1,
}


class ScriptedServer:
    """Control as a child process; use :func:`scripted_server`."""

    def __init__(self, folder: Path, config: Config, model: Path) -> None:
        self.run_dir = folder / "runs" / f"{config.run.name}-{secrets.token_hex(4)}"
        self.run_dir.mkdir(parents=True)
        self.worker_key = config.server.worker_key or secrets.token_urlsafe(32)
        self.url = ""
        self.local_url = ""
        """As processes of this machine call it: without TLS."""
        self.process: subprocess.Popen[bytes] | None = None
        self.engine: ScriptedEngine
        """Set where :func:`scripted_server` runs one in this process."""
        self._config = config
        self._models = {name: str(model) for name in config.policies}
        self._log = self.run_dir / "control.log"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start control and wait until it listens.  A second start continues the run, at the same address."""
        address = self.run_dir / "server.json"
        address.unlink(missing_ok=True)
        config = self._config.model_dump(mode="json") | {
            "server": self._config.server.without_keys().model_dump(mode="json")
        }
        ports = {"local_port": int(self.local_url.rpartition(":")[2]) if self.local_url != self.url else 0}
        if self.url:
            config["server"]["port"] = int(self.url.rpartition(":")[2])
        launch = self.run_dir / "launch.json"
        launch.write_text(json.dumps({"config": config, "models": self._models, "run_dir": str(self.run_dir), **ports}))
        environment = {**os.environ, **WITH_LIFELINE, WORKER_KEY_VARIABLE: self.worker_key}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "wingbeat.server", str(launch)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._until(address.exists, "its address")
        where = json.loads(address.read_bytes())
        self.url, self.local_url = str(where["url"]), str(where["local_url"])

    def until_served(self) -> None:
        """Wait until every policy is served and every trainable one has its (scripted) trainer."""
        self._until(self._is_served, "every policy to be served")

    def _is_served(self) -> bool:
        key = self._config.server.admin_key
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        request = urllib.request.Request(f"{self.local_url}/api/policies", headers=headers)
        try:
            with OPENER.open(request, timeout=5) as reply:
                policies = json.load(reply)
        except (urllib.error.URLError, OSError):
            return False
        return all(p["served_version"] is not None and p["trainer"] != "absent" for p in policies)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"waited for {what} of control; its log: {self._log.read_text()[-4000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, as a machine's out-of-memory killer does it."""
        assert self.process is not None
        self.process.kill()
        self._wait(None)

    def _wait(self, timeout_s: float | None) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.wait(timeout_s)
        self.process.stdin.close()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)  # does nothing to one that has ended
        try:
            self._wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()


def write_model_folder(folder: Path, *, template: str | None = None) -> Path:
    """What control and a scripted engine read of a model: the calculator's tokenizer and a chat template.

    ``template`` (Jinja source) replaces the tokenizer's own, which is ChatML with Hermes tool calls.
    """
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def scripted_config(folder: Path, settings: Mapping[str, Any], *, model: Path, context_tokens: int) -> Config:
    """``settings`` are dotted keys and win; without a policy among them there is one trainable "solver"."""
    table: dict[str, Any] = {**DEFAULTS, "run.dir": str(folder / "runs"), **settings}
    names = {key.split(".")[1] for key in table if key.startswith("policies.")} or {"solver"}
    for name in names:
        table.setdefault(f"policies.{name}.model", str(model))
        table.setdefault(f"policies.{name}.context_tokens", context_tokens)
    return validate_config(apply_overrides({}, [(tuple(key.split(".")), value) for key, value in table.items()]))


@contextlib.contextmanager
def scripted_server(
    folder: Path,
    script: AnyScript,
    *,
    model: Path | None = None,
    template: str | None = None,
    context_tokens: int = 65_536,
    settings: Mapping[str, Any] | None = None,
    bounded: bool = False,
) -> Iterator[ScriptedServer]:
    """A server whose policies all say what ``script`` says; train and eval episodes both work.

    ``model``: a folder with tokenizer and template; unset makes one under ``folder`` (see
    :func:`write_model_folder`).  ``bounded``: its engine runs ``engine.max_running`` calls at once.
    Leaving the context ends every process.
    """
    model = model or write_model_folder(folder / "model", template=template)
    config = scripted_config(folder, settings or {}, model=model, context_tokens=context_tokens)
    server = ScriptedServer(folder, config, model)
    trainable = [name for name, policy in config.policies.items() if policy.trainable]
    try:
        server.start()
        with ScriptedEngine(
            server.local_url, server.worker_key, script, trainer_of=trainable, bounded=bounded
        ) as engine:
            server.engine = engine
            server.until_served()
            yield server
    finally:
        server.stop()
