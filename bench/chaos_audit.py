"""What a chaos run must answer for: read from the clients' own logs and, with plain SQL, from the ledger they trusted.

It shares no code with what it judges, but for the rule by which tasks are dealt.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from wingbeat.core.types import Task
from wingbeat.dataflow.task_sources import SourceState, TrainSource

SHOWN = 5
"""Cases of each fault that are told by name."""


class Ack(NamedTuple):
    """A finish that a client was told is safe."""

    at_s: float
    """Unix time."""
    episode_id: str
    attempt: int


@dataclass(slots=True)
class Audit:
    """What was found; all counts but the first are faults."""

    acknowledged: int = 0
    """Episodes whose finish some client saw acknowledged."""
    acknowledged_lost: int = 0
    trained_twice: int = 0
    tasks_skipped: int = 0
    details: list[str] = field(default_factory=list[str])
    """Some cases of each fault, in words."""


def read_acks(folder: Path) -> list[Ack]:
    """The whole lines of every client's log; a killed one's last line may be torn."""
    acks: list[Ack] = []
    for path in sorted(folder.glob("*.acks")):
        for line in path.read_text(encoding="ascii").splitlines(keepends=True):
            if line.endswith("\n"):
                at_s, episode_id, attempt = line.split()
                acks.append(Ack(float(at_s), episode_id, int(attempt)))
    return acks


def audit(ledger: Path, acks: Sequence[Ack], *, tasks: Mapping[str, Sequence[Task]], seed: int) -> Audit:
    """Judge a run that has ended; ``tasks`` are those of each source in the order in which they were put."""
    with _reading(ledger) as db:
        found = Audit(acknowledged=len({ack.episode_id for ack in acks}))
        lost = list(_lost(db, acks))
        twice = list(_twice(db))
        skipped = list(_skipped(db, tasks, seed=seed))
    found.acknowledged_lost, found.trained_twice, found.tasks_skipped = len(lost), len(twice), len(skipped)
    found.details = [*lost[:SHOWN], *twice[:SHOWN], *skipped[:SHOWN]]
    return found


@contextmanager
def _reading(ledger: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        yield db


def _lost(db: sqlite3.Connection, acks: Sequence[Ack]) -> Iterator[str]:
    """Acknowledged finishes that do not count, or of which nothing was kept for training."""
    finished = {
        (episode_id, attempt)
        for episode_id, attempt in db.execute(
            "SELECT episode_id, attempt FROM episodes WHERE state = 'finished' AND outcome = 'agent'"
        )
    }
    kept = {(episode_id, attempt) for episode_id, attempt in db.execute("SELECT episode_id, attempt FROM samples")}
    for ack in sorted(set(acks), key=lambda ack: ack.at_s):
        case = (ack.episode_id, ack.attempt)
        if case not in finished:
            state = db.execute("SELECT state FROM episodes WHERE episode_id = ? AND attempt = ?", case).fetchone()
            yield f"{case} was acknowledged at {ack.at_s}, and the ledger says {state[0] if state else 'nothing'}"
        elif case not in kept:
            yield f"{case} was acknowledged at {ack.at_s}, and the ledger has nothing of it to train"


def _twice(db: sqlite3.Connection) -> Iterator[str]:
    """Episodes that more than one step on the surviving lineage trains, whichever their attempts."""
    query = """SELECT b.policy, m.episode_id, COUNT(*) FROM members m JOIN batches b USING (batch_id)
        WHERE b.state != 'abandoned' AND NOT m.replayed GROUP BY b.policy, m.episode_id HAVING COUNT(*) > 1"""
    for policy, episode_id, count in db.execute(query):
        yield f"{episode_id} trains {policy} in {count} steps"


def _skipped(db: sqlite3.Connection, tasks: Mapping[str, Sequence[Task]], *, seed: int) -> Iterator[str]:
    """Tasks that were passed over: dealt and never issued, issued out of turn, or given up without an answer."""
    for source, members in tasks.items():
        state = SourceState(epoch=0, position=0, pass_=0.0, digest="")
        dealer = TrainSource(source, tuple(members), seed=seed, state=state)
        query = """SELECT t.id FROM groups g JOIN tasks t USING (task_key)
            WHERE g.split = 'train' AND t.source = ? ORDER BY g.group_key"""
        issued = [task_id for (task_id,) in db.execute(query, (source,))]
        expected = [dealer.deal().id for _ in issued]
        for task_id, count in (Counter(expected) - Counter(issued)).items():
            yield f"task {task_id} was passed over {count} times of {expected.count(task_id)}"
    for group_id, reason in db.execute("SELECT group_id, reason FROM groups WHERE state = 'closed' AND reason NOTNULL"):
        yield f"group {group_id} was dropped: {reason}"
