"""A run that cannot move says why."""

from __future__ import annotations

import io

from rich.console import Console

from wingbeat.cli.progress import RunProgress


def test_the_first_blocker_is_told_once_the_run_has_stood_still() -> None:
    now = 0.0
    out = io.StringIO()
    progress = RunProgress(Console(file=out, width=200), title="t", clock=lambda: now)
    progress.on_event({"event": "blockers", "blockers": ["no engine is connected"]})
    assert out.getvalue() == "", "starting takes a while"
    now = 20.0
    for _ in range(3):
        progress.on_event({"event": "blockers", "blockers": ["no engine is connected", "other"]})
    progress.on_event({"event": "blockers", "blockers": []})
    assert out.getvalue().splitlines() == ["waiting: no engine is connected"]
    progress.on_event({"event": "evaluation_done", "name": "before", "version": 0, "mean": 0.5})
    progress.on_event({"event": "blockers", "blockers": ["admission full"]})
    assert "admission" not in out.getvalue(), "it has just moved"
