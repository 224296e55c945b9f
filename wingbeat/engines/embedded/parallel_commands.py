"""What the first process of a tensor parallel engine tells the others, and over what.

    rank 0  ── Command frames (pipe) ──▶ rank 1 .. N-1
            ◀── Reply frames (pipe) ───
            ◀── tensors (torch.distributed) ──▶

Commands are carried out in order by all, so the collectives inside a forward pass meet.  A frame is 4 bytes of length
and msgpack.  Only rank 0 decides anything; the others know neither requests nor rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence

import msgspec

from wingbeat.core.errors import ModelSourceError, UnavailableError
from wingbeat.core.weight_protocol import AdapterInfo

LENGTH_BYTES = 4


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Read a model folder and keep this process's slices; answered."""

    model: int
    """Names the model in later commands."""
    folder: str
    dtype: str


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Learn the layers by a first forward pass, and make room for KV; answered."""

    model: int
    capacity_tokens: int


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    model: int
    segments: bytes
    """int32 [S, 4]: extent start and size, first position and count."""
    ids: bytes
    """int32 [T]."""
    due: bytes
    """int32 [B]."""


class Ensure(msgspec.Struct, frozen=True, tag="ensure"):
    model: int
    end: int


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    model: int
    source: int
    target: int
    tokens: int


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    model: int
    start: int
    tokens: int


class ClearAll(msgspec.Struct, frozen=True, tag="clear_all"):
    model: int


class ReadKv(msgspec.Struct, frozen=True, tag="read_kv"):
    model: int
    start: int
    tokens: int


class WriteKv(msgspec.Struct, frozen=True, tag="write_kv"):
    model: int
    start: int
    tokens: int


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Map a file of published weights and check that this process's slices fit; answered."""

    model: int
    path: str
    adapter: AdapterInfo | None


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Serve what was prepared last."""

    model: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    model: int


Command = Load | Open | Forward | Ensure | Copy | Clear | ClearAll | ReadKv | WriteKv | Prepare | Commit | Close


class Reply(msgspec.Struct, frozen=True):
    """To a command that is answered: how it went."""

    error: str = ""
    """Empty where all is well."""
    setup: bool = False
    """The error is one that has to be fixed first, like a model that cannot be split."""


_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


class Pipe:
    """One end of the two pipes between rank 0 and another rank; file descriptors that this object owns."""

    def __init__(self, *, read_fd: int, write_fd: int) -> None:
        self._in = os.fdopen(read_fd, "rb")
        self._write_fd = write_fd

    def send(self, frames: bytes) -> None:
        """Raises BrokenPipeError where the other process is gone."""
        view = memoryview(frames)
        while view:
            view = view[os.write(self._write_fd, view) :]

    def command(self) -> Command:
        """The next command.  Raises EOFError where rank 0 is gone."""
        return _command_decoder.decode(self._frame())

    def reply(self) -> Reply:
        """The answer.  Raises EOFError where the other process is gone."""
        return _reply_decoder.decode(self._frame())

    def close(self) -> None:
        self._in.close()
        os.close(self._write_fd)

    def _frame(self) -> bytes:
        length = int.from_bytes(self._read(LENGTH_BYTES), "little")
        return self._read(length)

    def _read(self, count: int) -> bytes:
        data = self._in.read(count)
        if len(data) < count:
            raise EOFError("the other process closed the pipe")
        return data


def frame(message: Command | Reply) -> bytes:
    """One message, ready to be sent."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Peers:
    """Rank 0's view of the other ranks: commands to all, answers from all."""

    def __init__(self, pipes: Sequence[Pipe]) -> None:
        self._pipes = pipes
        self._held = bytearray()

    def tell(self, command: Command, *, later: bool = False) -> None:
        """Send a command; ``later`` may wait for the next one, as what does not return anything can."""
        self._held += frame(command)
        if later:
            return
        held, self._held = bytes(self._held), bytearray()
        for pipe in self._pipes:
            pipe.send(held)

    @contextlib.contextmanager
    def together(self, command: Command) -> Generator[None]:
        """Have the others carry out a command that is answered while the body does rank 0's part.

        Raises what the body raises, else UnavailableError (SetupError, where it has to be fixed) with what the
        first of the others says that could not do it.
        """
        self.tell(command)
        try:
            yield
        except BaseException:
            self._answers()
            raise
        for rank, answer in self._answers():
            if answer.error:
                kind = ModelSourceError if answer.setup else UnavailableError
                raise kind(f"tensor parallel rank {rank}: {answer.error}")

    def _answers(self) -> list[tuple[int, Reply]]:
        return [(rank, pipe.reply()) for rank, pipe in enumerate(self._pipes, start=1)]
