"""``wingbeat ledger restore`` and what ``inspect --ledger`` says of attempts, clients and transactions."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from wingbeat.cli.main import app
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.records import BeginRecord, EpisodeRecord, GroupSpec


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """One group of three: lost, in doubt, running."""
    ledger = Ledger.open(tmp_path / "ledger.sqlite", run=RunMeta("run", seed=0))
    spec = GroupSpec("g", Task("src", "t"), Split.TRAIN, 3, ("solver",), floor_version={"solver": 0})
    ledger.record_group(spec, episode_ids=["e0", "e1", "e2"])
    for number in range(3):
        ledger.record_begin(BeginRecord(f"e{number}", 1, "g", client=f"laptop-{min(number, 1)}"))
    ledger.record_end("e0", 1, state=AttemptState.LOST, outcome=Outcome.CLIENT, cause="heartbeat_lost")
    record = EpisodeRecord("e1", 1, "g", Outcome.AGENT, "d", rewards={"solver": 1.0})
    ledger.prepare_finish(record, transaction_id="t-7", decider="https://east").result()
    return ledger


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_the_report_names_causes_clients_and_doubts(ledger: Ledger, tmp_path: Path) -> None:
    ledger.close()
    code, shown = run("inspect", str(tmp_path), "--ledger")
    assert code == 0 and "verified: no contradictions" in shown
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert ["lost", "client", "heartbeat_lost", "1"] in rows
    assert ["laptop-1", "2", "0", "2", "0"] in rows and ["laptop-0", "1", "0", "0", "0"] in rows
    assert any(row[:3] == ["t-7", "https://east", "e1 attempt 1"] for row in rows)


def test_a_damaged_ledger_is_restored_by_the_command_that_its_message_names(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger.back_up()
    code, said = run("ledger", "restore", str(tmp_path))
    assert code == 2 and "another server writes" in said
    ledger.close()
    path.write_bytes(b"garbage" * 1000)
    code, said = run("inspect", str(tmp_path), "--ledger")
    assert code == 2 and "ledger" in said
    code, said = run("ledger", "restore", str(tmp_path))
    assert code == 0, said
    assert "before the first step" in said and "ledger.damaged-1.sqlite" in said and "--resume" in said
    assert run("inspect", str(tmp_path), "--ledger")[0] == 0


def test_without_a_copy_nothing_is_touched(ledger: Ledger, tmp_path: Path) -> None:
    ledger.close()
    before = (tmp_path / "ledger.sqlite").read_bytes()
    code, said = run("ledger", "restore", str(tmp_path))
    assert code == 2 and "ledger_backup_s" in said
    assert (tmp_path / "ledger.sqlite").read_bytes() == before


def test_a_sound_ledger_is_not_thrown_away(ledger: Ledger, tmp_path: Path) -> None:
    ledger.back_up()
    ledger.record_end("e2", 1, state=AttemptState.LOST, outcome=Outcome.CLIENT, cause="heartbeat_lost").result()
    ledger.close()
    before = (tmp_path / "ledger.sqlite").read_bytes()
    code, said = run("ledger", "restore", str(tmp_path))
    assert code == 2 and "is sound" in said and "--force" in said
    assert (tmp_path / "ledger.sqlite").read_bytes() == before
    code, said = run("ledger", "restore", str(tmp_path), "--force")
    assert code == 0 and "seconds ago" in said, said
    (tmp_path / "ledger.sqlite").unlink()  # killed within a restore
    assert run("ledger", "restore", str(tmp_path))[0] == 0
    code, said = run("ledger", "restore", str(tmp_path / "nope"))
    assert code == 2 and "no folder" in said


def test_who_inspects_a_damaged_ledger_is_told_the_way_out(ledger: Ledger, tmp_path: Path) -> None:
    ledger.back_up()
    ledger.close()
    (tmp_path / "ledger.sqlite").write_bytes(b"garbage" * 1000)
    code, said = run("inspect", str(tmp_path))
    assert code == 2 and "is damaged" in said and "wingbeat ledger restore" in said
