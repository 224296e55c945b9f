"""The configured tasks: read here, where user code may run, and put to control, where it may not."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wingbeat.client import AsyncSwarm
from wingbeat.core.config import Config
from wingbeat.core.config.dataflow import ratios_fault
from wingbeat.core.errors import ConfigError, RequestError
from wingbeat.core.types import Split, Task
from wingbeat.dataflow.task_sources import check_source
from wingbeat.environments.registry import make_environment
from wingbeat.environments.tasks_file import load_tasks_file

Tasks = dict[tuple[str, Split], list[Task]]
"""By source and split."""


def load_tasks(config: Config, config_dir: Path) -> Tasks:
    """The tasks of the configured sources, by source and split; {} where clients bring their own.

    Raises ConfigError also for a source that the ratios leave out, and for ids that are not unique.
    """
    tasks = config.tasks
    result: Tasks = {}
    for name, source in tasks.sources.items():
        for split, members in _read(source.environment, source.options, file=source.file, folder=config_dir).items():
            if members:
                result[(name, split)] = [replace(task, source=name) for task in members]
    if tasks.environment is not None or tasks.file is not None:
        for split, members in _read(tasks.environment, tasks.options, file=tasks.file, folder=config_dir).items():
            for task in members:
                result.setdefault((task.source, split), []).append(task)
    for (source, split), members in result.items():
        if split is Split.TRAIN and tasks.ratios and source not in tasks.ratios:
            unknown = sorted(set(tasks.ratios) - {name for name, _ in result})
            raise ConfigError(f"`tasks`: {ratios_fault(source, unknown)}")
        try:
            check_source(source, tuple(members))
        except RequestError as error:
            raise ConfigError(error.message) from error
    _check_agents_sources(config, {name for name, _ in result})
    return result


def _check_agents_sources(config: Config, configured: set[str]) -> None:
    """Refuse an agent for a source that nobody will bring, and that it would wait for without end."""
    known = sorted(configured | set(config.tasks.ratios))
    if not configured:
        return
    for name, agent in {"": config.agent, **config.agents}.items():
        where = f"agents.{name}.sources" if name else "agent.sources"
        for source in agent.sources or ():
            if source not in known:
                near = difflib.get_close_matches(source, known, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ConfigError(
                    f"{where}: expected sources of [tasks] ({', '.join(known)}), got {source!r}{hint} One that a client"
                    " brings is named in tasks.ratios, or by the agent's own file"
                )


def _read(
    environment: str | None, options: Mapping[str, Any], *, file: str | None, folder: Path
) -> dict[Split, list[Task]]:
    if environment is not None:
        made = make_environment(environment, options, folder=folder)
        return {split: list(made.tasks(split)) for split in Split}
    assert file is not None, "the configuration has one of the two"
    found = load_tasks_file(folder / file)
    return {Split.TRAIN: list(found.train), Split.EVAL: list(found.eval)}


def training_sources(tasks: Tasks) -> list[str]:
    """The sources that a server should wait for before it deals anything out."""
    return sorted({source for source, split in tasks if split is Split.TRAIN})


async def put_tasks(swarm: AsyncSwarm, tasks: Tasks) -> None:
    """Give the server its sources; putting the same ones again changes nothing.

    Eval tasks first: with the training tasks of the last source, everything may begin.
    """
    for (source, split), members in sorted(tasks.items(), key=lambda item: item[0][1] is Split.TRAIN):
        await swarm.put_tasks(source, members, split=split)
