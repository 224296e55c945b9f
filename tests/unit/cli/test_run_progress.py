"""A run that cannot move says why."""

from __future__ import annotations

import io
from pathlib import Path

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


def test_evaluations_before_the_first_step_name_their_policy_and_names_are_no_markup() -> None:
    out = io.StringIO()
    progress = RunProgress(Console(file=out, width=200), title="t")
    for policy in ("solver", "verifier"):
        progress.on_event({"event": "evaluation_started", "policy": policy, "version": 0})
    done = {"event": "evaluation_done", "name": "before", "version": 0, "mean": 0.5}
    progress.on_event(done | {"policy": "solver"})
    progress.on_event({"event": "alarm", "alarm": "x", "policy": "solver", "step": 1, "text": "source '[/a]'"})
    assert out.getvalue().splitlines() == [
        "held-out reward of solver at version 0: 0.500",
        "alarm x of solver at step 1: source '[/a]'",
    ]


def test_rates_are_left_out_until_known_and_begin_anew_when_the_counter_does() -> None:
    now = 10.0
    out = io.StringIO()
    progress = RunProgress(Console(file=out, width=200), title="t", clock=lambda: now)
    progress.begin(10)
    for step, tokens in ((1, 1000.0), (2, 1600.0), (3, 50.0), (4, 110.0)):
        progress.on_event({"event": "step", "policy": "solver", "step": step, "perf/sampled_tokens": tokens})
        now += 6.0
    first, second, restarted, last = out.getvalue().splitlines()
    assert first == "step 1/10  reward 0.000  staleness 0 (bound 0)"
    assert second == "step 2/10  reward 0.000  100 tokens/s  staleness 0 (bound 0)  ETA 48 s"
    assert restarted == "step 3/10  reward 0.000  staleness 0 (bound 0)  ETA 42 s"
    assert last == "step 4/10  reward 0.000  10 tokens/s  staleness 0 (bound 0)  ETA 36 s"


def test_notes_of_the_start_are_lines_where_there_is_no_panel() -> None:
    out = io.StringIO()
    progress = RunProgress(Console(file=out, width=200), title="t")
    for text in ("preparing the model x", "preparing the model x", "starting the server"):
        progress.tell(text)
    progress.note("an engine joined")
    assert out.getvalue().splitlines() == ["preparing the model x", "starting the server"]


def test_failed_operators_and_alarms_are_told_at_once_and_kept_for_the_end() -> None:
    out = io.StringIO()
    progress = RunProgress(Console(file=out, width=200, force_terminal=True), title="t")
    progress.begin(5, log=Path("r/logs/control.log"))
    text = "operator 'mine' of 'solver' failed in on_group: KeyError: 'x'; it is left out from now on"
    progress.on_event({"event": "operator_quarantined", "policy": "solver", "operator": "mine", "text": text})
    alarm = {"event": "alarm", "alarm": "entropy_low", "policy": "solver", "step": 3, "text": "it fell"}
    progress.on_event(alarm)
    progress.on_event({"event": "blockers", "blockers": [], "warnings": [text, "entropy_low of 'solver': it fell"]})
    progress.on_event({"event": "blockers", "blockers": [], "warnings": ["from before the restart"]})
    assert out.getvalue().splitlines() == [
        f"{text} (traceback: r/logs/control.log)",
        "alarm entropy_low of solver at step 3: it fell",
        "from before the restart",
    ]
    assert progress.warnings == [text, "entropy_low of 'solver': it fell", "from before the restart"]
