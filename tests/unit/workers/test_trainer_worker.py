"""The trainer's process side: lineages, failed steps, checkpoints and weights that do not fit."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from wingbeat.core.config import PolicyConfig
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.worker_protocol import (
    BeginLineage,
    CheckpointSaved,
    Failed,
    KeepVersions,
    PolicySpec,
    ReleaseVersion,
    SaveCheckpoint,
    Shutdown,
    StepDone,
    TrainerReady,
    TrainStep,
    Welcome,
    WorkerMessage,
)
from wingbeat.environments.calculator.tokenizer import write_tokenizer
from wingbeat.workers.link import Connected, Inbound
from wingbeat.workers.trainer import TrainerWorker

Disk = namedtuple("Disk", "total used free")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> PolicySpec:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    policy = PolicyConfig.model_validate(
        {"model": str(folder), "context_tokens": 64, "trainer": {"learning_rate": 1e-2, "device": "cpu"}}
    )
    return PolicySpec("solver", str(folder), 64, policy.model_dump(mode="json"))


def batch(step: int, *, lineage: int = 0) -> TrainStep:
    """Two episodes of a group, of rewards 0 and 1."""
    rng = np.random.default_rng(step)
    episodes: list[EpisodeSamples] = []
    for member in range(2):
        sample = TrainingSample.build(
            f"{step}-{member}",
            token_ids=rng.integers(0, 96, 6).astype(np.int32),
            sampled=np.array([0, 0, 1, 1, 1, 1], np.uint8),
            sampling_logprobs=np.array([0, 0, -4, -4, -4, -4], np.float32),
            versions=np.array([-1, -1, *[step - 1] * 4], np.int32),
        )
        episodes.append(EpisodeSamples(f"{step}-{member}", 1, f"g{step}", "solver", "", float(member), (sample,)))
    name = f"solver-{lineage}.{step}" if lineage else f"solver-{step}"
    return TrainStep(TrainingBatch(name, "solver", step, tuple(episodes), seed=step, lineage=lineage))


class Driver:
    """Plays a script to a worker of a run, one entry per time that it listens."""

    def __init__(self, spec: PolicySpec, run_dir: Path) -> None:
        self.sent: list[WorkerMessage] = []
        self.slept: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None
        self.worker = TrainerWorker("host", lambda *messages: self.sent.extend(messages), sleep=self._sleep)
        self._welcome = Connected(Welcome("trainer", 1.0, (spec,), str(run_dir), seed=1, total_steps=10))

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.on_sleep()

    def play(self, *script: list[Inbound] | Inbound) -> None:
        turns = iter([self._welcome, *script])

        def receive(*, block: bool) -> list[Inbound]:
            turn = next(turns, None) if block else None
            if turn is None:
                return [Shutdown()] if block else []
            return turn if isinstance(turn, list) else [turn]

        self.worker.run(receive)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


@pytest.fixture
def driver(spec: PolicySpec, tmp_path: Path) -> Driver:
    return Driver(spec, tmp_path)


@pytest.fixture
def again(spec: PolicySpec, tmp_path: Path) -> Driver:
    """The next process of the same run."""
    return Driver(spec, tmp_path)


def test_a_checkpoint_remembers_its_lineage(driver: Driver, again: Driver) -> None:
    driver.play(batch(1), BeginLineage("solver", 1), batch(2, lineage=1), SaveCheckpoint("solver", 2))
    fresh, begun = driver.of(TrainerReady)
    assert (fresh.step, fresh.manifest.lineage, fresh.base_lineage) == (0, 0, 0)
    assert (begun.step, begun.manifest.lineage, begun.base_lineage) == (1, 1, 0)
    first, second = driver.of(StepDone)
    assert begun.manifest.path == first.manifest.path  # the same weights under another name
    assert (second.manifest.version, second.manifest.lineage) == (2, 1)
    (saved,) = driver.of(CheckpointSaved)
    assert (saved.step, saved.lineage) == (2, 1)
    again.play()
    (ready,) = again.of(TrainerReady)
    assert (ready.step, ready.manifest.lineage, ready.manifest.checksum) == (2, 1, second.manifest.checksum)


def test_a_trainer_whose_replay_fails_goes_back_to_its_checkpoint(driver: Driver, again: Driver) -> None:
    driver.play(batch(1), SaveCheckpoint("solver", 1), batch(2), batch(3))
    saved = driver.of(StepDone)[0].manifest
    damaged = TrainStep(TrainingBatch("solver-3", "solver", 3, (), seed=3), replay=True)  # nothing can be trained
    again.play(
        [batch(2), damaged, batch(4), SaveCheckpoint("solver", 2), BeginLineage("solver", 1)], batch(2, lineage=1)
    )
    assert [message.command for message in again.of(Failed)] == ["train_step", "train_step", "save_checkpoint"]
    assert f"a step before it failed: {again.of(Failed)[0].error}" in again.of(Failed)[1].error
    restored, back = again.of(TrainerReady)
    assert (restored.step, back.step, back.base_lineage, back.manifest.lineage) == (1, 1, 0, 1)
    assert back.manifest.checksum == restored.manifest.checksum == saved.checksum
    replayed, anew = again.of(StepDone)
    assert replayed.manifest.checksum == anew.manifest.checksum == driver.of(StepDone)[1].manifest.checksum
    assert anew.manifest.lineage == 1


def test_without_a_checkpoint_a_failed_replay_goes_back_to_the_beginning(driver: Driver) -> None:
    nothing = TrainStep(TrainingBatch("solver-2", "solver", 2, (), seed=3), replay=True)
    driver.play(batch(1), nothing, BeginLineage("solver", 1))
    fresh, back = driver.of(TrainerReady)
    assert (back.step, back.manifest.checksum) == (0, fresh.manifest.checksum)


def test_weights_wait_for_room_and_the_step_counts(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage
    full = {"now": False}
    monkeypatch.setattr(
        "wingbeat.weights.publish.shutil.disk_usage", lambda path: Disk(1, 1, 0) if full["now"] else usage(path)
    )
    turns = iter([[ReleaseVersion("solver", 0), SaveCheckpoint("solver", 1)], []])
    released: list[bool] = []

    def make_room() -> None:
        released.append(not Path(driver.of(TrainerReady)[0].manifest.path).exists())
        full["now"] = len(driver.slept) < 2

    driver.on_sleep = make_room
    play = iter([[driver._welcome], [batch(1)], None])

    def receive(*, block: bool) -> list[Inbound]:
        if not block:
            return next(turns, []) if full["now"] else []
        turn = next(play)
        full["now"] = turn is not None and isinstance(turn[0], TrainStep)
        return [Shutdown()] if turn is None else turn

    driver.worker.run(receive)
    (failed,) = driver.of(Failed)
    assert failed.command == "publish_weights" and "free some" in failed.error
    assert released == [True, True]  # an old version went although the step was not over
    (done,) = driver.of(StepDone)
    assert done.step == 1 and len(driver.slept) == 2
    kinds = [type(message) for message in driver.sent]
    assert kinds.index(StepDone) < kinds.index(CheckpointSaved)  # what came meanwhile had to wait


def test_a_checkpoint_that_does_not_fit_is_told_and_the_next_one_tried(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    from wingbeat.trainer import checkpoint

    save, tries = checkpoint.save_file, []

    def full_once(*arguments: Any) -> None:
        tries.append(arguments)
        if len(tries) == 1:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", full_once)
    driver.play(batch(1), SaveCheckpoint("solver", 1), batch(2), SaveCheckpoint("solver", 2))
    (failed,) = driver.of(Failed)
    assert failed.command == "save_checkpoint" and "No space left" in failed.error
    assert [done.step for done in driver.of(StepDone)] == [1, 2]
    assert [saved.step for saved in driver.of(CheckpointSaved)] == [2]


def test_a_release_that_came_behind_a_step_makes_room_for_it(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage
    monkeypatch.setattr(
        "wingbeat.weights.publish.shutil.disk_usage",
        lambda path: Disk(1, 1, 0) if len(list(Path(path).glob("*.safetensors"))) > 1 else usage(path),
    )
    driver.on_sleep = lambda: pytest.fail("there is room once the release is heeded")
    driver.play([batch(1)], [batch(2), ReleaseVersion("solver", 0)], [batch(3), ReleaseVersion("solver", 1)])
    assert [done.step for done in driver.of(StepDone)] == [1, 2, 3] and driver.of(Failed) == []


def test_steps_that_are_queued_do_not_fill_the_folder(driver: Driver) -> None:
    """A replay: control releases each repeated version as it hears of it, behind all the steps that it sent."""
    counts: list[int] = []

    def files() -> list[Path]:
        return list(Path(driver.of(TrainerReady)[0].manifest.path).parent.glob("*.safetensors"))

    play = iter([[driver._welcome], [batch(step) for step in range(1, 6)], None])

    def receive(*, block: bool) -> list[Inbound]:
        if driver.of(TrainerReady):
            counts.append(len(files()))
        if not block:
            return [ReleaseVersion("solver", len(driver.of(StepDone)) - 1)]
        turn = next(play)
        return [Shutdown()] if turn is None else turn

    driver.worker.run(receive)
    assert len(driver.of(StepDone)) == 5 and max(counts) == 2


def test_what_the_trainer_holds_is_never_released(driver: Driver) -> None:
    play = iter([[driver._welcome], [batch(1)], [ReleaseVersion("solver", 1), KeepVersions("solver", ())], None])
    left: list[str] = []

    def receive(*, block: bool) -> list[Inbound]:
        turn = next(play) if block else []
        if turn is None:
            left.extend(path.name for path in Path(driver.of(StepDone)[0].manifest.path).parent.iterdir())
        return [Shutdown()] if turn is None else turn

    driver.worker.run(receive)
    assert left == [Path(driver.of(StepDone)[0].manifest.path).name]
