"""Learning rates and AdamW, by hand; low precision through masters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.errors import SetupError, WingbeatError
from wingbeat.trainer.optimizer import PolicyOptimizer, lr_at


def _lrs(steps: list[int], **settings: object) -> list[float]:
    config = TrainerConfig.model_validate({"learning_rate": 1.0, "warmup_steps": 2} | settings)
    return [lr_at(step, config=config, total_steps=10) for step in steps]


def test_schedules_by_hand() -> None:
    assert _lrs([1, 2, 3, 10, 50]) == [0.5, 1, 1, 1, 1]
    assert _lrs([1, 2, 4, 6, 10, 11], schedule="linear") == [0.5, 1, 0.75, 0.5, 0, 0]
    assert _lrs([2, 6, 10], schedule="linear", min_lr_ratio=0.2) == pytest.approx([1, 0.6, 0.2])
    assert _lrs([1, 2, 4, 6, 10, 99], schedule="cosine", min_lr_ratio=0.1) == pytest.approx(
        [0.5, 1, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 0.55, 0.1, 0.1]
    )


def test_a_schedule_shorter_than_its_warm_up_ends_at_the_floor() -> None:
    config = TrainerConfig(learning_rate=1.0, warmup_steps=20, schedule="linear")
    assert lr_at(10, config=config, total_steps=10) == 0.5
    assert lr_at(21, config=config, total_steps=10) == 0.0


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step >= 1"):
        lr_at(0, config=TrainerConfig(), total_steps=10)


def _parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {
        "weight": nn.Parameter(torch.full((2, 2), 1.0, dtype=dtype)),
        "bias": nn.Parameter(torch.full((2,), 1.0, dtype=dtype)),
    }


def _backward(parameters: dict[str, nn.Parameter], factor: float) -> None:
    sum(factor * parameter.sum() for parameter in parameters.values()).backward()  # type: ignore[union-attr]


def test_the_norm_is_global_and_clipped() -> None:
    parameters = _parameters()
    optimizer = PolicyOptimizer(parameters, config=TrainerConfig(max_grad_norm=0.5))
    optimizer.zero_grad()
    _backward(parameters, 3.0)
    assert optimizer.step(0.0) == pytest.approx(3 * math.sqrt(6))
    total = math.sqrt(sum(float(g.square().sum()) for g in optimizer.gradients().values()))
    assert total == pytest.approx(0.5, rel=1e-5)


def test_decay_spares_vectors() -> None:
    parameters = _parameters()
    optimizer = PolicyOptimizer(parameters, config=TrainerConfig(weight_decay=0.5))
    optimizer.zero_grad()
    optimizer.step(0.1)
    assert parameters["weight"].tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert parameters["bias"].tolist() == [1.0, 1.0]


def test_first_adamw_step_is_the_learning_rate_against_the_sign() -> None:
    parameters = _parameters()
    optimizer = PolicyOptimizer(parameters, config=TrainerConfig(max_grad_norm=1e9))
    optimizer.zero_grad()
    _backward(parameters, -4.0)
    optimizer.step(0.25)
    assert parameters["bias"].tolist() == pytest.approx([1.25, 1.25])


def test_a_gradient_that_is_no_number_moves_nothing() -> None:
    parameters = _parameters()
    optimizer = PolicyOptimizer(parameters, config=TrainerConfig())
    optimizer.zero_grad()
    _backward(parameters, float("nan"))
    with pytest.raises(WingbeatError, match="finite gradient norm, got nan"):
        optimizer.step(0.1)
    assert parameters["weight"].tolist() == [[1, 1], [1, 1]]


def test_masters_keep_updates_that_bfloat16_would_lose() -> None:
    """1/1024 is below bfloat16's step at 1 (1/128): eight of them must still arrive."""
    parameters = _parameters(torch.bfloat16)
    optimizer = PolicyOptimizer(parameters, config=TrainerConfig(max_grad_norm=1e9, betas=(0.0, 0.0)))
    for _ in range(8):
        optimizer.zero_grad()
        _backward(parameters, -1.0)
        optimizer.step(1 / 1024)
    assert parameters["bias"].tolist() == [1 + 1 / 128] * 2
    assert optimizer.state_tensors()["master.bias"].tolist() == pytest.approx([1 + 8 / 1024] * 2)


def test_gradients_of_low_precision_parameters_add_up_in_float32() -> None:
    parameters = _parameters(torch.bfloat16)
    optimizer = PolicyOptimizer(parameters, config=TrainerConfig())
    optimizer.zero_grad()
    for factor in (1.0, 2**-10):
        _backward(parameters, factor)
    assert optimizer.gradients()["bias"].tolist() == [1 + 2**-10] * 2


def test_state_of_another_model_is_refused_before_anything_changes() -> None:
    optimizer = PolicyOptimizer(_parameters(), config=TrainerConfig())
    state = optimizer.state_tensors()
    with pytest.raises(SetupError, match=r"master\.extra"):
        optimizer.load_state_tensors(state | {"master.extra": torch.zeros(1)})
    with pytest.raises(SetupError, match=r"got torch.float32 \(3,\)"):
        optimizer.load_state_tensors(state | {"master.bias": torch.zeros(3)})


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(SetupError, match="nothing to train"):
        PolicyOptimizer({}, config=TrainerConfig())
