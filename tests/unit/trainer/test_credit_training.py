"""Credit per turn, per step group and per token, trained: no packing, tree or order changes a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from wingbeat.core.samples import EpisodeSamples, TrainingBatch
from wingbeat.trainer.single import PolicyTrainer

MakeTrainer = Callable[..., PolicyTrainer]
MakeEpisode = Callable[..., EpisodeSamples]
FORMS: dict[str, dict[str, Any]] = {
    "turn": {"credit": "turn", "gamma": 0.9},
    "turn, leave one out": {"credit": "turn", "algorithm": "rloo"},
    "step groups": {"credit": "step_groups", "gamma": 0.95, "step_weight": 0.7},
    "step groups, gspo": {"credit": "step_groups", "algorithm": "gspo"},
    "ppo": {"algorithm": "ppo", "gamma": 0.99, "critic": {"learning_rate": 0.01}},
    "penalties off the reward": {"credit": "turn", "kl_coef": 0.1, "kl_in": "reward"},
    "penalties off ppo's tokens": {"algorithm": "ppo", "kl_coef": 0.1, "kl_in": "reward"},
}
QUICK = ("turn", "penalties off ppo's tokens")
MOSTLY_SLOW = [pytest.param(form, marks=() if form in QUICK else pytest.mark.slow) for form in FORMS]
SHARING: list[dict[str, Any]] = [
    {"prefix_tree": "off", "sequence_packing": "off", "micro_batch_tokens": 1, "logprob_chunk_tokens": 3},
    {"prefix_tree": "off", "sequence_packing": "off", "micro_batch_tokens": 60},
    {"prefix_tree": "off", "sequence_packing": "on"},
    {"prefix_tree": "off", "sequence_packing": "on", "micro_batch_tokens": 40},
    *({"prefix_tree": "on", "prefix_tree_backend": backend} for backend in ("mask", "nodes", "depth_first")),
]


def _norm(module: Any, hidden: Tensor) -> Tensor:
    """Transformers' takes a detour through float32."""
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return hidden * scale * module.weight


@pytest.fixture
def make_form(make_trainer: MakeTrainer, model_folder: Callable[..., Path]) -> MakeTrainer:
    """A trainer by the name of a form; a KL penalty is towards another model, so that it is not 0."""

    def make(form: str, *, kind: str = "qwen3", **settings: Any) -> PolicyTrainer:
        chosen = FORMS[form] | settings
        if "kl_coef" in chosen:
            chosen |= {"reference": str(model_folder(kind, 1))}
        return make_trainer(kind=kind, **chosen)

    return make


@pytest.fixture
def batches(make_episode: MakeEpisode) -> list[TrainingBatch]:
    """Two steps of two groups of forked episodes with rewards of their own for turns."""
    rng = np.random.default_rng(3)
    trees = [(-1, 0, 0, 1), (-1, 0, 1), (-1, -1, 1), (-1,)]

    def episode(index: int) -> EpisodeSamples:
        return make_episode(
            rng,
            trees[index % 4],
            lengths=rng.integers(1, 5, 4).tolist(),
            rewards=rng.random(len(trees[index % 4])).tolist(),
            states=rng.choice(["x", "y"], 4).tolist(),
            episode_id=f"e{index}",
            group_id=f"g{index // 4}",
            reward=float(rng.random() * 3),
        )

    return [
        TrainingBatch(f"b{step}", "p", step, tuple(episode(index) for index in range(8)), seed=step) for step in (1, 2)
    ]


def _state(trainer: PolicyTrainer, batches: Sequence[TrainingBatch]) -> dict[str, Tensor]:
    """What two steps leave: the gradients' moments, of a critic, too, whose values matter in the second."""
    for batch in batches:
        trainer.train_step(batch)
    return {name: tensor.clone() for name, tensor in trainer.state_tensors().items() if "exp_avg." in name}


def _distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    difference = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    return math.sqrt(difference / sum(float(tensor.double().square().sum()) for tensor in left.values()))


@pytest.mark.parametrize(
    "form", ["turn", *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form != "turn")]
)
def test_packing_trees_and_order_never_change_a_gradient(
    form: str, make_form: MakeTrainer, batches: list[TrainingBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off-policy enough for clips.  AdamW's own rule turns rounding into more than rounding where a gradient is
    near zero, so the steps are small."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", _norm)
    settings: dict[str, Any] = {
        "kind": "llama",
        "dtype": torch.float64,
        "max_grad_norm": 1e9,
        "learning_rate": 1e-9,
    }
    wanted = _state(make_form(form, **settings, prefix_tree="off", sequence_packing="off"), batches)
    for sharing in SHARING:
        assert _distance(wanted, _state(make_form(form, **settings, **sharing), batches)) <= 1e-12
    turned = [msgspec.structs.replace(batch, episodes=batch.episodes[::-1]) for batch in batches]
    assert (
        _distance(wanted, _state(make_form(form, **settings, prefix_tree="off", sequence_packing="off"), turned))
        <= 1e-12
    )


@pytest.mark.parametrize("form", MOSTLY_SLOW)
def test_a_replay_is_bit_equal(form: str, make_form: MakeTrainer, batches: list[TrainingBatch]) -> None:
    """In float32, also from a state in the middle."""
    straight, replayed = (make_form(form, updates_per_batch=2) for _ in range(2))
    first = straight.train_step(batches[0])
    middle = {name: tensor.clone() for name, tensor in straight.state_tensors().items()}
    second = straight.train_step(batches[1])
    replayed.load_state(middle, step=1)
    assert replayed.train_step(batches[1]).advantages == second.advantages
    for name, tensor in straight.state_tensors().items():
        assert torch.equal(tensor, replayed.state_tensors()[name]), name
    assert first.advantages.keys() == {f"e{index}:1:" for index in range(8)}


@pytest.mark.parametrize("form", MOSTLY_SLOW)
def test_the_control_trains_other_episodes_advantages(
    form: str, make_form: MakeTrainer, batches: list[TrainingBatch]
) -> None:
    real = make_form(form).train_step(batches[0])
    control = make_form(form, control="shuffled_advantages").train_step(batches[0])
    assert sorted(real.advantages.values()) == sorted(control.advantages.values())
    assert list(real.advantages.values()) != list(control.advantages.values())


def test_turn_credit_trains_where_episodes_are_equal(make_trainer: MakeTrainer, batches: list[TrainingBatch]) -> None:
    """All episodes earned 1, but at different turns."""
    equal = tuple(msgspec.structs.replace(episode, reward=1.0) for episode in batches[0].episodes)
    batch = msgspec.structs.replace(batches[0], episodes=equal)
    assert make_trainer().train_step(batch).metrics["grad_norm"] == 0
    metrics = make_trainer(credit="turn").train_step(batch).metrics
    assert metrics["grad_norm"] > 0
    assert metrics["advantage/std"] > 0
