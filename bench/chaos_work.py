"""What the chaos benchmark trains: a small model from random weights, on short tasks of three sources."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from bench import chaos_agent
from bench.chaos_plan import NUM_CLIENTS
from bench.team_work import ALPHABET, CONTEXT_TOKENS, Work, write_model, write_tasks
from wingbeat.core.config import Config
from wingbeat.core.types import Task

SOURCES = {"vowels": "aeiou", "digits": "0123456789", "rare": "jqxz"}
"""Task sources, and the characters of replies that each rewards."""
TASKS_PER_SOURCE = 300
QUESTION_CHARS = 24
REPLY_TOKENS = 8
SLEEPS_S = (0.2, 1.2)
"""Between which the two tools of an episode take."""
NUM_TURNS = 2
CONCURRENCY = 4
"""Episodes at once in each client process."""
HEARTBEAT_S = 2.0
GROUP_SIZE, GROUPS_PER_STEP = 4, 4
MAX_STALENESS = 8
"""Agents go on for some seconds while there is no trainer."""
MODEL = Work(hidden=64, layers=2)
AGENT = Path(chaos_agent.__file__)
DESCRIPTION = (
    f"One Qwen3 of {MODEL.layers} layers and hidden size {MODEL.hidden} trained by GRPO from random weights,"
    f" {GROUPS_PER_STEP} groups of {GROUP_SIZE} episodes a step, at most {MAX_STALENESS} stale; {NUM_TURNS} turns of"
    f" {REPLY_TOKENS} tokens, each with a tool of {SLEEPS_S[0]:g} to {SLEEPS_S[1]:g} s; {CONCURRENCY} episodes at once"
    f" in each of {NUM_CLIENTS} client processes over {len(SOURCES)} task sources"
)


def make_tasks(source: str, *, seed: int) -> list[Task]:
    """The tasks of a source; they follow from the seed."""
    return [Task(source, f"{source}-{index}", _payload(source, f"{seed}:{index}")) for index in range(TASKS_PER_SOURCE)]


def _payload(source: str, name: str) -> dict[str, Any]:
    rng = random.Random(f"{source}:{name}")
    question, result = ("".join(rng.choice(ALPHABET[:-3]) for _ in range(QUESTION_CHARS)) for _ in range(2))
    return {
        "question": question,
        "result": result,
        "wanted": SOURCES[source],
        "reply_tokens": REPLY_TOKENS,
        "sleep_s": [round(rng.uniform(*SLEEPS_S), 3) for _ in range(NUM_TURNS)],
    }


def sources_of(client: int) -> str:
    """Each client process runs the tasks of one source."""
    return list(SOURCES)[client % len(SOURCES)]


def write_work(folder: Path, *, seed: int) -> tuple[Path, dict[str, Path]]:
    """The model's folder, and a file of tasks for each source."""
    files: dict[str, Path] = {}
    for source in SOURCES:
        (folder / source).mkdir(parents=True)
        files[source] = write_tasks(folder / source, make_tasks(source, seed=seed), [])
    return write_model(folder / "model", MODEL, seed=seed), files


def chaos_config(model: Path, files: dict[str, Path], *, runs: Path, port: int, worker_key: str, seed: int) -> Config:
    """A run that never ends by itself, with one engine of its own; the benchmark brings another one."""
    return Config.model_validate(
        {
            "run": {"name": "chaos", "dir": str(runs), "seed": seed, "steps": 1_000_000},
            "server": {
                "port": port,
                "worker_key": worker_key,
                "heartbeat_s": HEARTBEAT_S,
                "begin_wait_s": 5.0,
                "lease_s": 4 * HEARTBEAT_S,
            },
            "policies": {
                "solver": {
                    "model": str(model),
                    "context_tokens": CONTEXT_TOKENS,
                    "trainer": {"learning_rate": 1e-4, "checkpoint_every": 10, "threads": 1},
                }
            },
            "engine": {"count": 1, "threads": 1},
            # Every jump of the clocks costs each running episode an attempt; none is to be given up for that.
            "dataflow": {
                "group_size": GROUP_SIZE,
                "groups_per_step": GROUPS_PER_STEP,
                "max_staleness": MAX_STALENESS,
                "max_attempts": 100,
            },
            "tasks": {"sources": {source: {"file": str(path)} for source, path in files.items()}},
            "eval": {"at_start": False, "at_end": False},
        }
    )
