"""Sandboxes made by bubblewrap (``bwrap``): processes, files and network of their own, limits that hold.

One ``bwrap`` per sandbox, for its whole life: inside, ``sandbox_init`` is process 1 of a process namespace and runs
what it is sent. Against a ``bwrap`` for each command this costs one start of Python per sandbox, and gives
background processes, one loopback network and one ``/tmp`` through a whole lease, and commands without start-up.

What it sees is made by ``sandbox_root``; what this machine offers, ``sandbox_means`` finds out.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from wingbeat.core.errors import ConfigError
from wingbeat.resources.backends.limits import Plan, check_place, plan_limits
from wingbeat.resources.backends.limits_cgroups import sweep
from wingbeat.resources.backends.limits_homes import Homes, find_homes
from wingbeat.resources.backends.sandbox_box import BoxInstance, Opening, start_box
from wingbeat.resources.backends.sandbox_means import INIT_AT, PATH, Means, find_means, programs
from wingbeat.resources.backends.sandbox_process import BoxProcess, Launch, environment, not_started, reap_box
from wingbeat.resources.backends.sandbox_root import FILES, SHM, TMP, root_of
from wingbeat.resources.specs import Reuse, SandboxSpec, Spec, UnsupportedField

DEFAULT_PIDS = 1024
"""Where a spec says nothing: enough for a compiler, not enough to take a machine down."""


class SandboxBackend:
    """Starts sandboxes; what this machine offers is looked up once."""

    kind: ClassVar[str] = "sandbox"

    def __init__(self, *, homes: Callable[[], Homes] = find_homes) -> None:
        self._find_homes = homes
        self._means: Means | None = None
        self._texts: dict[str, int] = {}

    def check(self, spec: Spec) -> None:
        """Raises UnsupportedField; ConfigError for a mount of what is not here, or where no sandbox can be made."""
        assert isinstance(spec, SandboxSpec), f"expected a SandboxSpec, got {type(spec).__name__}"
        if spec.holds.gpus:
            raise UnsupportedField(
                self.kind, "needs.gpus", "a sandbox has no devices: use kind subprocess or kubernetes"
            )
        for mount in spec.mounts:
            if not os.path.exists(mount.source):
                raise ConfigError(
                    f"mounts: expected a file or folder of this machine, got {mount.source!r}", param="mounts"
                )
        self._plan(spec)

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> BoxInstance:
        assert isinstance(spec, SandboxSpec), f"expected a SandboxSpec, got {type(spec).__name__}"
        plan = self._plan(spec)
        means = self._look()
        with contextlib.ExitStack() as ours:

            def kept(fd: int) -> int:
                ours.callback(os.close, fd)
                return fd

            try:
                texts = {path: kept(_reopen(fd)) for path, fd in self._texts.items()}
                told = kept(os.memfd_create("told"))  # a pipe would end bwrap, not its child, when its reader dies
            except OSError as error:
                raise not_started(error) from error
            opening = self._opening(spec, plan, means, texts, told)
            return await start_box(opening, means.homes, started=started)

    def _opening(self, spec: SandboxSpec, plan: Plan, means: Means, texts: Mapping[str, int], told: int) -> Opening:
        """``texts``: path -> descriptor of what is to be there; ``told``: where ``bwrap`` says what it did."""
        fixed = [*root_of(spec, texts, flags=means.flags, binds=means.binds), "--info-fd", str(told)]

        def argv(fds: Sequence[str]) -> list[str]:
            return [means.bwrap, *fixed, "--", means.python, "-I", "-S", INIT_AT, *fds, "isolated"]

        def look_inside(process: BoxProcess) -> None:
            child = re.search(rb'"child-pid": (\d+)', os.pread(told, 4096, 0))
            if child is not None:  # it is there before bwrap lets its child run
                process.adopt(int(child[1]))

        return Opening(
            spec=spec,
            plan=plan,
            launch=Launch(argv=argv, pass_fds=(told, *texts.values()), user=means.next_user(), mark=INIT_AT),
            workdir=spec.workdir,
            env=environment(spec.env, home=TMP, path=PATH),
            scratch=(TMP, SHM),
            look_inside=look_inside,
        )

    async def reap(self, handle: str) -> bool:
        """End what a dead owner left: processes first, then the control groups."""
        return await reap_box(handle)

    async def close(self) -> None:
        for fd in self._texts.values():
            os.close(fd)
        self._texts.clear()
        self._means = None

    def _plan(self, spec: SandboxSpec) -> Plan:
        means = self._look()
        check_place(spec, spec.workdir, "workdir")
        for mount in spec.mounts:
            check_place(spec, mount.target, "mounts")
            if not mount.read_only and spec.reuse is Reuse.AFTER_RESET:
                raise UnsupportedField(
                    spec.kind, "mounts", f"{mount.target} is written and cannot be reset; use reuse never, or read_only"
                )
        if spec.memory_mb is not None and spec.disk_mb is not None and spec.disk_mb >= spec.memory_mb:
            instead = f"files are kept in memory here: expected less than memory_mb ({spec.memory_mb})"
            raise UnsupportedField(spec.kind, "disk_mb", instead)
        return plan_limits(spec, means.homes, pids=spec.pids or DEFAULT_PIDS, uncounted=means.uncounted)

    def _look(self) -> Means:
        if self._means is None:
            means = find_means(self._find_homes())
            sweep(means.homes)
            self._texts = {path: _in_memory(text.encode()) for path, text in FILES.items()}
            self._texts.update({path: _in_memory(program) for path, program in programs(means.python).items()})
            self._means = means
        return self._means


def _in_memory(data: bytes) -> int:
    fd = os.memfd_create("wingbeat")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def _reopen(fd: int) -> int:
    """The same file, read from its beginning."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
