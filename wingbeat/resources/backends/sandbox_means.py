"""What this machine offers for sandboxes, found out by making one.

Whoever is root gives each sandbox a user that owns nothing on this machine. Where that cannot be done (a container that
has no other users) it runs as root outside, whom the kernel exempts from ``RLIMIT_NPROC``: whether that holds is tried,
too, and a limit of processes that nothing would hold is refused.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from wingbeat.core.errors import ConfigError
from wingbeat.resources.backends.limits_homes import Homes, hint_of
from wingbeat.resources.backends.sandbox_root import INSIDE, TMP, isolation, system
from wingbeat.resources.specs import ResourceFailed

logger = logging.getLogger("wingbeat.resources")

FIRST_USER, NUM_USERS = 61184, 4336
"""On the host, where its owner is root: of the range that systemd keeps for users which exist for a while."""

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
INIT_AT = f"{INSIDE}/init"

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
    uncounted: str = ""
    """Why RLIMIT_NPROC does not hold a sandbox, and what to do; "": it does."""
    homes: Homes = field(default_factory=lambda: Homes(0))

    def next_user(self) -> int | None:
        """Of the next sandbox; None: that of its owner, who cannot give it another."""
        if not self.has_users or os.geteuid() != 0:
            return None
        return FIRST_USER + (os.getpid() + next(_users)) % NUM_USERS


def find_means(homes: Homes) -> Means:
    """Tries it out, the best first.  Raises ConfigError, saying what is missing."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigError(
            "resource kind 'sandbox': bwrap is not installed; install the package bubblewrap, or use kind 'docker'"
        )
    faults = {True: "no python3 that its processes may run was found"}
    users = (True, False) if os.geteuid() == 0 else (True,)
    flags = (("--disable-userns",), ())
    for has_users, (python, binds), known in itertools.product(users, _pythons(), flags):
        means = Means(bwrap, python, binds, known, has_users=has_users, homes=homes)
        fault, counts = _try(means)
        if fault is None:
            return means if counts else replace(means, uncounted=_why_uncounted(means, faults[True]))
        faults[has_users] = fault
    raise ConfigError(
        f"resource kind 'sandbox': bwrap cannot make sandboxes here: {faults.get(False, faults[True])}; user namespaces"
        " must be allowed (sysctl kernel.apparmor_restrict_unprivileged_userns=0 where that is 1, as on Ubuntu), and a"
        " python3 (3.9 or newer) be there that every user may run"
    )


def _why_uncounted(means: Means, fault: str) -> str:
    if means.has_users:
        return "this kernel does not hold RLIMIT_NPROC; let this user make control groups, or use kind docker"
    logger.warning("sandboxes have no users of their own here (%s): outside, theirs is root", fault)
    return (
        f"outside it is root's, since no user of its own could be had ({fault}), and RLIMIT_NPROC does not hold root;"
        " let root make control groups or have other users, run as a user that is not root, or use kind docker"
    )


def _pythons() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Candidates: that of the system, which every sandbox sees, then ours with the folder that it lives in."""
    found = shutil.which("python3", path=PATH)
    if found is not None:
        yield found, ()
    ours = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
    if not ours.startswith("/usr/"):
        yield ours, (str(Path(sys.base_prefix).resolve()),)


_CHECK = """
import os, resource, sys
os.pidfd_open(1)
if sys.version_info < (3, 9):
    sys.exit("python3 is older than 3.9")
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    if os.fork() == 0:
        os._exit(0)
except OSError:
    print("counted")
"""
"""Run as the first process of a sandbox."""


def _try(means: Means) -> tuple[str | None, bool]:
    """What is wrong with them (None: a process came up), and whether RLIMIT_NPROC holds it.

    Raises ResourceFailed where that cannot be told now: something weaker must not be chosen for it.
    """
    argv = [means.bwrap, *isolation(means.flags, network=False), *system(means.binds), "--proc", "/proc"]
    argv += ["--dev", "/dev", "--mqueue", "/dev/mqueue", "--perms", "1777", "--size", "65536", "--tmpfs", TMP]
    user = means.next_user()
    try:
        done = subprocess.run(
            [*argv, "--remount-ro", "/", "--", means.python, "-I", "-S", "-c", _CHECK],
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
    except subprocess.TimeoutExpired as error:
        raise ResourceFailed("a sandbox that was made to see what works here did not come up in 60 s") from error
    except OSError as error:
        if hint := hint_of(error):  # which says nothing of what works here
            raise ResourceFailed(f"no sandbox can be made now: {error}{hint}") from error
        # its text would name a folder that is not at fault
        return f"{'' if user is None else f'as user {user}: '}{error.strerror}", False
    said = done.stderr.decode(errors="replace").strip().splitlines()
    fault = None if done.returncode == 0 else (said or [f"{means.python} ended with {done.returncode}"])[-1]
    return fault, b"counted" in done.stdout


@functools.cache
def programs(python: str) -> Mapping[str, bytes]:
    """What runs inside and where: compiled once here, instead of at every start, if this Python can run that."""
    sources = {INIT_AT: _beside("sandbox_init.py")}
    sources.update(
        {f"{INSIDE}/{name}": _beside(f"{name}.py") for name in ("sandbox_files", "sandbox_guard", "sandbox_runs")}
    )
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
