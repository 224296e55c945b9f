"""``wingbeat inspect RUN_DIR --ledger``: what a run's ledger holds, what it takes, and whether it is sound."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from wingbeat.cli.inspect_episode import shown_state
from wingbeat.cli.liveness import is_served
from wingbeat.cli.terminal import local_time
from wingbeat.dataflow.audit import audit_run
from wingbeat.dataflow.ledger_reader import LedgerReader
from wingbeat.dataflow.ledger_schema import AttemptState, BatchState
from wingbeat.dataflow.ledger_views import LedgerSizes
from wingbeat.dataflow.operators.chain import Counts

MAX_CLIENTS = 20

BATCH_STATES = {
    BatchState.LOGGED: "logged, not trained yet",
    BatchState.TRAINED: "trained",
    BatchState.ABANDONED: "abandoned by a rollback",
}


def show_ledger(console: Console, ledger: LedgerReader, run_dir: Path) -> bool:
    """Print the report.  False where the ledger contradicts itself."""
    show_states(console, ledger, run_dir)
    _show_endings(console, ledger)
    _show_clients(console, ledger)
    _show_in_doubt(console, ledger)
    _show_tokens(console, ledger)
    _show_operators(console, ledger)
    _show_batches(console, ledger)
    _show_lineages(console, ledger)
    _show_checkpoints(console, ledger)
    _show_sizes(console, ledger.sizes())
    problems = audit_run(run_dir)
    console.print("verified: no contradictions" if not problems else "the ledger contradicts itself:")
    for problem in problems:
        console.print(f"  {problem}", highlight=False, soft_wrap=True)
    return not problems


def show_states(console: Console, ledger: LedgerReader, run_dir: Path) -> None:
    """Which run it is, and its groups, attempts and samples by state."""
    summary, meta = ledger.summary(), ledger.meta()
    console.print(f"run {meta.run_id}, seed {meta.seed}: {run_dir}", highlight=False, soft_wrap=True)
    counts = Table("what", "state", "number", "tokens", title="ledger")
    for kind, states in (("groups", summary.groups), ("attempts", summary.attempts)):
        for state, number in sorted(states.items()):
            shown = state
            if kind == "attempts" and state == AttemptState.RUNNING:
                shown = shown_state(AttemptState.RUNNING, is_open=is_served(run_dir))
            counts.add_row(kind, shown, str(number), "")
    for sample in summary.samples:
        state = f"{sample.state} ({sample.reason})" if sample.reason else str(sample.state)
        counts.add_row(f"samples of {sample.policy}", state, str(sample.num_attempts), str(sample.num_tokens))
    console.print(counts)


def _show_endings(console: Console, ledger: LedgerReader) -> None:
    """Why attempts ended: only the outcome agent reaches a baseline."""
    table = Table("state", "outcome", "cause", "attempts", title="how attempts ended")
    for found in ledger.endings():
        if found.outcome or found.cause:
            table.add_row(found.state, found.outcome, found.cause or "-", str(found.num_attempts))
    if table.row_count:
        console.print(table)


def _show_clients(console: Console, ledger: LedgerReader) -> None:
    """The busiest; nothing where no client said who it is."""
    found = ledger.clients()
    table = Table("client", "attempts", "that count", "open", "sampled tokens", title="clients")
    for client in found[:MAX_CLIENTS]:
        counts = (client.num_begun, client.num_counted, client.num_open, client.num_tokens)
        table.add_row(client.client or "(unnamed)", *map(str, counts))
    if len(found) > MAX_CLIENTS:
        table.caption = f"and {len(found) - MAX_CLIENTS} more"
    if any(client.client for client in found):
        console.print(table)


def _show_in_doubt(console: Console, ledger: LedgerReader) -> None:
    """Finishes that wait for a decision elsewhere."""
    table = Table("transaction", "decider", "episode", "since", title="finishes in doubt")
    for found in ledger.in_doubt():
        name = f"{found.record.episode_id} attempt {found.record.attempt}"
        table.add_row(found.transaction_id, found.decider, name, local_time(found.prepared_s))
    if table.row_count:
        console.print(table)


def _show_tokens(console: Console, ledger: LedgerReader) -> None:
    """By tenths of the episodes: whether training sees them in the proportion in which they were sampled."""
    deciles = ledger.token_deciles()
    table = Table(
        *("policy", "tenth", "episodes", "longest", "sampled", "trained", "masked", "waiting", "discarded"),
        *("share of sampled", "share of trained"),
        title="tokens by length of the episode, shortest tenth first",
    )
    for row in deciles:
        of_policy = [other for other in deciles if other.policy == row.policy]
        reasons = ", ".join(f"{reason} {tokens}" for reason, tokens in sorted(row.discarded.items()))
        table.add_row(
            row.policy,
            *map(str, (row.decile, row.num_episodes, row.longest, row.sampled, row.trained, row.masked, row.waiting)),
            f"{sum(row.discarded.values())} ({reasons})" if reasons else "0",
            shown_share(row.sampled, sum(other.sampled for other in of_policy)),
            shown_share(row.trained, sum(other.trained for other in of_policy)),
        )
    if deciles:
        console.print(table)


def shown_share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _show_operators(console: Console, ledger: LedgerReader) -> None:
    """What each did, as of the last group that closed."""
    table = Table(
        *("policy", "operator", "episodes dropped", "their tokens", "rewards shaped", "tasks refused", "replayed"),
        title="operators",
    )
    for policy, state in sorted(ledger.load_operator_states().items()):
        for label, own in state.get("operators", {}).items():
            counts = Counts(*own["counts"])
            done = (counts.dropped, counts.dropped_tokens, counts.shaped, counts.refused, counts.replayed)
            table.add_row(policy, f"{label} (failed)" if own.get("error") else label, *map(str, done))
    if table.row_count:
        console.print(table)


def _show_lineages(console: Console, ledger: LedgerReader) -> None:
    """Where trainers did not come back to the last step."""
    table = Table("policy", "lineage", "began at", "because", title="lineages")
    for found in ledger.lineages():
        base = f"step {found.base_step} of lineage {found.base_lineage}"
        table.add_row(found.policy, str(found.lineage), base, found.reason)
    if table.row_count:
        console.print(table)


def _show_batches(console: Console, ledger: LedgerReader) -> None:
    table = Table("policy", "state", "batches", "steps", "size", title="batches")
    for found in ledger.batches():
        steps = f"{found.first_step} to {found.last_step}"
        table.add_row(
            found.policy, BATCH_STATES[found.state], str(found.num_batches), steps, shown_size(found.num_bytes)
        )
    if table.row_count:
        console.print(table)


def _show_checkpoints(console: Console, ledger: LedgerReader) -> None:
    table = Table("policy", "step", "folder", "on disk", title="checkpoints")
    for found in ledger.checkpoints():
        table.add_row(found.policy, str(found.step), found.path, "yes" if Path(found.path).exists() else "no")
    if table.row_count:
        console.print(table)


def _show_sizes(console: Console, sizes: LedgerSizes) -> None:
    table = Table("what", "size", title="on disk")
    table.add_row("ledger.sqlite", shown_size(sizes.file))
    table.add_row("  samples of finished attempts", shown_size(sizes.samples))
    table.add_row("  their token graphs", shown_size(sizes.graphs))
    table.add_row("  batches", shown_size(sizes.batches))
    table.add_row("write-ahead log", shown_size(sizes.write_ahead_log))
    table.add_row("turns of attempts without an end", shown_size(sizes.captures))
    if sizes.num_finished:
        table.add_row("ledger.sqlite per finished attempt", shown_size(round(sizes.file / sizes.num_finished)))
    console.print(table)


def shown_size(num_bytes: int) -> str:
    """Bytes in the unit that leaves at least one whole digit."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{num_bytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
