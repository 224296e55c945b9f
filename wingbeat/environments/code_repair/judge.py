"""The score of a repaired repository, from hidden cases that run in the very sandbox that the agent worked in.

What an agent can do to a test that runs in its own sandbox is bounded by what the sandbox is told. So it is told
little, and late: once the agent is done and all its processes are ended, the cases' source goes in through the
standard input of a bare interpreter, and what each case *returned* comes out. What it should have returned never
enters; it is compared here. Replaced tests, a patched ``unittest``, ``os._exit(0)``, a forged report: none of them
brings forth the right values.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from wingbeat.environments.code_repair.index import expected_answers
from wingbeat.environments.code_repair.programs import Program
from wingbeat.resources import ResourceFailed

if TYPE_CHECKING:
    from wingbeat.resources import Box

SECONDS = 20.0
"""All cases of a program together take a tenth of a second where nothing hangs and the machine is not busy."""

START_S = 20.0
"""More than an interpreter needs to begin and end, on a busy machine too."""

PYTHON = ("python3", "-I", "-S", "-B", "-c")
"""Sees nothing of the folder that it is started in, nor of the user's."""

_NOT_RUN = (126, 127)
"""Exit codes of a command that is not there or cannot be executed."""


@cache
def runner_source() -> str:
    return files("wingbeat.environments.code_repair").joinpath("hidden_runner.py").read_text(encoding="utf-8")


async def score_box(box: Box, program: Program, *, seconds: float = SECONDS) -> float:
    """The share of hidden cases that the repository in ``box`` gets right, from 0 to 1.

    Ends all processes in the box.  Cases that have not answered within ``seconds`` are wrong.  Raises ResourceFailed
    if the cases could not be run for a reason that is not the agent's: the box is gone, or has no Python.
    """
    answers = await run_cases(box, program, seconds=seconds)
    expected = expected_answers(program.name)
    return sum(answers.get(case) == expected[case] for case in program.cases) / len(program.cases)


async def run_cases(box: Box, program: Program, *, seconds: float) -> Mapping[str, Any]:
    """What each hidden case returned or raised; {} if the code under test brought the runner itself down."""
    await box.end_processes()
    nonce = secrets.token_hex(16)
    request = {
        "workdir": box.workdir,
        "package": program.name,
        "source": program.hidden,
        "cases": program.cases,
        "seconds": seconds,
        "nonce": nonce,
    }
    try:
        done = await box.run(
            [*PYTHON, runner_source()], stdin=json.dumps(request).encode(), timeout_s=seconds + START_S
        )
    except PermissionError:  # the agent has locked up its own folder
        return {}
    if done.exit_code in _NOT_RUN:
        await check_python(box)
    return read_report(done.stdout, nonce) if done.ok else {}


async def check_python(box: Box) -> None:
    """Raises ResourceFailed where a box has no Python.

    Asked apart, with nothing of the agent's running: the exit code of the runner may be the doing of what it ran.
    """
    await box.end_processes()
    done = await box.run([*PYTHON, ""], timeout_s=START_S)
    if done.exit_code in _NOT_RUN:
        words = done.stderr.decode("utf-8", "replace").strip()
        raise ResourceFailed(f"the sandbox cannot run python3, which scoring needs: {words}")


def read_report(output: bytes, nonce: str) -> Mapping[str, Any]:
    """The runner's report: the line that begins with the nonce.  {} if there is none that can be read."""
    for line in output.decode("utf-8", "replace").splitlines():
        mark, _, report = line.partition(" ")
        if mark == nonce:
            try:
                answers = json.loads(report)
            except (ValueError, RecursionError):  # the code under test may have written it
                return {}
            return answers if isinstance(answers, dict) else {}
    return {}
