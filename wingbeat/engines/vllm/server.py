"""A vLLM server: the process that we started, or one that runs already.

Ours listens on a socket in a folder of its own that nobody else may enter: there is no port to collide with, and
nobody on the network can give it weights.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from wingbeat.core.errors import DependencyMissing
from wingbeat.engines.vllm.flags import ServerSpec, command, environment

END_S = 10.0
LONGEST_FOLDER = 70
"""The path of a socket has 107 characters at most, and vLLM names its own ones by 36 within the folder."""
LAST_BYTES = 100_000
"""Of the log, which are looked through for a reason."""
SHOWN = 600


class Server(Protocol):
    """Something that listens where a client connects."""

    @property
    def address(self) -> str:
        """``http://…``, or the path of a socket."""
        ...

    def start(self) -> None:
        """Make it run; it may take minutes until it answers."""
        ...

    def ended(self) -> str:
        """Why it does not run any more; "" while it does, as far as can be seen from here."""
        ...

    def last_words(self) -> str:
        """What it said of a failure; "" where we do not have its log."""
        ...

    def close(self) -> None: ...


class OwnServer:
    """A server that lives and dies with us."""

    def __init__(self, spec: ServerSpec, *, log: Path | None = None) -> None:
        """``log`` takes what it writes; None: a file that goes with it."""
        self._spec = spec
        self._folder = _new_folder()
        self._log = log or self._folder / "vllm.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = 0
        """Bytes that the log had when the process was started."""

    @property
    def address(self) -> str:
        return str(self._folder / "http.sock")

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Raises DependencyMissing where the interpreter is none."""
        self._end()
        Path(self.address).unlink(missing_ok=True)
        python = self._spec.python or sys.executable
        try:
            with self._log.open("ab") as log:
                self._begin = log.tell()
                self._process = subprocess.Popen(
                    command(self._spec, python=python, socket=Path(self.address)),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment(self._spec, sockets=self._folder),
                    start_new_session=True,
                )
        except OSError as error:
            raise DependencyMissing(
                f"expected a Python interpreter at engine.vllm.python = {python!r}, got: {error}; name that of an"
                " environment with vLLM"
            ) from error

    def ended(self) -> str:
        if self._process is None:
            return "it was not started"
        code = self._process.poll()
        if code is None:
            return ""
        return f"it ended with {code}: {self.last_words()} (all of it in {self._log})"

    def last_words(self) -> str:
        """What its log says of a failure: the last line that tells of an error, else the last line."""
        try:
            text = self._log.read_bytes()[self._begin :][-LAST_BYTES:].decode(errors="replace")
        except OSError:
            return "nothing"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if "Error:" in line or line.startswith("expected ")]
        first = next((line for line in telling if "EngineDead" not in line and "EngineCore" not in line), "")
        return (first or (lines[-1] if lines else "nothing"))[-SHOWN:]

    def close(self) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        """End the server and whatever it started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _new_folder() -> Path:
    """One for sockets, which nobody else may enter: where temporary files go, or below /tmp if that is too long."""
    folder = Path(tempfile.mkdtemp(prefix="wingbeat-vllm-"))
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="wingbeat-vllm-", dir="/tmp"))
    return folder


class RunningServer:
    """A server that somebody else started with :data:`~wingbeat.engines.vllm.flags.LAUNCHER`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    @property
    def address(self) -> str:
        return self._url

    def start(self) -> None:
        """It runs, or will again."""

    def ended(self) -> str:
        return ""

    def last_words(self) -> str:
        return ""

    def close(self) -> None:
        """It goes on without us."""
