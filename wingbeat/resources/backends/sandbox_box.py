"""A box whose first process is ours (``sandbox_init``), and its life in a pool."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wingbeat.resources.backends.limits import Plan, stopped_by
from wingbeat.resources.backends.limits_cgroups import Counters, Group
from wingbeat.resources.backends.limits_homes import Homes
from wingbeat.resources.backends.sandbox_channel import Channel
from wingbeat.resources.backends.sandbox_process import BoxProcess, Launch
from wingbeat.resources.boxes import Finished, check_bytes, check_run
from wingbeat.resources.specs import BoxSpec, ResourceFailed, ResourceLost

GRACE_S = 3.0
"""How long after a command's own deadline its box may take to say that it was stopped."""
ANSWER_S = 30.0
"""For what runs no command: files, a health check."""
LEAVE_S = 5.0
CPU_CHECK_S = 0.02
STOPPED_S = 0.2
"""So long after a command's deadline its box is looked at, and again: one that was stopped will not say anything."""


class ChannelBox:
    """Implements :class:`wingbeat.resources.boxes.Box` over a channel."""

    def __init__(
        self, channel: Channel, process: BoxProcess, spec: BoxSpec, plan: Plan, *, workdir: str, env: Mapping[str, str]
    ) -> None:
        self._channel = channel
        self._process = process
        self._spec = spec
        self._plan = plan
        self._env = dict(env)
        self._workdir = workdir

    @property
    def workdir(self) -> str:
        return self._workdir

    @property
    def process_id(self) -> int:
        """Of the process on this machine whose end is the box's end."""
        return self._process.handle.pid

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Finished:
        argv = check_run(command, stdin=stdin, timeout_s=timeout_s, env=env, cwd=cwd)
        if timeout_s is None:
            timeout_s = self._spec.command_timeout_s
        texts = [text for pair in {**self._env, **(env or {})}.items() for text in pair]
        before = self._counters()
        numbers = " ".join(map(str, (timeout_s, self._spec.output_bytes, *self._plan.numbers)))
        number, answer = self._channel.post(
            b"run",
            numbers.encode(),
            os.fsencode(cwd or "."),
            b"%d" % len(argv),
            *map(os.fsencode, argv),
            *map(os.fsencode, texts),
            stdin,
        )
        try:
            await self._watch(number, answer, timeout_s=timeout_s, before=before)
        except asyncio.CancelledError:
            self._stop(number, b"cancelled")
            raise
        finally:
            self._channel.forget(number)
        return self._finished(answer.result(), before)

    async def write(self, path: str, data: bytes) -> None:
        check_bytes("data", data)
        await self._call(b"write", path, data)

    async def read(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        return (await self._call(b"read", path, b"%d" % max_bytes))[0]

    async def list(self, path: str = ".") -> list[str]:
        names = os.fsdecode((await self._call(b"list", path))[0])
        return names.split("\0") if names else []

    async def end_processes(self) -> None:
        await self._channel.call(b"end", within_s=ANSWER_S)

    async def _call(self, verb: bytes, path: str, *fields: bytes) -> list[bytes]:
        try:
            return await self._channel.call(verb, os.fsencode(path), *fields, within_s=ANSWER_S)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None

    async def _watch(
        self, number: bytes, answer: asyncio.Future[list[bytes]], *, timeout_s: float, before: Counters
    ) -> None:
        """Wait for a command's end, and end it when its box has used its processor time.

        Looks at the clock of the group no earlier than all processors together could have used up the rest.
        """
        loop = asyncio.get_running_loop()
        late = loop.time() + timeout_s + STOPPED_S
        until = loop.time() + timeout_s + GRACE_S
        limit = self._spec.cpu_s if self._plan.group.counts_cpu else None
        while not answer.done():
            now = loop.time()
            if now >= until or (now >= late and self._process.is_stopped):
                self._channel.lose("a command did not end in time, nor did the box say so")
                self._process.kill()
                break
            left = late - now if now < late else min(STOPPED_S, until - now)
            if limit is not None:
                cpu_left = limit - (self._counters().cpu_s - before.cpu_s)
                if cpu_left <= 0:
                    self._stop(number, b"cpu")
                    limit = None
                else:
                    left = min(left, max(CPU_CHECK_S, cpu_left / (self._spec.cpus or os.cpu_count() or 1)))
            await asyncio.wait([answer], timeout=left)

    def _stop(self, number: bytes, reason: bytes) -> None:
        with contextlib.suppress(ResourceLost):
            self._channel.forget(self._channel.post(b"stop", number, reason)[0])

    def _counters(self) -> Counters:
        return Counters() if self._process.group is None else self._process.group.counters()

    def _finished(self, fields: Sequence[bytes], before: Counters) -> Finished:
        try:
            facts, stdout, stderr = fields
            words = facts.decode().split()
            exit_code, seconds, (truncated, is_full) = int(words[0]), float(words[1]), words[2:4]
        except (ValueError, IndexError) as error:
            self._channel.lose(f"what it said of a command makes no sense: {error}")
            self._channel.raise_if_lost()
            raise
        stopped = words[4] if words[4:] and words[4] in ("timeout", "output", "cpu") else None
        if stopped is None:
            stopped = stopped_by(
                self._plan,
                exit_code=exit_code,
                stderr=stderr,
                is_full=is_full == "1",
                before=before,
                after=self._counters(),
            )
        return Finished(
            exit_code=exit_code,
            stdout=stdout,
            stderr=stderr,
            seconds=seconds,
            truncated=truncated == "1",
            stopped_by=stopped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """All that makes a box of a started process."""

    spec: BoxSpec
    plan: Plan
    launch: Launch
    workdir: str
    env: Mapping[str, str]
    scratch: Sequence[str] = ()
    """Further places that can be written; a reset empties them."""
    look_inside: Callable[[BoxProcess], None] = lambda _: None
    """Tells the process which one inside ends all others, if that is known by now: as soon as the latter serves."""


class BoxInstance:
    """A box as the pool holds it."""

    def __init__(self, process: BoxProcess, opening: Opening) -> None:
        self._process = process
        self._opening = opening
        self._channel: Channel | None = None
        self._box: ChannelBox | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def value(self) -> ChannelBox:
        assert self._box is not None, "an instance is handed out once it is open"
        return self._box

    @property
    def handle(self) -> str:
        return str(self._process.handle)

    async def open(self) -> None:
        """Wait for its first process and fill the working folder.  Raises ResourceFailed."""
        opening = self._opening
        self._channel = channel = await Channel.over(self._process.end)
        try:
            async with asyncio.timeout(opening.spec.start_timeout_s):
                await channel.ready
            opening.look_inside(self._process)
            await channel.call(
                b"open",
                os.fsencode(opening.workdir),
                b"%d" % len(opening.scratch),
                *map(os.fsencode, opening.scratch),
                *self._files(),
                within_s=opening.spec.start_timeout_s,
            )
        except (ResourceLost, OSError, ValueError) as error:
            said = self._process.complaint() or str(error)
            raise ResourceFailed(f"a {opening.spec.title} does not start: {said}") from error
        self._box = ChannelBox(
            channel, self._process, opening.spec, opening.plan, workdir=opening.workdir, env=opening.env
        )

    async def reset(self) -> None:
        """No processes, and the files of the spec, as at its start."""
        await self._ask(b"reset", *self._files())

    async def check(self) -> None:
        """Raises ResourceLost if its first process does not answer, or its working folder is gone."""
        try:
            await self._ask(b"check")
        except OSError as error:
            raise ResourceLost(f"a {self._opening.spec.title} has no working folder any more: {error}") from error

    async def close(self) -> None:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(), name="wingbeat-box-end")
        await asyncio.shield(self._ending)

    async def _ask(self, verb: bytes, *fields: bytes) -> None:
        assert self._channel is not None, "an instance is used once it is open"
        await self._channel.call(verb, *fields, within_s=self._opening.spec.reset_timeout_s)

    async def _end(self) -> None:
        """Hang up; one that cleans up outside its processes is given the time, any other is killed at once."""
        if self._channel is not None:
            await self._channel.close()
        leaves_by_itself = self._channel is not None and bool(self._opening.launch.folder)
        if self._box is None:
            self._opening.look_inside(self._process)
        if not (leaves_by_itself and await self._process.gone(within_s=LEAVE_S)):
            self._process.kill()
            if not await self._process.gone():
                raise ResourceFailed(f"a {self._opening.spec.title} does not end: {self.handle}")
        await self._process.clean()

    def _files(self) -> list[bytes]:
        return [os.fsencode(text) for pair in self._opening.spec.files.items() for text in pair]


async def start_box(opening: Opening, homes: Homes, *, started: Callable[[str], None]) -> BoxInstance:
    """Start a box, or leave nothing behind.  Raises ResourceFailed."""
    limits = opening.plan.group
    group = Group.make(homes, limits) if limits.controllers else None
    with contextlib.ExitStack() as undo_group:
        if group is not None:
            undo_group.callback(group.end)
        process = BoxProcess.start(opening.launch, group)
        undo_group.pop_all()
    instance = BoxInstance(process, opening)
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(instance.close)
        started(instance.handle)
        await instance.open()
        undo.pop_all()
    return instance
