"""References and teachers: which models are asked, and what a step makes of their answers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from wingbeat.core.config.trainer import LoraConfig
from wingbeat.core.errors import ModelSourceError, SetupError
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.kl import kl_estimate
from wingbeat.trainer.rows import build_rows
from wingbeat.trainer.scores import PerRow, Scores
from wingbeat.trainer.single import PolicyTrainer

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

MakeTrainer = Callable[..., PolicyTrainer]
MakeBatch = Callable[..., TrainingBatch]
ModelFolder = Callable[..., Path]
OPTIONS: list[dict[str, Any]] = [
    {"kl_coef": 0.5},
    {"kl_coef": 0.5, "kl_in": "reward"},
    {"algorithm": "decoupled_ppo", "updates_per_batch": 2, "tis_cap": 2.0},
    {"algorithm": "m2po", "updates_per_batch": 2},
    {"algorithm": "distill"},
    {"algorithm": "sft", "entropy_coef": 0.1},
    {"algorithm": "maxrl", "sequence_tis_cap": 2.0, "mis_low": 0.1, "sft_coef": 0.1},
    {"kl_coef": 0.5, "kl_estimator": "k1", "lora": LoraConfig(rank=2), "entropy_coef": 0.1},
]
MOSTLY_SLOW = [
    *OPTIONS[1:3],
    *(pytest.param(options, marks=pytest.mark.slow) for options in OPTIONS[:1] + OPTIONS[3:]),
]
"""One penalty and one algorithm that scores its own policy in the unit part."""


def _ids(options: Mapping[str, Any]) -> str:
    return "+".join(f"{key}={value}" for key, value in options.items() if key != "lora")


def _scores(trainer: PolicyTrainer, batch: TrainingBatch) -> Scores:
    return trainer._scoring.score(build_rows(batch.episodes, vocabulary=48))


def _equal(left: PerRow | None, right: PerRow | None) -> bool:
    assert left is not None
    assert right is not None
    return all(np.allclose(a, b, atol=1e-6) for a, b in zip(left, right, strict=True))


def _distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    difference = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    return math.sqrt(difference / sum(float(tensor.double().square().sum()) for tensor in left.values()))


def _moments(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in trainer.state_tensors().items() if k.startswith("exp_avg.")}


def test_only_what_is_needed_is_scored(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    def asked(**settings: Any) -> set[str]:
        scores = _scores(make_trainer(**settings), make_batch())
        return {name for name in ("proximal_N", "reference_N", "teacher_N", "kept_N") if getattr(scores, name)}

    assert asked() == asked(algorithm="m2po") == asked(algorithm="decoupled_ppo") == set()
    assert asked(kl_coef=0.1) == {"reference_N"}
    assert asked(kl_coef=0.1, kl_in="reward") == {"reference_N", "proximal_N"}
    assert asked(algorithm="decoupled_ppo", updates_per_batch=2) == {"proximal_N"}
    assert asked(algorithm="distill") == {"teacher_N"}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_the_reference_is_the_policy_as_it_was(
    lora: LoraConfig | None, make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    trainer = make_trainer(kl_coef=0.1, lora=lora)
    first = _scores(trainer, make_batch())
    metrics = [trainer.train_step(make_batch(step=step)).metrics for step in (1, 2)]
    assert metrics[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[1]["kl"] > 1e-4
    assert _equal(_scores(trainer, make_batch()).reference_N, first.reference_N)


def test_lora_needs_no_copy_and_agrees_with_one(
    make_trainer: MakeTrainer, make_batch: MakeBatch, model_folder: ModelFolder
) -> None:
    """Adapters switched off, or the base model loaded once more: the same steps; and adapters are on again after."""
    bare = make_trainer(kl_coef=0.3, lora=LoraConfig(rank=2))
    copied = make_trainer(kl_coef=0.3, lora=LoraConfig(rank=2), reference=str(model_folder("qwen3")))
    assert not bare._scoring._frozen
    assert list(copied._scoring._frozen) == ["reference"]
    for step in (1, 2, 3):
        left, right = (trainer.train_step(make_batch(step=step)).metrics for trainer in (bare, copied))
        assert left["kl"] == pytest.approx(right["kl"], abs=1e-6)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
    assert left["kl"] > 0
    assert _distance(_moments(bare), _moments(copied)) <= 1e-4


def test_a_named_reference(make_trainer: MakeTrainer, make_batch: MakeBatch, model_folder: ModelFolder) -> None:
    """Another model of the same vocabulary, of another kind: the KL is that between two models from the start."""
    trainer = make_trainer(kl_coef=0.1, reference=str(model_folder("llama", 1)))
    assert trainer.train_step(make_batch()).metrics["kl"] > 0.01


@pytest.mark.parametrize("term", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"algorithm": "distill"}])
def test_rows_without_advantage_are_trained_where_a_term_wants_them(
    term: dict[str, Any], make_trainer: MakeTrainer, make_batch: MakeBatch, model_folder: ModelFolder
) -> None:
    equal = make_batch(rewards=[1.0] * 8)
    other = {"reference": str(model_folder("qwen3", 1))} if "kl_coef" in term else {}
    metrics = make_trainer(**term, **other).train_step(equal).metrics
    assert metrics["grad_norm"] > 0
    assert metrics["perf/row_tokens"] == sum(s.num_tokens for episode in equal.episodes for s in episode.samples)


@pytest.mark.parametrize("backend", ["auto", "depth_first"])
def test_scores_do_not_depend_on_packing_or_trees(
    backend: str, make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    settings: dict[str, Any] = {"algorithm": "distill", "kl_coef": 0.1, "kl_in": "loss"}
    plain = _scores(
        make_trainer(prefix_tree="off", sequence_packing="off", micro_batch_tokens=1, **settings), make_batch()
    )
    tree = _scores(make_trainer(prefix_tree="on", prefix_tree_backend=backend, **settings), make_batch())
    assert _equal(plain.reference_N, tree.reference_N)
    assert _equal(plain.teacher_N, tree.teacher_N)


@pytest.mark.parametrize("options", MOSTLY_SLOW, ids=_ids)
def test_micro_batching_and_trees_never_change_a_gradient(
    options: dict[str, Any], make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    """Trees to 1e-6 here, because transformers' norms take a detour through float32; to 1e-12 in test_tree_exact.  A
    second update amplifies rounding: it starts from where Adam's first one went.
    """
    layouts: list[tuple[dict[str, Any], float]] = [
        ({"prefix_tree": "off", "sequence_packing": "off", "micro_batch_tokens": 1}, 1e-12),
        ({"prefix_tree": "on", "micro_batch_tokens": 60}, 1e-6),
        ({"prefix_tree": "on", "prefix_tree_backend": "depth_first"}, 1e-6),
    ]
    settings = {"kind": "llama", "dtype": torch.float64, "max_grad_norm": 1e9} | options
    whole = make_trainer(prefix_tree="off", sequence_packing="off", micro_batch_tokens=100_000, **settings)
    wanted = whole.train_step(make_batch()).metrics
    amplified = 1e3 if "updates_per_batch" in options else 1
    for layout, tolerance in layouts:
        other = make_trainer(**layout, **settings)
        metrics = other.train_step(make_batch()).metrics
        assert _distance(_moments(whole), _moments(other)) <= amplified * tolerance, layout
        for name in ("loss", "kl", "kl/teacher", "entropy", "m2", "correction/masked", "correction/capped"):
            assert metrics.get(name) == pytest.approx(wanted.get(name), abs=1e-6), name


@pytest.mark.parametrize("options", MOSTLY_SLOW, ids=_ids)
def test_the_order_of_episodes_never_changes_a_gradient(
    options: dict[str, Any], make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    settings = {"kind": "llama", "dtype": torch.float64, "max_grad_norm": 1e9} | options | {"updates_per_batch": 1}
    batch = make_batch()
    turned = msgspec.structs.replace(batch, episodes=batch.episodes[::-1])
    left, right = make_trainer(**settings), make_trainer(**settings)
    left.train_step(batch)
    right.train_step(turned)
    assert _distance(_moments(left), _moments(right)) <= 1e-12


@pytest.mark.parametrize("options", MOSTLY_SLOW, ids=_ids)
def test_replay_gives_the_same_bits(options: dict[str, Any], make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """Steps 1 to 3 at once, and step 3 from the state after step 2."""

    def tensors(trainer: PolicyTrainer) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}

    first = make_trainer(**options)
    for step in (1, 2):
        first.train_step(make_batch(step=step))
    saved = tensors(first)
    first.train_step(make_batch(step=3))
    again = make_trainer(**options)
    again.load_state(saved, step=2)
    again.train_step(make_batch(step=3))
    left, right = tensors(first), tensors(again)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("options", MOSTLY_SLOW, ids=_ids)
def test_bfloat16_trains(options: dict[str, Any], make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer(dtype=torch.bfloat16, **options)
    for step in (1, 2):
        metrics = trainer.train_step(make_batch(step=step)).metrics
        assert all(map(math.isfinite, metrics.values()))
        assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_in_the_reward_by_hand(estimator: Any, make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """Where credit is per episode: the sum over its trained tokens comes off its reward, before the baseline."""
    settings: dict[str, Any] = {"algorithm": "rloo", "max_grad_norm": 1e9, "learning_rate": 1e-2}
    penalised = make_trainer(kl_coef=0.2, kl_in="reward", kl_estimator=estimator, **settings)
    plain = make_trainer(**settings)
    # Rewards without difference: the penalty of step 1 is zero, so both stay what they were.
    for trainer in (penalised, plain):
        trainer.train_step(make_batch(step=1, rewards=[0.0] * 8), clock=lambda: 0.0)
        trainer.train_step(make_batch(step=2, rewards=[1.0, 0.0] * 4))
    batch = make_batch(step=3)
    rows = build_rows(batch.episodes, vocabulary=48)
    scores = _scores(penalised, batch)
    assert scores.proximal_N is not None
    assert scores.reference_N is not None
    sums = [0.0] * len(batch.episodes)
    for row, policy_N, reference_N in zip(rows, scores.proximal_N, scores.reference_N, strict=True):
        pair = (torch.from_numpy(policy_N).double(), torch.from_numpy(reference_N).double())
        sums[row.episode] += kl_estimate(*pair, estimator=estimator).sum().item()
    advantages = penalised.train_step(batch).advantages
    rewards = [episode.reward - 0.2 * total for episode, total in zip(batch.episodes, sums, strict=True)]
    group = rewards[:4]
    wanted = group[0] - (sum(group) - group[0]) / 3
    assert next(iter(advantages.values())) == pytest.approx(wanted, abs=1e-9)
    assert max(map(abs, sums)) > 1e-4


def test_zero_advantage_but_cross_entropy_weight_is_kept(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """prime-rl#3223: a row is skipped only where nothing trains it."""
    flat = make_batch(rewards=[1.0] * 4 + [0.0] * 4)
    skipped = make_trainer().train_step(flat).metrics
    assert skipped["grad_norm"] == 0.0
    kept = make_trainer(sft_coef=0.5).train_step(flat).metrics
    assert kept["grad_norm"] > 0
    rows = [row for row in build_rows(flat.episodes, vocabulary=48) if row.num_trained]
    assert kept["perf/row_tokens"] == sum(len(row.token_ids_T) for row in rows if row.episode < 4)
    alone = make_trainer(algorithm="sft", sft_min_reward=1.0).train_step(flat).metrics
    assert alone["grad_norm"] == pytest.approx(2 * kept["grad_norm"], rel=1e-4)


def test_where_every_token_is_trained_no_row_is_skipped(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    flat = make_batch(rewards=[1.0] * 8)
    rows = [row for row in build_rows(flat.episodes, vocabulary=48) if row.num_trained]
    choices: list[dict[str, Any]] = [{"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"algorithm": "distill"}]
    for settings in choices:
        metrics = make_trainer(**settings).train_step(flat).metrics
        assert metrics["perf/row_tokens"] == sum(len(row.token_ids_T) for row in rows), settings


def test_distillation_reaches_the_teacher(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer(algorithm="distill", learning_rate=3e-3)
    found = [trainer.train_step(make_batch(step=step)).metrics["kl/teacher"] for step in range(1, 25)]
    assert found[-1] < 0.5 * found[0]


def test_a_teacher_of_another_vocabulary_is_refused_by_name(
    make_trainer: MakeTrainer, model_folder: ModelFolder, tmp_path: Path
) -> None:
    other = shutil.copytree(model_folder("qwen3", 1), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["w7"], words["w8"] = words["w8"], words["w7"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(SetupError, match=r"trainer\.teacher: expected a model with the policy's vocabulary.*2 of 48"):
        make_trainer(algorithm="distill", teacher=str(other))
    with pytest.raises(SetupError, match=r"trainer\.reference: expected .*'w7', 'w8'"):
        make_trainer(kl_coef=0.1, reference=str(other))


def test_a_teacher_that_is_not_there_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"trainer\.teacher: .*nothing lies at"):
        make_trainer(algorithm="distill", teacher=str(tmp_path / "nowhere"))
