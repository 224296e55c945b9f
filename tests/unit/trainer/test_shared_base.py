"""Several LoRA policies over one base model in memory: each trains as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wingbeat.core.config import PolicyConfig
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.checkpoint import CheckpointStore
from wingbeat.trainer.shared_base import SharedBases
from wingbeat.trainer.single import PolicyTrainer

MakeBatch = Callable[..., TrainingBatch]
Folder = Callable[..., Path]
TIMED = ("time/", "perf/tokens_per_s")

SMALL: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
LARGE: dict[str, Any] = {"rank": 8, "alpha": 4.0}


@pytest.fixture
def make(model_folder: Folder) -> Callable[..., PolicyTrainer]:
    def make(
        lora: dict[str, Any] | None, bases: SharedBases | None, *, dtype: torch.dtype = torch.float32, **settings: Any
    ) -> PolicyTrainer:
        config = PolicyConfig.model_validate(
            {"model": "x", "context_tokens": 32, "trainer": {"learning_rate": 1e-2} | settings, "lora": lora}
        )
        return PolicyTrainer(
            model_folder("qwen3"), config=config, total_steps=9, seed=3, device="cpu", dtype=dtype, bases=bases
        )

    return make


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def large_tensors(*models: Any) -> set[int]:
    """The distinct memory of what is frozen."""
    frozen: Iterable[Tensor] = (p for model in models for p in model.parameters() if not p.requires_grad)
    return {parameter.data_ptr() for parameter in frozen}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policies_of_one_base_train_as_if_each_were_alone(
    make: Callable[..., PolicyTrainer], make_batch: MakeBatch, dtype: torch.dtype
) -> None:
    """Bit for bit, with different ranks, targets, algorithms and checkpointing, in any order of steps."""
    bases = SharedBases()
    settings = ({"gradient_checkpointing": True, "kl_coef": 0.1}, {"algorithm": "rloo", "prefix_tree": "on"})
    alone = [make(lora, None, dtype=dtype, **more) for lora, more in zip((SMALL, LARGE), settings, strict=True)]
    shared = [make(lora, bases, dtype=dtype, **more) for lora, more in zip((SMALL, LARGE), settings, strict=True)]
    base = large_tensors(shared[0].model)
    assert base == large_tensors(shared[1].model), "one base model in memory"
    assert not base & large_tensors(alone[0].model)
    untouched = copied({name: p for name, p in shared[0].model.named_parameters() if not p.requires_grad})
    for which in (0, 1, 1, 0):
        other = copied(shared[1 - which].state_tensors())
        batch = make_batch(step=shared[which].step + 1, seed=which)
        got, wanted = shared[which].train_step(batch), alone[which].train_step(batch)
        assert same(shared[1 - which].state_tensors(), other), "the other policy did not move"
        kept = [name for name in wanted.metrics if not name.startswith(TIMED)]
        assert [got.metrics[name] for name in kept] == [wanted.metrics[name] for name in kept]
        assert same(shared[which].state_tensors(), alone[which].state_tensors())
        assert same(shared[which].published_tensors(), alone[which].published_tensors())
    assert same(untouched, {name: p for name, p in shared[0].model.named_parameters() if name in untouched})
    assert all(p.grad is None for p in shared[0].model.parameters() if not p.requires_grad)


def test_critic_reference_and_teacher_take_no_further_memory(
    make: Callable[..., PolicyTrainer], make_batch: MakeBatch, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wingbeat.trainer import shared_base

    loads: list[Path] = []
    load = shared_base.load_model
    monkeypatch.setattr(shared_base, "load_model", lambda source, **how: loads.append(source) or load(source, **how))
    bases, teacher = SharedBases(), str(model_folder("qwen3", 1))
    keys: list[dict[str, Any]] = [
        {"algorithm": "ppo"},
        {"algorithm": "distill", "teacher": teacher},
        {"kl_coef": 0.1, "reference": teacher},
    ]
    shared, alone = ([make(SMALL, where, **key) for key in keys] for where in (bases, None))
    assert loads == [model_folder("qwen3"), model_folder("qwen3", 1)], "two models, each once"
    batch = make_batch()
    for one, other in zip(shared, alone, strict=True):
        one.train_step(batch)
        other.train_step(batch)
        assert same(one.state_tensors(), other.state_tensors())


def test_checkpoints_and_exports_are_those_of_a_policy_alone(
    make: Callable[..., PolicyTrainer], make_batch: MakeBatch, tmp_path: Path
) -> None:
    """A policy moves into a group, and out of it, with its run."""
    bases = SharedBases()
    alone, shared, neighbour = make(SMALL, None), make(SMALL, bases), make(LARGE, bases)
    neighbour.train_step(make_batch())
    alone.train_step(make_batch())
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.save(alone)
    assert store.load_latest(shared).step == 1
    for trainer in (alone, shared):
        trainer.train_step(make_batch(step=2, seed=1))
        trainer.export(tmp_path / f"merged-{trainer is alone}", merged=True)
        trainer.export(tmp_path / f"adapter-{trainer is alone}")
    assert same(alone.state_tensors(), shared.state_tensors())
    for name in ("merged-{}/model.safetensors", "adapter-{}/adapter_model.safetensors"):
        assert (tmp_path / name.format(True)).read_bytes() == (tmp_path / name.format(False)).read_bytes()
    shared.train_step(make_batch(step=3, seed=2))  # a merged export left the base as it was
    alone.train_step(make_batch(step=3, seed=2))
    assert same(alone.state_tensors(), shared.state_tensors())


def test_a_policy_that_trains_all_weights_has_a_model_of_its_own(make: Callable[..., PolicyTrainer]) -> None:
    bases = SharedBases()
    full, adapted = make(None, bases), make(SMALL, bases)
    owned = {parameter.data_ptr() for parameter in full.model.parameters()}
    assert not owned & {parameter.data_ptr() for parameter in adapted.model.parameters()}


def test_a_base_is_of_one_dtype(make: Callable[..., PolicyTrainer]) -> None:
    bases = SharedBases()
    made = [make(SMALL, bases, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    dtypes = [{p.dtype for p in trainer.model.parameters() if not p.requires_grad} for trainer in made]
    assert dtypes == [{torch.float32}, {torch.bfloat16}]
