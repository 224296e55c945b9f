"""Whether a run's server lives is read from the process numbers in its directory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from wingbeat.cli.liveness import is_served


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[int]:
    """The number of a process that has started and waits."""
    code = "print(flush=True); input()"
    # elsewhere than here: where it lies must not look like ours
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        try:
            yield started.pid
        finally:
            started.communicate(b"\n")


def test_a_directory_without_processes_is_not_served(tmp_path: Path) -> None:
    assert not is_served(tmp_path)


def test_processes_of_the_run_are_seen_until_they_end(tmp_path: Path) -> None:
    with process("wingbeat.server") as pid:
        (tmp_path / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": pid}))
        assert is_served(tmp_path)
    assert not is_served(tmp_path)


def test_a_number_that_another_program_got_is_not_ours(tmp_path: Path) -> None:
    with process() as pid:
        (tmp_path / "processes.json").write_text(json.dumps({"control": pid}))
        assert not is_served(tmp_path)
