"""Which processes a server consists of: control, engines, trainers, resources servers.

Where they run is a :class:`Place`'s business.

All are :class:`~wingbeat.deploy.children.Child` s, or have their face.  The number of engines may change at any time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from wingbeat.core.config import Config, dump_value
from wingbeat.core.config.lora_groups import trainer_processes
from wingbeat.core.errors import SetupError, UnavailableError
from wingbeat.core.files import write_atomically
from wingbeat.core.lifeline import LENDING_GRACE_S
from wingbeat.deploy.children import Child, ChildSpec, ChildState
from wingbeat.deploy.devices import VARIABLE, Needs, assign_devices, needs_of, usable_cores, visible_devices
from wingbeat.deploy.run_keys import RunKeys, without_plain_keys
from wingbeat.server.keys.file import key_file_path

logger = logging.getLogger(__name__)

CONTROL = "control"
DRAIN_S = 30.0
"""For the running generations of an engine that is no longer wanted; what is left then goes on elsewhere."""
DRAIN_GRACE_S = 5.0
Drain = Callable[[str, float], Awaitable[bool]]
"""Have an engine (by name) drain for so many seconds and end; False where control does not know it."""


class Kept(Protocol):
    """A process that is kept running (:class:`~wingbeat.deploy.children.Child`)."""

    @property
    def spec(self) -> ChildSpec: ...
    @property
    def state(self) -> ChildState: ...
    @property
    def error(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    async def run(self) -> None: ...
    async def stop(self) -> None: ...


OnChange = Callable[[Kept], None]


class Place(Protocol):
    """Where processes run."""

    @property
    def is_remote(self) -> bool:
        """Workers may be on other machines than control."""
        ...

    def control(self, spec: ChildSpec, *, on_change: OnChange) -> Kept:
        """Control, on the machine of the run directory."""
        ...

    def worker(self, spec: ChildSpec, needs: Needs, *, on_change: OnChange) -> Kept:
        """An engine or a trainer."""
        ...

    async def close(self) -> None:
        """All have stopped."""
        ...


class ThisMachine:
    """Children of this process; each worker sees its own accelerators while there are enough."""

    is_remote = False

    def __init__(self, devices: tuple[str, ...] | None = None) -> None:
        """``devices``: names of accelerators; None looks for them."""
        self._devices = visible_devices() if devices is None else devices
        self._wanted: dict[str, int] = {}

    def control(self, spec: ChildSpec, *, on_change: OnChange) -> Kept:
        return Child(spec, on_change=on_change)

    def worker(self, spec: ChildSpec, needs: Needs, *, on_change: OnChange) -> Kept:
        self._wanted[spec.name] = needs.devices
        seen = assign_devices(self._wanted, self._devices)[spec.name] if self._devices else ()
        own = {VARIABLE: ",".join(seen)} if seen else {}
        return Child(replace(spec, environment={**spec.environment, **own}), on_change=on_change)

    async def close(self) -> None:
        """Nothing is left."""


class Processes:
    """Starts and watches them; lives in the task group of its owner."""

    def __init__(self, config: Config, *, run_dir: Path, keys: RunKeys, place: Place, drain: Drain) -> None:
        """``drain`` tells control to have an engine leave."""
        self.all: dict[str, Kept] = {}
        """By name."""
        self.failed = asyncio.Event()
        """Set once one could not be kept running."""
        self.ended = asyncio.Event()
        """Set once control ended by itself."""
        self._config = config
        self._run_dir = run_dir
        self._keys = keys
        self._place = place
        self._drain = drain
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._url = ""
        self._groups = trainer_processes(config.policies)
        ranks = sum(config.policies[policies[0]].trainer.processes for policies in self._groups.values())
        busy = config.engine.count * config.engine.tensor_parallel + ranks
        self._share = max(1, usable_cores() // max(1, busy))
        """Threads of a worker for which the configuration names none."""

    def start_control(self, group: asyncio.TaskGroup, module: str, launch: Path) -> None:
        spec = self._spec(CONTROL, [sys.executable, "-m", module, str(launch)], self._keys.of_control)
        self._run(group, self._place.control(spec, on_change=self._on_change))

    def start_workers(self, group: asyncio.TaskGroup, url: str, *, engines: int) -> None:
        """Trainers first: where devices must be shared, engines share among themselves."""
        self._url = url
        for name, policies in self._groups.items():
            trainers = [self._config.policies[policy].trainer for policy in policies]
            threads = max((t.threads or self._share) for t in trainers)
            needs = needs_of(trainers[0].device, threads=threads, ranks=trainers[0].processes)
            self._start_worker(group, "trainer", name, needs, "--policies", ",".join(policies))
        self.scale_engines(group, engines)
        for index in range(self._config.resources.count):
            self._start_resources(group, index)

    def _start_resources(self, group: asyncio.TaskGroup, index: int) -> None:
        """One resources server; what it is to lend comes as arguments, since it may be on another machine."""
        name, resources = f"resources-{index}", self._config.resources
        command = [sys.executable, "-m", "wingbeat.cli", "resources", *lending_arguments(self._config, index=index)]
        keys = key_file_path(self._config.server.keys_file, runs=self._run_dir.parent)
        command += ["--key-file", str(keys.absolute()), "--server", self._url]
        gpus = resources.gpus or 0
        needs = Needs(
            threads=max(1, math.ceil(resources.cpus or 1)),
            devices=gpus,
            insists=gpus > 0,
            grace_s=LENDING_GRACE_S if resources.port else 0.0,
        )
        lent = {key: os.environ[key] for key in resources.key_variables if key in os.environ}
        spec = self._spec(name, command, {**lent, **self._keys.of_resources})
        self._run(group, self._place.worker(spec, needs, on_change=self._on_change))

    def scale_engines(self, group: asyncio.TaskGroup, wanted: int) -> list[asyncio.Task[None]]:
        """Have so many engines; those that are too many are told to drain and end, which the tasks wait for.

        One that was drained by somebody else, and so has ended, is started again.
        """
        names = [f"engine-{index}" for index in range(wanted)]
        engine = self._config.engine
        needs = needs_of(engine.device, threads=engine.threads or self._share, ranks=engine.tensor_parallel)
        for name in names:
            if name not in self.all or self.all[name].state is ChildState.STOPPED:
                self._start_worker(group, "engine", name, needs, "--tensor-parallel", str(engine.tensor_parallel))
        surplus = [name for name in self.all if name.startswith("engine-") and name not in names]
        tasks = [group.create_task(self._retire(name), name=f"retire-{name}") for name in surplus]
        self._retiring.update(tasks)
        return tasks

    async def stop(self) -> None:
        """Control first, so that it tells the workers and the ledger closes in peace."""
        control = self.all.get(CONTROL)
        if control is not None:
            await control.stop()
        for task in self._retiring:  # nobody is there to drain to
            task.cancel()
        await asyncio.gather(*(kept.stop() for kept in self.all.values()))
        await asyncio.gather(*self._retiring, return_exceptions=True)

    def failure(self) -> SetupError:
        errors = [kept.error for kept in self.all.values() if kept.state is ChildState.FAILED]
        return SetupError(errors[0] if errors else "a process of the server failed")

    async def _retire(self, name: str) -> None:
        """An engine that drains ends by itself; one that control does not know is told to end."""
        kept, task = self.all.pop(name), self._tasks.pop(name)
        try:
            if await self._drain(name, DRAIN_S):
                await asyncio.wait({task}, timeout=DRAIN_S + DRAIN_GRACE_S)
        finally:
            await kept.stop()
        self._on_change(kept)

    def _start_worker(self, group: asyncio.TaskGroup, role: str, name: str, needs: Needs, *more: str) -> None:
        command = [sys.executable, "-m", "wingbeat.workers", role, "--url", self._url, "--worker-id", name]
        command += ["--threads", str(needs.threads), *more]
        spec = self._spec(name, command, self._keys.of_worker, threads=needs.threads)
        self._run(group, self._place.worker(spec, needs, on_change=self._on_change))

    def _spec(self, name: str, command: list[str], keys: Mapping[str, str], *, threads: int = 1) -> ChildSpec:
        environment = {**keys, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        return ChildSpec(name, command, environment, self._run_dir / "logs" / f"{name}.log")

    def _run(self, group: asyncio.TaskGroup, kept: Kept) -> None:
        self.all[kept.spec.name] = kept
        self._tasks[kept.spec.name] = group.create_task(kept.run(), name=kept.spec.name)

    def _on_change(self, kept: Kept) -> None:
        """Keep ``processes.json`` true, and notice failures and ends."""
        if kept.state is ChildState.FAILED and self.all.get(kept.spec.name) is kept:  # not one that is to end anyway
            self.failed.set()
        if kept.state is ChildState.STOPPED and kept.spec.name == CONTROL:
            self.ended.set()
        pids = {name: one.pid for name, one in self.all.items() if one.pid is not None}
        try:
            write_atomically(self._run_dir / "processes.json", json.dumps(pids).encode())
        except UnavailableError as error:  # a full disk; nobody needs this file to go on
            logger.warning("%s", error)


def lending_arguments(config: Config, *, index: int) -> list[str]:
    """A configuration's ``[resources]`` and ``[server]``, as overrides, without any key in the clear.

    The process runs where there is no configuration file, and takes no default of its own.
    """
    port = config.resources.port and config.resources.port + index
    sections = {
        "resources": config.resources.model_copy(update={"count": 0, "port": port}),
        "server": without_plain_keys(config).server,
    }
    arguments: list[str] = []
    for name, section in sections.items():
        for key, value in section.model_dump(mode="json", exclude_none=True, exclude_defaults=True).items():
            arguments.append(f"--{name}.{key}={dump_value(value)}")
    return ["--no-file", *arguments]
