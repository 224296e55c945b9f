"""Whether a run kept its promises, from its files alone: nothing lost, trained twice, skipped or leaked.

``verify`` asks whether a ledger contradicts itself; the audit also compares it with what lies beside it: the task
sources and the dealer's place in them, the checkpoints, the captured turns.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from wingbeat.core.types import Split, Task
from wingbeat.dataflow.ledger_captures import Captures
from wingbeat.dataflow.ledger_checks import contradictions
from wingbeat.dataflow.ledger_connection import captures_folder
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.dataflow.ledger_rows import OPERATORS
from wingbeat.dataflow.operators.chain import Counts
from wingbeat.dataflow.records import NOT_DEALT
from wingbeat.dataflow.task_sources import SourceState, TrainSource

SHOWN = 5


class _SavedTasks(msgspec.Struct):
    """A file of ``RUN_DIR/tasks``."""

    source: str
    split: Split
    tasks: tuple[Task, ...]


class _Dealer(msgspec.Struct):
    """What the audit needs of the dealer's state."""

    seed: int
    sources: dict[str, SourceState]


def audit_run(run_dir: Path) -> list[str]:
    """Broken promises, in words; none for a sound run.  Best of a run that has stopped.

    Raises SetupError where there is no ledger.
    """
    with open_read_only(run_dir / "ledger.sqlite") as ledger, ledger.snapshot() as db:
        problems = contradictions(db)
        for problem, query in _PROMISES.items():
            rows = [" ".join(map(str, row)) for row in db.execute(query)]
            if rows:
                problems.append(f"{problem}: {_some(rows)}")
        problems += _captures_left(db, captures_folder(run_dir / "ledger.sqlite"))
        state = db.execute("SELECT value FROM meta WHERE key = 'dealer'").fetchone()
        if state is not None:
            problems += _skipped_tasks(db, msgspec.json.decode(state[0], type=_Dealer), run_dir / "tasks")
        return problems


def _skipped_tasks(db: sqlite3.Connection, dealer: _Dealer, folder: Path) -> Iterable[str]:
    """Tasks that the dealer passed, and that no group was opened for."""
    refused = _num_refused(db)
    for path in sorted(folder.glob("*.json")):
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=_SavedTasks)
        except msgspec.MsgspecError as error:
            yield f"{path} is damaged: {error}"
            continue
        state = dealer.sources.get(saved.source)
        if saved.split is not Split.TRAIN or state is None:
            continue
        issued = _issued(db, saved.source)
        num_groups = sum(issued.values())
        if num_groups != state.dealt:
            yield f"source {saved.source!r}: the dealer dealt {state.dealt} groups, the ledger has {num_groups}"
        passed = _passed(saved, state, seed=dealer.seed)
        passed.subtract(state.returned)  # dealt, given back, and not dealt again yet
        missing = passed - issued
        if sum(missing.values()) > refused:  # (operators may pass tasks over)
            names = [f"{task} ({times} times)" for task, times in sorted(missing.items())]
            yield f"source {saved.source!r}: tasks that were passed and never issued: {_some(names)}"


def _passed(saved: _SavedTasks, state: SourceState, *, seed: int) -> Counter[str]:
    """How often the dealer came past each task, since it deals these tasks."""
    passed: Counter[str] = Counter({task.id: state.epoch - state.first_epoch for task in saved.tasks})
    place = TrainSource(
        saved.source, saved.tasks, seed=seed, state=msgspec.structs.replace(state, position=0, returned=[])
    )
    passed.update(place.deal().id for _ in range(state.position))
    return passed


def _issued(db: sqlite3.Connection, source: str) -> Counter[str]:
    """Groups that the dealer's tasks opened, by task."""
    rows = db.execute(
        """SELECT t.id, g.group_id FROM groups g JOIN tasks t USING (task_key) WHERE t.source = ?
        AND g.split = 'train'""",
        (source,),
    )
    return Counter(task_id for task_id, group_id in rows if not group_id.startswith(NOT_DEALT))


def _num_refused(db: sqlite3.Connection) -> int:
    """Tasks that operators passed over."""
    total = 0
    for (text,) in db.execute("SELECT value FROM meta WHERE key LIKE ? || '%'", (OPERATORS,)):
        operators = msgspec.json.decode(text).get("operators", {})
        total += sum(Counts(*own["counts"]).refused for own in operators.values())
    return total


def _captures_left(db: sqlite3.Connection, folder: Path) -> list[str]:
    has_ended = "SELECT 1 FROM episodes WHERE episode_id = ? AND attempt = ? AND state IN ('finished', 'aborted')"
    left = [f"{key[0]}:{key[1]}" for key in Captures(folder).attempts() if db.execute(has_ended, key).fetchone()]
    return [f"captured turns of attempts that have ended: {_some(left)}"] if left else []


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


_PROMISES: Mapping[str, str] = {
    "attempts that run although a later one has begun": """SELECT episode_id, attempt FROM episodes e
        WHERE state IN ('running', 'prepared') AND attempt <
            (SELECT MAX(attempt) FROM episodes n WHERE n.episode_id = e.episode_id)""",
    "groups that are open although all their episodes count": """SELECT group_id FROM groups g WHERE state = 'open'
        AND size = (SELECT COUNT(*) FROM episodes e WHERE e.group_id = g.group_id AND state = 'finished'
            AND outcome = 'agent')""",
    "training groups that closed with neither a reason nor an episode that counts": """SELECT group_id FROM groups g
        WHERE state = 'closed' AND split = 'train' AND reason IS NULL AND NOT EXISTS (SELECT 1 FROM episodes e
            WHERE e.group_id = g.group_id AND e.state = 'finished' AND e.outcome = 'agent')""",
    "finished training episodes whose samples are nowhere": """SELECT episode_id, attempt FROM episodes e
        JOIN groups g USING (group_id) WHERE g.split = 'train' AND e.state = 'finished' AND e.outcome = 'agent'
        AND e.num_sampled > 0 AND NOT EXISTS (SELECT 1 FROM samples s WHERE s.episode_id = e.episode_id
            AND s.attempt = e.attempt)""",
    "closed episodes that no group names": """SELECT episode_id FROM episodes e JOIN groups g USING (group_id)
        WHERE g.episode_ids NOT LIKE '%' || json_quote(e.episode_id) || '%'""",
    "logged steps behind a trained one": """SELECT policy, step FROM batches b WHERE state = 'logged' AND EXISTS
        (SELECT 1 FROM batches t WHERE t.policy = b.policy AND t.state = 'trained' AND t.step > b.step)""",
}
