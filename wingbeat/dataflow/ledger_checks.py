"""Whether a ledger contradicts itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from wingbeat.dataflow.ledger_integrity import row_faults
from wingbeat.dataflow.ledger_lineages import read_ancestry
from wingbeat.dataflow.ledger_schema import BatchState


def contradictions(db: sqlite3.Connection) -> list[str]:
    """In words; none for every file that only the ledger wrote."""
    problems = [str(row[0]) for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
    broken_links = db.execute("PRAGMA foreign_key_check").fetchall()
    problems += [f"table {row[0]}: row {row[1]} refers to a missing {row[2]}" for row in broken_links]
    problems += row_faults(db)
    for problem, query in _CONTRADICTIONS.items():
        (count,) = db.execute(query).fetchone()
        if count:
            problems.append(f"{problem}: {count}")
    return problems + _misplaced_batches(db)


def _misplaced_batches(db: sqlite3.Connection) -> list[str]:
    """Abandoned are exactly the batches whose step no longer counts."""
    problems: list[str] = []
    for (policy,) in db.execute("SELECT DISTINCT policy FROM batches").fetchall():
        ancestry = read_ancestry(db, policy)
        wrong = sum(
            ancestry.contains(lineage, step) == (state == BatchState.ABANDONED)
            for lineage, step, state in db.execute(
                "SELECT lineage, step, state FROM batches WHERE policy = ?", (policy,)
            )
        )
        if wrong:
            problems.append(f"batches of {policy} whose state does not fit their lineage: {wrong}")
    return problems


_CONTRADICTIONS: Mapping[str, str] = {
    "prepared attempts without payload or transaction": """SELECT COUNT(*) FROM episodes WHERE state = 'prepared'
        AND (payload IS NULL OR finish_digest IS NULL OR outcome IS NULL OR transaction_id IS NULL)""",
    "prepared attempts whose transaction is decided": """SELECT COUNT(*) FROM episodes JOIN transactions
        USING (transaction_id) WHERE state = 'prepared'""",
    "prepared attempts in closed groups": """SELECT COUNT(*) FROM episodes e JOIN groups g USING (group_id)
        WHERE e.state = 'prepared' AND g.state != 'open'""",
    "running attempts in closed groups": """SELECT COUNT(*) FROM episodes e JOIN groups g USING (group_id)
        WHERE e.state = 'running' AND g.state != 'open'""",
    "attempts that count against their transaction": """SELECT COUNT(*) FROM episodes JOIN transactions
        USING (transaction_id) WHERE (state = 'finished') != (decision = 'commit')""",
    "finished attempts whose transaction is undecided": """SELECT COUNT(*) FROM episodes WHERE state = 'finished'
        AND transaction_id IS NOT NULL AND transaction_id NOT IN (SELECT transaction_id FROM transactions)""",
    "samples in a batch of another state": """SELECT COUNT(*) FROM samples s LEFT JOIN batches b USING (batch_id)
        WHERE (s.state = 'batched' AND b.state IS NOT 'logged')
        OR (s.state = 'trained' AND b.state IS NOT 'trained')""",
    "samples of attempts that did not finish": """SELECT COUNT(*) FROM samples s JOIN episodes e
        USING (episode_id, attempt) WHERE e.state IS NOT 'finished'""",
    "dropped samples without a reason": "SELECT COUNT(*) FROM samples WHERE state = 'dropped' AND reason IS NULL",
    "finished attempts without payload": """SELECT COUNT(*) FROM episodes
        WHERE state = 'finished' AND (payload IS NULL OR finish_digest IS NULL OR outcome IS NULL)""",
    "samples of evaluation episodes": """SELECT COUNT(*) FROM samples JOIN episodes USING (episode_id, attempt)
        JOIN groups USING (group_id) WHERE split IS NOT 'train'""",
    "samples whose batch does not hold them": """SELECT COUNT(*) FROM samples s WHERE s.state IN ('batched', 'trained')
        AND NOT EXISTS (SELECT 1 FROM members m WHERE m.batch_id = s.batch_id AND m.episode_id = s.episode_id
            AND m.attempt = s.attempt AND NOT m.replayed)""",
    "samples that two surviving batches train": """SELECT COUNT(*) FROM (SELECT 1 FROM members m
        JOIN batches b USING (batch_id) WHERE b.state != 'abandoned' AND NOT m.replayed
        GROUP BY b.policy, m.episode_id, m.attempt HAVING COUNT(*) > 1)""",
    "steps that two surviving batches take": """SELECT COUNT(*) FROM (SELECT 1 FROM batches WHERE state != 'abandoned'
        GROUP BY policy, step HAVING COUNT(*) > 1)""",
    "steps missing between batches": """SELECT COALESCE(SUM(missing), 0) FROM (
        SELECT MAX(step) - MIN(step) + 1 - COUNT(*) AS missing FROM batches GROUP BY policy, lineage)""",
    "lineages that do not go on where they began": """SELECT COUNT(*) FROM (SELECT MIN(step) AS first, base_step
        FROM batches JOIN lineages USING (policy, lineage) GROUP BY policy, lineage) WHERE first != base_step + 1""",
}
