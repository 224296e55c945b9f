"""``wingbeat inspect RUN --agents``: versions of an agent side by side; numbers by hand."""

from __future__ import annotations

import io
import math
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from wingbeat.cli.agents_report import show_agents
from wingbeat.cli.main import app
from wingbeat.core.types import Outcome, Split, Task, Variant
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.ledger_versions import AgentVersionReport, predecessor
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.records import BeginRecord, EpisodeRecord, GroupSpec

OLD, NEW, OTHER = Variant("mine", "aa" * 32), Variant("mine", "bb" * 32), Variant("theirs", "cc" * 32)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two tasks; the old version got 0, 1 and 1, the new one 1, 1, 1 and 0.5, another one failed."""
    ledger = Ledger.open(tmp_path / "ledger.sqlite", run=RunMeta("run", seed=0), clock=lambda: 1000.0)
    runs = [
        (OLD, "t1", [0.0, 1.0]),
        (OLD, "t2", [1.0]),
        (NEW, "t1", [1.0, 1.0]),
        (NEW, "t2", [1.0, 0.5]),
        (OTHER, "t1", []),
    ]
    for number, (variant, task, rewards) in enumerate(runs):
        group = f"g{number}"
        spec = GroupSpec(group, Task("src", task), Split.TRAIN, 3, ("solver",), floor_version={"solver": 0})
        ledger.record_group(spec, episode_ids=[f"{group}-{i}" for i in range(3)])
        for index, reward in enumerate(rewards):
            episode = f"{group}-{index}"
            ledger.record_begin(BeginRecord(episode, 1, group, label=variant.label, code=variant.code))
            ledger.record_finish(
                EpisodeRecord(
                    episode,
                    1,
                    group,
                    Outcome.AGENT,
                    "d",
                    rewards={"solver": reward, "solver:helper": 9.0},
                    label=variant.label,
                    code=variant.code,
                    created_s=1000.0,
                    finished_s=1002.0,
                )
            )
    ledger.record_begin(BeginRecord("g4-0", 1, "g4", label=OTHER.label, code=OTHER.code))
    ledger.record_end("g4-0", 1, state=AttemptState.ABORTED, outcome=Outcome.CLIENT).result()
    ledger.close()
    return tmp_path


def test_means_errors_and_differences_are_clustered_by_task(run_dir: Path) -> None:
    with open_read_only(run_dir / "ledger.sqlite") as ledger:
        versions = ledger.agent_versions()
    old, new, other = versions
    assert [version.variant for version in versions] == [OLD, NEW, OTHER]
    assert old.mean("solver") == pytest.approx(2 / 3) and new.mean("solver") == 0.875
    # the tasks' sums of deviations: t1 1 - 4/3, t2 1 - 2/3
    assert old.stderr("solver") == pytest.approx(math.sqrt(2 * (1 / 3) ** 2) / 3)
    difference = new.difference("solver", old)
    assert difference is not None and difference.num_tasks == 2
    assert difference.mean == pytest.approx(((1 - 0.5) + (0.75 - 1)) / 2)
    margin = 1.959964 * math.sqrt(2 * (0.375**2)) / math.sqrt(2)
    assert (difference.low, difference.high) == pytest.approx((0.125 - margin, 0.125 + margin), abs=1e-5)
    assert (other.mean("solver"), other.endings["client"], old.seconds) == (None, 1, 6.0)
    assert predecessor(versions, 0) is None and predecessor(versions, 1) is old and predecessor(versions, 2) is new


def test_the_table_has_a_line_for_each(run_dir: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(run_dir), "--agents"])
    assert result.exit_code == 0, result.output
    assert _row(Split.EVAL, tokens=0) == "-" and _row(Split.TRAIN, tokens=6) == "3.0"
    for shown in ("aaaaaaaaaaaa", "0.8750", "+0.1250", "2 tasks", "theirs", "client 1", "agent 4"):
        assert shown in result.output
    both = CliRunner().invoke(app, ["inspect", str(run_dir), "--agents", "--ledger"])
    assert both.exit_code == 2 and "--ledger and --agents are two reports" in " ".join(both.output.split())


def _row(split: Split, *, tokens: int) -> str:
    """The tokens that a line shows of two episodes; those of evaluations are not counted."""
    console = Console(file=io.StringIO(), width=300)
    endings = Counter({"agent": 2})
    show_agents(console, (AgentVersionReport(OLD, split, endings=endings, tokens=tokens, first_s=1.0),), served=False)
    assert isinstance(console.file, io.StringIO)
    line = next(line for line in console.file.getvalue().splitlines() if "aaaaaaaaaaaa" in line)
    return line.split("│")[-5].strip()
