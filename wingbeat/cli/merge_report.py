"""``wingbeat inspect RUN_DIR --merge-report``: what timeline merging and prefix trees saved, and why agents forked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from wingbeat.dataflow.ledger_reader import LedgerReader
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.merging import MergeCounts, count_merge
from wingbeat.tracking.serialize import load_graph
from wingbeat.tracking.timelines import count_untrainable

REASONS_SHOWN = 12
EXCERPTS = r"(: | ?\()('.*'|\".*\") -> ('.*'|\".*\")\)?"
"""Both sides of a difference, as fork reasons spell them: ``('a' -> 'b')`` or ``: 'a' -> 'b'``."""


@dataclass(slots=True)
class PolicyReport:
    """One policy over a run."""

    counts: MergeCounts = field(default_factory=MergeCounts)
    forks: Counter[str] = field(default_factory=Counter[str])
    """By what happened and why, message numbers and excerpts left out."""
    untrainable: Counter[str] = field(default_factory=Counter[str])
    """Sampled tokens by reason."""


@dataclass(slots=True)
class RunReport:
    """All training episodes of a run that finished in order."""

    num_episodes: int = 0
    policies: dict[str, PolicyReport] = field(default_factory=dict[str, PolicyReport])
    """Trainable ones that were called."""
    frozen_turns: Counter[str] = field(default_factory=Counter[str])
    """Turns of policies that never train."""


def build_report(ledger: LedgerReader, *, train_superseded: Collection[str], frozen: Collection[str]) -> RunReport:
    """Over all training episodes that count, also those of which nothing trains; trees are of one group's samples.

    ``train_superseded``: the policies whose superseded turns train; ``frozen``: those that never train.
    """
    report = RunReport()
    for _, records in ledger.training_groups():
        graphs = [load_graph(record.graph) for record in records]
        report.num_episodes += len(graphs)
        calls = Counter(turn.policy for graph in graphs for turn in graph.turns)
        for policy, num_turns in sorted(calls.items()):
            if policy in frozen:
                report.frozen_turns[policy] += num_turns
                continue
            samples = [s for record in records for e in record.samples if e.policy == policy for s in e.samples]
            found = report.policies.setdefault(policy, PolicyReport())
            found.counts += count_merge(graphs, samples, policy=policy)
            _count_turns(found, graphs, policy=policy, train_superseded=policy in train_superseded)
    return report


def _count_turns(
    report: PolicyReport, graphs: Collection[EpisodeGraph], *, policy: str, train_superseded: bool
) -> None:
    for graph in graphs:
        report.untrainable.update(count_untrainable(graph, policy=policy, train_superseded=train_superseded))
        for turn in graph.turns:
            if turn.policy == policy and turn.fork_reason:
                what = "rendered anew" if turn.parent_id is None else "branched off"
                report.forks[f"{what}: {general_reason(turn.fork_reason)}"] += 1


def general_reason(reason: str) -> str:
    """A fork's reason without what is particular to one episode: numbers and excerpts."""
    return re.sub(r"\d+", "N", re.sub(EXCERPTS, "", reason, flags=re.DOTALL)).strip()


def show_report(console: Console, report: RunReport) -> None:
    """Print it."""
    if report.num_episodes == 0:
        console.print("no training episode has finished with outcome agent yet, so there is nothing to merge")
        return
    if any(found.counts.timelines for found in report.policies.values()):
        _show_counts(console, report)
    else:
        console.print(_why_nothing_trains(report), highlight=False, soft_wrap=True)
    for policy, found in report.policies.items():
        for title, reasons, what in (
            (f"why turns of {policy} do not continue the newest one", found.forks, "turns"),
            (f"sampled tokens of {policy} that do not train", found.untrainable, "tokens"),
        ):
            if reasons:
                listing = Table("reason", what, title=title)
                for reason, number in reasons.most_common(REASONS_SHOWN):
                    listing.add_row(Text(reason), str(number))
                console.print(listing)


def _why_nothing_trains(report: RunReport) -> str:
    """One line where the episodes have no sample at all."""
    reasons = [
        f"{number} tokens of {policy} are {reason}"
        for policy, found in report.policies.items()
        for reason, number in found.untrainable.most_common()
    ]
    reasons += [f"{number} turns are of {policy}, which is frozen" for policy, number in report.frozen_turns.items()]
    finished = f"{report.num_episodes} training episode{'s' if report.num_episodes > 1 else ''} finished"
    return f"{finished}; none has a token that trains: {'; '.join(reasons) or 'no model was called'}"


def _show_counts(console: Console, report: RunReport) -> None:
    table = Table("policy", "episodes", "turns", "timelines", "one row per turn", "merged", "tree", title="tokens")
    for policy, found in report.policies.items():
        counts = found.counts
        table.add_row(
            policy,
            str(counts.episodes),
            str(counts.turns),
            str(counts.timelines),
            str(counts.rows),
            _saving(counts.rows, counts.merged),
            _saving(counts.rows, counts.tree),
        )
    console.print(table)
    console.print("A tree holds the samples of one group; the trainer may share more, over groups of one step.")


def _saving(rows: int, tokens: int) -> str:
    return f"{tokens} ({rows / tokens:.2f}x fewer)" if tokens else "0"
