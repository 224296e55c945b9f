"""``wingbeat export`` and ``wingbeat inspect --ledger``, on a ledger that the code of a run wrote."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bench.recorded import POLICY, merged_batch, record_group, write_tokenizer
from wingbeat.cli.ledger_report import shown_size
from wingbeat.cli.main import app
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.records import BeginRecord, EpisodeRecord, GroupSpec
from wingbeat.tracking import ChatTemplate, EpisodeGraph
from wingbeat.tracking.serialize import dump_graph, dump_turn


@dataclass(frozen=True)
class Run:
    folder: Path
    graphs: list[EpisodeGraph]

    def rows(self, target: Path, *options: str) -> list[dict[str, Any]]:
        done = self.invoke("export", "--episodes", str(target), *options)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in target.read_bytes().splitlines()]

    def invoke(self, command: str, *options: str) -> Result:
        return CliRunner().invoke(app, [command, str(self.folder), *options])


def spec(group_id: str, split: Split) -> GroupSpec:
    floors = {POLICY: 0} if split is Split.TRAIN else {}
    return GroupSpec(group_id, Task("src", f"task-{group_id}", {"x": [1]}), split, 4, (POLICY,), floor_version=floors)


def record_of(graph: EpisodeGraph, samples: Any, *, group_id: str) -> EpisodeRecord:
    return EpisodeRecord(
        episode_id=graph.episode_id,
        attempt=1,
        group_id=group_id,
        outcome=Outcome.AGENT,
        finish_digest="digest",
        rewards={POLICY: samples.reward},
        metrics={"tools": 9.0},
        samples=(samples,),
        graph=dump_graph(graph),
        num_turns=graph.num_turns,
        created_s=5.0,
        finished_s=6.0,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two trained episodes, a lost one with its turns, one that timed out, and one of an evaluation."""
    folder = tmp_path_factory.mktemp("run")
    write_tokenizer(folder)
    graphs = record_group("single", episodes=4, seed=1, template=ChatTemplate.load(folder))
    first, second, lost, scored = graphs
    batch = merged_batch(graphs)
    with Ledger.open(folder / "ledger.sqlite", run=RunMeta("run-1", seed=7), clock=lambda: 5.0) as ledger:
        ids = [first.episode_id, second.episode_id, lost.episode_id, "timed-out"]
        ledger.record_group(spec("g", Split.TRAIN), episode_ids=ids)
        ledger.record_group(spec("e", Split.EVAL), episode_ids=[scored.episode_id])
        for episode_id in ids:
            ledger.record_begin(BeginRecord(episode_id, 1, group_id="g", label="mine")).result()
        for turn in lost.turns[:3]:
            ledger.capture_turn(lost.episode_id, 1, dump_turn(lost, turn))
        ledger.record_end(lost.episode_id, 1, state=AttemptState.LOST, outcome=Outcome.CLIENT, message="no heartbeat")
        ledger.record_end("timed-out", 1, state=AttemptState.ABORTED, outcome=Outcome.TIMEOUT)
        for graph, samples in zip(graphs[:2], batch.episodes[:2], strict=True):
            ledger.record_finish(record_of(graph, samples, group_id="g"))
        ledger.record_finish(record_of(scored, batch.episodes[3], group_id="e"))
        ledger.close_group("g")
        ledger.log_batch(TrainingBatch("b1", POLICY, 1, batch.episodes[:2], 0), group_ids=["g"])
        advantages = {f"{first.episode_id}:1:": -0.5, f"{second.episode_id}:1:": 0.5}
        ledger.mark_trained(POLICY, step=1, metrics={}, advantages=advantages)
        ledger.record_checkpoint(POLICY, step=1, path=str(folder)).result()
        ledger.record_checkpoint(POLICY, step=2, path=str(folder / "gone")).result()
    return Run(folder, graphs)


def test_one_row_per_attempt_with_what_became_of_it(run: Run, tmp_path: Path) -> None:
    first, second, lost, timed_out, scored = run.rows(tmp_path / "out.jsonl")
    assert second == {
        **{"run_id": "run-1", "episode_id": run.graphs[1].episode_id, "attempt": 1, "group_id": "g", "source": "src"},
        **{"task_id": "task-g", "task": {"x": [1]}, "split": "train", "evaluation_id": None, "label": "mine"},
        **{"state": "finished", "outcome": "agent", "message": "", "created_s": 5.0, "ended_s": 6.0, "num_turns": 10},
        **{"num_sampled": run.graphs[1].num_sampled_tokens, "rewards": {POLICY: 1.0}, "metrics": {"tools": 9.0}},
        **{"advantages": {POLICY: 0.5}, "versions": {POLICY: [0]}},
        "samples": [{**second["samples"][0], "policy": POLICY, "state": "trained", "reason": None, "step": 1}],
    }
    assert first["advantages"] == {POLICY: -0.5}
    assert (lost["state"], lost["outcome"], lost["message"]) == ("lost", "client", "no heartbeat")
    assert (lost["num_turns"], lost["rewards"], lost["samples"]) == (3, {}, [])
    assert (timed_out["state"], timed_out["outcome"], timed_out["num_turns"]) == ("aborted", "timeout", 0)
    assert (scored["split"], scored["advantages"], scored["samples"]) == ("eval", {}, [])


def test_a_split_alone(run: Run, tmp_path: Path) -> None:
    (scored,) = run.rows(tmp_path / "eval.jsonl", "--split", "eval", "--tokens")
    assert scored["episode_id"] == run.graphs[3].episode_id
    assert {turn["trains"] for turn in scored["turns"]} == {False}
    assert len(run.rows(tmp_path / "train.jsonl", "--split", "train")) == 4


def test_turns_add_up_to_the_conversation_and_to_the_tokens(run: Run, tmp_path: Path) -> None:
    first = run.rows(tmp_path / "out.jsonl", "--messages", "--tokens")[0]
    graph = run.graphs[0]
    messages = [message for turn in first["turns"] for message in turn["messages"]]
    assert [m["content"] for m in messages] == [m.content for m in graph.turns[-1].messages]
    assert [c["name"] for m in messages for c in m["tool_calls"]] == [
        call.name for m in graph.turns[-1].messages for call in m.tool_calls
    ]
    tokens = [token for turn in first["turns"] for token in (*turn["prompt_ids"], *turn["sampled_ids"])]
    assert tokens == graph.full_ids(graph.turns[-1]).tolist()
    for row, turn in zip(first["turns"], graph.turns, strict=True):
        assert row["logprobs"] == turn.logprobs.tolist() and row["token_versions"] == turn.versions_T.tolist()
        assert row["trains"] is True and row["superseded"] is None
    assert "messages" not in run.rows(tmp_path / "tokens.jsonl", "--tokens")[0]["turns"][0]
    assert "turns" not in run.rows(tmp_path / "plain.jsonl")[0]


@pytest.mark.parametrize("options", [(), ("--messages",), ("--messages", "--tokens")])
def test_parquet_holds_what_json_lines_hold(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "out.parquet"
    done = run.invoke("export", "--episodes", str(target), *options)
    assert done.exit_code == 0 and "5 attempts written" in done.output
    table = parquet.read_table(target)
    found = table.to_pylist(maps_as_pydicts="strict")
    for row in found:
        row["task"] = json.loads(row["task"])
    assert found == run.rows(tmp_path / "out.jsonl", *options)


def test_parquet_without_its_library_names_the_extra(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused = run.invoke("export", "--episodes", str(tmp_path / "out.parquet"))
    assert refused.exit_code == 2 and "'.[export]'" in refused.output
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    for name, words in (
        ("there.jsonl", "exists"),
        ("out.csv", "*.parquet"),
        ("no/out.jsonl", "cannot write"),
        ("there.jsonl/out.jsonl", "cannot write"),
    ):
        refused = run.invoke("export", "--episodes", str(tmp_path / name))
        assert refused.exit_code == 2 and words in refused.output, refused.output
    assert (tmp_path / "there.jsonl").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["there.jsonl"]


def test_the_ledger_report_names_states_batches_checkpoints_and_sizes(run: Run) -> None:
    shown = run.invoke("inspect", "--ledger")
    assert shown.exit_code == 0, shown.output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.output.splitlines() if "│" in line]
    assert ["attempts", "finished:agent", "3", ""] in cells
    assert ["attempts", "lost", "1", ""] in cells
    (batches,) = [row for row in cells if row[1] == "trained" and row[0] == POLICY]
    assert batches[2:4] == ["1", "1 to 1"]
    assert [POLICY, "1", str(run.folder), "yes"] in cells and [POLICY, "2", str(run.folder / "gone"), "no"] in cells
    assert any(row[0] == "ledger.sqlite per finished attempt" for row in cells)
    assert "verified: no contradictions" in shown.output


def test_a_ledger_that_contradicts_itself_ends_with_1(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "ledger.sqlite"
    with sqlite3.connect(run.folder / "ledger.sqlite") as source, sqlite3.connect(copy) as target:
        source.backup(target)
        target.execute("UPDATE samples SET state = 'dropped', reason = NULL, batch_id = NULL")
        target.commit()
    source.close()
    target.close()
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path), "--ledger"])
    assert shown.exit_code == 1
    assert "dropped samples without a reason: 2" in shown.output


def test_two_reports_at_once_are_refused(run: Run) -> None:
    for options in (("an-episode", "--ledger"), ("--merge-report", "--ledger")):
        refused = run.invoke("inspect", *options)
        assert refused.exit_code == 2 and "--ledger" in refused.output


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5120.0 GiB")],
)
def test_sizes_are_shown_in_the_largest_unit_that_fits(num_bytes: int, shown: str) -> None:
    assert shown_size(num_bytes) == shown


@pytest.mark.slow
def test_the_ledger_benchmark_reports_its_keys() -> None:
    command = [sys.executable, "-m", "bench.ledger", "--quick"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["episodes_per_s"] > 0 and summary["ratio_over_one_by_one"] > 0
    assert 1000 < summary["bytes_per_episode"] < summary["bytes_uncompressed"]
    assert summary["tokens_per_episode"] >= 2000
