"""``wingbeat eval --environment``: without a server, from one command, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OWN = '''
from wingbeat import Task


class Letters:
    """Say anything at all."""

    name = "letters"

    def __init__(self, options):
        self.reward = options["reward"]

    def tasks(self, split):
        return [Task("letters", f"{split}-{letter}", {"letter": letter}) for letter in "abcdef"]

    def score(self, task, answer):
        return self.reward if answer is not None else 0.0

    async def play(self, episode):
        async with episode.openai() as client:
            reply = await client.chat.completions.create(
                model=episode.model, messages=[{"role": "user", "content": "?"}], max_tokens=2
            )
        return self.score(episode.task, reply.choices[0].message.content)
'''


HANGING = """
import asyncio, os
from pathlib import Path

from wingbeat import Task


class Hanging:
    name = "hanging"

    def __init__(self, options):
        self.folder = Path(options["folder"])

    def tasks(self, split):
        return [Task("hanging", f"{split}-{number}", {"number": number}) for number in range(2)]

    def score(self, task, answer):
        return 0.0

    async def play(self, episode):
        (self.folder / f"pid-{episode.task.id}").write_text(str(os.getpid()))
        await asyncio.Event().wait()
"""


def write_untrained(folder: Path) -> None:
    """A model that says anything: building takes no time, and its episodes do not care."""
    from wingbeat.environments.calculator.model import build_model
    from wingbeat.environments.calculator.tokenizer import write_tokenizer

    write_tokenizer(folder)
    build_model(0).save_pretrained(folder)


def test_an_environment_of_ones_own_is_scored_without_a_server(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    write_untrained(tmp_path / "model")
    command = ["eval", "--environment", "own.py:Letters", "--model", "model", "--options", "reward=0.5"]
    more = ["--policies.solver.context_tokens=128", "--tasks", "4", "--samples", "2", "--dir", "runs", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "wingbeat.cli", *command, *more],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reply = json.loads(done.stdout)
    assert (reply["mean_reward"], reply["stderr"], reply["num_finished"], reply["num_expected"]) == (0.5, 0.0, 8, 8)
    assert set(reply["sources"]) == {"letters"}
    (run_dir,) = (tmp_path / "runs").iterdir()
    for pid in json.loads((run_dir / "processes.json").read_text()).values():
        assert not Path(f"/proc/{pid}").exists()


def test_ctrl_c_ends_all_of_it(tmp_path: Path) -> None:
    """As a terminal sends it: to the whole process group."""
    (tmp_path / "own.py").write_text(HANGING)
    write_untrained(tmp_path / "model")
    command = ["eval", "--environment", "own.py:Hanging", "--model", "model", "--options", f"folder={tmp_path}"]
    more = ["--policies.solver.context_tokens=128", "--dir", "runs"]
    process = subprocess.Popen(
        [sys.executable, "-m", "wingbeat.cli", *command, *more],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("pid-*"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err[-3000:]
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert "interrupted, and nothing is scored (0 of 2 episodes have ended); run directory: " in err
    pids = [path.read_text() for path in tmp_path.glob("pid-*")]
    for pid in [*json.loads((run_dir / "processes.json").read_text()).values(), *pids]:
        assert not Path(f"/proc/{pid}").exists()
