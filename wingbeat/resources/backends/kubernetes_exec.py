"""One command in a pod: the WebSocket of ``GET /api/v1/namespaces/NS/pods/NAME/exec``.

The first byte of a message is its channel (``v4.channel.k8s.io``, ``v5.channel.k8s.io``): 0 input, 1 and 2 outputs, 3 a
Status in JSON at the end.  The connection is the official client's (address, TLS, keys), but not its reader: that one
goes on as long as something comes, so that a command that floods it would never be noticed, and cannot send meanwhile.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import websocket
from kubernetes import client, stream

from wingbeat.resources.backends.container_box import STDERR, STDOUT, ChannelBroken

STDIN_CHANNEL, STATUS_CHANNEL = 0, 3
SEND_BYTES = 8192
"""Less than a connection that says it can take something takes at once."""
PING_S = 20.0
"""Of silence: what stands before a cluster cuts connections on which nothing moves, and a test may run for long."""
CONTAINER = "box"


class PodExec:
    """A command that runs (``container_box.Channel``)."""

    def __init__(self, connection: Any, stdin: bytes) -> None:
        """``connection``: the official client's ``WSClient``."""
        self._websocket: websocket.WebSocket = connection.sock
        self._unsent = memoryview(stdin)
        self._status = b""
        self._is_read = False

    def frames(self) -> Iterator[tuple[int, bytes]]:
        self._is_read = True
        try:
            while self._wait_for_some():
                code, frame = self._websocket.recv_data_frame(control_frame=True)
                if code == websocket.ABNF.OPCODE_CLOSE:
                    return
                data = bytes(frame.data)
                if code not in (websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT) or not data:
                    continue
                if data[0] in (STDOUT, STDERR) and len(data) > 1:
                    yield data[0], data[1:]
                elif data[0] == STATUS_CHANNEL:
                    self._status += data[1:]
        except (websocket.WebSocketException, OSError, ValueError) as error:
            if not self._status:
                raise ChannelBroken(f"the connection to a command broke: {error}") from error
        finally:
            self._websocket.shutdown()

    def exit_code(self) -> int:
        try:
            status = orjson.loads(self._status)
            if status.get("status") == "Success":
                return 0
            causes = (status.get("details") or {}).get("causes") or ()
            codes = [cause["message"] for cause in causes if cause.get("reason") == "ExitCode"]
            if codes:
                return int(codes[0])
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            status = {}
        raise ChannelBroken(
            f"a command ended without an exit code: {status.get('message') or 'the connection was cut'}"
        )

    def close(self) -> None:
        raw = self._websocket.sock
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_RDWR)
        if not self._is_read:  # else its reader, which may be waiting for it now, frees it
            self._websocket.shutdown()

    def _wait_for_some(self) -> bool:
        """Until a message comes; sends what can be sent meanwhile.  False once the connection is closed."""
        while True:
            raw = self._websocket.sock
            if raw is None:
                return False
            if isinstance(raw, ssl.SSLSocket) and raw.pending():
                return True
            poll = select.poll()
            poll.register(raw, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            ready = sum(event for _, event in poll.poll(PING_S * 1000))
            if not ready:
                self._websocket.ping()
            if ready & ~select.POLLOUT:
                return True
            if ready & select.POLLOUT:
                self._send_some()

    def _send_some(self) -> None:
        part = self._unsent[:SEND_BYTES]
        self._websocket.send(bytes([STDIN_CHANNEL]) + bytes(part), opcode=websocket.ABNF.OPCODE_BINARY)
        self._unsent = self._unsent[len(part) :]


def start_exec(
    configuration: client.Configuration, namespace: str, pod: str, argv: Sequence[str], stdin: bytes
) -> PodExec:
    """Run a command in a pod.  Raises ChannelBroken."""
    # a client of its own: while a stream is opened, the official one's other calls would become streams
    api = client.CoreV1Api(client.ApiClient(configuration))
    try:
        connection = stream.stream(
            api.connect_get_namespaced_pod_exec,
            pod,
            namespace,
            command=list(argv),
            container=CONTAINER,
            stdin=bool(stdin),
            stdout=True,
            stderr=True,
            tty=False,
            _preload_content=False,
            binary=True,
        )
    except client.ApiException as error:
        raise ChannelBroken(f"a command could not be begun: {' '.join(str(error.reason).split())[:300]}") from error
    return PodExec(connection, stdin)
