"""A real container without a daemon: bubblewrap makes its namespaces, nsenter runs commands in them.

What the fake API servers of Docker and Kubernetes are in front of, so that the shell of a box is really run: in a PID
namespace of its own, with a read-only root and its tmpfs mounts.  Limits of memory and processes are not enforced.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_LAUNCHER = ThreadPoolExecutor(max_workers=1)


@dataclass
class FakeContainer:
    """A container that was made, and may run."""

    command: Sequence[str]
    env: Mapping[str, str]
    tmpfs: Sequence[str]
    workdir: str
    binds: Sequence[tuple[str, str, bool]] = ()
    """Source, target, read-only."""
    starts: int = 0
    oom_killed: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _inner: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        with self._lock:
            assert self._process is None, "it runs"
            root = ["--tmpfs", "/", *_system()]
            mounts = [word for path in sorted(self.tmpfs) for word in ("--perms", "0777", "--tmpfs", path)]
            for source, target, read_only in self.binds:
                mounts += ["--ro-bind" if read_only else "--bind", source, target]
            told, tell = os.pipe()
            argv = [
                *("bwrap", *root, *mounts, "--proc", "/proc", "--dev", "/dev"),
                *("--remount-ro", "/", "--chdir", self.workdir),
                *("--unshare-user", "--unshare-pid", "--unshare-net", "--as-pid-1", "--die-with-parent"),
                *("--info-fd", str(tell), "--", *self.command),
            ]
            # it dies with the thread that starts it, so that nothing is left of a test run that is killed
            self._process = _LAUNCHER.submit(
                subprocess.Popen,
                argv,
                pass_fds=[tell],
                env={"PATH": os.environ["PATH"], **self.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            ).result()
            os.close(tell)
            with open(told, "rb") as info:
                text = info.read()
            if not text:
                raise RuntimeError((self._process.communicate()[1] or b"").decode())
            self._inner = json.loads(text)["child-pid"]
            program = Path(f"/proc/{self._inner}/cmdline")
            while self.running and program.read_bytes().split(b"\0")[0] != self.command[0].encode():
                time.sleep(0.001)  # its mounts are being made
            if not self.running:
                raise RuntimeError((self._process.communicate()[1] or b"").decode())
            self.starts += 1

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._inner

    def exec(self, argv: Sequence[str], *, stdin: bool) -> subprocess.Popen[bytes]:
        """Run a command inside; a session of its own, as runtimes make it."""
        with self._lock:
            if not self.running:
                raise RuntimeError("it does not run")
            enter = ["nsenter", "-t", str(self._inner), "-U", "-m", "-p", "-n", "-i", "--preserve-credentials"]
            return subprocess.Popen(
                [*enter, "--", "/bin/sh", "-c", 'cd "$0" && exec "$@"', self.workdir, *argv],
                env={"PATH": os.environ["PATH"], **self.env},
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End all of it; its tmpfs mounts go with it."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._inner, signal.SIGKILL)
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def _system() -> list[str]:
    """The folders of this machine that hold programs, read-only."""
    words: list[str] = []
    for path in sorted(Path("/").iterdir()):
        if path.name not in ("bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr"):
            continue
        words += (
            ["--symlink", os.readlink(path), str(path)] if path.is_symlink() else ["--ro-bind", str(path), str(path)]
        )
    return words


def exit_code_of(process: subprocess.Popen[bytes]) -> int:
    """As runtimes say it: 128 and the signal."""
    code = process.wait()
    return 128 - code if code < 0 else code


def _why_not() -> str:
    """Why this machine cannot run one; "" where it can."""
    missing = [tool for tool in ("bwrap", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    probe = FakeContainer(["/bin/sh", "-c", "sleep 60"], {}, tmpfs=["/work"], workdir="/work")
    try:
        probe.start()
        process = probe.exec(["true"], stdin=False)
        said = process.communicate()[1]
        return "" if process.returncode == 0 else f"nsenter does not work here: {said.decode()}"
    except RuntimeError as error:
        return f"bubblewrap does not work here: {error}"
    finally:
        probe.kill()


WHY_NOT = _why_not()
