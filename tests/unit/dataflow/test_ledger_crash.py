"""Kill -9 at any moment: everything acknowledged is there, and what is there makes sense."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from wingbeat.core.types import Split, Task
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import SampleState
from wingbeat.dataflow.ledger_views import RunMeta

WRITER = """
import sys
from pathlib import Path

import numpy as np

from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.records import BeginRecord, EpisodeRecord, GroupSpec

ledger = Ledger.open(Path(sys.argv[1]), run=RunMeta("crash", seed=0))
dealer = TaskDealer(0)
dealer.add_source("src", Split.TRAIN, [Task("src", str(i)) for i in range(10_000)])
values = np.arange(200, dtype=np.int32)


def acknowledge(line):
    sys.stdout.write(line + "\\n")
    sys.stdout.flush()


for step in range(1, 10_000):
    task = dealer.next_task()
    spec = GroupSpec(f"g{step}", task, Split.TRAIN, 4, ("solver",), floor_version={"solver": step - 1})
    ids = [f"g{step}-{i}" for i in range(4)]
    ledger.record_group(spec, episode_ids=ids, dealer_state=dealer.state_dict())
    members, futures = [], []
    for i, episode_id in enumerate(ids):
        sample = TrainingSample.build(
            episode_id, token_ids=values, sampled=np.ones(200, np.uint8),
            sampling_logprobs=-values.astype(np.float32), versions=np.full(200, step - 1, np.int32),
        )
        members.append(EpisodeSamples(episode_id, 1, spec.id, "solver", "", float(i), (sample,)))
        ledger.record_begin(BeginRecord(episode_id, 1, group_id=spec.id))
        record = EpisodeRecord(
            episode_id, 1, spec.id, Outcome.AGENT, f"digest-{episode_id}", rewards={"solver": float(i)},
            samples=(members[-1],),
        )
        futures.append(ledger.record_finish(record))
    for episode_id, future in zip(ids, futures):
        assert future.result()
        acknowledge(f"finish {episode_id}")
    ledger.close_group(spec.id)
    batch = TrainingBatch(f"b{step}", "solver", step, tuple(members), seed=step)
    ledger.log_batch(batch, group_ids=[spec.id]).result()
    acknowledge(f"batch {step}")
    ledger.mark_trained("solver", step=step, metrics={"loss": 0.0}, advantages={}).result()
    acknowledge(f"trained {step}")
"""


def run_and_kill(path: Path, *, num_lines: int) -> list[str]:
    """The acknowledgements of a writer that was killed while it went on after ``num_lines`` of them."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(num_lines)]
    writer.kill()
    rest = writer.stdout.read()
    writer.wait()
    writer.stdout.close()
    whole = [*lines, *(line for line in rest.splitlines(keepends=True) if line.endswith("\n"))]
    return [line.strip() for line in whole]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kill_loses_nothing_acknowledged(tmp_path, seed):
    path = tmp_path / "ledger.sqlite"
    acknowledged = run_and_kill(path, num_lines=random.Random(seed).randint(1, 200))
    kinds: dict[str, list[str]] = {"finish": [], "batch": [], "trained": []}
    for line in acknowledged:
        kind, value = line.split()
        kinds[kind].append(value)
    with Ledger.open(path, run=RunMeta("crash", seed=0)) as ledger:
        assert ledger.verify() == []
        for episode_id in kinds["finish"]:
            record = ledger.episode(episode_id)[0].record
            assert record is not None and record.finish_digest == f"digest-{episode_id}"
            assert len(record.samples[0].samples[0].tokens_T) == 200
        batches = ledger.batches_after("solver", 0)
        assert [b.step for b in batches] == list(range(1, len(batches) + 1))
        assert len(batches) >= max(map(int, kinds["batch"]), default=0)
        trained_step = ledger.summary().trained_step.get("solver", 0)
        assert len(batches) >= trained_step >= max(map(int, kinds["trained"]), default=0)
        states = {view.samples[0].state for b in batches[:trained_step] for e in b.episodes
                  for view in ledger.episode(e.episode_id)}  # fmt: skip
        assert states <= {SampleState.TRAINED}
        assert_dealer_goes_on(ledger)


def assert_dealer_goes_on(ledger: Ledger) -> None:
    """The next task is one that no recorded group has."""
    dealer = TaskDealer(0)
    dealer.add_source("src", Split.TRAIN, [Task("src", str(i)) for i in range(10_000)])
    state = ledger.load_dealer_state()
    num_groups = sum(ledger.summary().groups.values())
    if state is None:
        assert num_groups == 0
    else:
        dealer.load_state_dict(state)
        assert dealer.state_dict()["sources"]["src"]["position"] == num_groups
