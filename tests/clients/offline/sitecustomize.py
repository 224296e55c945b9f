"""Loaded by every Python process of a client: whatever would leave this machine is refused and written down.

Frameworks swallow errors of their telemetry, so the refusal alone would prove nothing; the file does. An audit
hook cannot be undone or bypassed by Python code. What native code does by itself, it does not see.
"""

import ipaddress
import os
import sys
import traceback

LOG = os.environ.get("OFFLINE_LOG", "")


def _is_here(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False


def _target(event: str, arguments: tuple[object, ...]) -> object:
    """The host that an event is about; None where it is about none."""
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        return arguments[0]
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1] if len(arguments) > 1 else None
        return address[0] if isinstance(address, tuple) else None  # a path is a Unix socket
    return None


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if not event.startswith("socket."):
        return
    host = _target(event, arguments)
    if _is_here(host):
        return
    place = "".join(traceback.format_stack(limit=12)[:-2])
    with open(LOG, "a", encoding="utf-8") as log:
        log.write(f"{event} {host!r}\n{place}\n")
    raise OSError(f"{event} to {host!r}: this process must stay on this machine")


if LOG:
    sys.addaudithook(_refuse)
