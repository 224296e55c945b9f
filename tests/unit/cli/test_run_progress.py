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


def test_lines_name_the_policy_where_there_are_several() -> None:
    now = 0.0
    out = io.StringIO()
    progress = RunProgress(Console(file=out, width=200), title="t", clock=lambda: now)
    progress.begin(10)
    step = {"event": "step", "perf/sampled_tokens": 5.0}
    progress.on_event(step | {"policy": "solver", "step": 1, "rollout/reward_mean": 0.25})
    for policy, reward in (("solver", 0.5), ("verifier", 1.0)):
        now += 6.0
        progress.on_event(step | {"policy": policy, "step": 2, "rollout/reward_mean": reward})
    progress.on_event({"event": "evaluation_done", "name": "x", "policy": "solver", "version": 2, "mean": 0.5})
    first, second, evaluation = out.getvalue().splitlines()
    assert first.startswith("step 2/10  reward 0.300")
    assert second.startswith("verifier: step 2/10  reward 1.000")
    assert evaluation == "held-out reward of solver at version 2: 0.500"
    assert progress.rewards == [0.25, 0.5]
