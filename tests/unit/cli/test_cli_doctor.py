"""What the doctor finds, and what it advises."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wingbeat.cli.doctor import (
    SERVER_PACKAGES,
    Level,
    check_cores,
    check_install,
    check_port,
    check_python,
    check_sandboxes,
    check_shared_memory,
    installed_version,
)
from wingbeat.cli.main import app


def test_python() -> None:
    assert check_python((3, 11, 0)).level is Level.OK
    assert check_python((3, 10, 9)).level is Level.FAULT


def test_install() -> None:
    assert check_install(lambda package: "1.0").level is Level.OK
    light = check_install(lambda package: None)
    assert light.level is Level.NOTE
    assert "light client" in light.found
    broken = check_install(lambda package: None if package == "msgspec" else "1.0")
    assert broken.level is Level.FAULT
    assert "msgspec" in broken.found
    assert "torch" in SERVER_PACKAGES


def test_cores_and_versions() -> None:
    assert check_cores(2).level is Level.OK
    assert check_cores(1).level is Level.NOTE
    assert installed_version("aiohttp")
    assert installed_version("no-such-package-anywhere") is None


def test_shared_memory(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "none").level is Level.NOTE
    assert "MiB free" in check_shared_memory(tmp_path).found


def test_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "--server.port=0" in check_port("127.0.0.1", port).advice
    assert check_port("127.0.0.1", port).level is Level.OK


def test_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "bubblewrap" in check_sandboxes().found
    monkeypatch.setenv("PATH", "/nowhere")
    lacking = check_sandboxes()
    assert lacking.level is Level.NOTE
    assert "install the package bubblewrap" in lacking.found


@pytest.mark.slow
def test_report() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert {"python", "install", "torch", "cores", "shared memory", "port", "model packages"} <= set(findings)
    assert findings["python"]["level"] == "ok"
    assert done.exit_code == int(any(finding["level"] == "fault" for finding in findings.values()))
    assert "wingbeat doctor" in CliRunner().invoke(app, ["doctor"]).stdout
