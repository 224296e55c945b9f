"""What people see while a run trains: one live panel on standard error, fed by the event stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"
CURVE_HEIGHT = 8
CURVE_WIDTH = 60
SMOOTHING = 0.8
RATE_WINDOW_S = 15.0
STUCK_S = 15.0


class RunProgress:
    """Collects events into a few numbers and draws them (only on a terminal; else one line now and then)."""

    def __init__(self, console: Console, *, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._started = clock()
        self._total = 0
        self._step: dict[str, Any] = {}
        self._note = "starting the processes"
        self._tokens: deque[tuple[float, float]] = deque()
        self._steps: deque[tuple[float, int]] = deque()
        self._printed = 0.0
        self._moved = clock()
        """When the last step or evaluation ended."""
        self._said = ""
        self._told: set[str] = set()
        self._warnings: dict[str, None] = {}
        self._log: Path | None = None
        self._rewards: dict[str, list[float]] = {}
        self._policies: set[str] = set()
        """Those heard of: evaluations come before the first step."""
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live.is_started:
            self._live.stop()

    def begin(self, total_steps: int, *, log: Path | None = None) -> None:
        """The server is up; ``log`` is control's, which has the tracebacks of operators."""
        self._total = total_steps
        self._log = log
        self._note = "the server is up; waiting for the first step"

    @property
    def rewards(self) -> list[float]:
        """Mean reward of the episodes that finished during each step, of the policy that stepped first."""
        return next(iter(self._rewards.values()), [])

    @property
    def warnings(self) -> list[str]:
        """What people should know at the end, oldest first: operators that failed, alarms that sounded."""
        return list(self._warnings)

    def note(self, text: str) -> None:
        self._note = text

    def tell(self, text: str) -> None:
        """A note that is also a line, once, where there is no panel."""
        self.note(text)
        if text not in self._told:
            self._told.add(text)
            self._say(text)

    def on_event(self, record: dict[str, Any]) -> None:
        """Take one event of the run."""
        handler = {
            "step": self._on_step,
            "evaluation_started": self._on_evaluation_started,
            "evaluation_done": self._on_evaluation,
            "engine_left": lambda r: self.note("an engine left; it is being restarted"),
            "engine_joined": lambda r: self.note("an engine joined"),
            "trainer_lost": lambda r: self.note("the trainer went away; it is being restarted"),
            "replayed": lambda r: self.note(f"the trainer caught up by replay (exact: {r['exact']})"),
            "blockers": self._on_blockers,
            "alarm": self._on_alarm,
            "operator_quarantined": self._on_operator,
            "operator_stopped": self._on_operator,
            "complete": lambda r: self.note("complete"),
        }.get(record["event"])
        if handler is not None:
            handler(record)

    def _on_blockers(self, record: dict[str, Any]) -> None:
        """Say what a run waits for once it has not moved for a while; keep what is said of it at the end."""
        for warning in record.get("warnings", ()):
            self._warn(warning, line=warning)
        first = next(iter(record["blockers"]), "")
        if not first or self._clock() - self._moved < STUCK_S:
            return
        self.note(f"waiting: {first}")
        if first != self._said:
            self._said = first
            self._say(f"waiting: {first}")

    def _on_alarm(self, record: dict[str, Any]) -> None:
        line = f"alarm {record['alarm']} of {record['policy']} at step {record['step']}: {record['text']}"
        self._warn(f"{record['alarm']} of {record['policy']!r}: {record['text']}", line=line)

    def _on_operator(self, record: dict[str, Any]) -> None:
        where = f" (traceback: {self._log})" if self._log is not None else ""
        self._warn(record["text"], line=f"{record['text']}{where}")

    def _warn(self, warning: str, *, line: str) -> None:
        """Print a line, also above the panel, which would soon show something else; say it again at the end."""
        if warning in self._warnings:
            return
        self._warnings[warning] = None
        self.note(line)
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _on_evaluation_started(self, record: dict[str, Any]) -> None:
        self._policies.add(record["policy"])
        self.note(f"evaluating version {record['version']} on held-out tasks")

    def _on_evaluation(self, record: dict[str, Any]) -> None:
        self._moved = self._clock()
        mean = record["mean"]
        shown = "no result" if mean is None else f"{mean:.3f}"
        of = f" of {record['policy']}" if self._has_several else ""
        self.note(f"held-out reward{of} {record['name']}: {shown}")
        self._say(f"held-out reward{of} at version {record['version']}: {shown}")

    @property
    def _has_several(self) -> bool:
        return len(self._policies | set(self._rewards)) > 1

    def _on_step(self, record: dict[str, Any]) -> None:
        now = self._moved = self._clock()
        self._step = record
        rewards = self._rewards.setdefault(record["policy"], [])
        if "rollout/reward_mean" in record:
            rewards.append(record["rollout/reward_mean"])
        if self._tokens and record["perf/sampled_tokens"] < self._tokens[-1][1]:
            self._tokens.clear()  # control was restarted, and counts from 0
        self._tokens.append((now, record["perf/sampled_tokens"]))
        self._steps.append((now, record["step"]))
        for window in (self._tokens, self._steps):
            while len(window) > 2 and now - window[0][0] > RATE_WINDOW_S:
                window.popleft()
        if now - self._printed > 5.0:
            self._printed = now
            self._say(self._line())

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, highlight=False, markup=False)

    def _line(self) -> str:
        step = self._step
        of = f"{step['policy']}: " if self._has_several else ""
        rate, eta = _rate(self._tokens), self._eta()
        parts = [
            f"{of}step {step.get('step', 0)}/{self._total}",
            f"reward {self._smoothed(step['policy']):.3f}",
            *([] if rate is None else [f"{rate:.0f} tokens/s"]),
            f"staleness {step.get('staleness/max', 0):.0f} (bound {step.get('staleness/bound', 0):.0f})",
            *([] if eta is None else [f"ETA {eta}"]),
        ]
        return "  ".join(parts)

    def _smoothed(self, policy: str) -> float:
        rewards = self._rewards[policy]
        value = rewards[0] if rewards else 0.0
        for reward in rewards:
            value = SMOOTHING * value + (1 - SMOOTHING) * reward
        return value

    def _eta(self) -> str | None:
        rate = _rate(self._steps)
        if rate is None or rate <= 0 or not self._total:
            return None
        return f"{(self._total - int(self._step.get('step', 0))) / rate:.0f} s"

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        step, rate, eta = self._step, _rate(self._tokens), self._eta()
        for name, value in (
            ("step", f"{step.get('step', 0)} of {self._total}"),
            *(
                (f"reward of {policy}" if self._has_several else "reward", f"{self._smoothed(policy):.3f}")
                for policy, rewards in self._rewards.items()
                if rewards
            ),
            *([] if rate is None else [("tokens/s", f"{rate:.0f}")]),
            ("staleness", f"{step.get('staleness/max', 0):.0f} (bound {step.get('staleness/bound', 0):.0f})"),
            ("overlap", f"{step.get('perf/overlap_frac', 0):.0%} of training beside rollouts"),
            *([] if eta is None else [("ETA", eta)]),
            ("elapsed", f"{self._clock() - self._started:.0f} s"),
        ):
            table.add_row(Text(name, style="dim"), value)
        curve = Text("\n".join(draw_curve(self.rewards)), style="green")
        return Group(Text(self._title, style="bold"), table, curve, Text(self._note, style="italic"))


def draw_curve(values: list[float], *, width: int = CURVE_WIDTH, height: int = CURVE_HEIGHT) -> list[str]:
    """A block chart of values between 0 and 1, as lines of text from top to bottom."""
    if not values:
        return []
    columns = _resample(values, width)
    levels = [max(0.0, min(1.0, v)) * height * 8 for v in columns]
    lines: list[str] = []
    for row in range(height - 1, -1, -1):
        label = "1.0 ┤" if row == height - 1 else "0.0 ┤" if row == 0 else "    │"
        lines.append(label + "".join(BLOCKS[int(max(0, min(8, level - row * 8)))] for level in levels))
    return lines


def _resample(values: list[float], width: int) -> list[float]:
    """Means over ``width`` equal stretches, or the values themselves if they are fewer."""
    if len(values) <= width:
        return values
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _rate(window: deque[tuple[float, Any]]) -> float | None:
    """Per second; None before it can be known."""
    if len(window) < 2 or window[-1][0] <= window[0][0]:
        return None
    return float(window[-1][1] - window[0][1]) / (window[-1][0] - window[0][0])
