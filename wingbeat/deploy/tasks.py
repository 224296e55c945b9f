"""The configured tasks: read here, where user code may run, and put to control, where it may not."""

from __future__ import annotations

from pathlib import Path

from wingbeat.client import AsyncSwarm
from wingbeat.core.config import Config
from wingbeat.core.types import Split, Task
from wingbeat.environments.registry import make_environment
from wingbeat.environments.tasks_file import load_tasks_file

Tasks = dict[tuple[str, Split], list[Task]]
"""By source and split."""


def load_tasks(config: Config, config_dir: Path) -> Tasks:
    """The tasks of the configured environment or file, by source and split; {} where clients bring their own."""
    tasks = config.tasks
    if tasks.environment is not None:
        environment = make_environment(tasks.environment, tasks.options)
        found = {split: list(environment.tasks(split)) for split in Split}
    elif tasks.file is not None:
        file = load_tasks_file(config_dir / tasks.file)
        found = {Split.TRAIN: list(file.train), Split.EVAL: list(file.eval)}
    else:
        return {}
    result: Tasks = {}
    for split, members in found.items():
        for task in members:
            result.setdefault((task.source, split), []).append(task)
    return result


async def put_tasks(swarm: AsyncSwarm, tasks: Tasks) -> None:
    """Give the server its sources; putting the same ones again changes nothing."""
    for (source, split), members in tasks.items():
        await swarm.put_tasks(source, members, split=split)
