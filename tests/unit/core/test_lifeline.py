"""Ending with one's supervisor, seen from outside: a real process and its standard input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wingbeat.core.lifeline import LIFELINE_VARIABLE, ORPHANED_EXIT

ROOT = Path(__file__).parents[3]
CHILD = """
import os, signal, sys, threading
from wingbeat.core.lifeline import end_with_supervisor, is_orphaned
stop = threading.Event()
if sys.argv[1] == "polite":
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
elif sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
end_with_supervisor(grace_s=float(sys.argv[2]))
print("up", "WINGBEAT_LIFELINE" in os.environ, flush=True)
while not stop.wait(0.05):
    pass
sys.exit(7 if is_orphaned() else 8)
"""


def start(manner: str, grace_s: float, *, lifeline: str = "1") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), LIFELINE_VARIABLE: lifeline}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, manner, str(grace_s)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("manner", "grace_s", "exit_code"),
    [("polite", 20.0, 7), ("deaf", 0.1, ORPHANED_EXIT), ("polite", 0.0, ORPHANED_EXIT)],
    ids=["in peace", "by force", "at once"],
)
def test_the_end_of_the_supervisor_ends_the_process(manner: str, grace_s: float, exit_code: int) -> None:
    with start(manner, grace_s) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up False\n"
        process.communicate(timeout=10)  # closes the pipe, as the death of its holder does
        assert process.returncode == exit_code


def test_without_a_supervisor_standard_input_is_not_read() -> None:
    with start("polite", 0.0, lifeline="") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.close()
        process.terminate()
        assert process.wait(10) == 8
