"""``wingbeat inspect RUN_DIR --agents``: how the versions of agents in one run compare."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from wingbeat.cli.inspect_episode import shown_state
from wingbeat.cli.terminal import local_time
from wingbeat.core.types import CODE_SHOWN, Split
from wingbeat.dataflow.evaluation import PairedDifference
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.ledger_versions import AgentVersionReport, predecessor

NOTE = (
    "difference: mean reward less that of the version before (same label first), on the tasks of both, with its 95%"
    " interval; - where both had fewer than two tasks in common. Policies learn meanwhile: between versions that"
    " worked one after the other it is what both changed."
)


def show_agents(console: Console, versions: tuple[AgentVersionReport, ...], *, served: bool) -> None:
    """One line for each version, split and policy; ``served``: what runs may still finish."""
    table = Table(
        *("label", "code", "split", "attempts", "policy", "reward", "standard error", "difference"),
        *("tokens", "seconds", "first seen", "last seen"),
        title="versions of agents",
    )
    for index, version in enumerate(versions):
        before = predecessor(versions, index)
        for policy in sorted(version.rewards) or [""]:
            finished = version.endings["agent"]
            difference = version.difference(policy, before) if before is not None else None
            table.add_row(
                version.variant.label or "-",
                version.variant.code[:CODE_SHOWN] or "-",
                version.split,
                _endings(version, served=served),
                policy or "-",
                _number(version.mean(policy)),
                _number(version.stderr(policy)),
                _difference(difference),
                _number(version.tokens / finished if finished and version.split is Split.TRAIN else None, digits=1),
                _number(version.seconds / finished if finished else None, digits=2),
                local_time(version.first_s),
                local_time(version.last_s),
            )
    if not versions:
        console.print("no episode has begun")
        return
    console.print(table)
    console.print("tokens and seconds: of a finished episode, on average; tokens are those that may train")
    console.print(NOTE)


def _endings(version: AgentVersionReport, *, served: bool) -> str:
    running = shown_state(AttemptState.RUNNING, is_open=served)
    shown = ((running if ending == AttemptState.RUNNING else ending, n) for ending, n in version.endings.most_common())
    return ", ".join(f"{ending} {count}" for ending, count in shown)


def _number(value: float | None, *, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _difference(difference: PairedDifference | None) -> str:
    if difference is None:
        return "-"
    interval = f"{difference.low:+.4f} to {difference.high:+.4f}"
    return f"{difference.mean:+.4f} ({interval}; {difference.num_tasks} tasks)"
