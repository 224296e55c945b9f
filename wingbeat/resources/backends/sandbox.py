"""Sandboxes made by bubblewrap (``bwrap``): processes, files and network of their own, limits that hold.

One ``bwrap`` per sandbox, for its whole life: inside, ``sandbox_init`` is process 1 of a process namespace and runs
what it is sent. Against a ``bwrap`` for each command this costs one start of Python per sandbox, and gives
background processes, one loopback network and one ``/tmp`` through a whole lease, and commands without start-up.

What a sandbox sees is made here from nothing: ``/usr``, a few harmless files of ``/etc``, its own ``/proc`` and
``/dev``, and two places that it can write, the working folder and ``/tmp``, both in memory. Whoever is root gives each
sandbox a user that owns nothing on this machine.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from wingbeat.core.errors import ConfigError
from wingbeat.resources.backends.limits import MIB, Plan, check_place, plan_limits
from wingbeat.resources.backends.limits_cgroups import Homes, find_homes, sweep
from wingbeat.resources.backends.sandbox_box import BoxInstance, Opening, start_box
from wingbeat.resources.backends.sandbox_process import (
    BoxProcess,
    Launch,
    environment,
    reap_box,
)
from wingbeat.resources.specs import Reuse, SandboxSpec, Spec, UnsupportedField

logger = logging.getLogger("wingbeat.resources")

DEFAULT_PIDS = 1024
DEFAULT_DISK_MB = 1024
"""Where a spec says nothing: enough for a compiler, not enough to take a machine down."""
SHM_MB = 64

USER = 1000
"""Inside."""
FIRST_USER, NUM_USERS = 61184, 4336
"""On the host, where its owner is root: of the range that systemd keeps for users which exist for a while."""

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
INSIDE = "/run/wingbeat"
"""Where a sandbox has the program of its first process."""
INIT_AT = f"{INSIDE}/init"
TMP = "/tmp"
SHM = "/dev/shm"

ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types", "ssl/certs")
ETC_NETWORK = ("resolv.conf", "services", "protocols", "ssl/openssl.cnf", "ca-certificates", "pki/tls/certs")
"""Of the host's ``/etc``, where they are there: nothing in them is secret."""
FILES = {
    "/etc/passwd": f"agent:x:{USER}:{USER}:agent:{TMP}:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": f"agent:x:{USER}:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}

_users = itertools.count()


@dataclass(frozen=True, slots=True)
class Means:
    """What this machine offers for sandboxes."""

    bwrap: str
    python: str
    """Runs the first process of a sandbox."""
    binds: tuple[str, ...] = ()
    """Where that Python lives, if that is not ``/usr``."""
    flags: tuple[str, ...] = ()
    """Of ``bwrap``, those that it knows here."""
    has_users: bool = True
    """Whether a sandbox has a user that is not root outside."""
    homes: Homes = field(default_factory=lambda: Homes(0))


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
        texts = {path: _reopen(fd) for path, fd in self._texts.items()}
        told = os.memfd_create("told")  # a pipe would end bwrap, and not its child, when its reader dies
        fixed = [*_root(spec, means, texts), "--info-fd", str(told)]

        def argv(fds: Sequence[str]) -> list[str]:
            return [means.bwrap, *fixed, "--", means.python, "-I", "-S", INIT_AT, *fds, "isolated"]

        def look_inside(process: BoxProcess) -> None:
            child = re.search(rb'"child-pid": (\d+)', os.pread(told, 4096, 0))
            if child is not None:  # it is there before bwrap lets its child run
                process.adopt(int(child[1]))

        launch = Launch(
            argv=argv,
            pass_fds=(told, *texts.values()),
            user=_next_user() if means.has_users else None,
            mark=INIT_AT,
        )
        env = environment(spec.env, home=TMP, path=PATH)
        opening = Opening(
            spec=spec,
            plan=plan,
            launch=launch,
            workdir=spec.workdir,
            env=env,
            scratch=(TMP, SHM),
            look_inside=look_inside,
        )
        try:
            return await start_box(opening, means.homes, started=started)
        finally:
            for fd in (told, *texts.values()):
                os.close(fd)

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
        return plan_limits(spec, means.homes, pids=spec.pids or DEFAULT_PIDS, has_own_users=means.has_users)

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


def _next_user() -> int | None:
    """None: that of its owner, who has no right to give it another."""
    return FIRST_USER + (os.getpid() + next(_users)) % NUM_USERS if os.geteuid() == 0 else None


# --- what a sandbox sees -------------------------------------------------------------------------------------------


def _root(spec: SandboxSpec, means: Means, texts: Mapping[str, int]) -> Iterator[str]:
    """The arguments that build its root; the order is that of the mounts."""
    yield from _isolation(means, network=spec.network)
    yield from _system(means.binds)
    for path in ("/etc", "/etc/ssl", "/run", INSIDE, "/var"):
        yield from ("--perms", "0755", "--dir", path)
    for name in (*ETC, *(ETC_NETWORK if spec.network else ())):
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    for path, fd in texts.items():
        yield from ("--perms", "0444", "--ro-bind-data", str(fd), path)
    yield from ("--proc", "/proc", "--dev", "/dev", "--mqueue", "/dev/mqueue")
    disk = spec.disk_mb or min(DEFAULT_DISK_MB, (spec.memory_mb or 2 * DEFAULT_DISK_MB) // 2 or 1)
    for path, size_mb, mode in ((TMP, disk, "1777"), (SHM, min(SHM_MB, disk), "1777"), (spec.workdir, disk, "0755")):
        yield from ("--perms", mode, "--size", str(size_mb * MIB), "--tmpfs", path)
    yield from ("--symlink", "/tmp", "/var/tmp")
    for mount in spec.mounts:
        yield from ("--ro-bind" if mount.read_only else "--bind", mount.source, mount.target)
    yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", spec.workdir)


def _isolation(means: Means, *, network: bool) -> Iterator[str]:
    yield from ("--unshare-all", "--unshare-user", *means.flags)
    if network:
        yield "--share-net"
    yield from ("--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv")
    yield from ("--new-session", "--as-pid-1")


def _system(binds: Sequence[str]) -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for path in binds:
        yield from ("--ro-bind", path, path)


# --- what this machine offers --------------------------------------------------------------------------------------


def find_means(homes: Homes) -> Means:
    """Tries it out, the best first.  Raises ConfigError, saying what is missing."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigError(
            "resource kind 'sandbox': bwrap is not installed; install the package bubblewrap, or use kind 'docker'"
        )
    fault = "no python3 that its processes may run was found"
    users = (True, False) if os.geteuid() == 0 else (True,)
    flags = (("--disable-userns",), ())
    for has_users, (python, binds), known in itertools.product(users, _pythons(), flags):
        means = Means(bwrap, python, binds, known, has_users, homes)
        fault = _try(means)
        if fault is None:
            if not has_users:
                logger.warning("sandboxes have no users of their own here: outside, theirs is root")
            return means
    raise ConfigError(
        f"resource kind 'sandbox': bwrap cannot make sandboxes here: {fault}; user namespaces must be allowed, and a"
        " python3 (3.9 or newer) be there that every user may run"
    )


def _pythons() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Candidates: that of the system, which every sandbox sees, then ours with the folder that it lives in."""
    found = shutil.which("python3", path=PATH)
    if found is not None:
        yield found, ()
    ours = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
    if not ours.startswith("/usr/"):
        yield ours, (str(Path(sys.base_prefix).resolve()),)


def _try(means: Means) -> str | None:
    """What is wrong with them; None: a process came up."""
    argv = [means.bwrap, *_isolation(means, network=False), *_system(means.binds), "--proc", "/proc", "--dev", "/dev"]
    argv += ["--mqueue", "/dev/mqueue", "--perms", "1777", "--size", "65536", "--tmpfs", TMP, "--remount-ro", "/"]
    check = "import os, sys; os.pidfd_open(1); sys.exit(sys.version_info < (3, 9))"
    user = _next_user() if means.has_users else None
    try:
        done = subprocess.run(
            [*argv, "--", means.python, "-I", "-S", "-c", check],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={},
            cwd="/",
            timeout=60,
            check=False,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return None if done.returncode == 0 else (said or [f"{means.python} ended with {done.returncode}"])[-1]


@functools.cache
def programs(python: str) -> Mapping[str, bytes]:
    """What runs inside and where: compiled once here, instead of at every start, if this Python can run that."""
    sources = {INIT_AT: _beside("sandbox_init.py")}
    sources.update({f"{INSIDE}/{name}": _beside(f"{name}.py") for name in ("sandbox_files", "sandbox_guard")})
    if _version(python) != _version(sys.executable):
        return {path if path == INIT_AT else f"{path}.py": source.read_bytes() for path, source in sources.items()}
    made: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        to = str(Path(folder, "compiled"))
        for path, source in sources.items():
            py_compile.compile(str(source), cfile=to, dfile=path, doraise=True)
            made[path if path == INIT_AT else f"{path}.pyc"] = Path(to).read_bytes()
    return made


def _beside(name: str) -> Path:
    return Path(__file__).with_name(name)


def _version(python: str) -> str:
    """Of the form in which it runs compiled programs."""
    code = "import importlib.util as u; print(u.MAGIC_NUMBER.hex())"
    done = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or python
