"""``wingbeat inspect``: a run, an episode token by token, its ledger, or what merging saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wingbeat.cli.agents_report import show_agents
from wingbeat.cli.evaluate import shown_agents
from wingbeat.cli.inspect_conversation import open_conversation, show_conversations
from wingbeat.cli.inspect_episode import Training, show_attempt, shown_state
from wingbeat.cli.ledger_report import show_ledger, show_states
from wingbeat.cli.liveness import is_served
from wingbeat.cli.merge_report import build_report, show_report
from wingbeat.cli.terminal import PlainConsole
from wingbeat.core.errors import SetupError
from wingbeat.core.types import Split
from wingbeat.dataflow.ledger_reader import LedgerReader, open_read_only
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.ledger_views import AttemptView
from wingbeat.tracking.template import ChatTemplate

EPISODES_SHOWN = 10
RUNS_SHOWN = 10
UNWRAPPED = 10_000
"""Columns where no terminal sets them: what is piped is searched and copied, so ids stay whole."""


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What the launch of a run says about a policy."""

    template: ChatTemplate | None
    """To show tokens as text; None where the model folder is gone."""
    train_superseded: bool
    trainable: bool


class Report(StrEnum):
    """Of a whole run, by the option that asks for it."""

    MERGING = "--merge-report"
    LEDGER = "--ledger"
    AGENTS = "--agents"


def run_inspect(
    run_dir: Path,
    episode_id: str | None,
    *,
    reports: Sequence[Report] = (),
    full: bool = False,
) -> bool:
    """Print the run, one episode, or a report.  False where the ledger contradicts itself.

    Raises SetupError where there is no run or several were asked for, UnknownEpisode for a wrong id.
    """
    if reports and episode_id is not None:
        raise SetupError(f"{reports[0]} is of a whole run: leave the episode out")
    if len(reports) > 1:
        raise SetupError(f"{reports[0]} and {reports[1]} are two reports: ask for one at a time")
    report = reports[0] if reports else None
    check_run_dir(run_dir)
    console = PlainConsole()
    if not console.is_terminal:
        console.width = UNWRAPPED
    policies = load_policies(run_dir)
    superseded = frozenset(name for name, facts in policies.items() if facts.train_superseded)
    frozen = frozenset(name for name, facts in policies.items() if not facts.trainable)
    with open_read_only(run_dir / "ledger.sqlite") as ledger:
        if report is Report.LEDGER:
            return show_ledger(console, ledger, run_dir)
        if report is Report.AGENTS:
            show_agents(console, ledger.agent_versions(), served=is_served(run_dir))
        elif report is Report.MERGING:
            show_report(console, build_report(ledger, train_superseded=superseded, frozen=frozen))
        elif episode_id is None:
            _show_run(console, ledger, run_dir)
        else:
            templates = {name: facts.template for name, facts in policies.items() if facts.template is not None}
            served = is_served(run_dir)
            waiting = open_conversation(run_dir, episode_id)
            attempts = ledger.episode(episode_id) if waiting is None else (waiting.attempt,)
            for attempt in attempts:
                captured = ledger.captured_turns(episode_id, attempt.attempt) if waiting is None else waiting.captured
                is_open = served and _may_finish(attempt, last=attempt is attempts[-1])
                training = Training(superseded=superseded, frozen=frozen, is_open=is_open)
                show_attempt(console, attempt, captured=captured, templates=templates, training=training, full=full)
    return True


def check_run_dir(run_dir: Path) -> None:
    """Raises SetupError where it is none, with the names of those below it."""
    if (run_dir / "ledger.sqlite").is_file():
        return
    if not run_dir.is_dir():
        raise SetupError(f"no folder {run_dir}; name a run directory")
    below = sorted(run_dir.glob("*/ledger.sqlite"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not below:
        raise SetupError(f"{run_dir} is no run directory: it holds no ledger.sqlite")
    shown = ", ".join(str(path.parent) for path in below[:RUNS_SHOWN])
    more = f" and {len(below) - RUNS_SHOWN} older ones" if len(below) > RUNS_SHOWN else ""
    raise SetupError(f"{run_dir} is no run directory, but holds some; name one of {shown}{more}")


def _may_finish(attempt: AttemptView, *, last: bool) -> bool:
    """A lost attempt may still finish, until its successor begins."""
    return attempt.state is AttemptState.RUNNING or (attempt.state is AttemptState.LOST and last)


def load_policies(run_dir: Path) -> dict[str, PolicyFacts]:
    """By name; {} where the launch file is gone."""
    launch = run_dir / "launch.json"
    if not launch.is_file():
        return {}
    data: dict[str, Any] = json.loads(launch.read_text(encoding="utf-8"))
    models: dict[str, str] = data["models"]
    found: dict[str, PolicyFacts] = {}
    for name, folder in models.items():
        settings = data["config"]["policies"][name]
        template = None
        if (Path(folder) / "tokenizer.json").is_file():
            path = settings.get("chat_template")
            source = Path(path).read_text(encoding="utf-8") if path else None
            template = ChatTemplate.load(Path(folder), template=source)
        found[name] = PolicyFacts(
            template, train_superseded=bool(settings.get("train_superseded")), trainable=bool(settings["trainable"])
        )
    return found


def _show_run(console: Console, ledger: LedgerReader, run_dir: Path) -> None:
    show_states(console, ledger, run_dir)
    _show_evaluations(console, ledger)
    show_conversations(console, run_dir)
    for split in (Split.TRAIN, Split.EVAL):
        recent = ledger.recent_episodes(EPISODES_SHOWN, split=split)
        if recent:
            console.print(f"recent {split} episodes (wingbeat inspect RUN_DIR EPISODE shows one):")
            for episode_id in recent:
                console.print(f"  {episode_id}", highlight=False, soft_wrap=True)
    unfinished = ledger.unfinished_attempts(EPISODES_SHOWN)
    if unfinished:
        served = is_served(run_dir)
        console.print("recent attempts that have not finished:")
        for attempt in unfinished:
            state = shown_state(attempt.state, is_open=served)
            console.print(f"  {attempt.episode_id} attempt {attempt.attempt}: {state}", highlight=False, soft_wrap=True)


def _show_evaluations(console: Console, ledger: LedgerReader) -> None:
    results = ledger.evaluations()
    if not results:
        return
    columns = ("evaluation", "policy", "version", "reward", "standard error", "episodes", "agent")
    evaluations = Table(*columns, title="evaluations")
    for done in results:
        evaluations.add_row(
            done.spec.name,
            done.spec.policy,
            str(done.spec.version),
            _number(done.mean),
            _number(done.stderr),
            f"{done.num_finished} of {done.num_expected}",
            shown_agents(done.agents) if done.agents else "-",
        )
    console.print(evaluations)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
