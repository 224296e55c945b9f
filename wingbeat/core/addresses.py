"""Addresses of servers."""

from __future__ import annotations

from urllib.parse import urlsplit

PORTS = {"http": 80, "https": 443}


def server_address(url: str) -> str:
    """A server's address in its normal form.  Raises ValueError where it is anything but scheme, host and port."""
    expected = f"expected the address of a server, as https://west.example:8321, got {url!r:.100}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from None
    if parts.scheme not in PORTS or not host or "@" in parts.netloc:
        raise ValueError(expected)
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        raise ValueError(f"{expected}: leave the path out")
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}:{port or PORTS[parts.scheme]}"
