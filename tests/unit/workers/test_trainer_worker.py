"""The trainer's process side: lineages, failed steps, checkpoints and weights that do not fit."""

from __future__ import annotations

import queue
import shutil
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trainer_play import Driver, training_step

from wingbeat.core.config import PolicyConfig
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.weight_protocol import KeepVersions, Manifest, Published, ReleaseVersion
from wingbeat.core.worker_protocol import (
    BeginLineage,
    CheckpointSaved,
    Export,
    Exported,
    Failed,
    PolicySpec,
    SaveCheckpoint,
    Shutdown,
    StepDone,
    TrainerReady,
    TrainStep,
    WorkerMessage,
)
from wingbeat.weights.publish import WeightPublisher
from wingbeat.weights.upload import UploadRefused
from wingbeat.workers.link import Connected, Inbound

Disk = namedtuple("Disk", "total used free")


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> PolicySpec:
    policy = PolicyConfig.model_validate(
        {"model": str(tiny_model), "context_tokens": 64, "trainer": {"learning_rate": 1e-2, "device": "cpu"}}
    )
    return PolicySpec("solver", str(tiny_model), 64, policy.model_dump(mode="json"))


batch = partial(training_step, "solver")


@pytest.fixture
def driver(spec: PolicySpec, tmp_path: Path) -> Driver:
    return Driver(tmp_path, spec)


@pytest.fixture
def again(spec: PolicySpec, tmp_path: Path) -> Driver:
    """The next process of the same run."""
    return Driver(tmp_path, spec)


def test_a_checkpoint_remembers_its_lineage(driver: Driver, again: Driver) -> None:
    driver.play(batch(1), BeginLineage("solver", 1), batch(2, lineage=1), SaveCheckpoint("solver", 2))
    fresh, begun = driver.of(TrainerReady)
    assert (fresh.step, fresh.manifest.lineage, fresh.base_lineage) == (0, 0, 0)
    assert (begun.step, begun.manifest.lineage, begun.base_lineage) == (1, 1, 0)
    first, second = driver.published(1, 2)
    assert begun.manifest.path == first.manifest.path  # the same weights under another name
    assert (second.manifest.version, second.manifest.lineage) == (2, 1)
    (saved,) = driver.of(CheckpointSaved)
    assert (saved.step, saved.lineage) == (2, 1)
    again.play()
    (ready,) = again.of(TrainerReady)
    assert (ready.step, ready.manifest.lineage, ready.manifest.checksum) == (2, 1, second.manifest.checksum)


def test_a_trainer_whose_replay_fails_goes_back_to_its_checkpoint(driver: Driver, again: Driver) -> None:
    driver.play(batch(1), SaveCheckpoint("solver", 1), batch(2), batch(3))
    saved = driver.published(1)[0].manifest
    damaged = TrainStep(TrainingBatch("solver-3", "solver", 3, (), seed=3), replay=True)  # nothing can be trained
    again.play(
        [batch(2), damaged, batch(4), SaveCheckpoint("solver", 2), BeginLineage("solver", 1)], batch(2, lineage=1)
    )
    assert [message.command for message in again.of(Failed)] == ["train_step", "train_step", "save_checkpoint"]
    assert f"a step before it failed: {again.of(Failed)[0].error}" in again.of(Failed)[1].error
    restored, back = again.of(TrainerReady)
    assert (restored.step, back.step, back.base_lineage, back.manifest.lineage) == (1, 1, 0, 1)
    assert back.manifest.checksum == restored.manifest.checksum == saved.checksum
    replayed, anew = (m.manifest for m in again.published(2))
    assert replayed.checksum == anew.checksum == driver.published(2)[0].manifest.checksum
    assert anew.lineage == 1


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

    def make_room() -> None:
        """On the publishing thread, which sleeps."""
        old = Path(driver.of(TrainerReady)[0].manifest.path)
        if len(driver.slept) == 1:
            driver.own.put(ReleaseVersion("solver", 0))
            driver.own.put(SaveCheckpoint("solver", 1))
        full["now"] = old.exists()  # the other thread heeds the release although the step's weights wait

    driver.on_sleep = make_room

    def fill() -> Inbound:
        full["now"] = True
        return batch(1)

    driver.play(fill)
    (failed,) = driver.of(Failed)
    assert failed.command == "publish_weights" and "free some" in failed.error
    kinds = [type(message) for message in driver.sent if not isinstance(message, Published) or message.step == 1]
    assert kinds[:3] == [TrainerReady, StepDone, Failed]  # the step counted before there was room
    assert {*kinds[3:]} == {Published, CheckpointSaved}


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


def test_a_replay_publishes_its_last_step_only(driver: Driver, again: Driver) -> None:
    driver.play(batch(1), batch(2), batch(3))
    steps: list[Inbound] = [TrainStep(batch(step).batch, replay=True, publish=step == 3) for step in (1, 2, 3)]
    counts: list[int] = []
    again.play(steps, lambda: counts.append(len(again.files())) or [])
    assert [done.step for done in again.of(StepDone)] == [1, 2, 3]
    assert [message.step for message in again.of(Published)] == [0, 3] and counts == [2]
    assert again.published(3)[0].manifest.checksum == driver.published(3)[0].manifest.checksum


def test_a_control_that_comes_in_the_middle_of_a_replay_is_told_of_published_weights(driver: Driver) -> None:
    driver.play(TrainStep(batch(1).batch, replay=True, publish=False), driver.welcome, driver.welcome)
    assert [(m.step, m.manifest.version) for m in driver.of(TrainerReady)] == [(0, 0), (1, 1), (1, 1)]
    assert [m.step for m in driver.of(StepDone)] == [1, 1, 1]  # said again
    assert [m.step for m in driver.of(Published)] == [0, 1, 1, 1]


def test_a_failed_step_is_never_published(driver: Driver) -> None:
    """What a trainer holds then may be half a step: asked where it stands, it goes back."""
    nothing = TrainStep(TrainingBatch("solver-2", "solver", 2, (), seed=3), replay=True)
    first = TrainStep(batch(1).batch, replay=True, publish=False)
    driver.play([first, nothing], driver.welcome)
    fresh, back = driver.of(TrainerReady)
    assert (back.step, back.manifest.checksum) == (0, fresh.manifest.checksum)
    assert {message.step for message in driver.of(Published)} == {0}


def test_the_next_step_runs_while_weights_are_published(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step's file is not written before the second step is done, and holds the first step's weights."""
    written = queue.SimpleQueue[None]()
    publish = WeightPublisher.publish

    def slow(publisher: WeightPublisher, tensors: Any, *, version: int, **more: Any) -> Manifest:
        if version == 1:
            written.get(timeout=20)
        return publish(publisher, tensors, version=version, **more)

    monkeypatch.setattr(WeightPublisher, "publish", slow)
    order: list[str] = []
    send = driver.sent.extend

    def sending(*messages: WorkerMessage) -> None:
        send(messages)
        for message in messages:
            if isinstance(message, StepDone | Published):
                order.append(f"{type(message).__name__} {message.step}")
            if isinstance(message, StepDone) and message.step == 2:
                written.put(None)

    driver.worker._send = sending
    driver.play([batch(1), batch(2)])
    assert order == ["Published 0", "StepDone 1", "StepDone 2", "Published 1", "Published 2"]
    first, second = driver.published(1, 2)
    assert first.manifest.checksum != second.manifest.checksum


def test_a_publishing_thread_that_fails_ends_the_process(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a defect")

    def breaking() -> Inbound:
        monkeypatch.setattr(WeightPublisher, "publish", broken)
        return batch(1)

    with pytest.raises(ZeroDivisionError):
        driver.play(breaking)
    assert [message.step for message in driver.of(StepDone)] == [1]


def test_told_to_end_it_waits_for_no_room(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill() -> Inbound:
        monkeypatch.setattr("wingbeat.weights.publish.shutil.disk_usage", lambda path: Disk(1, 1, 0))
        driver.on_sleep = lambda: driver.own.put(Shutdown())
        return batch(1)

    driver.play(fill, batch(2))
    assert [message.step for message in driver.of(StepDone)] == [1] and not driver.published(1)
    assert [message.command for message in driver.of(Failed)] == ["publish_weights"]


def test_what_the_trainer_holds_is_never_released(driver: Driver) -> None:
    left: list[str] = []
    driver.play(
        batch(1),
        [ReleaseVersion("solver", 1), KeepVersions("solver", ())],
        lambda: left.extend(path.name for path in driver.files()) or [],
    )
    assert left == [Path(driver.published(1)[0].manifest.path).name]


@pytest.mark.parametrize(("control", "carried"), [("host", []), ("elsewhere", [0, 1])])
def test_what_is_published_is_brought_to_a_control_of_another_host(
    driver: Driver, control: str, carried: list[int]
) -> None:
    found: list[int] = []

    def carry(manifest: Manifest, is_wanted: Callable[[], bool], on_trouble: Callable[[str], None]) -> bool:
        assert not driver.published(manifest.version) and is_wanted()
        found.append(manifest.version)
        return True

    driver.worker._carry = carry
    driver.welcome = Connected(msgspec.structs.replace(driver.welcome.welcome, host_id=control))
    driver.play(batch(1))
    assert found == carried and driver.published(1)


def test_weights_that_control_refuses_for_ever_end_training_and_what_was_learnt_is_kept(
    driver: Driver, tmp_path: Path
) -> None:
    refused = [1]

    def carry(manifest: Manifest, is_wanted: Callable[[], bool], on_trouble: Callable[[str], None]) -> bool:
        if manifest.version in refused:
            on_trouble("nothing moves")
            raise UploadRefused("cannot bring it: it answers 404")
        return True

    driver.worker._carry = carry
    driver.welcome = Connected(msgspec.structs.replace(driver.welcome.welcome, host_id="elsewhere"))
    folder = tmp_path / "exported"
    driver.play(
        batch(1),
        batch(2),
        [SaveCheckpoint("solver", 1), Export("solver", str(folder))],
        driver.welcome,  # another control of the run may take them; this one does not
        lambda: refused.clear() or driver.welcome,
    )
    assert [done.step for done in driver.of(StepDone)] == [1, 1], "the last one said again"
    told = [(message.command, message.final) for message in driver.of(Failed)]
    publish = ("publish_weights", False), ("publish_weights", True)
    assert told == [*publish, ("train_step", False), *publish]
    assert "it answers 404" in driver.of(Failed)[2].error
    assert [saved.step for saved in driver.of(CheckpointSaved)] == [1]
    assert driver.of(Exported) and (folder / "config.json").exists()
    assert [ready.step for ready in driver.of(TrainerReady)] == [0, 1]


def test_the_first_weights_of_a_trainer_are_refused(driver: Driver) -> None:
    def carry(manifest: Manifest, is_wanted: Callable[[], bool], on_trouble: Callable[[str], None]) -> bool:
        raise UploadRefused("cannot bring it: it answers 401")

    driver.worker._carry = carry
    driver.welcome = Connected(msgspec.structs.replace(driver.welcome.welcome, host_id="elsewhere"))
    driver.play()
    (failed,) = driver.sent
    assert isinstance(failed, Failed) and failed.final and "401" in failed.error
