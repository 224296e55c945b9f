"""A box in a container, whatever runs the container: its API must only be able to run a command and pass its streams.

::

    run ──▶ open a channel ──▶ pump frames in a thread ──▶ Finished
              │ time or output over: a second command ends the first, with all that it started
              └ cancelled: the same, and the channel is closed

Clients of container runtimes block, so each command holds a thread for as long as it runs.
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import tarfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from wingbeat.resources.backends import container_scripts as scripts
from wingbeat.resources.backends.container_threads import Threads
from wingbeat.resources.boxes import Finished, check_bytes, check_run
from wingbeat.resources.specs import BoxSpec, ResourceFailed, ResourceLost

STDOUT, STDERR = 1, 2
SIGNALLED = 128
"""Runtimes say so much more than the number of the signal that ended a command."""
MAX_SIGNAL = 64
SIGKILL, SIGXFSZ = 9, 25
END_S = 10.0
"""For a command that is ended to be gone."""
FILES_S = 120.0
"""For one file to go in or out."""
NOT_RUN = 125
"""How :data:`container_scripts.RUN` says that the box is not as it should be."""
ERROR_BYTES = 10_000
OUT_OF_MEMORY = -1
"""In the place of an exit code: all of the container ended, and runs again."""


class ChannelBroken(OSError):
    """The connection to a command failed, or the runtime refuses it: the command's end is not known."""


class Channel(Protocol):
    """One command in a container, through its runtime's client; methods block."""

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """(STDOUT or STDERR, bytes) until it has ended; passes its input on meanwhile.  Raises ChannelBroken."""
        ...

    def exit_code(self) -> int:
        """Once all frames are read.  Raises ChannelBroken where it is not known."""
        ...

    def close(self) -> None:
        """From any thread; ends ``frames``.  Twice is harmless."""
        ...


class Container(Protocol):
    """A running container, through its runtime's client."""

    def open(self, argv: Sequence[str], stdin: bytes) -> Channel:
        """Run a command.  Its input need not be ended: commands are told its size.  Raises ChannelBroken."""
        ...

    async def ran_out_of_memory(self, *, broke: bool) -> bool:
        """Why a command was just killed, or (``broke``) why the connection to it was cut.

        Where all of the container ended with it for want of memory, waits until it runs again.  Raises ResourceLost
        where the container is gone, for whatever reason.
        """
        ...

    async def fault(self, error: BaseException) -> ResourceLost:
        """What is the matter, after ``error`` came from its client."""
        ...


@dataclass(slots=True)
class _Output:
    """What a command said, each stream cut at ``limit`` bytes."""

    limit: int
    tell: Callable[[], None]
    """Called in the pumping thread, once, when it is too much."""
    out: bytearray
    err: bytearray
    is_over: bool = False

    def add(self, stream: int, data: bytes) -> None:
        kept = self.out if stream == STDOUT else self.err
        room = self.limit - len(kept)
        kept += data[:room]
        if len(data) > room and not self.is_over:
            self.is_over = True
            self.tell()


@dataclass(frozen=True, slots=True)
class _Ended:
    exit_code: int
    out: bytes
    err: bytes
    truncated: bool
    stopped_by: str | None


class ContainerBox:
    """Runs commands and holds files (``wingbeat.resources.boxes.Box``)."""

    def __init__(self, spec: BoxSpec, container: Container, threads: Threads) -> None:
        self._spec = spec
        self._container = container
        self._threads = threads

    @property
    def workdir(self) -> str:
        return self._spec.workdir

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Finished:
        """As the protocol says; an exit code of 129 to 192 is taken for a signal, which runtimes do not tell apart."""
        argv = check_run(command, stdin=stdin, timeout_s=timeout_s, env=env, cwd=cwd)
        limit_s = self._spec.command_timeout_s if timeout_s is None else timeout_s
        folder = self.workdir if cwd is None else await self._folder(cwd)
        run_id = uuid.uuid4().hex
        variables = {**(env or {}), scripts.RUN_VARIABLE: run_id}
        inner = ["/bin/sh", "-c", scripts.RUN, "wingbeat-run", str(len(stdin)), run_id, folder, *argv]
        loop = asyncio.get_running_loop()
        began = loop.time()
        ended = await self._execute(
            ["env", *(f"{name}={value}" for name, value in variables.items()), *inner],
            stdin=stdin,
            limit=self._spec.output_bytes,
            timeout_s=limit_s,
            run_id=run_id,
        )
        if ended.exit_code == NOT_RUN and ended.stopped_by is None and b".wingbeat-" in ended.err:
            raise ResourceLost(f"the box cannot run commands: {ended.err.decode(errors='replace').strip()[:300]}")
        code, stopped_by = await self._verdict(ended)
        return Finished(code, ended.out, ended.err, loop.time() - began, ended.truncated, stopped_by)

    async def write(self, path: str, data: bytes) -> None:
        """As the protocol says."""
        check_bytes("data", data)
        await self._file("write", path, number=len(data), stdin=data)

    async def read(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        """As the protocol says."""
        data = await self._file("read", path, number=max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"{path}: expected at most {max_bytes} bytes, got a larger file")
        return data

    async def list(self, path: str = ".") -> list[str]:
        """As the protocol says."""
        names = await self._file("list", path)
        return sorted(name.decode("utf-8", "surrogateescape") for name in names.split(b"\0") if name)

    async def end_processes(self) -> None:
        """As the protocol says."""
        ended = await self._script(scripts.END_ALL)
        if ended.exit_code != 0:
            raise ResourceLost(f"the box's processes cannot be ended: {_words(ended)}")

    async def prepare(self) -> None:
        """See that the image can be a box, and write the spec's files.  Raises ResourceFailed."""
        ended = await self._script(scripts.CHECK, self.workdir)
        if ended.exit_code != 0:
            raise ResourceFailed(f"this container cannot be a box: {_words(ended)}")
        if self._spec.files:
            archive = archive_of(self._spec.files)
            ended = await self._script(scripts.UNPACK, str(len(archive)), self.workdir, stdin=archive)
            if ended.exit_code != 0:
                raise ResourceFailed(f"the box's files cannot be written: {_words(ended)}")

    async def _verdict(self, ended: _Ended) -> tuple[int, str | None]:
        """Exit code and limit, in the words of :class:`Finished`."""
        if ended.stopped_by is not None:
            return -SIGKILL, ended.stopped_by
        if ended.exit_code == OUT_OF_MEMORY:
            return -SIGKILL, "memory"
        if not SIGNALLED < ended.exit_code <= SIGNALLED + MAX_SIGNAL:
            return ended.exit_code, None
        code = SIGNALLED - ended.exit_code
        if code == -SIGXFSZ and self._spec.file_mb is not None:
            return code, "file"
        if code == -SIGKILL and await self._container.ran_out_of_memory(broke=False):
            return code, None if self._spec.memory_mb is None else "memory"
        return code, None

    async def _folder(self, path: str) -> str:
        return (await self._file("enter", path)).decode("utf-8", "surrogateescape").removesuffix("\n")

    async def _file(self, verb: str, path: str, *, number: int = 0, stdin: bytes = b"") -> bytes:
        inner = within(self.workdir, path, is_file=verb in ("write", "read"))
        limit = max(number, self._spec.output_bytes, 1_000_000)
        ended = await self._script(scripts.FILES, verb, self.workdir, inner, str(number), stdin=stdin, limit=limit)
        faults: dict[int, Exception] = {
            scripts.OUTSIDE: ValueError(f"{path!r} leaves {self.workdir}"),
            scripts.MISSING: FileNotFoundError(f"no such file or folder in the box: {path!r}"),
            scripts.NO_FOLDER: NotADirectoryError(f"not a folder in the box: {path!r}"),
            scripts.IS_FOLDER: IsADirectoryError(f"a folder in the box: {path!r}"),
            scripts.NO_FILE: ValueError(f"no regular file in the box: {path!r}"),
            scripts.FULL: OSError(
                f"{path!r} cannot be {'written' if stdin or verb == 'write' else 'read'} in the box: {_words(ended)}"
            ),
        }
        if ended.exit_code in faults:
            raise faults[ended.exit_code]
        if ended.exit_code != 0 or ended.truncated:
            raise ResourceLost(f"the box's files are out of reach: {_words(ended)}")
        return ended.out

    async def _script(self, script: str, *arguments: str, stdin: bytes = b"", limit: int = 1_000_000) -> _Ended:
        run_id = uuid.uuid4().hex
        argv = ["env", f"{scripts.RUN_VARIABLE}={run_id}", "/bin/sh", "-c", script, "wingbeat-box-script", *arguments]
        ended = await self._execute(argv, stdin=stdin, limit=limit, timeout_s=FILES_S, run_id=run_id)
        if ended.stopped_by is not None:
            raise ResourceLost(f"the box did not answer within {FILES_S:.0f} s")
        return ended

    async def _execute(self, argv: Sequence[str], *, stdin: bytes, limit: int, timeout_s: float, run_id: str) -> _Ended:
        """Run to the end, or to the first limit.  Raises ResourceLost."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(over.set)

        output = _Output(limit, tell, bytearray(), bytearray())
        channel = await self._open(argv, stdin, run_id=run_id)
        pumping = self._threads.begin(_pump, channel, output)
        waiting = asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait({pumping, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            stopped_by = None if pumping.done() else "output" if over.is_set() else "timeout"
            if stopped_by is not None:
                await self._end_run(run_id)
                await asyncio.wait({pumping}, timeout=END_S)
                if not pumping.done():
                    raise ResourceLost(f"a command that was stopped ({stopped_by}) did not end within {END_S:.0f} s")
            code = await self._result(pumping, stopped=stopped_by is not None)
        except asyncio.CancelledError:
            self._threads.clean(self._end_run(run_id))
            raise
        finally:
            waiting.cancel()
            self._threads.clean_soon(channel.close)
        if output.is_over and stopped_by is None:
            stopped_by = "output"
        return _Ended(code, bytes(output.out), bytes(output.err), output.is_over, stopped_by)

    async def _open(self, argv: Sequence[str], stdin: bytes = b"", *, run_id: str = "") -> Channel:
        """Run a command; one that ``run_id`` names is ended if the caller is cancelled while it begins."""
        opening = self._threads.begin(self._container.open, argv, stdin)
        try:
            return await asyncio.shield(opening)
        except ChannelBroken as error:
            raise await self._container.fault(error) from error
        except asyncio.CancelledError:
            self._threads.clean(self._given_up(opening, run_id))
            raise

    async def _given_up(self, opening: asyncio.Future[Channel], run_id: str) -> None:
        await asyncio.wait({opening})
        if opening.exception() is None:
            self._threads.clean_soon(opening.result().close)
        if run_id:  # its connection may have failed after it began
            await self._end_run(run_id)

    async def _result(self, pumping: asyncio.Future[int], *, stopped: bool) -> int:
        try:
            return await asyncio.shield(pumping)
        except ChannelBroken as error:
            if stopped:
                return SIGNALLED + SIGKILL
            if await self._container.ran_out_of_memory(broke=True):
                return OUT_OF_MEMORY
            raise await self._container.fault(error) from error

    async def _end_run(self, run_id: str) -> None:
        """A second command ends the first."""
        output = _Output(ERROR_BYTES, lambda: None, bytearray(), bytearray())
        channel = await self._open(["/bin/sh", "-c", scripts.END_RUN, "wingbeat-end", run_id])
        try:
            async with asyncio.timeout(END_S):
                await self._threads.call(_pump, channel, output)
        except TimeoutError as error:
            raise ResourceLost(f"a command of the box could not be stopped within {END_S:.0f} s") from error
        except ChannelBroken as error:
            raise await self._container.fault(error) from error
        finally:
            self._threads.clean_soon(channel.close)


def _pump(channel: Channel, output: _Output) -> int:
    for stream, data in channel.frames():
        output.add(stream, data)
    return channel.exit_code()


def _words(ended: _Ended) -> str:
    text = (ended.err + ended.out).decode("utf-8", "replace")
    return " ".join(text.split())[:300] or f"exit code {ended.exit_code}"


def within(workdir: str, path: str, *, is_file: bool) -> str:
    """The path relative to the folder, links apart.  Raises ValueError for one that leaves it."""
    full = posixpath.normpath(posixpath.join(workdir, path))
    root = posixpath.normpath(workdir)
    if not path or "\0" in path or (full != root and not full.startswith(f"{root.rstrip('/')}/")):
        raise ValueError(f"path: expected one in {workdir}, got {path!r}")
    if is_file and (full == root or path.endswith("/")):
        raise IsADirectoryError(f"a folder in the box: {path!r}")
    return posixpath.relpath(full, root)


def archive_of(files: Mapping[str, str]) -> bytes:
    """A tar archive of texts, with the folders on their way."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        folders: set[str] = set()
        for path, text in files.items():
            name = posixpath.normpath(path)
            parents = [str(parent) for parent in PurePosixPath(name).parents if str(parent) != "."]
            for folder in reversed([parent for parent in parents if parent not in folders]):
                folders.add(folder)
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
            data = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
