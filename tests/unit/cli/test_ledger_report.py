"""``wingbeat inspect RUN --ledger``: tokens by length of the episode, operators, lineages; by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from wingbeat.cli.main import app
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.records import Dropped, EpisodeRecord, GroupSpec

NUM_EPISODES = 20
"""With 1 to 20 sampled tokens: tenth k holds those of 2k - 1 and 2k."""


def samples_of(number: int) -> EpisodeSamples:
    length = number + 1
    sample = TrainingSample.build(
        f"e{number}",
        token_ids=np.arange(length, dtype=np.int32),
        sampled=np.array([0, *[1] * number], np.uint8),
        sampling_logprobs=np.zeros(length, np.float32),
        versions=np.array([-1, *[0] * number], np.int32),
    )
    return EpisodeSamples(f"e{number}", 1, "g", "solver", "", float(number), (sample,))


def batch(step: int, numbers: tuple[int, ...], *, lineage: int = 0, masked: int = 0) -> TrainingBatch:
    episodes = tuple(msgspec.structs.replace(samples_of(number), masked=masked) for number in numbers)
    return TrainingBatch(f"b{lineage}.{step}", "solver", step, episodes, seed=0, lineage=lineage)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """All trained but: 20 dropped by an operator, 19 too old, 18 masked in part, 17 failed, 1 waits; one rollback."""
    ledger = Ledger.open(tmp_path / "ledger.sqlite", run=RunMeta("run", seed=0))
    numbers = range(1, NUM_EPISODES + 1)
    spec = GroupSpec("g", Task("src", "t"), Split.TRAIN, NUM_EPISODES, ("solver",), floor_version={"solver": 0})
    ledger.record_group(spec, episode_ids=[f"e{number}" for number in numbers])
    for number in numbers:
        outcome = Outcome.TIMEOUT if number == 17 else Outcome.AGENT
        ledger.record_finish(EpisodeRecord(f"e{number}", 1, "g", outcome, "d", samples=(samples_of(number),)))
    state = {"operators": {"length_filter": {"state": "", "counts": [1, 20, 0, 3, 0]}}}
    ledger.close_group("g", dropped={"solver": [Dropped("e20", 1, "too_long")]}, operators={"solver": state})
    ledger.log_batch(batch(1, tuple(range(2, 11))), group_ids=["g"])
    ledger.mark_trained("solver", step=1, metrics={}, advantages={})
    ledger.log_batch(batch(2, (11, 12)), group_ids=["g"])
    ledger.mark_trained("solver", step=2, metrics={}, advantages={})
    ledger.begin_lineage("solver", base_lineage=0, base_step=1, reason="replay is off")
    ledger.log_batch(batch(2, tuple(range(11, 17)), lineage=1), group_ids=["g"], dropped=[Dropped("e19", 1, "stale")])
    ledger.mark_trained("solver", step=2, metrics={}, advantages={})
    ledger.log_batch(batch(3, (18,), lineage=1, masked=8), group_ids=["g"])
    ledger.mark_trained("solver", step=3, metrics={}, advantages={}).result()
    assert ledger.verify() == []
    ledger.close()
    return tmp_path


def test_the_report_shows_what_became_of_every_token(run_dir: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(run_dir), "--ledger"])
    assert shown.exit_code == 0, shown.output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.output.splitlines() if "│" in line]
    tenths = [row for row in cells if row[0] == "solver" and len(row) == 11]
    sampled, trained = 210, sum(range(2, 17)) + 10  # 145
    expected = [
        ["1", "2", "2", "3", "2", "0", "1", "0", f"{3 / sampled:.1%}", f"{2 / trained:.1%}"],
        ["9", "2", "18", "35", "10", "8", "0", "17 (outcome_timeout 17)", f"{35 / sampled:.1%}", f"{10 / trained:.1%}"],
        ["10", "2", "20", "39", "0", "0", "0", "39 (stale 19, too_long 20)", f"{39 / sampled:.1%}", "0.0%"],
    ]
    assert [tenths[i][1:] for i in (0, 8, 9)] == expected
    assert [row[0] for row in tenths] == ["solver"] * 10
    assert ["solver", "length_filter", "1", "20", "0", "3", "0"] in cells
    assert ["solver", "1", "step 1 of lineage 0", "replay is off"] in cells
    assert ["solver", "abandoned by a rollback", "1", "2 to 2"] in [row[:4] for row in cells]
    assert "verified: no contradictions" in shown.output
