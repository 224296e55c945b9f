"""From a ledger's rows to values."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import zstandard

from wingbeat.core.errors import LedgerCorrupt
from wingbeat.core.samples import EpisodeSamples, TrainingBatch
from wingbeat.core.types import Outcome, Split, Task, Variant
from wingbeat.dataflow.aging import rebase_member
from wingbeat.dataflow.ledger_integrity import checksum, damaged, damaged_row, member_of, require_sound
from wingbeat.dataflow.ledger_lineages import read_ancestry
from wingbeat.dataflow.ledger_schema import AttemptState, SampleState
from wingbeat.dataflow.ledger_views import SampleStatus
from wingbeat.dataflow.lineages import Ancestry
from wingbeat.dataflow.records import EpisodeRecord, GroupSpec, ReadyGroup
from wingbeat.dataflow.slots import RestoredSlot

_samples_decoder: msgspec.msgpack.Decoder[tuple[EpisodeSamples, ...]] = msgspec.msgpack.Decoder(
    tuple[EpisodeSamples, ...]
)
_batch_decoder: msgspec.msgpack.Decoder[TrainingBatch] = msgspec.msgpack.Decoder(TrainingBatch)

GROUP_COLUMNS = f"""g.group_id, t.source, t.id AS task_id, t.payload AS task_payload, g.split, g.size, g.policies,
    g.floor_version, g.evaluation_id, g.episode_ids, {damaged("groups", "g")} AS group_is_damaged"""

UNCONSUMED_COLUMNS = f"""e.episode_id, e.attempt, e.outcome, e.finish_digest, e.rewards, e.metrics, e.payload,
    e.checksum, s.lineage, s.shaping, {damaged("samples", "s")} AS sample_is_damaged"""


def decode_samples(payload: bytes) -> tuple[EpisodeSamples, ...]:
    """Undo what the ledger did to an episode's samples.  Raises LedgerCorrupt."""
    try:
        return _samples_decoder.decode(_decompress(payload))
    except msgspec.MsgspecError as error:
        raise LedgerCorrupt(f"an episode's samples cannot be decoded: {error}") from error


def decode_batch(row: sqlite3.Row) -> TrainingBatch:
    """A batch that is what was logged.  Raises LedgerCorrupt where it is not."""
    name = f"the batch of step {row['step']} of policy {row['policy']!r}"
    packed = _decompress(row["payload"])
    if hashlib.sha256(packed).hexdigest() != row["digest"]:
        raise damaged_row("batches", name)
    batch = _batch_decoder.decode(packed)
    if (batch.policy, batch.step, batch.lineage) != (row["policy"], row["step"], row["lineage"]):
        raise damaged_row("batches", name)
    return batch


MAX_VALUE_BYTES = 2**31
"""Of one episode's graph, samples or batch, unpacked."""


def _decompress(payload: bytes) -> bytes:
    """Raises LedgerCorrupt, also for a few bytes that would fill the memory: no value of ours is so large."""
    try:
        if (size := zstandard.frame_content_size(payload)) > MAX_VALUE_BYTES:
            raise LedgerCorrupt(f"a compressed value claims {size} bytes; none has more than {MAX_VALUE_BYTES}")
        return zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise LedgerCorrupt(f"a compressed value cannot be read: {error}") from error


def group_spec(row: sqlite3.Row) -> GroupSpec:
    if row["group_is_damaged"]:
        raise damaged_row("groups", f"group {row['group_id']}")
    return GroupSpec(
        id=row["group_id"],
        task=Task(row["source"], row["task_id"], msgspec.json.decode(row["task_payload"], type=dict[str, Any])),
        split=Split(row["split"]),
        size=row["size"],
        policies=msgspec.json.decode(row["policies"], type=tuple[str, ...]),
        floor_version=msgspec.json.decode(row["floor_version"], type=dict[str, int]),
        evaluation_id=row["evaluation_id"],
    )


def record_of(row: sqlite3.Row) -> EpisodeRecord:
    """Of an attempt that is finished or prepared.  Raises LedgerCorrupt where its row is not what was written."""
    name = f"episode {row['episode_id']} attempt {row['attempt']}"
    require_sound("episodes", row, name=name)
    if row["graph_checksum"] is not None and row["graph_checksum"] != checksum(row["graph"]):
        raise damaged_row("episodes", f"the token graph of {name}")
    return EpisodeRecord(
        episode_id=row["episode_id"],
        attempt=row["attempt"],
        group_id=row["group_id"],
        outcome=Outcome(row["outcome"]),
        finish_digest=row["finish_digest"],
        rewards=msgspec.json.decode(row["rewards"], type=dict[str, float]),
        metrics=msgspec.json.decode(row["metrics"], type=dict[str, float]),
        samples=decode_samples(row["payload"]),
        graph=_decompress(row["graph"]) if row["graph"] is not None else b"",
        label=row["label"],
        message=row["message"],
        cause=row["cause"],
        client=row["client"],
        code=row["code"],
        num_turns=row["num_turns"],
        created_s=row["created_s"],
        finished_s=row["finished_s"],
    )


def restored_slots(connection: sqlite3.Connection, group: sqlite3.Row) -> tuple[RestoredSlot, ...]:
    slots = {
        episode_id: RestoredSlot(episode_id)
        for episode_id in msgspec.json.decode(group["episode_ids"], type=tuple[str, ...])
    }
    rows = connection.execute("SELECT * FROM episodes WHERE group_id = ? ORDER BY attempt", (group["group_id"],))
    for row in rows:
        before, attempt = slots[row["episode_id"]], row["attempt"]
        state = member_of(AttemptState, row["state"], where=f"the row of episode {row['episode_id']}")
        counted = state is AttemptState.FINISHED and row["outcome"] == Outcome.AGENT
        failed = not counted and state in (AttemptState.FINISHED, AttemptState.LOST, AttemptState.ABORTED)
        slots[row["episode_id"]] = RestoredSlot(
            before.episode_id,
            next_attempt=attempt + 1,
            num_failures=before.num_failures + failed,
            record=_rebased(connection, record_of(row)) if counted else before.record,
            running=attempt if state in (AttemptState.RUNNING, AttemptState.PREPARED) else None,
            lost=attempt if state is AttemptState.LOST else None,
            variant=Variant(row["label"], row["code"]),
        )
    return tuple(slots.values())


def _rebased(connection: sqlite3.Connection, record: EpisodeRecord) -> EpisodeRecord:
    """With versions as they count now."""
    rows = connection.execute(
        "SELECT policy, lineage FROM samples WHERE episode_id = ? AND attempt = ?", (record.episode_id, record.attempt)
    ).fetchall()
    lineages = {row["policy"]: (read_ancestry(connection, row["policy"]), row["lineage"]) for row in rows}
    samples = tuple(rebase(s, *lineages[s.policy]) if s.policy in lineages else s for s in record.samples)
    return replace(record, samples=samples)


def rebase(samples: EpisodeSamples, ancestry: Ancestry, lineage: int) -> EpisodeSamples:
    """Samples that were recorded in ``lineage``, with versions as they count now."""
    highest = ancestry.ceiling(lineage=lineage)
    return samples if highest is None else rebase_member(samples, highest=highest)


def ready_groups(rows: Iterable[sqlite3.Row], policy: str, ancestry: Ancestry) -> tuple[ReadyGroup, ...]:
    """Rows of finished samples with their groups, in order: members as the buffer takes them."""
    specs: dict[str, GroupSpec] = {}
    members: dict[str, list[EpisodeSamples]] = {}
    metrics: dict[str, dict[tuple[str, int], dict[str, float]]] = {}
    for row in rows:
        spec = specs.setdefault(row["group_id"], group_spec(row))
        members.setdefault(spec.id, []).extend(_members(row, policy, ancestry))
        told = msgspec.json.decode(row["metrics"], type=dict[str, float])
        metrics.setdefault(spec.id, {})[row["episode_id"], row["attempt"]] = told
    return tuple(
        ReadyGroup(
            spec.id,
            policy,
            floor_version=spec.floor_version[policy],
            size=spec.size,
            members=tuple(members[spec.id]),
            task=spec.task,
            metrics=metrics[spec.id],
        )
        for spec in specs.values()
    )


def _members(row: sqlite3.Row, policy: str, ancestry: Ancestry) -> Sequence[EpisodeSamples]:
    name = f"episode {row['episode_id']} attempt {row['attempt']}"
    require_sound("episodes", row, name=name)
    if row["sample_is_damaged"]:
        raise damaged_row("samples", name)
    shaping = msgspec.json.decode(row["shaping"] or "{}", type=dict[str, float])
    found = (rebase(s, ancestry, row["lineage"]) for s in decode_samples(row["payload"]) if s.policy == policy)
    return [msgspec.structs.replace(s, shaping=shaping[s.agent]) if s.agent in shaping else s for s in found]


def sample_statuses(connection: sqlite3.Connection, episode_id: str, attempt: int) -> tuple[SampleStatus, ...]:
    rows = connection.execute(
        """SELECT s.policy, s.state, s.reason, s.num_tokens, b.step, b.advantages FROM samples s
        LEFT JOIN batches b USING (batch_id) WHERE s.episode_id = ? AND s.attempt = ? ORDER BY s.policy""",
        (episode_id, attempt),
    )
    key = f"{episode_id}:{attempt}:"
    statuses: list[SampleStatus] = []
    for row in rows:
        by_key = msgspec.json.decode(row["advantages"] or "{}", type=dict[str, float | None])
        advantages = {name.removeprefix(key): value for name, value in by_key.items() if name.startswith(key)}
        state = SampleState(row["state"])
        statuses.append(
            SampleStatus(row["policy"], state, row["reason"], row["num_tokens"], row["step"], advantages=advantages)
        )
    return tuple(statuses)
