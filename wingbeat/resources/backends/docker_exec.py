"""One command in a Docker container: the hijacked connection of ``POST /exec/ID/start``.

Docker sends both outputs on it in frames (``[stream, 0, 0, 0, size (4 bytes, big-endian)]``, then the bytes) and takes
the command's input as it comes.  The library's own reader begins at the socket, where what came with the headers is
lost, blocks without end and cannot send meanwhile; hence this one, on the connection that the library opened.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from docker import APIClient
from docker.errors import DockerException

from wingbeat.resources.backends.container_box import STDERR, STDOUT, ChannelBroken

HEADER = struct.Struct(">BxxxL")
READ_BYTES = 65536
SEND_BYTES = 16384
EXIT_CODE_S = 5.0
"""Between the end of its outputs and the daemon's knowing its exit code."""
LOOK_S = 0.02


class DockerExec:
    """A command that runs (``container_box.Channel``)."""

    def __init__(self, client: APIClient, exec_id: str, connection: Any, stdin: bytes) -> None:
        """``connection``: what ``exec_start(socket=True)`` returned."""
        self._client = client
        self._exec_id = exec_id
        self._connection = connection
        self._socket: socket.socket = getattr(connection, "_sock", connection)
        self._unsent = memoryview(stdin)
        self._closed = False
        self._is_read = False

    def frames(self) -> Iterator[tuple[int, bytes]]:
        self._is_read = True
        buffer = bytearray()
        try:
            for data in self._received():
                buffer += data
                while len(buffer) >= HEADER.size:
                    stream, size = HEADER.unpack_from(buffer)
                    if len(buffer) < HEADER.size + size:
                        break
                    body = bytes(buffer[HEADER.size : HEADER.size + size])
                    del buffer[: HEADER.size + size]
                    if stream in (STDOUT, STDERR) and body:
                        yield stream, body
            if buffer:
                raise ChannelBroken(
                    f"the connection to a command was cut within a frame, of {len(buffer)} bytes so far"
                )
        except ChannelBroken:
            raise
        except (OSError, ValueError) as error:
            raise ChannelBroken(f"the connection to a command broke: {error}") from error
        finally:
            self._free()

    def exit_code(self) -> int:
        until = time.monotonic() + EXIT_CODE_S
        try:
            while not self._closed:
                state = self._client.exec_inspect(self._exec_id)
                if not state["Running"] and state["ExitCode"] is not None:
                    return int(state["ExitCode"])
                if time.monotonic() > until:
                    break
                time.sleep(LOOK_S)
        except (DockerException, OSError) as error:
            raise ChannelBroken(f"the end of a command is not known: {error}") from error
        raise ChannelBroken("the connection to a command was cut while it ran")

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_read:  # else its reader, which may be waiting for it now, frees it
            self._free()

    def _free(self) -> None:
        response = getattr(self._connection, "_response", None)
        for held in (response, self._connection, self._socket):  # the first owns the others, if it is there
            with contextlib.suppress(OSError, ValueError):
                if held is not None:
                    held.close()

    def _received(self) -> Iterator[bytes]:
        """What comes, until the end; sends what can be sent meanwhile."""
        self._socket.setblocking(False)
        yield self._came_with_the_headers()
        poll = select.poll()
        while not self._closed:
            events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            poll.register(self._socket, events)
            has_more = isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0
            ready = 0 if has_more else sum(event for _, event in poll.poll())
            if self._unsent and ready & select.POLLOUT:
                self._send_some()
            if has_more or ready & ~select.POLLOUT:
                with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    data = self._socket.recv(READ_BYTES)
                    if not data:
                        return
                    yield data

    def _came_with_the_headers(self) -> bytes:
        response = getattr(self._connection, "_response", None)
        reader = getattr(getattr(getattr(response, "raw", None), "_fp", None), "fp", None)
        return b"" if reader is None else bytes(reader.peek())

    def _send_some(self) -> None:
        try:
            sent = self._socket.send(self._unsent[:SEND_BYTES])
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:  # the command has ended, or closed its input: it need not read what it is given
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]


def start_exec(client: APIClient, container: str, argv: Sequence[str], stdin: bytes) -> DockerExec:
    """Run a command in a container.  Raises ChannelBroken."""
    try:
        made = client.exec_create(container, list(argv), stdin=bool(stdin), stdout=True, stderr=True)
        connection = client.exec_start(made["Id"], socket=True)
    except (DockerException, OSError) as error:
        raise ChannelBroken(f"a command could not be begun: {error}") from error
    return DockerExec(client, made["Id"], connection, stdin)
