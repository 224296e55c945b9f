"""A web page of another origin must not reach a server on loopback, where no key stands in its way."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from harness import Server


def post(url: str, *, origin: str | None) -> int:
    headers = {"content-type": "text/plain"} | ({"origin": origin} if origin else {})
    request = urllib.request.Request(url, data=b"{}", headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_a_foreign_page_is_refused(server: Server, origin: str) -> None:
    assert post(f"{server.url}/api/stop", origin=origin) == 403
    assert post(f"{server.url}/api/tasks/lease", origin=origin) == 403


def test_callers_without_an_origin_and_the_servers_own_pages_are_served(server: Server) -> None:
    assert post(f"{server.url}/api/episodes", origin=None) == 400
    assert post(f"{server.url}/api/episodes", origin=server.url) == 400
