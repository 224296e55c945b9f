"""Turns of attempts that have not ended: what a killed server would take with it.

A finished attempt's record holds its token graph; until then the graph lives in memory.  So every turn is
also appended to a file of its attempt before its answer leaves, and the file goes when the attempt's end is
on record.  The bytes are with the operating system then: they survive the death of the process, SIGKILL
included, though not that of the machine (nothing is synced, and nobody waits for a disk).

One file per attempt rather than a table: an append costs microseconds on the caller's own thread (a thread of
its own would cost two hand-overs per turn), the end of an attempt frees everything by one unlink, and no
answer ever waits for a database lock.  A file is a sequence of frames, the first one names the attempt::

    frame   uint32 size | uint32 crc32 | bytes        (little-endian)

What was cut off (a kill inside an append, a full disk, a power cut) fails its checksum, and reading ends before it.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from wingbeat.core.errors import UnavailableError
from wingbeat.core.files import OWNER_ONLY

FORMAT = "wingbeat-turns/1"
SUFFIX = ".turns"

_FRAME = struct.Struct("<II")


class CaptureHeader(msgspec.Struct, frozen=True):
    """The first frame of a file."""

    format: str
    episode_id: str
    attempt: int


_header_decoder = msgspec.msgpack.Decoder(CaptureHeader)


class Captures:
    """The files of one run; appends come from one thread, everything else from any."""

    def __init__(self, folder: Path) -> None:
        """``folder`` need not exist for reading."""
        self._folder = folder

    def prepare(self) -> None:
        """Make the folder."""
        self._folder.mkdir(exist_ok=True)

    def append(self, episode_id: str, attempt: int, turn: bytes) -> None:
        """Hand a turn to the operating system.

        Raises UnavailableError where it does not take all of it; then the file is as before.
        """
        try:
            file = os.open(self._path(episode_id, attempt), os.O_WRONLY | os.O_APPEND | os.O_CREAT, OWNER_ONLY)
            try:
                size = os.fstat(file).st_size
                frames = _frame(turn)
                if not size:
                    frames = [*_frame(msgspec.msgpack.encode(CaptureHeader(FORMAT, episode_id, attempt))), *frames]
                if os.writev(file, frames) != sum(map(len, frames)):
                    os.ftruncate(file, size)
                    raise UnavailableError(f"the disk took only a part of a turn of episode {episode_id}: is it full?")
            finally:
                os.close(file)
        except OSError as error:
            raise UnavailableError(f"cannot record a turn of episode {episode_id}: {error}") from error

    def read(self, episode_id: str, attempt: int) -> tuple[bytes, ...]:
        """The turns of an attempt, in order; none where it is unknown, or its end is on record."""
        frames = _frames_in(self._path(episode_id, attempt))
        return () if _header_of(frames) is None else tuple(frames)

    def recover(self, episode_id: str, attempt: int) -> tuple[bytes, ...]:
        """The turns of an attempt that goes on in this process; what a kill cut off at the end is removed.

        Raises ValueError where a turn is damaged that others follow: what its agent was told is not there whole.
        """
        path = self._path(episode_id, attempt)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return ()
        frames, end = _whole_frames(data)
        if _is_damaged(data, end):
            raise ValueError(f"the turns that {path.name} keeps of episode {episode_id} are damaged at byte {end}")
        if end < len(data):
            os.truncate(path, end)
        if not frames:
            return ()
        if _header_of(iter(frames)) is None:
            raise ValueError(f"{path.name} should keep turns of episode {episode_id}, and its header is damaged")
        return tuple(frames[1:])

    def cut_damage(self, episode_id: str, attempt: int) -> bool:
        """Remove what follows the last whole turn, so that what is appended next can be read.

        True where that was more than an append that was cut off: turns are lost.
        """
        path = self._path(episode_id, attempt)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return False
        _, end = _whole_frames(data)
        if end < len(data):
            os.truncate(path, end)
        return _is_damaged(data, end)

    def unreadable(self) -> tuple[Path, ...]:
        """Files whose header is damaged, so that nobody knows of which attempt they are."""
        return tuple(p for p in sorted(self._folder.glob(f"*{SUFFIX}")) if _header_of(_frames_in(p)) is None)

    def remove(self, episode_id: str, attempt: int) -> None:
        """Forget an attempt; harmless where nothing of it is there."""
        self._path(episode_id, attempt).unlink(missing_ok=True)

    def attempts(self) -> tuple[tuple[str, int], ...]:
        """(episode id, attempt) of everything that is kept; files without a readable header are none."""
        found: list[tuple[str, int]] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            header = _header_of(_frames_in(path))
            if header is not None:
                found.append((header.episode_id, header.attempt))
        return tuple(found)

    def newest_first(self) -> list[tuple[str, int, int]]:
        """(episode id, attempt, bytes) of everything that is kept, what was written last first."""
        found: list[tuple[float, str, int, int]] = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            header = _header_of(_frames_in(path))
            with suppress(FileNotFoundError):
                stat = path.stat()
                if header is not None:
                    found.append((stat.st_mtime, header.episode_id, header.attempt, stat.st_size))
        return [(episode_id, attempt, size) for _, episode_id, attempt, size in sorted(found, reverse=True)]

    def num_bytes(self) -> int:
        """Of all files together; one that goes meanwhile counts nothing."""
        total = 0
        for path in self._folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def _path(self, episode_id: str, attempt: int) -> Path:
        """Ids may hold anything (clients name groups), so the name is a digest."""
        return self._folder / (hashlib.sha256(f"{attempt}:{episode_id}".encode()).hexdigest()[:32] + SUFFIX)


def _frame(data: bytes) -> list[bytes]:
    return [_FRAME.pack(len(data), zlib.crc32(data)), data]


def _frames_in(path: Path) -> Iterator[bytes]:
    """The whole frames of a file, up to the first damaged one."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            size, checksum = _FRAME.unpack(head)
            data = file.read(size)
            if len(data) != size or zlib.crc32(data) != checksum:
                return
            yield data


def _whole_frames(data: bytes) -> tuple[list[bytes], int]:
    """The frames up to the first that is not whole, and where that begins."""
    frames, at = list[bytes](), 0
    while (frame := _frame_at(data, at)) is not None:
        frames.append(frame)
        at += _FRAME.size + len(frame)
    return frames, at


def _frame_at(data: bytes, at: int) -> bytes | None:
    if at + _FRAME.size > len(data):
        return None
    size, checksum = _FRAME.unpack_from(data, at)
    end = at + _FRAME.size + size
    if not size or end > len(data):  # before anything is copied: damage is looked for at every byte
        return None
    frame = data[at + _FRAME.size : end]
    return frame if zlib.crc32(frame) == checksum else None


def _is_damaged(data: bytes, end: int) -> bool:
    """Whether what follows the last whole frame is more than an append that was cut off.

    A frame of full length with a wrong checksum is, and so is anything before another whole frame.
    """
    if end + _FRAME.size <= len(data):
        size, _ = _FRAME.unpack_from(data, end)
        if 0 < size <= len(data) - end - _FRAME.size:
            return True
    return any(_frame_at(data, at) is not None for at in range(end + 1, len(data) - _FRAME.size))


def _header_of(frames: Iterator[bytes]) -> CaptureHeader | None:
    """Takes the first frame; None where it is no header of ours."""
    for first in frames:
        try:
            header = _header_decoder.decode(first)
        except msgspec.MsgspecError:
            return None
        return header if header.format == FORMAT else None
    return None
