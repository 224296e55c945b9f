"""However few files the system allows, connections leave some to the ledger."""

from __future__ import annotations

import logging
import resource

import pytest

from wingbeat.server.http.listening import OWN_FILES, fitting_connections


@pytest.mark.parametrize(
    ("soft", "hard", "fitting", "taken"),
    [
        (1024, 1 << 20, 8192, 8192 + OWN_FILES),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 8192, None),
        (1 << 19, 1 << 20, 8192, None),
        (1024, 4096, 4096 - OWN_FILES, 4096),
        (1024, 1024, 512, None),
    ],
)
def test_what_the_system_allows_bounds_connections(
    soft: int,
    hard: int,
    fitting: int,
    taken: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: set_to.append(limits))
    with caplog.at_level(logging.WARNING):
        assert fitting_connections(8192) == fitting
    assert set_to == ([] if taken is None else [(taken, hard)])
    assert ("ulimit -Hn" in caplog.text) == (fitting < 8192)
