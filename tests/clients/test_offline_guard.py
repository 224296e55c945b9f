"""That the clients' environment is what it should be: no torch, nothing of ours, and no way off this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kit import HERE, client_environment, find_python, left_the_machine

ATTEMPTS = {
    "connect": "s = socket.socket(); s.settimeout(0.1); s.connect(('192.0.2.1', 80))",
    "name": "socket.getaddrinfo('telemetry.invalid', 443)",
    "datagram": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 80))",
}


def in_client(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(find_python()), "-c", code],
        cwd=folder,  # of the folder where it starts, Python imports everything
        env=client_environment(folder),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_leaving_the_machine_is_refused_and_written_down(tmp_path: Path, attempt: str) -> None:
    """Also where the client swallows the error, and in processes that it starts."""
    inner = f"import contextlib, socket\nwith contextlib.suppress(Exception): {ATTEMPTS[attempt]}"
    done = in_client(tmp_path, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)")
    assert done.returncode == 0, done.stderr
    assert left_the_machine(tmp_path).startswith("socket.")


def test_loopback_is_allowed(tmp_path: Path) -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    done = in_client(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert left_the_machine(tmp_path) == ""


def test_the_environment_has_the_pinned_clients_and_neither_torch_nor_wingbeat(tmp_path: Path) -> None:
    code = (
        "import importlib.metadata as m, importlib.util as u; "
        "print(*[n for n in ('torch', 'wingbeat') if u.find_spec(n)]); "
        "print(*sorted(d.metadata['Name'].lower().replace('_', '-') + '==' + d.version for d in m.distributions()))"
    )
    done = in_client(tmp_path, code)
    assert done.returncode == 0, done.stderr
    unwanted, installed = done.stdout.splitlines()
    assert unwanted == ""
    wanted = (HERE.parents[1] / "requirements-clients-pinned.txt").read_text().splitlines()
    assert {line for line in wanted if line and not line.startswith("#")} <= set(installed.split())
