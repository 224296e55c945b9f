"""Exact resume, and what damage does."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wingbeat.core.config.trainer import LoraConfig
from wingbeat.core.errors import SetupError
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.checkpoint import CheckpointStore
from wingbeat.trainer.single import PolicyTrainer


class Counter:
    """The smallest thing that can be saved."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.tensors = {"value": torch.tensor([step, step + 0.5])}

    def state_tensors(self) -> dict[str, Tensor]:
        return self.tensors

    def load_state(self, tensors: Mapping[str, Tensor], *, step: int) -> None:
        self.step, self.tensors = step, dict(tensors)


def _bytes(trainer: PolicyTrainer) -> dict[str, bytes]:
    tensors = trainer.published_tensors() | trainer.state_tensors()
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"lora": LoraConfig(rank=2)},
        {"dtype": torch.bfloat16},
        {"updates_per_batch": 2, "schedule": "cosine", "weight_decay": 0.1, "algorithm": "dapo"},
    ],
    ids=["full", "lora", "bfloat16", "updates"],
)
def test_resume_is_bit_identical(
    settings: dict[str, Any],
    tmp_path: Path,
    make_trainer: Callable[..., PolicyTrainer],
    make_batch: Callable[..., TrainingBatch],
) -> None:
    """Four steps at once equal two, save, load into a fresh object, two more: byte for byte."""
    straight = make_trainer(**settings)
    for step in range(1, 5):
        straight.train_step(make_batch(step=step, seed=step))
    first = make_trainer(**settings)
    for step in (1, 2):
        first.train_step(make_batch(step=step, seed=step))
    CheckpointStore(tmp_path, keep=2).save(first)
    second = make_trainer(**settings)
    assert CheckpointStore(tmp_path, keep=2).load_latest(second).step == 2
    for step in (3, 4):
        second.train_step(make_batch(step=step, seed=step))
    assert second.step == straight.step == 4
    assert _bytes(second) == _bytes(straight)


def test_a_checkpoint_before_the_first_step_restores(
    tmp_path: Path, make_trainer: Callable[..., PolicyTrainer], make_batch: Callable[..., TrainingBatch]
) -> None:
    trainer = make_trainer()
    CheckpointStore(tmp_path, keep=1).save(trainer)
    fresh = make_trainer()
    fresh.train_step(make_batch())
    assert CheckpointStore(tmp_path, keep=1).load_latest(fresh).step == 0
    assert _bytes(fresh) == _bytes(trainer)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, make_trainer: Callable[..., PolicyTrainer]) -> None:
    CheckpointStore(tmp_path, keep=1).save(make_trainer(kind="llama"))
    with pytest.raises(SetupError, match="not of this policy"):
        CheckpointStore(tmp_path, keep=1).load_latest(make_trainer(kind="qwen3"))


def test_nothing_to_load(tmp_path: Path) -> None:
    report = CheckpointStore(tmp_path / "none", keep=1).load_latest(Counter())
    assert report.step is None
    assert report.skipped == ()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 12):
        assert store.save(Counter(step)) == store.path_of(step)
    assert store.steps() == [3, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000012"]


def test_going_back_abandons_later_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        store.save(Counter(step))
    back = Counter(2)
    back.tensors = {"value": torch.tensor([-1.0])}
    store.save(back)
    assert store.steps() == [1, 2]
    found = Counter()
    store.load_latest(found)
    assert found.tensors["value"].tolist() == [-1.0]
    assert not list(tmp_path.glob(".partial*"))


def test_the_lineage_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.load_latest(Counter()).lineage == 0
    scalars = store.save(Counter(1), lineage=3) / "state.json"
    assert store.load_latest(Counter()).lineage == 3
    scalars.write_text(scalars.read_text().replace('"lineage": 3,', ""))
    assert store.load_latest(Counter()).lineage == 0, "written before there were lineages"


def test_loading_can_be_bounded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    for step in (1, 4, 9):
        store.save(Counter(step))
    assert store.load_latest(Counter(), max_step=8).step == 4


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit flip": (lambda folder: _flip(folder / "state.safetensors"), "checksum differs"),
    "truncated": (
        lambda folder: (folder / "state.safetensors").write_bytes((folder / "state.safetensors").read_bytes()[:-3]),
        "expected .* bytes",
    ),
    "no tensors": (lambda folder: (folder / "state.safetensors").unlink(), "cannot be read"),
    "no scalars": (lambda folder: (folder / "state.json").unlink(), "cannot be read"),
    "torn scalars": (lambda folder: (folder / "state.json").write_text('{"format": 1, "st'), "cannot be read"),
    "scalars of another kind": (lambda folder: (folder / "state.json").write_text("[]"), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_falls_back_to_the_previous_one(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    act, reason = DAMAGE[damage]
    store = CheckpointStore(tmp_path, keep=3)
    store.save(Counter(1))
    act(store.save(Counter(2)))
    found = Counter()
    with caplog.at_level(logging.WARNING):
        report = store.load_latest(found)
    assert (report.step, found.step) == (1, 1)
    assert found.tensors["value"].tolist() == [1, 1.5]
    (skipped,) = report.skipped
    assert skipped.path == store.path_of(2)
    assert re.search(reason, skipped.reason)
    assert "step-00000002 is damaged" in caplog.text


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_wherever_a_bit_flips_it_is_found_or_harmless(name: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(Counter(1))
    path = store.save(Counter(2), lineage=1) / name
    good, rng, found = path.read_bytes(), random.Random(3), 0
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
        counter = Counter()
        report = store.load_latest(counter)
        found += report.step == 1
        assert report.step is not None and (report.step, report.lineage) in ((1, 0), (2, 1))
        assert counter.tensors["value"].tolist() == [report.step, report.step + 0.5]
    assert found > len(good) / 2
    for size in (0, 1, len(good) // 2):
        path.write_bytes(good[:size])
        assert store.load_latest(Counter()).step == 1


def test_what_is_damaged_is_none_of_those_that_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(Counter(1))
    _flip(store.save(Counter(2)) / "state.safetensors")
    assert store.load_latest(Counter()).step == 1
    store.save(Counter(3))
    assert store.steps() == [1, 3], "two that can be used"


def test_a_save_killed_half_way_is_invisible_and_swept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(Counter(1))

    class Dying(Counter):
        def state_tensors(self) -> dict[str, Tensor]:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        store.save(Dying(2))
    torn = tmp_path / ".partial-00000002-1"
    torn.mkdir()
    (torn / "state.safetensors").write_bytes(b"half")
    assert store.load_latest(Counter()).step == 1
    store.save(Counter(3))
    assert not torn.exists()
    assert store.steps() == [1, 3]


def test_another_release_s_format_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    path = store.save(Counter(1)) / "state.json"
    scalars = json.loads(path.read_text()) | {"format": 3}
    del scalars["seal"]
    seal = hashlib.sha256(json.dumps(scalars, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(scalars | {"seal": seal}))
    with pytest.raises(SetupError, match="format 3"):
        store.load_latest(Counter())
