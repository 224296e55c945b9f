"""The supervisor behind ``wingbeat serve``: control, engines and trainers as processes, of this machine or a cluster.

It holds no state of the run.  Any child may be killed at any moment: it is started again and finds
its place (workers through control, control through the ledger).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from wingbeat.client import AsyncSwarm
from wingbeat.core.config import Config, PolicyConfig, dump_toml
from wingbeat.core.config.server import is_loopback
from wingbeat.core.deployment import Requests
from wingbeat.core.errors import ConfigError, SetupError, UnavailableError, WingbeatError
from wingbeat.core.files import OWNER_ONLY, write_atomically
from wingbeat.deploy.builtin_models import place_builtin
from wingbeat.deploy.checks import BUILTIN, OTHER_MODELS, check_exposure, check_port, positions_of
from wingbeat.deploy.children import run_to_end, tail
from wingbeat.deploy.paths import absolute_paths
from wingbeat.deploy.processes import CONTROL, Place, Processes, ThisMachine
from wingbeat.deploy.run_keys import RunKeys, without_plain_keys
from wingbeat.deploy.stopping import Interrupted, stop_event, unless_stopped
from wingbeat.deploy.tasks import load_tasks, put_tasks, training_sources
from wingbeat.trainer.folders import checked_folder
from wingbeat.weights.host import run_weights_candidates

logger = logging.getLogger(__name__)

START_S = 120.0
ACCEPT_POLL_S = 0.2
"""Between looks whether the trainers have taken a continued run's settings."""
SCALE_POLL_S = 0.5
"""Between looks whether another number of engines is wanted."""
CONTROL_MODULE = "wingbeat.server"
OnNote = Callable[[str], None]
"""Takes what takes its time, in words."""
MakePlace = Callable[[Config], Place]
"""Where the processes of a configuration run."""


def this_machine(config: Config) -> Place:
    """Its processes are children of this one."""
    return ThisMachine()


def make_run_dir(config: Config, *, now: Callable[[], datetime] = datetime.now) -> Path:
    """A new run directory ``DIR/NAME-DATE-TIME`` with its sub-folders."""
    stamp = now().strftime("%Y%m%d-%H%M%S")
    base = Path(config.run.dir).expanduser().absolute()
    for suffix in ("", *(f"-{i}" for i in range(1, 100))):
        run_dir = base / f"{config.run.name}-{stamp}{suffix}"
        try:
            run_dir.mkdir(parents=True, mode=0o700)  # logs, tasks and exports hold what agents read and wrote
        except FileExistsError:
            continue
        except OSError as error:
            raise SetupError(f"cannot create {run_dir}: {error}; set run.dir to a folder you can write") from error
        return run_dir
    raise SetupError(f"too many runs named {config.run.name} started in this second; try again")


class Supervisor:
    """Starts and watches all processes of one server; an async context manager."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        config_dir: Path,
        sources: Sequence[str] = (),
        on_note: OnNote = lambda text: None,
        control_module: str = CONTROL_MODULE,
        place: Place | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        """``config_dir`` is what relative paths in the configuration are relative to, ``sources`` what the caller
        will bring, ``control_module`` the program of control (another one may give it other clocks), ``place`` where
        the processes run (None: this machine).  Once ``stop`` is set, no model is made any more, and entering raises
        Interrupted."""
        check_exposure(config, config_dir, resume=run_dir)
        self.config = config
        self.run_dir = run_dir
        self.url = ""
        """As other machines call it."""
        self.local_url = ""
        """As this machine does: without TLS, on loopback, where there is TLS outside."""
        self._config_dir = config_dir
        self._sources = list(sources)
        self._on_note = on_note
        self._control_module = control_module
        self._is_new = not any(run_dir.iterdir())
        self._keys = RunKeys.new()
        self._stop_event = asyncio.Event() if stop is None else stop
        self._place = ThisMachine() if place is None else place
        self._requests = Requests(run_dir, configured=config.engine.count)
        self._processes = Processes(
            config, run_dir=run_dir, keys=self._keys, place=self._place, drain=self._drain_engine
        )
        self._group: asyncio.TaskGroup | None = None
        self._acceptance: asyncio.Task[None] | None = None
        self._scaling: asyncio.Task[None] | None = None
        self._lock: BinaryIO | None = None

    async def __aenter__(self) -> Self:
        self._lock = lock_run(self.run_dir)  # before anything of the run is touched
        for folder in ("logs", "checkpoints", "export", "models"):
            (self.run_dir / folder).mkdir(exist_ok=True)
        if self._is_new:
            self._write_config()
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        try:
            check_port(self.config.server.host, self.config.server.port)
            models = await self.prepare_models()
            asked = self._requests.new()
            self._on_note("starting the server")
            await self._start_control(models)
            away = self._place.is_remote and not is_loopback(self.config.server.host)
            engines = self.config.engine.count if asked is None else asked.engines
            self._processes.start_workers(self._group, self.url if away else self.local_url, engines=engines)
            self._scaling = self._group.create_task(self._scale(), name="scale")
            if not self._is_new:
                self._acceptance = self._group.create_task(self._accept(), name="accept")
        except BaseException:
            await self._stop()
            if self._is_new and CONTROL not in self._processes.all:  # there is no run yet, only what we wrote
                shutil.rmtree(self.run_dir)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        for task in (self._acceptance, self._scaling):
            if task is not None:
                task.cancel()
        await self._processes.stop()
        if self._group is not None:
            await self._group.__aexit__(None, None, None)
            self._group = None
        await self._place.close()
        for folder in run_weights_candidates(self.run_dir):
            shutil.rmtree(folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _write_config(self) -> None:
        stored = dump_toml(without_plain_keys(self.config))
        write_atomically(self.run_dir / "config.toml", stored.encode(), mode=OWNER_ONLY)

    async def _accept(self) -> None:
        """Keep a continued run's settings once control and every trainer took them.

        Until then one of them may refuse (another seed, another rank), and the run must stay as it was.
        """
        async with self.swarm() as swarm:
            while True:
                with contextlib.suppress(WingbeatError):
                    if all(policy.trainer != "absent" for policy in (await swarm.status()).policies):
                        break
                await asyncio.sleep(ACCEPT_POLL_S)
        try:
            self._write_config()
        except UnavailableError as error:  # a full disk
            logger.warning("%s", error)

    def swarm(self) -> AsyncSwarm:
        """A client with the admin role, for this process."""
        return AsyncSwarm(self.local_url, self._keys.admin)

    @property
    def agent_key(self) -> str:
        """Of the agents that this run starts."""
        return self._keys.client

    async def wait_failed(self) -> SetupError:
        """Returns once a child could not be kept running."""
        await self._processes.failed.wait()
        return self.failure()

    async def wait_ended(self) -> None:
        """Returns once control ended by itself (a client asked it to stop)."""
        await self._processes.ended.wait()

    def failure(self) -> SetupError:
        """Why :meth:`wait_failed` returned."""
        return self._processes.failure()

    async def _scale(self) -> None:
        """Have as many engines as `wingbeat scale` asks for, whenever it does."""
        assert self._group is not None
        while True:
            await asyncio.sleep(SCALE_POLL_S)
            try:
                wanted = self._requests.new()
            except SetupError as error:  # a running server goes on as it is
                logger.warning("%s", error)
                continue
            if wanted is not None:
                self._processes.scale_engines(self._group, wanted.engines)

    async def _drain_engine(self, name: str, drain_s: float) -> bool:
        try:
            async with self.swarm() as swarm:
                await swarm.drain(name, drain_s=drain_s)
        except WingbeatError as error:
            logger.info("%s is not drained: %s", name, error)
            return False
        return True

    # --- models -------------------------------------------------------------------------------

    async def prepare_models(self) -> dict[str, Path]:
        """The folder of every policy's model, converting or building what needs it."""
        models: dict[str, Path] = {}
        for name, policy in self.config.policies.items():
            models[name] = await self._prepared(policy.model)
            check_context(name, policy, models[name])
        return models

    async def _resolved(self) -> dict[str, Any]:
        """The configuration as JSON data, with the folders of the models that trainers load besides their policy's."""
        data = without_plain_keys(self.config).model_dump(mode="json")
        for name, policy in self.config.policies.items():
            for key in OTHER_MODELS if policy.trainable else ():
                source = getattr(policy.trainer, key)
                if source is not None:
                    data["policies"][name]["trainer"][key] = str(await self._prepared(source))
        return data

    async def _prepared(self, source: str) -> Path:
        """Its folder.  Raises Interrupted."""
        folder = await unless_stopped(self._prepare(source), self._stop_event)
        if folder is None:
            raise Interrupted
        return folder

    async def _prepare(self, source: str) -> Path:
        if source.startswith(BUILTIN):
            name = source.removeprefix(BUILTIN)
            folder = self.run_dir / "models" / name
            return await place_builtin(name, seed=self.config.run.seed, folder=folder, on_note=self._on_note)
        local = self._config_dir / source
        if local.is_dir():
            return checked_folder(local.absolute())
        if local.exists():
            source = str(local.absolute())
        self._on_note(f"preparing the model {source} (a first time may take minutes)")
        out = await run_to_end(
            [sys.executable, "-m", "wingbeat.trainer.models", source], what=f"preparing the model {source!r}"
        )
        return Path(json.loads(out.splitlines()[-1])["path"])

    # --- processes ----------------------------------------------------------------------------

    async def _start_control(self, models: dict[str, Path]) -> None:
        launch: dict[str, Any] = {
            "config": await self._resolved(),
            "models": {name: str(path) for name, path in models.items()},
            "run_dir": str(self.run_dir),
            "sources": self._sources,
        }
        address = self.run_dir / "server.json"
        address.unlink(missing_ok=True)
        path = self.run_dir / "launch.json"
        write_atomically(path, json.dumps(launch).encode(), mode=OWNER_ONLY)
        assert self._group is not None
        self._processes.start_control(self._group, self._control_module, path)
        await self._until_up(address)
        where = json.loads(address.read_text())
        self.url, self.local_url = str(where["url"]), str(where["local_url"])
        # a restarted control must be found where the first one was
        launch["config"]["server"]["port"] = int(self.url.rpartition(":")[2])
        launch["local_port"] = int(self.local_url.rpartition(":")[2]) if self.local_url != self.url else 0
        write_atomically(path, json.dumps(launch).encode(), mode=OWNER_ONLY)

    async def _until_up(self, address: Path) -> None:
        """Wait for control to have written its address, or to have failed."""
        deadline = time.monotonic() + START_S
        while not os.path.exists(address):  # noqa: ASYNC240 - a stat takes microseconds
            if self._processes.failed.is_set():
                raise self.failure()
            if time.monotonic() > deadline:
                why = self._processes.all[CONTROL].error or tail(self.run_dir / "logs" / "control.log")
                raise SetupError(f"control did not start within {START_S:.0f} s: {why}")
            await asyncio.sleep(0.02)


def lock_run(run_dir: Path) -> BinaryIO:
    """Held while a supervisor lives, however it ends.  Raises SetupError where another one has this run.

    A second one would sweep the published weights of the first away.
    """
    file = (run_dir / "supervisor.lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SetupError(f"{run_dir} is running already; stop that first (Ctrl-C), or start a new run") from None
    return file


def check_context(name: str, policy: PolicyConfig, folder: Path) -> None:
    """Refuse a context longer than the model's positions, which no engine could serve."""
    longest = positions_of(folder)
    if longest is not None and policy.context_tokens > longest:
        raise ConfigError(
            f"policies.{name}.context_tokens is {policy.context_tokens}, but the model has only {longest} positions;"
            f" set --policies.{name}.context_tokens={longest} or less"
        )


def run_server(
    config: Config,
    config_dir: Path,
    *,
    resume: Path | None = None,
    on_ready: Callable[[Supervisor], None],
    on_note: OnNote = lambda text: None,
    control_module: str = CONTROL_MODULE,
    place: MakePlace = this_machine,
) -> Path:
    """Serve until SIGINT, SIGTERM or a client's stop, and return the run directory, which is gone where control did
    not even begin.

    Raises SetupError if a process cannot be kept up.
    """
    return asyncio.run(_serve(config, config_dir, resume, on_ready, on_note, control_module, place))


async def _serve(
    config: Config,
    config_dir: Path,
    resume: Path | None,
    on_ready: Callable[[Supervisor], None],
    on_note: OnNote,
    control_module: str,
    place: MakePlace,
) -> Path:
    stop = stop_event()
    check_exposure(config, config_dir, resume=resume)
    tasks = load_tasks(config, config_dir)
    config = absolute_paths(config, config_dir)
    where = place(config)  # before there is a run directory: there may be no such place
    run_dir = resume or make_run_dir(config)
    start = Supervisor(
        config,
        run_dir=run_dir,
        config_dir=config_dir,
        sources=training_sources(tasks),
        on_note=on_note,
        control_module=control_module,
        place=where,
        stop=stop,
    )
    try:
        async with start as supervisor:
            async with supervisor.swarm() as swarm:
                await put_tasks(swarm, tasks)
            on_ready(supervisor)
            await _until_over(supervisor, stop)
    except Interrupted:
        pass  # and there is no run, or the old one as it was
    return run_dir


async def _until_over(supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Until a signal, or a client's stop.  Raises SetupError where a process cannot be kept up."""
    waits = [
        asyncio.create_task(stop.wait()),
        asyncio.create_task(supervisor.wait_failed()),
        asyncio.create_task(supervisor.wait_ended()),
    ]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    failed = waits[1].done()
    for task in waits:
        task.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    if failed:
        raise supervisor.failure()
