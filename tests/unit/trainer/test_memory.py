"""Out of memory in a step: smaller forwards, the same gradient, remembered; by name where no forward is smaller."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from wingbeat.core.errors import SetupError
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.memory import ForwardBudget, is_out_of_memory
from wingbeat.trainer.single import PROGRESS, PolicyTrainer

MakeTrainer = Callable[..., PolicyTrainer]
MakeBatch = Callable[..., TrainingBatch]
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"prefix_tree": "off", "sequence_packing": "off"},
    "packed": {"prefix_tree": "off", "sequence_packing": "on"},
    "tree": {"prefix_tree": "on"},
    "depth first": {"prefix_tree": "on", "prefix_tree_backend": "depth_first"},
}
CASES = [
    pytest.param(way, in_backward, marks=() if (way, in_backward) == ("packed", True) else pytest.mark.slow)
    for way in WAYS
    for in_backward in (False, True)
]


def _run_out(*, above: int, in_backward: bool = False) -> Callable[..., Any]:
    """A forward hook on a decoder that has room for so many tokens, and then fails as torch does."""

    def allocate(*_: object) -> None:
        torch.empty(10**15)  # the real exception of this machine's allocator

    def hook(_module: object, _inputs: object, output: Any) -> None:
        hidden: Tensor = output.last_hidden_state
        if hidden.shape[0] * hidden.shape[1] > above:
            if in_backward and hidden.requires_grad:
                hidden.register_hook(allocate)
            else:
                allocate()

    return hook


def _gradient(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """Of the first step, in which nothing is clipped."""
    return {k: v.clone() for k, v in trainer.state_tensors().items() if k.startswith("exp_avg.")}


@pytest.mark.parametrize(("way", "in_backward"), CASES)
def test_a_step_that_does_not_fit_is_taken_in_smaller_forwards(
    way: str,
    in_backward: bool,
    make_trainer: MakeTrainer,
    make_batch: MakeBatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings, room = {"max_grad_norm": 1e9, **WAYS[way]}, 24 if way == "depth first" else 60
    wanted = make_trainer(**settings)
    metrics = wanted.train_step(make_batch()).metrics
    assert (metrics["perf/oom_retries"], metrics["perf/micro_batch_tokens"]) == (0, 16384)
    trainer = make_trainer(**settings)
    trainer.model.model.register_forward_hook(_run_out(above=room, in_backward=in_backward))
    with caplog.at_level(logging.WARNING, logger="wingbeat"):
        tight = trainer.train_step(make_batch()).metrics
    assert tight["perf/oom_retries"] == len(caplog.records) >= 1
    assert tight["perf/micro_batch_tokens"] <= room
    assert "micro_batch_tokens goes from 16384 to" in caplog.records[0].getMessage()
    assert tight["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    for (name, left), right in zip(_gradient(wanted).items(), _gradient(trainer).values(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4, msg=name)
    remembered = trainer.train_step(make_batch(step=2)).metrics
    assert remembered["perf/oom_retries"] == 0
    assert remembered["perf/micro_batch_tokens"] == tight["perf/micro_batch_tokens"]


def test_a_sample_that_fits_nowhere_is_named_and_nothing_moves(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    trainer = make_trainer(prefix_tree="off", sequence_packing="on", lora=None)
    before = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    trainer.model.model.register_forward_hook(_run_out(above=4))
    with pytest.raises(SetupError, match=r"one sample of \d+ tokens to fit into memory, got: .*allocate memory"):
        trainer.train_step(make_batch())
    assert trainer.step == 0
    after = trainer.state_tensors()
    assert {name for name, tensor in after.items() if not torch.equal(before[name], tensor)} == {PROGRESS}


def test_what_was_gathered_before_the_failure_does_not_count_twice(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    settings: dict[str, Any] = {"prefix_tree": "off", "sequence_packing": "on", "micro_batch_tokens": 60}
    wanted, trainer = (make_trainer(max_grad_norm=1e9, **settings) for _ in range(2))
    forwards: list[int] = []

    def hook(*_: object) -> None:
        forwards.append(1)
        if len(forwards) == 2:
            torch.empty(10**15)

    trainer.model.model.register_forward_hook(hook)
    for one in (wanted, trainer):
        one.train_step(make_batch())
    assert len(forwards) > 2
    for (name, left), right in zip(_gradient(wanted).items(), _gradient(trainer).values(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4, msg=name)


def test_a_checkpoint_keeps_what_fitted_so_that_a_replay_is_exact(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    """The replaying process has all the memory in the world, and makes small forwards all the same."""
    settings: dict[str, Any] = {"prefix_tree": "off", "sequence_packing": "on"}
    tight, roomy, plain, changed = (
        make_trainer(**settings, **more) for more in ({}, {}, {}, {"micro_batch_tokens": 99})
    )
    tight.model.model.register_forward_hook(_run_out(above=60))
    tight.train_step(make_batch())
    checkpoint = {name: tensor.clone() for name, tensor in tight.state_tensors().items()}
    without = {name: tensor for name, tensor in checkpoint.items() if name != PROGRESS}
    wanted = tight.train_step(make_batch(step=2)).metrics
    for trainer, state in ((roomy, checkpoint), (plain, without), (changed, checkpoint)):
        trainer.load_state(state, step=1)
    replayed = roomy.train_step(make_batch(step=2)).metrics
    assert replayed["perf/micro_batch_tokens"] == wanted["perf/micro_batch_tokens"] <= 60
    assert all(torch.equal(tensor, roomy.state_tensors()[name]) for name, tensor in tight.state_tensors().items())
    assert plain.train_step(make_batch(step=2)).metrics["perf/micro_batch_tokens"] == 16384
    assert changed.train_step(make_batch(step=2)).metrics["perf/micro_batch_tokens"] == 99


def test_what_did_not_fit_is_freed_before_the_next_attempt(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """Also what the exception's own traceback holds."""
    trainer = make_trainer(prefix_tree="off", sequence_packing="on")
    failed: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    fail = _run_out(above=60)

    def hook(module: object, inputs: object, output: Any) -> None:
        alive.append(any(reference() is not None for reference in failed))
        try:
            fail(module, inputs, output)
        except RuntimeError:
            failed.append(weakref.ref(output.last_hidden_state))
            raise

    trainer.model.model.register_forward_hook(hook)
    trainer.train_step(make_batch())
    assert failed
    assert not any(alive)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"kl_coef": 0.1, "kl_in": "reward"}, {"algorithm": "ppo"}, {"algorithm": "m2po"}])
def test_passes_beside_the_gradient_are_repeated_too(
    settings: dict[str, Any], make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    wanted, trainer = (make_trainer(**settings) for _ in range(2))
    trainer.model.model.register_forward_hook(_run_out(above=60))
    if trainer._critic is not None:
        trainer._critic._model.decoder.register_forward_hook(_run_out(above=40))
    metrics = wanted.train_step(make_batch()).metrics
    tight = trainer.train_step(make_batch()).metrics
    assert tight["perf/oom_retries"] >= 1
    for key in {"loss", "critic/value_loss", "kl"} & metrics.keys():
        assert tight[key] == pytest.approx(metrics[key], rel=1e-4)


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        ForwardBudget(8).until_it_fits(_raises, clean=lambda: None)


def _raises() -> None:
    raise RuntimeError("shapes")
