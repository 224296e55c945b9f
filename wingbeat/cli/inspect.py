"""``wingbeat inspect``: what a run did, and one episode of it token by token, from the ledger alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from wingbeat.core.errors import SetupError
from wingbeat.core.types import Provenance
from wingbeat.dataflow.ledger_reader import LedgerReader, open_read_only
from wingbeat.dataflow.ledger_views import AttemptView
from wingbeat.tracking.serialize import load_graph
from wingbeat.tracking.template import ChatTemplate
from wingbeat.tracking.turns import Turn

EPISODES_SHOWN = 10
PROVENANCE_STYLES = {Provenance.RENDERED: "dim", Provenance.FORCED: "yellow"}


def run_inspect(run_dir: Path, episode_id: str | None) -> None:
    """Print the run, or one episode.  Raises SetupError where there is no run, UnknownEpisode for a wrong id."""
    path = run_dir / "ledger.sqlite"
    if not path.is_file():
        raise SetupError(f"{run_dir} is no run directory: it holds no ledger.sqlite")
    console = Console()
    with open_read_only(path) as ledger:
        if episode_id is None:
            _show_run(console, ledger, run_dir)
        else:
            templates = load_templates(run_dir)
            for attempt in ledger.episode(episode_id):
                _show_attempt(console, attempt, templates)


def load_templates(run_dir: Path) -> dict[str, ChatTemplate]:
    """The tokenizer of each policy, to show tokens as text; {} where the model folders are gone."""
    launch = run_dir / "launch.json"
    if not launch.is_file():
        return {}
    models: dict[str, str] = json.loads(launch.read_text(encoding="utf-8"))["models"]
    config: dict[str, Any] = json.loads(launch.read_text(encoding="utf-8"))["config"]
    found: dict[str, ChatTemplate] = {}
    for name, folder in models.items():
        if (Path(folder) / "tokenizer.json").is_file():
            path = config["policies"][name].get("chat_template")
            found[name] = ChatTemplate.load(Path(folder), template=Path(path).read_text() if path else None)
    return found


def _show_run(console: Console, ledger: LedgerReader, run_dir: Path) -> None:
    summary, meta = ledger.summary(), ledger.meta()
    console.print(f"run {meta.run_id}, seed {meta.seed}: {run_dir}", highlight=False)
    counts = Table("what", "state", "number", "tokens", title="ledger")
    for kind, states in (("groups", summary.groups), ("attempts", summary.attempts)):
        for state, number in sorted(states.items()):
            counts.add_row(kind, state, str(number), "")
    for sample in summary.samples:
        state = f"{sample.state} ({sample.reason})" if sample.reason else str(sample.state)
        counts.add_row(f"samples of {sample.policy}", state, str(sample.num_attempts), str(sample.num_tokens))
    console.print(counts)
    evaluations = Table("evaluation", "policy", "version", "reward", "standard error", "episodes", title="evaluations")
    for done in ledger.evaluations():
        evaluations.add_row(
            done.spec.name,
            done.spec.policy,
            str(done.spec.version),
            _number(done.mean),
            _number(done.stderr),
            f"{done.num_finished} of {done.num_expected}",
        )
    console.print(evaluations)
    recent = ledger.recent_episodes(EPISODES_SHOWN)
    if recent:
        console.print("recent episodes (wingbeat inspect RUN_DIR EPISODE shows one):")
        for episode_id in recent:
            console.print(f"  {episode_id}", highlight=False)


def _show_attempt(console: Console, attempt: AttemptView, templates: dict[str, ChatTemplate]) -> None:
    task = attempt.group.task
    console.rule(f"attempt {attempt.attempt}: {attempt.state}")
    console.print(
        f"task {task.source}/{task.id}, group {attempt.group.id} ({attempt.group.split})"
        + (f", label {attempt.label}" if attempt.label else ""),
        highlight=False,
    )
    record = attempt.record
    if record is None:
        return
    console.print(f"outcome {record.outcome}, rewards {dict(record.rewards)}, metrics {dict(record.metrics)}")
    for status in attempt.samples:
        advantages = ", ".join(f"{agent or status.policy}: {value:+.4f}" for agent, value in status.advantages.items())
        console.print(
            f"policy {status.policy}: {status.state}"
            + (f" ({status.reason})" if status.reason else "")
            + (f" in step {status.step}" if status.step is not None else "")
            + (f", advantage {advantages}" if advantages else ""),
            highlight=False,
        )
    graph = load_graph(record.graph)
    for turn in graph.turns:
        trained = any(status.policy == turn.policy for status in attempt.samples)
        _show_turn(console, turn, templates.get(turn.policy), trained=trained)


def _show_turn(console: Console, turn: Turn, template: ChatTemplate | None, *, trained: bool) -> None:
    """``trained`` False: the episode has no samples of this policy (evaluation, or an outcome that does not count)."""
    parent = f"extends {turn.parent_id}" if turn.parent_id else "prompt rendered anew"
    why = f" (fork: {turn.fork_reason})" if turn.fork_reason else ""
    console.print()
    console.print(
        Text(f"turn {turn.turn_id} of {turn.policy}{':' + turn.agent if turn.agent else ''}: ", style="bold")
        + Text(f"{parent}{why}; finish {turn.finish_reason}, temperature {turn.temperature:g}")
    )
    table = Table("#", "token", "text", "provenance", "version", "logprob", "trained", box=None, padding=(0, 1))
    position = turn.prompt_length - len(turn.segment)
    at = 0
    for provenance, count in turn.segment_runs:
        for token in turn.segment[at : at + count].tolist():
            style = PROVENANCE_STYLES[provenance]
            table.add_row(str(position), str(token), _text(template, token), provenance, "", "", "", style=style)
            position += 1
        at += count
    versions = [version for version, count in turn.versions for _ in range(count)]
    for token, logprob, version, trains in zip(
        turn.sampled.tolist(), turn.logprobs.tolist(), versions, turn.trainable_T.tolist(), strict=True
    ):
        table.add_row(
            str(position),
            str(token),
            _text(template, token),
            Provenance.SAMPLED,
            str(version),
            "-" if math.isnan(logprob) else f"{logprob:.4f}",
            "yes" if trained and trains and turn.temperature > 0 else "no",
        )
        position += 1
    console.print(table)


def _text(template: ChatTemplate | None, token: int) -> Text:
    return Text(repr(template.decode([token])) if template is not None else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
