"""One attempt of an episode: its token graph, why it forks, and every token with what is known of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from rich.tree import Tree

from wingbeat.core.types import Provenance, Split
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.ledger_views import AttemptView
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.serialize import load_graph, load_turns
from wingbeat.tracking.template import ChatTemplate
from wingbeat.tracking.timelines import build_samples
from wingbeat.tracking.turns import Turn

EDGE_TOKENS = 12
"""How many tokens of a long prompt segment are shown at either end, unless all are asked for."""
RULE_WIDTH = 110
HEADER = "      #   token provenance version   logprob mask  advantage support  text"
STYLES = {Provenance.RENDERED: "dim", Provenance.FORCED: "yellow", Provenance.SAMPLED: ""}


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token of a turn as it is shown."""

    position: int
    """In the turn's whole sequence, prompt included."""
    token: int
    provenance: Provenance
    version: int | None = None
    logprob: float | None = None
    """None: not sampled, or the engine gave none."""
    mask: str = ""
    """``train``, ``out``, or ``?`` where the end of the episode decides; empty where it was not sampled."""
    support: int | None = None
    """Place in the turn's table of supports; None: drawn from the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """What the tables are made from."""

    graph: EpisodeGraph
    trained: Mapping[str, frozenset[str]]
    """Per policy, the turns whose tokens train, or may."""
    advantages: Mapping[tuple[str, str], float | None]
    """Per (policy, agent), once trained."""
    superseded: Mapping[str, str]
    is_open: bool = False
    """The attempt may still finish: only then is known what was delivered, and so what trains."""

    def rows(self, turn: Turn) -> Iterator[TokenRow]:
        """The turn's own tokens: its prompt segment, then what it sampled."""
        position, at = turn.prompt_length - len(turn.segment), 0
        for provenance, count in turn.segment_runs:
            for token in turn.segment[at : at + count].tolist():
                yield TokenRow(position, token, provenance)
                position += 1
            at += count
        trains = turn.turn_id in self.trained.get(turn.policy, frozenset())
        supports = turn.support_index.tolist() or [-1] * turn.num_sampled
        for token, logprob, version, usable, support in zip(
            turn.sampled.tolist(),
            turn.logprobs.tolist(),
            turn.versions_T.tolist(),
            turn.trainable_T.tolist(),
            supports,
            strict=True,
        ):
            yield TokenRow(
                position,
                token,
                Provenance.SAMPLED,
                version=version,
                logprob=None if math.isnan(logprob) else logprob,
                mask=("?" if self.is_open else "train") if trains and usable else "out",
                support=None if support < 0 else support,
            )
            position += 1


@dataclass(frozen=True, slots=True)
class Training:
    """What decides whether tokens train, besides the episode itself."""

    superseded: Collection[str] = ()
    """The policies whose superseded turns train all the same."""
    frozen: Collection[str] = ()
    """The policies that never train."""
    is_open: bool = False
    """The attempt may still finish."""


def build_view(attempt: AttemptView, graph: EpisodeGraph, *, training: Training) -> EpisodeView:
    """What trains of an attempt; of an open one what may, of one that can never finish nothing."""
    counts = {status.policy for status in attempt.samples}
    if training.is_open and attempt.group.split is Split.TRAIN:
        counts = {turn.policy for turn in graph.turns}.difference(training.frozen)
    trained = {
        policy: frozenset(
            turn_id
            for samples in build_samples(
                graph, policy=policy, episode_id="", train_superseded=policy in training.superseded
            ).values()
            for sample in samples
            for turn_id in sample.turn_ids
        )
        for policy in counts
    }
    advantages = {
        (status.policy, agent): value for status in attempt.samples for agent, value in status.advantages.items()
    }
    return EpisodeView(graph, trained, advantages, graph.superseded(), is_open=training.is_open)


def show_attempt(
    console: Console,
    attempt: AttemptView,
    *,
    captured: Sequence[bytes],
    templates: Mapping[str, ChatTemplate],
    training: Training,
    full: bool,
) -> None:
    """Print an attempt; one without a record (running, lost, interrupted) from its captured turns."""
    task = attempt.group.task
    title = f"attempt {attempt.attempt}: {shown_state(attempt.state, is_open=training.is_open)}"
    console.print(Rule(title), width=min(console.width, RULE_WIDTH))
    console.print(
        f"task {task.source}/{task.id}, group {attempt.group.id} ({attempt.group.split})"
        + (f", label {attempt.label}" if attempt.label else ""),
        highlight=False,
        soft_wrap=True,
    )
    if attempt.cause:
        said = f": {attempt.message.splitlines()[-1]}" if attempt.message.strip() else ""
        ended = f"ended as {attempt.outcome}, {attempt.cause}{said}"
        console.print(ended, highlight=False, soft_wrap=True, markup=False)
    if attempt.record is not None:
        record = attempt.record
        console.print(
            f"outcome {record.outcome}, rewards {dict(record.rewards)}, metrics {dict(record.metrics)}", soft_wrap=True
        )
        graph = load_graph(record.graph)
    elif captured:
        graph = load_turns("", captured)
        console.print(f"not finished; {graph.num_turns} turns were captured so far", highlight=False)
        console.print(_outlook(attempt, training), highlight=False, soft_wrap=True)
    else:
        return
    _show_samples(console, attempt)
    view = build_view(attempt, graph, training=training)
    console.print(_tree(view))
    for turn in graph.turns:
        _show_turn(console, turn, view, templates.get(turn.policy), full=full)


def shown_state(state: AttemptState, *, is_open: bool) -> str:
    """An attempt's state in words: the ledger learns of a server's end only when the run is continued."""
    return "running when the server stopped" if state is AttemptState.RUNNING and not is_open else str(state)


def _outlook(attempt: AttemptView, training: Training) -> str:
    """Whether anything of an unfinished attempt can train."""
    if not training.is_open:
        return "it can no longer finish: none of it trains"
    if attempt.group.split is not Split.TRAIN:
        return "episodes of an evaluation do not train"
    return "mask ?: trains if the episode finishes in order and the reply was delivered, which is known when it ends"


def _show_samples(console: Console, attempt: AttemptView) -> None:
    for status in attempt.samples:
        advantages = ", ".join(
            f"{agent or status.policy}: {_signed(value)}" for agent, value in status.advantages.items()
        )
        console.print(
            f"policy {status.policy}: {status.state}"
            + (f" ({status.reason})" if status.reason else "")
            + (f" in step {status.step}" if status.step is not None else "")
            + (f", advantage {advantages}" if advantages else ""),
            highlight=False,
            soft_wrap=True,
        )


def _tree(view: EpisodeView) -> Tree:
    """The turns as a tree: a branch or a second root is a fork."""
    root = Tree(Text(f"token graph of {view.graph.num_turns} turns", style="bold"))
    branches = {"": root}
    for turn in view.graph.turns:
        branches[turn.turn_id] = branches[turn.parent_id or ""].add(_label(turn, view))
    return root


def _label(turn: Turn, view: EpisodeView) -> Text:
    who = turn.policy + (f":{turn.agent}" if turn.agent else "")
    text = Text(f"{turn.turn_id} ", style="bold")
    text.append(
        f"{who}: +{len(turn.segment)} prompt, {turn.num_sampled} sampled, {turn.finish_reason}", style="not bold"
    )
    if turn.fork_reason:
        text.append(f"\nfork: {turn.fork_reason}", style="not bold yellow")
    if turn.chosen_by:
        text.append(f"\nseveral earlier turns fitted; decided by {turn.chosen_by}", style="not bold")
    reason = view.superseded.get(turn.turn_id)
    if reason is not None:
        text.append(f"\nsuperseded: {reason}", style="not bold red")
    return text


def _show_turn(console: Console, turn: Turn, view: EpisodeView, template: ChatTemplate | None, *, full: bool) -> None:
    console.print()
    origin = f"extends {turn.parent_id}" if turn.parent_id else "prompt rendered anew"
    console.print(
        Text(f"turn {turn.turn_id}: ", style="bold") + Text(f"{origin}, temperature {turn.temperature:g}"),
        soft_wrap=True,
    )
    console.print(Text(HEADER, style="bold"), soft_wrap=True)
    advantage = view.advantages.get((turn.policy, turn.agent))
    hidden = range(0) if full else range(EDGE_TOKENS, len(turn.segment) - EDGE_TOKENS)
    for place, row in enumerate(view.rows(turn)):
        if place not in hidden:
            text = repr(template.decode([row.token])) if template is not None else ""
            console.print(Text(_line(row, text, advantage=advantage), style=STYLES[row.provenance]), soft_wrap=True)
        elif place == hidden.start:
            console.print(Text(f"{'…':>7} {len(hidden)} more (--full shows them)", style="dim"))


def _line(row: TokenRow, text: str, *, advantage: float | None) -> str:
    """One token in columns of :data:`HEADER`."""
    is_sampled = row.provenance is Provenance.SAMPLED
    version = "" if row.version is None else str(row.version)
    logprob = f"{row.logprob:.4f}" if row.logprob is not None else "-" if is_sampled else ""
    credit = f"{advantage:+.4f}" if row.mask == "train" and advantage is not None else ""
    support = "" if row.support is None else f"#{row.support}"
    columns = (
        f"{row.position:>7} {row.token:>7} {row.provenance:<10} {version:>7} {logprob:>9} {row.mask:<5} {credit:>9}"
    )
    return f"{columns} {support:>7}  {text}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"
