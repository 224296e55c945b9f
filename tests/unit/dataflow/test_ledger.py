"""The ledger: durability, state transitions, idempotency and resuming."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import msgspec
import pytest

from wingbeat.core.errors import (
    ConflictError,
    EpisodeClosed,
    IdempotencyConflict,
    NotFoundError,
    SetupError,
    UnavailableError,
    UnknownEpisode,
)
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.evaluation import EvaluationResult, EvaluationSpec
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_migrations import migrate, schema_version
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.dataflow.ledger_schema import SCHEMA_VERSION, AttemptState, SampleState
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.records import BeginRecord, Dropped, Shaping

IDS = ("g-0", "g-1")


def batch_of(*records, step: int = 1, batch_id: str = "b1", seed: int = 3) -> TrainingBatch:
    return TrainingBatch(batch_id, "solver", step, tuple(s for r in records for s in r.samples), seed)


@pytest.fixture
def ledger(open_ledger, make) -> Ledger:
    """A ledger with one open group ``g`` of two."""
    ledger = open_ledger()
    ledger.record_group(make.spec(), episode_ids=IDS).result()
    return ledger


@pytest.fixture
def finished(ledger, make):
    """... whose two members finished with rewards 0 and 1 and which has closed."""
    records = [make.record(episode_id, reward=float(i)) for i, episode_id in enumerate(IDS)]
    for record in records:
        ledger.record_finish(record)
    ledger.close_group("g").result()
    return records


def test_finish_survives_and_reads_back_equal(ledger, open_ledger, make):
    ledger.record_begin(BeginRecord("g-0", 1, group_id="g", label="run-a")).result()
    record = replace(
        make.record(), metrics={"turns": 2.0}, message="ok", label="run-a", num_turns=2, graph=b"graph" * 9
    )
    assert ledger.record_finish(record).result() is True
    ledger.close()
    again = open_ledger()
    (view,) = again.episode("g-0")
    assert view.record == record and view.group == make.spec() and view.label == "run-a"
    assert again.verify() == []


def test_same_finish_is_a_duplicate_and_another_body_conflicts(ledger, make):
    first = ledger.record_finish(make.record())
    second = ledger.record_finish(make.record())
    third = ledger.record_finish(make.record(digest="other", reward=5.0))
    assert (first.result(), second.result()) == (True, False)
    with pytest.raises(IdempotencyConflict, match="another body"):
        third.result()
    assert ledger.episode("g-0")[0].record.rewards == {"solver": 1.0}
    assert ledger.summary().attempts == {"finished:agent": 1}


def test_refused_job_does_not_disturb_its_neighbours(ledger, make):
    futures = [ledger.record_finish(make.record(i, group_id=g)) for i, g in [("g-0", "g"), ("x", "no"), ("g-1", "g")]]
    assert futures[0].result() and futures[2].result()
    with pytest.raises(NotFoundError, match="record_group comes first"):
        futures[1].result()


def test_finish_after_close_or_for_a_superseded_attempt_is_refused(ledger, make):
    ledger.record_begin(BeginRecord("g-0", 1, group_id="g"))
    ledger.record_end("g-0", 1, state=AttemptState.LOST, outcome=Outcome.CLIENT)
    ledger.record_begin(BeginRecord("g-0", 2, group_id="g")).result()
    with pytest.raises(ConflictError, match="attempt 2 is running"):
        ledger.record_finish(make.record()).result()
    assert ledger.record_finish(make.record(attempt=2)).result()
    with pytest.raises(ConflictError, match="attempt 2 is finished"):
        ledger.record_finish(make.record(attempt=3)).result()
    with pytest.raises(ConflictError, match="cannot begin"):
        ledger.record_begin(BeginRecord("g-0", 2, group_id="g")).result()
    assert ledger.close_group("g").result() and not ledger.close_group("g").result()
    with pytest.raises(EpisodeClosed, match="has closed"):
        ledger.record_finish(make.record("g-1")).result()


def test_lost_attempts_may_finish_late_and_aborted_ones_may_not(ledger, make):
    for episode_id, state in zip(IDS, (AttemptState.LOST, AttemptState.ABORTED), strict=True):
        ledger.record_begin(BeginRecord(episode_id, 1, group_id="g"))
        ledger.record_end(episode_id, 1, state=state, outcome=Outcome.CLIENT, message="gone").result()
    assert ledger.record_finish(make.record("g-0")).result()
    with pytest.raises(EpisodeClosed, match="aborted"):
        ledger.record_finish(make.record("g-1")).result()
    with pytest.raises(NotFoundError):
        ledger.record_end("g-1", 2, state=AttemptState.LOST, outcome=Outcome.CLIENT).result()
    with pytest.raises(ValueError, match="expected lost, aborted"):
        ledger.record_end("g-1", 1, state=AttemptState.FINISHED, outcome=Outcome.CLIENT)
    with pytest.raises(ValueError, match="record_finish"):
        ledger.record_end("g-1", 1, state=AttemptState.LOST, outcome=Outcome.AGENT)


def test_batch_goes_from_finished_to_trained(ledger, finished):
    batch = batch_of(*finished)
    assert ledger.log_batch(batch, group_ids=["g"]).result() is True
    assert ledger.log_batch(batch, group_ids=["g"]).result() is False
    assert ledger.unconsumed("solver") == ()
    assert ledger.batches_after("solver", 0) == [batch] and ledger.batches_after("solver", 1) == []
    advantages = {"g-0:1:": -0.5, "g-1:1:": 0.5}
    assert ledger.mark_trained("solver", step=1, metrics={"loss": 0.1}, advantages=advantages).result() is True
    assert ledger.mark_trained("solver", step=1, metrics={}, advantages={}).result() is False
    (status,) = ledger.episode("g-1")[0].samples
    assert (status.state, status.step, dict(status.advantages)) == (SampleState.TRAINED, 1, {"": 0.5})
    assert ledger.batches_after("solver", 0) == [batch]
    assert ledger.summary().trained_step == {"solver": 1}
    assert ledger.verify() == []


def test_samples_train_at_most_once(ledger, finished):
    ledger.log_batch(batch_of(finished[0]), group_ids=["g"]).result()
    with pytest.raises(ConflictError, match="g-0 attempt 1 are batched"):
        ledger.log_batch(batch_of(*finished, step=2, batch_id="b2"), group_ids=["g"]).result()
    assert [m.episode_id for g in ledger.unconsumed("solver") for m in g.members] == ["g-1"]
    assert len(ledger.batches_after("solver", 0)) == 1


def test_batches_are_unique_and_without_gaps(ledger, finished):
    ledger.log_batch(batch_of(finished[0]), group_ids=["g"]).result()
    with pytest.raises(IdempotencyConflict, match="another content"):
        ledger.log_batch(batch_of(finished[0], seed=4), group_ids=["g"]).result()
    for step in (1, 3):
        with pytest.raises(ConflictError, match="expected a batch of step 2"):
            ledger.log_batch(batch_of(finished[1], step=step, batch_id="b2"), group_ids=["g"]).result()
    with pytest.raises(NotFoundError, match="log_batch comes first"):
        ledger.mark_trained("solver", step=2, metrics={}, advantages={}).result()


def test_drops_are_final_and_counted_by_reason(ledger, finished):
    ledger.log_batch(batch_of(finished[0]), group_ids=["g"], dropped=[Dropped("g-1", 1, "stale")]).result()
    with pytest.raises(ConflictError, match="dropped"):
        ledger.mark_dropped("solver", dropped=[Dropped("g-0", 1, "x"), Dropped("g-1", 1, "x")]).result()
    with pytest.raises(NotFoundError):
        ledger.mark_dropped("other", dropped=[Dropped("g-0", 1, "x")]).result()
    counts = {(c.state, c.reason): (c.num_attempts, c.num_tokens) for c in ledger.summary().samples}
    assert counts == {(SampleState.BATCHED, None): (1, 2), (SampleState.DROPPED, "stale"): (1, 2)}
    with pytest.raises(ConflictError, match="batched"):
        ledger.mark_dropped("solver", dropped=[Dropped("g-0", 1, "late")]).result()
    assert ledger.verify() == []


def test_closing_saves_what_operators_made_of_the_group(ledger, open_ledger, make):
    records = [make.record(episode_id, reward=float(i)) for i, episode_id in enumerate(IDS)]
    for record in records:
        ledger.record_finish(replace(record, metrics={"turns": 3.0}))
    shaping = [Shaping("g-1", 1, "solver", "", -0.25), Shaping("g-1", 1, "solver", "", -0.5)]
    closing = {
        "dropped": {"solver": [Dropped("g-0", 1, "too_long")]},
        "shaping": shaping,
        "operators": {"solver": {"ewma": {"t1": 0.5}}},
    }
    assert ledger.close_group("g", **closing).result() is True
    assert ledger.close_group("g", **closing, reason="again").result() is False
    ledger.close()
    again = open_ledger()
    (ready,) = again.unconsumed("solver")
    (member,) = ready.members
    assert (member.episode_id, member.reward, member.shaping, member.shaped_reward) == ("g-1", 1.0, -0.75, 0.25)
    assert ready.task == make.spec().task and ready.metrics == {("g-1", 1): {"turns": 3.0}}
    assert again.load_operator_states() == {"solver": {"ewma": {"t1": 0.5}}}
    counts = {(c.state, c.reason): c.num_attempts for c in again.summary().samples}
    assert counts == {(SampleState.DROPPED, "too_long"): 1, (SampleState.FINISHED, None): 1}
    assert again.verify() == []


def test_a_close_that_is_refused_saves_nothing(ledger, make):
    ledger.record_finish(make.record())
    for wrong in ({"dropped": {"solver": [Dropped("g-1", 1, "x")]}}, {"shaping": [Shaping("x", 1, "solver", "", 1.0)]}):
        with pytest.raises(NotFoundError, match="no finished samples"):
            ledger.close_group("g", **wrong, operators={"solver": {"a": 1}}).result()
    assert ledger.load_operator_states() == {} and len(ledger.open_groups()) == 1


def test_replayed_members_stay_trained_and_masked_tokens_are_counted(ledger, finished):
    ledger.log_batch(batch_of(finished[0]), group_ids=["g"])
    ledger.mark_trained("solver", step=1, metrics={}, advantages={}).result()
    batch = batch_of(*finished, step=2, batch_id="b2")
    masked = tuple(msgspec.structs.replace(e, masked=i) for i, e in enumerate(batch.episodes))
    batch = msgspec.structs.replace(batch, episodes=masked, replayed=(("g-0", 1),))
    assert ledger.log_batch(batch, group_ids=["g"]).result() is True
    statuses = [ledger.episode(i)[0].samples[0] for i in IDS]
    assert [(s.state, s.step) for s in statuses] == [(SampleState.TRAINED, 1), (SampleState.BATCHED, 2)]
    assert ledger.mark_trained("solver", step=2, metrics={}, advantages={}).result()
    assert ledger.verify() == []


def test_failures_are_kept_but_never_train(ledger, make):
    ledger.record_finish(make.record(outcome=Outcome.ENVIRONMENT)).result()
    ledger.close_group("g", reason="nobody finished").result()
    assert ledger.unconsumed("solver") == ()
    (count,) = ledger.summary().samples
    assert (count.state, count.reason, count.num_tokens) == (SampleState.DROPPED, "outcome_environment", 2)


def test_evaluation_episodes_have_no_samples_to_train(ledger, make):
    ledger.record_group(make.spec("e", split=Split.EVAL), episode_ids=["e-0", "e-1"])
    ledger.record_finish(make.record("e-0", group_id="e")).result()
    assert ledger.summary().samples == () and ledger.episode("e-0")[0].record is not None
    assert ledger.verify() == []


def test_unconsumed_refills_a_buffer_with_closed_groups_only(ledger, finished, make):
    ledger.record_group(make.spec("h", floor=4), episode_ids=["h-0", "h-1"])
    ledger.record_finish(make.record("h-0", group_id="h", versions=(5,))).result()
    (ready,) = ledger.unconsumed("solver")
    assert (ready.group_id, ready.floor_version, ready.size) == ("g", 0, 2)
    assert ready.members == tuple(s for r in finished for s in r.samples)
    assert ledger.unconsumed("other") == ()


def test_open_groups_restore_into_a_book(ledger, open_ledger, open_book, make):
    ledger.record_finish(make.record("g-0"))
    ledger.record_begin(BeginRecord("g-1", 1, group_id="g"))
    ledger.record_end("g-1", 1, state=AttemptState.LOST, outcome=Outcome.CLIENT)
    ledger.record_begin(BeginRecord("g-1", 2, group_id="g")).result()
    ledger.close()
    again = open_ledger()
    (opened,) = again.open_groups()
    assert [(slot.running, slot.num_failures) for slot in opened.slots] == [(None, 0), (2, 1)]
    assert again.interrupt_running(keep=[("g-1", 2)]).result() == 0
    assert again.interrupt_running().result() == 1  # nobody took it up
    assert [v.state for v in again.episode("g-1")] == [AttemptState.LOST, AttemptState.INTERRUPTED]
    with pytest.raises(EpisodeClosed, match="interrupted"):
        again.record_finish(make.record("g-1", 2)).result()
    (opened,) = again.open_groups()
    book = open_book(max_attempts=2)
    book.restore(opened.spec, slots=opened.slots)
    ticket = book.take("g")
    assert (ticket.episode_id, ticket.attempt) == ("g-1", 3)
    book.begin("g-1", 3)
    again.record_begin(BeginRecord("g-1", 3, group_id="g"))
    again.record_finish(make.record("g-1", 3)).result()
    book.finish("g-1", 3, make.record("g-1", 3))
    (closed,) = book.closed()
    assert [(r.episode_id, r.attempt) for r in closed.finished] == [("g-0", 1), ("g-1", 3)]


def test_dealer_state_is_saved_with_its_group(ledger, open_ledger, make):
    assert ledger.load_dealer_state() is None
    ledger.record_group(make.spec("h"), episode_ids=["h-0", "h-1"], dealer_state={"seed": 1}).result()
    with pytest.raises(ConflictError):
        ledger.record_group(make.spec("h"), episode_ids=["h-0", "h-1"], dealer_state={"seed": 2}).result()
    assert ledger.load_dealer_state() == {"seed": 1}
    assert ledger.summary().num_tasks == 1


def test_checkpoints_and_evaluations_read_back(ledger):
    for step in (2, 4):
        ledger.record_checkpoint("solver", step=step, path=f"/c/{step}").result()
    assert [(c.step, c.path) for c in ledger.checkpoints("solver")] == [(4, "/c/4"), (2, "/c/2")]
    result = EvaluationResult(EvaluationSpec("e", "solver", 2), False, 2, 1, {"failed": 1}, 0.5, None, {"t": (0.5,)})
    ledger.record_evaluation(result)
    done = replace(result, done=True, stderr=0.25)
    ledger.record_evaluation(done).result()
    assert ledger.evaluations() == (done,)


def test_readers_see_a_live_ledger_and_cannot_write(ledger, tmp_path, finished):
    with open_read_only(tmp_path / "ledger.sqlite") as reader:
        assert reader.meta() == ledger.meta() == RunMeta("run-1", seed=7, config='{"run":{}}')
        assert reader.summary() == ledger.summary()
        ledger.log_batch(batch_of(*finished), group_ids=["g"]).result()
        assert len(reader.batches_after("solver", 0)) == 1
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader._rows("DELETE FROM meta")
        with pytest.raises(UnknownEpisode):
            reader.episode("nobody")


def test_second_writer_is_refused_until_the_first_closes(ledger, tmp_path, make):
    with pytest.raises(SetupError, match="another server"):
        Ledger.open(tmp_path / "ledger.sqlite", run=make.run)
    ledger.close()
    ledger.close()
    Ledger.open(tmp_path / "ledger.sqlite", run=make.run).close()


def test_nothing_is_recorded_after_close(ledger, make):
    pending = ledger.record_finish(make.record())
    ledger.close()
    assert pending.result() is True
    with pytest.raises(UnavailableError, match="closed"):
        ledger.record_finish(make.record("g-1"))


@pytest.mark.parametrize("run", [RunMeta("run-2", seed=7), RunMeta("run-1", seed=8)])
def test_another_run_is_refused(ledger, tmp_path, run):
    ledger.close()
    with pytest.raises(SetupError, match="choose another run directory"):
        Ledger.open(tmp_path / "ledger.sqlite", run=run)


def test_newer_schema_is_refused_with_a_hint(ledger, tmp_path, make):
    ledger.close()
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        newer = "UPDATE meta SET value = ?, checksum = NULL WHERE key = 'schema_version'"
        db.execute(newer, (str(SCHEMA_VERSION + 1),))
    db.close()
    for attempt in (lambda: open_read_only(path), lambda: Ledger.open(path, run=make.run)):
        with pytest.raises(SetupError, match="upgrade Wingbeat"):
            attempt()


def test_files_that_are_no_ledgers_are_refused(tmp_path, make):
    with pytest.raises(SetupError, match="found none"):
        open_read_only(tmp_path / "nothing.sqlite")
    with pytest.raises(SetupError, match="create it first"):
        Ledger.open(tmp_path / "no" / "ledger.sqlite", run=make.run)
    text = tmp_path / "text.sqlite"
    text.write_text("not a database, but long enough to look like one" * 100)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE songs (title TEXT)")
    db.close()
    stranger = "expected a Wingbeat ledger"
    for path, opened, read in (
        (text, "SQLite cannot open it", "is damaged: file is not a database"),
        (other, stranger, stranger),
    ):
        with pytest.raises(SetupError, match=opened):
            Ledger.open(path, run=make.run)
        with pytest.raises(SetupError, match=read):
            open_read_only(path)


def test_migrations_run_in_order_and_all_or_nothing():
    db = sqlite3.connect(":memory:", isolation_level=None)
    migrate(db)
    now, then = SCHEMA_VERSION, SCHEMA_VERSION + 2
    steps = {
        now: lambda c: c.execute("CREATE TABLE extra (x)"),
        now + 1: lambda c: c.execute("INSERT INTO extra VALUES (1)"),
    }
    failing = steps | {now + 1: lambda c: c.execute("INSERT INTO missing VALUES (1)")}
    with pytest.raises(sqlite3.OperationalError):
        migrate(db, latest=then, migrations=failing)
    assert schema_version(db) == now
    migrate(db, latest=then, migrations=steps)
    assert schema_version(db) == then and db.execute("SELECT x FROM extra").fetchall() == [(1,)]
    db.close()


def test_attempts_come_in_order_of_their_beginning_by_split(ledger, finished, make):
    ledger.record_group(make.spec("e", split=Split.EVAL), episode_ids=("a-first-by-name",))
    ledger.record_begin(BeginRecord("a-first-by-name", 1, group_id="e"))
    ledger.record_end("a-first-by-name", 1, state=AttemptState.LOST, outcome=Outcome.TIMEOUT, message="late")
    ledger.record_begin(BeginRecord("a-first-by-name", 2, group_id="e")).result()
    found = [(view.episode_id, view.attempt, view.state, view.outcome, view.message) for view in ledger.attempts()]
    assert found == [
        ("g-0", 1, AttemptState.FINISHED, Outcome.AGENT, ""),
        ("g-1", 1, AttemptState.FINISHED, Outcome.AGENT, ""),
        ("a-first-by-name", 1, AttemptState.LOST, Outcome.TIMEOUT, "late"),
        ("a-first-by-name", 2, AttemptState.RUNNING, None, ""),
    ]
    assert [view.attempt for view in ledger.attempts(split=Split.EVAL)] == [1, 2]
    assert [view.record for view in ledger.attempts(split=Split.TRAIN)] == finished


def test_batches_and_checkpoints_are_listed_over_all_policies(ledger, finished):
    ledger.log_batch(batch_of(finished[0]), group_ids=["g"])
    ledger.mark_trained("solver", step=1, metrics={}, advantages={})
    ledger.log_batch(batch_of(finished[1], step=2, batch_id="b2"), group_ids=["g"])
    for policy, step in (("solver", 1), ("solver", 2), ("judge", 5)):
        ledger.record_checkpoint(policy, step=step, path=f"{policy}-{step}").result()
    counts = [(found.state, found.num_batches, found.first_step, found.last_step) for found in ledger.batches()]
    assert counts == [("trained", 1, 1, 1), ("logged", 1, 2, 2)]
    assert [(c.policy, c.step) for c in ledger.checkpoints()] == [("judge", 5), ("solver", 2), ("solver", 1)]
    assert [c.path for c in ledger.checkpoints("solver")] == ["solver-2", "solver-1"]
    assert ledger.sizes().batches == sum(found.num_bytes for found in ledger.batches()) > 0


def test_sizes_add_up(ledger, make):
    empty = ledger.sizes()
    assert (empty.num_finished, empty.samples, empty.graphs, empty.batches, empty.captures) == (0, 0, 0, 0, 0)
    ledger.record_begin(BeginRecord("g-1", 1, group_id="g")).result()
    ledger.capture_turn("g-1", 1, b"x" * 1000)
    ledger.record_finish(replace(make.record("g-0"), graph=b"graph" * 9)).result()
    sizes = ledger.sizes()
    assert sizes.num_finished == 1 and sizes.samples > 0 and sizes.graphs > 0 and sizes.write_ahead_log > 0
    assert 1000 < sizes.captures < 1200 and sizes.file > 0


def test_verify_names_contradictions(ledger, finished, tmp_path):
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("UPDATE samples SET state = 'batched' WHERE episode_id = 'g-0'")
    db.close()
    with open_read_only(tmp_path / "ledger.sqlite") as reader:
        assert reader.verify() == [
            "samples in a batch of another state: 1",
            "samples whose batch does not hold them: 1",
        ]
