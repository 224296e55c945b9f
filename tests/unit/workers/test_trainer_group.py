"""One trainer process for the policies of a LoRA group: it says and does of each what a process alone would."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_play import Driver, training_step

from wingbeat.core.config import PolicyConfig
from wingbeat.core.weight_protocol import Published
from wingbeat.core.worker_protocol import (
    BeginLineage,
    CheckpointSaved,
    Failed,
    PolicySpec,
    SaveCheckpoint,
    StepDone,
    TrainerReady,
)
from wingbeat.trainer import shared_base
from wingbeat.workers import trained_policy, trainer

RANKS = {"planner": 2, "coder": 4}


def spec(folder: Path, name: str, *, group: str | None) -> PolicySpec:
    lora = {"rank": RANKS[name], "alpha": 4.0, "group": group}
    trainer = {"learning_rate": 1e-2, "device": "cpu"}
    policy = PolicyConfig.model_validate({"model": str(folder), "context_tokens": 64, "trainer": trainer, "lora": lora})
    return PolicySpec(name, str(folder), 64, policy.model_dump(mode="json"))


def checksums(process: Driver, policy: str) -> list[str]:
    ready = [message.manifest.checksum for message in process.of(TrainerReady, policy)]
    return ready + [message.manifest.checksum for message in process.of(Published, policy)]


@pytest.fixture
def process(tiny_model: Path, tmp_path: Path) -> Callable[..., Driver]:
    def make(*names: str, group: str | None = "team", run: str = "run") -> Driver:
        return Driver(tmp_path / run, *(spec(tiny_model, name, group=group) for name in names))

    return make


def test_each_policy_of_a_group_becomes_what_it_would_alone(
    process: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Path] = []
    load = shared_base.load_model
    monkeypatch.setattr(shared_base, "load_model", lambda source, **how: loads.append(source) or load(source, **how))
    together = process(*RANKS)
    together.play(
        [*(training_step("planner", step) for step in (1, 2, 3)), *(training_step("coder", step) for step in (1, 2))],
        [SaveCheckpoint("coder", 2)],
    )
    assert len(loads) == 1, "one base model"
    order = [(message.policy, message.step) for message in together.sent if isinstance(message, StepDone)]
    assert order == [("planner", 1), ("coder", 1), ("planner", 2), ("coder", 2), ("planner", 3)]
    for name, steps in (("planner", 3), ("coder", 2)):
        alone = process(name, group=None, run=f"alone-{name}")
        alone.play(*([training_step(name, step)] for step in range(1, steps + 1)))
        assert set(checksums(alone, name)) >= set(checksums(together, name))
        assert checksums(alone, name)[-1] == checksums(together, name)[-1]
        for one, other in zip(alone.of(StepDone, name), together.of(StepDone, name), strict=True):
            assert one.metrics["grad_norm"] == other.metrics["grad_norm"]
    (saved,) = together.of(CheckpointSaved, "coder")
    again = process(*RANKS)
    again.play()
    assert [m.step for name in RANKS for m in again.of(TrainerReady, name)] == [0, 2]
    assert set(checksums(again, "coder")) == {checksums(together, "coder")[-1]}
    assert Path(saved.path).parent.name == "coder"


def test_what_fails_or_goes_back_is_one_policy(process: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a policy that begins again has let go of what it was: two may not fit into memory."""
    built: list[weakref.ref[Any]] = []
    alive: list[int] = []
    build = trained_policy.build_trainer

    def watched(*arguments: Any, **how: Any) -> Any:
        alive.append(sum(made() is not None for made in built))
        found = build(*arguments, **how)
        built.append(weakref.ref(found))
        return found

    monkeypatch.setattr(trained_policy, "build_trainer", watched)
    monkeypatch.setattr(trainer.logger, "disabled", True)  # pytest keeps what is logged, tracebacks and all
    group = process(*RANKS)
    group.play(
        [training_step("planner", 1), training_step("coder", 1)],
        [training_step("planner", 2, empty=True), training_step("coder", 2), SaveCheckpoint("planner", 1)],
        [BeginLineage("planner", 1)],
        [training_step("planner", 1, lineage=1), training_step("coder", 3)],
    )
    assert [m.command for m in group.of(Failed, "planner")] == ["train_step", "save_checkpoint"]
    assert alive == [0, 1, 1]
    assert group.of(Failed, "coder") == []
    assert [m.step for m in group.of(StepDone, "coder")] == [1, 2, 3]
    fresh, back = group.of(TrainerReady, "planner")
    assert (back.step, back.manifest.lineage, back.manifest.checksum) == (0, 1, fresh.manifest.checksum)
    assert len(group.of(TrainerReady, "coder")) == 1
    alone = process("coder", group=None, run="alone")
    alone.play(*([training_step("coder", step)] for step in (1, 2, 3)))
    assert checksums(alone, "coder")[-1] == checksums(group, "coder")[-1]
