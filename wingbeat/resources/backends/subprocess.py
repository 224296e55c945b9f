"""Boxes that are folders of this machine, whose commands are ordinary processes of this user.

THIS ISOLATES NOTHING. A command reads and writes what this user may, reaches the network and every process of
this user, the owner included. It is for commands that you would run yourself: your own tools, a simulator, tests
of your own code. What a model writes belongs into kind ``sandbox`` or ``docker``.

What a box does give: a private folder, an environment without the owner's variables, commands in sessions of
their own, limits on time, output, file size, and, of all processes together where control groups may be made, on
memory, processes and processors; and an end that takes everything along, also when its owner is killed. Processes that
mean to get away can: they run as the same user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from wingbeat.resources.backends.limits import Plan, plan_limits
from wingbeat.resources.backends.limits_cgroups import sweep
from wingbeat.resources.backends.limits_homes import Homes, find_homes, is_abandoned, owner_mark
from wingbeat.resources.backends.sandbox_box import BoxInstance, Opening, start_box
from wingbeat.resources.backends.sandbox_process import FOLDER_PREFIX, Launch, environment, not_started, reap_box
from wingbeat.resources.specs import Spec, SubprocessSpec, UnsupportedField

ELSEWHERE = "use kind 'sandbox' or 'docker'"
UNCOUNTED = "RLIMIT_NPROC would count other processes of this user too; leave it out"


class SubprocessBackend:
    """Starts boxes in the folder for temporary files."""

    kind: ClassVar[str] = "subprocess"

    def __init__(self, *, homes: Callable[[], Homes] = find_homes) -> None:
        self._find_homes = homes
        self._found: Homes | None = None

    def check(self, spec: Spec) -> None:
        """Raises UnsupportedField for whatever would need isolation."""
        assert isinstance(spec, SubprocessSpec), f"expected a SubprocessSpec, got {type(spec).__name__}"
        self._plan(spec)

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> BoxInstance:
        assert isinstance(spec, SubprocessSpec), f"expected a SubprocessSpec, got {type(spec).__name__}"
        plan = self._plan(spec)
        try:
            folder = _new_folder()
        except OSError as error:
            raise not_started(error) from error

        def argv(fds: Sequence[str]) -> list[str]:
            return [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_init.py")), *fds, "shared"]

        opening = Opening(
            spec=spec,
            plan=plan,
            launch=Launch(argv=argv, folder=folder),
            workdir=folder,
            env=environment(spec.env, home=folder, path=os.environ.get("PATH", os.defpath)),
        )
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            instance = await start_box(opening, self._homes(), started=started)
            undo.pop_all()
        return instance

    async def reap(self, handle: str) -> bool:
        """End what a dead owner left: processes, control groups, the folder."""
        return await reap_box(handle)

    async def close(self) -> None:
        self._found = None

    def _homes(self) -> Homes:
        if self._found is None:
            self._found = self._find_homes()
            sweep(self._found)
            _sweep_folders()
        return self._found

    def _plan(self, spec: SubprocessSpec) -> Plan:
        defaults = type(spec).model_fields
        if not spec.network:
            raise UnsupportedField(
                spec.kind, "network", f"processes of this machine have its network: say network=true, or {ELSEWHERE}"
            )
        if spec.mounts:
            raise UnsupportedField(spec.kind, "mounts", f"its commands see this machine's files; or {ELSEWHERE}")
        if spec.workdir != defaults["workdir"].default:
            raise UnsupportedField(spec.kind, "workdir", f"each box gets a folder (box.workdir); or {ELSEWHERE}")
        if spec.disk_mb is not None:
            raise UnsupportedField(spec.kind, "disk_mb", f"only file_mb can be held here; or {ELSEWHERE}")
        return plan_limits(spec, self._homes(), pids=spec.pids, uncounted=UNCOUNTED)


def _new_folder() -> str:
    """For this user only, and without symbolic links in its path."""
    return os.path.realpath(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{owner_mark()}-"))


def _sweep_folders() -> None:
    """Remove those that dead owners left, whose boxes did not come to it: they were killed too."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if is_abandoned(entry.name, FOLDER_PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                shutil.rmtree(entry.path, ignore_errors=True)
