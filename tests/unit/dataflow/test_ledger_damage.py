"""What bit rot, torn files and lost pages do to a ledger: it is found and named, or it does not matter."""

from __future__ import annotations

import random
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from wingbeat.core.errors import LedgerCorrupt, SetupError
from wingbeat.core.samples import TrainingBatch
from wingbeat.dataflow import ledger_opening
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_backup import restore
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.dataflow.records import BeginRecord, Dropped, Shaping

NUM_FLIPS = 40


def fill(ledger: Ledger, make) -> None:
    """A trained, a logged and a waiting group, one that runs, a dropped member, shaping, operators, a lineage."""
    for i in range(4):
        ids = [f"g{i}-0", f"g{i}-1"]
        ledger.record_group(
            make.spec(f"g{i}"), episode_ids=ids, dealer_state={"seed": i, "sources": {"src": {"digest": "d"}}}
        )
        for n, episode_id in enumerate(ids[: 1 if i == 3 else 2]):
            ledger.record_begin(BeginRecord(episode_id, 1, f"g{i}", key_digest=f"k{i}{n}"))
            record = make.record(episode_id, group_id=f"g{i}", reward=float(n), versions=tuple(range(30)))
            ledger.record_finish(replace(record, metrics={"turns": 2.0}, graph=b"a graph" * 60))
        if i < 3:
            shaping = [Shaping(ids[0], 1, "solver", "", 0.25)]
            ledger.close_group(f"g{i}", shaping=shaping, operators={"solver": {"seen": i}})
    for step, group in ((1, "g0"), (2, "g1")):
        members = tuple(make.samples(f"{group}-{n}", group_id=group, reward=float(n)) for n in range(2))
        ledger.log_batch(TrainingBatch(f"solver-{step}", "solver", step, members, step), group_ids=[group])
    ledger.begin_lineage("solver", base_lineage=0, base_step=1, reason="lost")
    members = (make.samples("g1-0", group_id="g1"),)
    ledger.log_batch(TrainingBatch("solver-1.2", "solver", 2, members, 2, lineage=1), group_ids=["g1"])
    ledger.mark_dropped("solver", dropped=[Dropped("g1-1", 1, "stale")]).result()


def what_trains(ledger) -> tuple:
    """All that a continued run takes from its ledger."""
    return (
        ledger.unconsumed("solver"),
        ledger.open_groups(),
        ledger.batches_after("solver", 0),
        {n: (one.base_lineage, one.base_step) for n, one in ledger.ancestry("solver").lineages.items()},
        ledger.load_dealer_state(),
        ledger.load_operator_states(),
        ledger.summary().trained_step,
        ledger.meta(),
    )


@pytest.fixture
def whole(tmp_path, open_ledger, make) -> tuple[Path, tuple]:
    ledger = open_ledger()
    fill(ledger, make)
    ledger.close()
    path = tmp_path / "ledger.sqlite"
    ledger = open_ledger()
    assert ledger.verify() == []
    expected = what_trains(ledger)
    assert len(expected[0]) == 1 and len(expected[2]) == 2
    ledger.close()
    return path, expected


def read(path: Path, run) -> tuple:
    with Ledger.open(path, run=run) as ledger:
        return what_trains(ledger)


def test_no_flipped_byte_ever_changes_what_trains(whole, tmp_path, make):
    path, expected = whole
    good, rng = path.read_bytes(), random.Random(5)
    mark = path.with_name("ledger.sqlite.lock").read_bytes()
    found = 0
    for _ in range(NUM_FLIPS):
        folder = tmp_path / "damaged"
        folder.mkdir()
        damaged = bytearray(good)
        for _ in range(rng.choice((1, 1, 1, 8))):
            damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        copy = folder / path.name
        copy.write_bytes(damaged)
        copy.with_name("ledger.sqlite.lock").write_bytes(mark)
        try:
            assert read(copy, make.run) == expected
        except SetupError as error:
            found += 1
            assert str(copy) in str(error) or "ledger" in str(error)
        shutil.rmtree(folder)
    assert found, "most bytes are free space; not all are"


@pytest.mark.parametrize("damage", ["truncated", "empty", "zeroed page"])
def test_a_torn_file_is_named_with_its_way_out(whole, make, damage):
    path, _ = whole
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        del data[len(data) // 2 :]
    elif damage == "empty":
        data.clear()
    else:
        data[3 * 4096 : 4 * 4096] = bytes(4096)
    path.write_bytes(data)
    with pytest.raises(LedgerCorrupt, match=r"damaged: .*there is no backup"):
        read(path, make.run)


def test_writes_to_a_damaged_ledger_fail_by_name(whole, open_ledger, make):
    path, _ = whole
    ledger = open_ledger()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE episodes SET payload = x'00' WHERE episode_id = 'g3-0'")
    db.close()
    with pytest.raises(LedgerCorrupt, match=r"ledger\.sqlite is damaged.*episode g3-0 attempt 1"):
        ledger.open_groups()
    assert any("episodes: 1 rows" in problem for problem in ledger.verify())
    with pytest.raises(LedgerCorrupt, match="episodes: 1 rows"):
        ledger.back_up()


def test_a_damaged_token_graph_is_found_by_whoever_looks(whole, open_ledger):
    path, expected = whole
    ledger = open_ledger()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE episodes SET graph = x'00' WHERE episode_id = 'g0-0'")
    db.close()
    assert what_trains(ledger) == expected, "graphs do not train"
    with pytest.raises(LedgerCorrupt, match="the token graph of episode g0-0 attempt 1"):
        ledger.episode("g0-0")
    assert any("1 token graphs" in problem for problem in ledger.verify())
    with pytest.raises(LedgerCorrupt, match="1 token graphs"):
        ledger.back_up()


def test_a_row_that_a_run_goes_on_from_is_checked_at_the_start(whole, open_ledger):
    path, _ = whole
    with sqlite3.connect(path) as db:
        db.execute("UPDATE lineages SET base_step = 0")
    db.close()
    with pytest.raises(LedgerCorrupt, match="table lineages: 1 rows are not what was written"):
        open_ledger()


def test_a_backup_is_made_while_the_run_writes_and_restores_it(whole, open_ledger, make):
    path, expected = whole
    ledger = open_ledger()
    made = ledger.back_up()
    assert made is not None and made.path.name == "ledger.backup.sqlite"
    for name in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.backup.sqlite"):
        assert path.with_name(name).stat().st_mode & 0o777 == 0o600, name
    ledger.record_finish(make.record("g3-1", group_id="g3")).result()
    with pytest.raises(SetupError, match="another server writes"):
        restore(path)
    ledger.close()
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(LedgerCorrupt, match="wingbeat ledger restore"):
        read(path, make.run)
    kept, manifest = restore(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert kept.name == "ledger.damaged-1.sqlite" and manifest.trained_step == {"solver": 1}
    assert kept.stat().st_size == 5000
    waiting, still_open, *rest = read(path, make.run)
    assert (waiting, still_open) == ((), ()), "a step after the copy may have trained them"
    assert rest[0] == expected[2] and rest[1] == expected[3]
    assert rest[2]["sources"]["src"]["returned"] == ["t1"], "the task of the group that was open is dealt again"
    with Ledger.open(path, run=make.run) as ledger:
        assert ledger.verify() == []
        reasons = {v.group.id: v.samples[0].reason for v in ledger.attempts() if v.samples}
    assert reasons["g2"] == reasons["g3"] == "maybe_trained"


def test_a_copy_does_not_bring_back_what_was_deleted(whole, open_ledger, make):
    path, _ = whole
    ledger = open_ledger()
    ledger.back_up()
    ledger.close()
    deletion = '{"t": 1.0, "event": "collected_deleted", "episode_id": "%s"}'
    events = [deletion % "g2-0", deletion % "nobody", "{torn " + deletion % "g2-1", '{"event": "collected_deleted']
    path.with_name("events.jsonl").write_text("\n".join(events))
    restore(path)
    with Ledger.open(path, run=make.run) as ledger:
        assert not ledger.episode("g2-0")[0].record.graph and ledger.episode("g2-1")[0].record.graph
        assert ledger.verify() == []


def test_a_restoring_that_is_killed_never_leaves_a_ledger_without_its_last_writes(
    whole, open_ledger, make, monkeypatch
):
    path, _ = whole
    ledger = open_ledger()
    ledger.back_up()
    ledger.close()
    path.with_name("ledger.sqlite-wal").write_bytes(b"the last writes")
    rename = Path.rename

    def once(self: Path, target: Path) -> None:
        rename(self, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", once)
        with pytest.raises(KeyboardInterrupt):
            restore(path)
    with pytest.raises(LedgerCorrupt, match="wingbeat ledger restore"):
        open_ledger()
    restore(path)
    with Ledger.open(path, run=make.run) as ledger:
        assert ledger.verify() == []


def test_a_damaged_ledger_never_replaces_its_last_good_copy(whole, open_ledger, make):
    path, expected = whole
    ledger = open_ledger()
    ledger.back_up()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE groups SET size = 99")
    db.close()
    with pytest.raises(LedgerCorrupt, match="go"):
        ledger.back_up()
    ledger.close()
    restore(path)
    assert read(path, make.run)[2] == expected[2]


def test_a_damaged_backup_is_refused_and_changes_nothing(whole, open_ledger, make):
    path, expected = whole
    ledger = open_ledger()
    backup = ledger.back_up().path
    ledger.close()
    backup.write_bytes(backup.read_bytes()[:-1])
    with pytest.raises(LedgerCorrupt, match="damaged, too"):
        restore(path)
    backup.with_suffix(".json").unlink()
    with pytest.raises(SetupError, match="no backup"):
        restore(path)
    assert read(path, make.run) == expected


def test_a_stopped_backup_leaves_the_one_before(whole, open_ledger):
    ledger = open_ledger()
    made = ledger.back_up()
    before = made.path.read_bytes()
    assert ledger.back_up(stop=lambda: True) is None
    assert made.path.read_bytes() == before
    assert not list(made.path.parent.glob(".*tmp"))


def test_how_it_is_checked_depends_on_how_it_was_closed(whole, open_ledger, monkeypatch):
    path, _ = whole
    monkeypatch.setattr(ledger_opening, "WHOLE_CHECK_BYTES", 0)
    closed = open_ledger()
    assert (closed.check.why, closed.check.is_whole) == ("", False)
    path.with_name("ledger.sqlite.lock").write_bytes(b"")  # as a killed server leaves it
    closed.close()
    path.with_name("ledger.sqlite.lock").write_bytes(b"")
    killed = open_ledger()
    assert killed.check.is_whole and "did not close" in killed.check.why
    killed.close()
    path.write_bytes(path.read_bytes() + bytes(4096))
    changed = open_ledger()
    assert changed.check.is_whole and "size has changed" in changed.check.why


def test_a_reader_names_damage_too(whole):
    path, _ = whole
    data = bytearray(path.read_bytes())
    data[2 * 4096 : 12 * 4096] = bytes(10 * 4096)
    path.write_bytes(data)
    with pytest.raises(SetupError, match=r"damaged|cannot read"), open_read_only(path) as reader:
        what_trains(reader)
