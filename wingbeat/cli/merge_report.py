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


def build_report(ledger: LedgerReader, *, train_superseded: Collection[str]) -> dict[str, PolicyReport]:
    """By policy, over all training episodes that count; trees are those of one group's samples."""
    report: dict[str, PolicyReport] = {}
    for _, records in ledger.training_groups():
        graphs = [load_graph(record.graph) for record in records]
        for policy in sorted({turn.policy for graph in graphs for turn in graph.turns}):
            samples = [s for record in records for e in record.samples if e.policy == policy for s in e.samples]
            if not samples:
                continue
            found = report.setdefault(policy, PolicyReport())
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


def show_report(console: Console, report: dict[str, PolicyReport]) -> None:
    """Print it."""
    if not report:
        console.print("no training episode has finished yet, so there is nothing to merge")
        return
    table = Table("policy", "episodes", "turns", "timelines", "one row per turn", "merged", "tree", title="tokens")
    for policy, found in report.items():
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
    for policy, found in report.items():
        for title, reasons, what in (
            (f"why turns of {policy} do not continue the newest one", found.forks, "turns"),
            (f"sampled tokens of {policy} that do not train", found.untrainable, "tokens"),
        ):
            if reasons:
                listing = Table("reason", what, title=title)
                for reason, number in reasons.most_common(REASONS_SHOWN):
                    listing.add_row(Text(reason), str(number))
                console.print(listing)


def _saving(rows: int, tokens: int) -> str:
    return f"{tokens} ({rows / tokens:.2f}x fewer)" if tokens else "0"
