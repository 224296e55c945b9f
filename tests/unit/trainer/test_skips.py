"""Gradients that are not finite: the step is skipped and counted, a replay does the same, and too many end training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.optimizer import NonFiniteGradient
from wingbeat.trainer.single import PROGRESS, PolicyTrainer

MakeTrainer = Callable[..., PolicyTrainer]
MakeBatch = Callable[..., TrainingBatch]


def _poison(model: Any, bad_steps: set[int], step: list[int]) -> Any:
    """Makes the hidden states' gradient NaN in some steps, until the handle is removed."""

    def hook(_module: object, _inputs: object, output: Any) -> None:
        hidden: Tensor = output.last_hidden_state
        if step[0] in bad_steps and hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * math.nan)

    return model.register_forward_hook(hook)


def _run(trainer: PolicyTrainer, make_batch: MakeBatch, *, bad: set[int], steps: range) -> list[dict[str, float]]:
    current = [0]
    handle = _poison(trainer.model.model, bad, current)
    found: list[dict[str, float]] = []
    for number in steps:
        current[0] = number
        found.append(trainer.train_step(make_batch(step=number, seed=number)).metrics)
    handle.remove()
    return found


def test_a_skipped_step_moves_nothing_and_counts(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer()
    _run(trainer, make_batch, bad=set(), steps=range(1, 2))
    before = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    (skipped,) = _run(trainer, make_batch, bad={2}, steps=range(2, 3))
    assert trainer.step == 2
    after_it = trainer.state_tensors()
    assert {name for name, tensor in after_it.items() if not torch.equal(before[name], tensor)} == {PROGRESS}
    assert skipped["skipped_steps"] == 1
    assert "grad_norm" not in skipped
    assert all(map(math.isfinite, skipped.values()))
    (after,) = _run(trainer, make_batch, bad=set(), steps=range(3, 4))
    assert after["skipped_steps"] == 0
    assert after["grad_norm"] > 0


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"updates_per_batch": 2, "algorithm": "ppo"}],
    ids=["grpo", "ppo"],
)
def test_a_replay_of_skipped_steps_is_exact(
    settings: dict[str, Any], make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    first, again = (make_trainer(**settings) for _ in range(2))
    for trainer in (first, again):
        metrics = _run(trainer, make_batch, bad={2, 3}, steps=range(1, 5))
        assert [found["skipped_steps"] for found in metrics] == [0, 1, 2, 0]
    for name, tensor in first.state_tensors().items():
        assert torch.equal(tensor, again.state_tensors()[name]), name


def test_too_many_in_a_row_end_training(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer(max_skipped_steps=2)
    with pytest.raises(NonFiniteGradient, match="expected a finite gradient norm, got nan"):
        _run(trainer, make_batch, bad={1, 3, 4, 5}, steps=range(1, 6))
    assert trainer.step == 4
    with pytest.raises(NonFiniteGradient):
        _run(make_trainer(max_skipped_steps=0), make_batch, bad={1}, steps=range(1, 2))


def test_a_restart_does_not_forget_skipped_steps(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    stopped, resumed = (make_trainer(max_skipped_steps=2) for _ in range(2))
    _run(stopped, make_batch, bad={1, 2}, steps=range(1, 3))
    resumed.load_state({name: tensor.clone() for name, tensor in stopped.state_tensors().items()}, step=2)
    with pytest.raises(NonFiniteGradient):
        _run(resumed, make_batch, bad={3}, steps=range(3, 4))
