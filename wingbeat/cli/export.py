"""``wingbeat export``: a run's episodes as rows, one per attempt, for notebooks and other tools.

Rows are made and written one by one, so a run of any length fits in memory.  Whatever a row holds, both
formats hold: what JSON calls an object of names is a map in Parquet, and a task's payload, which has no
fixed shape, is JSON text there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from wingbeat.cli.inspect import check_run_dir
from wingbeat.core.errors import DependencyMissing, SetupError
from wingbeat.core.types import Split
from wingbeat.dataflow.ledger_reader import LedgerReader, open_read_only
from wingbeat.dataflow.ledger_schema import SampleState
from wingbeat.dataflow.ledger_views import AttemptView
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.messages import Message
from wingbeat.tracking.serialize import load_graph, load_turns
from wingbeat.tracking.turns import Turn, TurnKind

Row = dict[str, Any]

ROWS_PER_GROUP = 256
"""Of a Parquet file: what is in memory at a time."""
ATTEMPT_TEXTS = (
    *("run_id", "episode_id", "group_id", "source", "task_id", "task", "split", "evaluation_id"),
    *("label", "state", "outcome", "message"),
)
TURN_TEXTS = ("turn_id", "parent_id", "policy", "agent", "kind", "finish_reason", "fork_reason", "superseded")
"""The columns that hold text."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """What a row holds beyond an attempt's identity and results."""

    messages: bool = False
    tokens: bool = False

    @property
    def turns(self) -> bool:
        return self.messages or self.tokens


def run_export(run_dir: Path, target: Path, *, split: Split | None, options: RowOptions) -> int:
    """Write the attempts (of one split) to a new file, by its name JSON lines or Parquet; how many there were.

    The file appears once it is complete.  Raises SetupError where there is no run, where ``target`` exists
    or cannot be written, or has another ending; DependencyMissing for Parquet without pyarrow.
    """
    writers: Mapping[str, Callable[..., int]] = {".jsonl": _write_jsonl, ".parquet": _write_parquet}
    writer = writers.get(target.suffix.lower())
    if writer is None:
        raise SetupError(f"expected a file named *.jsonl or *.parquet, got {target.name!r}")
    check_run_dir(run_dir)
    if target.exists():
        raise SetupError(f"{target} exists; remove it or name another file")
    partial = target.with_name(f".{target.name}.partial")
    try:
        with open_read_only(run_dir / "ledger.sqlite") as ledger:
            count = writer(partial, export_rows(ledger, split=split, options=options), options=options)
        partial.replace(target)
    except OSError as error:
        raise SetupError(f"cannot write {target}: {error}") from error
    finally:
        with suppress(OSError):  # what could not be made need not go
            partial.unlink()
    return count


def export_rows(ledger: LedgerReader, *, split: Split | None, options: RowOptions) -> Iterator[Row]:
    """One row per attempt, episodes in order of their beginning."""
    run_id = ledger.meta().run_id
    for attempt in ledger.attempts(split=split):
        episode_id = attempt.episode_id
        if attempt.record is None:
            graph = load_turns(episode_id, ledger.captured_turns(episode_id, attempt.attempt))
        else:
            graph = load_graph(attempt.record.graph) if attempt.record.graph else EpisodeGraph(episode_id)
        row = {"run_id": run_id, **attempt_row(attempt, graph)}
        if options.turns:
            trains = _turns_that_train(attempt)
            superseded = graph.superseded()
            row["turns"] = [
                turn_row(turn, graph, options=options)
                | {"superseded": superseded.get(turn.turn_id), "trains": turn.turn_id in trains}
                for turn in graph.turns
            ]
        yield row


def attempt_row(attempt: AttemptView, graph: EpisodeGraph) -> Row:
    """Who the attempt is, how it ended, what it earned, and which versions acted in it."""
    group, record = attempt.group, attempt.record
    versions: dict[str, set[int]] = {}
    for turn in graph.turns:
        versions.setdefault(turn.policy, set()).update(version for version, _ in turn.versions)
    return {
        "episode_id": attempt.episode_id,
        "attempt": attempt.attempt,
        "group_id": group.id,
        "source": group.task.source,
        "task_id": group.task.id,
        "task": group.task.payload,
        "split": str(group.split),
        "evaluation_id": group.evaluation_id,
        "label": attempt.label,
        "state": str(attempt.state),
        "outcome": None if attempt.outcome is None else str(attempt.outcome),
        "message": attempt.message,
        "created_s": attempt.created_s,
        "ended_s": attempt.ended_s,
        "num_turns": graph.num_turns if record is None else record.num_turns,
        "num_sampled": graph.num_sampled_tokens,
        "rewards": {} if record is None else dict(record.rewards),
        "metrics": {} if record is None else dict(record.metrics),
        "advantages": {
            f"{status.policy}:{agent}" if agent else status.policy: value
            for status in attempt.samples
            for agent, value in status.advantages.items()
        },
        "versions": {policy: sorted(found) for policy, found in sorted(versions.items())},
        "samples": [
            {"policy": s.policy, "state": str(s.state), "reason": s.reason, "num_tokens": s.num_tokens, "step": s.step}
            for s in attempt.samples
        ],
    }


def turn_row(turn: Turn, graph: EpisodeGraph, *, options: RowOptions) -> Row:
    """One model call; messages and prompt tokens are those beyond its parent's."""
    row: Row = {
        "turn_id": turn.turn_id,
        "parent_id": turn.parent_id,
        "policy": turn.policy,
        "agent": turn.agent,
        "kind": str(turn.kind),
        "temperature": turn.temperature,
        "finish_reason": str(turn.finish_reason),
        "fork_reason": turn.fork_reason,
        "num_prompt": turn.prompt_length,
        "num_sampled": turn.num_sampled,
    }
    if options.messages:
        is_chat = turn.kind is TurnKind.CHAT
        shared = graph.turn(turn.parent_id).conversation.depth if is_chat and turn.parent_id is not None else 0
        row["messages"] = [message_row(message) for message in turn.conversation.messages_from(shared)]
        row |= {"prompt_text": turn.prompt_text, "sampled_text": turn.sampled_text}
    if options.tokens:
        row |= {
            "prompt_ids": turn.segment.tolist(),
            "sampled_ids": turn.sampled.tolist(),
            "logprobs": [value if math.isfinite(value) else None for value in turn.logprobs.tolist()],
            "token_versions": turn.versions_T.tolist(),
        }
    return row


def message_row(message: Message) -> Row:
    """As chat APIs spell it, every key always there."""
    return {
        "role": message.role,
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": [
            {"id": call.id, "name": call.name, "arguments": call.arguments_text} for call in message.tool_calls
        ],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }


def _turns_that_train(attempt: AttemptView) -> frozenset[str]:
    """Those whose sampled tokens trained or still may."""
    if attempt.record is None:
        return frozenset()
    policies = {status.policy for status in attempt.samples if status.state is not SampleState.DROPPED}
    episodes = [episode for episode in attempt.record.samples if episode.policy in policies]
    return frozenset(turn for episode in episodes for sample in episode.samples for turn in sample.turn_ids)


def _write_jsonl(path: Path, rows: Iterable[Row], *, options: RowOptions) -> int:
    del options  # rows say it all
    with path.open("wb") as file:
        return sum(file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)) > 0 for row in rows)


def _write_parquet(path: Path, rows: Iterable[Row], *, options: RowOptions) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DependencyMissing(
            "Parquet needs pyarrow, which is not installed; from a clone: pip install '.[export]' -c constraints.txt,"
            " or name a .jsonl file"
        ) from error
    arrow: Any = pyarrow
    schema = _schema(arrow, options=options)
    count, remaining = 0, iter(rows)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while part := [_flat(row) for row in islice(remaining, ROWS_PER_GROUP)]:
            writer.write_table(arrow.Table.from_pylist(part, schema=schema))
            count += len(part)
    return count


def _flat(row: Row) -> Row:
    """Maps as pairs, the task as JSON text."""
    maps = {name: list(row[name].items()) for name in ("rewards", "metrics", "advantages", "versions")}
    return {**row, **maps, "task": orjson.dumps(row["task"]).decode()}


def _schema(arrow: Any, *, options: RowOptions) -> Any:
    """The columns of :func:`attempt_row`, then the turns where they are asked for."""
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    numbers = arrow.map_(text, real)
    columns = dict.fromkeys(ATTEMPT_TEXTS, text)
    columns |= {"attempt": whole, "created_s": real, "ended_s": real, "num_turns": whole, "num_sampled": whole}
    columns |= {"rewards": numbers, "metrics": numbers, "advantages": numbers}
    columns["versions"] = arrow.map_(text, arrow.list_(whole))
    sample = {"policy": text, "state": text, "reason": text, "num_tokens": whole, "step": whole}
    columns["samples"] = arrow.list_(arrow.struct(sample))
    if options.turns:
        columns["turns"] = arrow.list_(arrow.struct(_turn_columns(arrow, options=options)))
    return arrow.schema(columns)


def _turn_columns(arrow: Any, *, options: RowOptions) -> dict[str, Any]:
    text, whole = arrow.string(), arrow.int64()
    columns = dict.fromkeys(TURN_TEXTS, text)
    columns |= {"temperature": arrow.float64(), "num_prompt": whole, "num_sampled": whole, "trains": arrow.bool_()}
    if options.messages:
        call = arrow.struct(dict.fromkeys(("id", "name", "arguments"), text))
        message = dict.fromkeys(("role", "content", "reasoning", "tool_call_id", "name"), text)
        columns["messages"] = arrow.list_(arrow.struct({**message, "tool_calls": arrow.list_(call)}))
        columns |= {"prompt_text": text, "sampled_text": text}
    if options.tokens:
        ids = arrow.list_(arrow.int32())
        columns |= {"prompt_ids": ids, "sampled_ids": ids, "token_versions": ids}
        columns["logprobs"] = arrow.list_(arrow.float32())
    return columns
