"""Whole training steps over trees: the same policy as over rows, whatever else is configured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from wingbeat.core.config.trainer import Algorithm, LoraConfig
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample, TurnCredit
from wingbeat.trainer.single import PolicyTrainer

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

MakeTrainer = Callable[..., PolicyTrainer]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
QUICK: tuple[Algorithm, ...] = ("grpo", "gspo", "ppo")
"""In the unit part."""
SHARED_METRICS = [
    *("loss", "grad_norm", "entropy", "mismatch_kl", "clip_ratio/low", "clip_ratio/high", "ratio/max"),
    *("mismatch_kl/on_policy", "max_abs_logprob_diff"),
]
TREES: list[dict[str, Any]] = [
    {"prefix_tree": "auto"},
    {"prefix_tree": "on", "micro_batch_tokens": 40},
    {"prefix_tree": "on", "prefix_tree_backend": "depth_first"},
]


def _episode(index: int, samples: list[TrainingSample]) -> EpisodeSamples:
    reward = [1.0, 0.0, 0.5, 0.0][index % 4]
    turns = [TurnCredit("t0"), TurnCredit("t1", "t0", 0.25), TurnCredit("t2", "t1"), TurnCredit("t3", "t1", 0.125)]
    return EpisodeSamples(
        f"e{index}", 1, f"g{index // 4}", "p", "", reward, tuple(samples), turns=tuple(turns[: 2 + len(samples)])
    )


def _sample(
    rng: np.random.Generator, tokens: np.ndarray, sampled: np.ndarray, *, name: str, turns: tuple[str, ...]
) -> TrainingSample:
    return TrainingSample.build(
        name,
        token_ids=tokens.astype(np.int32),
        sampled=sampled.astype(np.uint8),
        sampling_logprobs=np.where(sampled, rng.normal(-3.5, 0.5, len(tokens)), 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        temperature=0.8,
        turn_ids=turns,
        turn_starts=tuple(np.flatnonzero(np.diff(sampled, prepend=0) == 1).tolist()),
    )


def _batch(step: int = 1) -> TrainingBatch:
    """Two groups of four.  Every episode has three turns on its group's prompt; every second one forks after two,
    and the second and third episodes of a group sampled the same first reply."""
    rng = np.random.default_rng(7)
    episodes: list[EpisodeSamples] = []
    prompt = first_reply = np.zeros(0, np.int64)
    for index in range(8):
        if index % 4 == 0:
            prompt, first_reply = rng.integers(0, 48, 9), rng.integers(0, 48, 4)
        reply = first_reply if index % 4 in (1, 2) else rng.integers(0, 48, 4)
        turns = [(prompt, 0), (reply, 1), (rng.integers(0, 48, 3), 0), (rng.integers(0, 48, 4), 1)]
        tails = [[(rng.integers(0, 48, 2), 0), (rng.integers(0, 48, 3), 1)] for _ in range(1 + index % 2)]
        samples: list[TrainingSample] = []
        for number, tail in enumerate(tails):
            path = turns + tail
            tokens = np.concatenate([part for part, _ in path])
            # A later timeline trains only its own turns: each sampled token trains once per episode.
            owned = [own if number == 0 or place >= len(turns) else 0 for place, (_, own) in enumerate(path)]
            ids = ("t3",) if number else ("t0", "t1", "t2")
            sampled = np.repeat(owned, [len(part) for part, _ in path])
            samples.append(_sample(rng, tokens, sampled, name=f"e{index}s{number}", turns=ids))
        episodes.append(_episode(index, samples))
    return TrainingBatch(f"b{step}", "p", step, tuple(episodes), seed=3)


def _by_turns(batch: TrainingBatch) -> TrainingBatch:
    """The same turns without any merging: a sample per turn, with all that precedes it."""
    return msgspec.structs.replace(
        batch,
        episodes=tuple(
            msgspec.structs.replace(episode, samples=tuple(turn for s in episode.samples for turn in _turns(s)))
            for episode in batch.episodes
        ),
    )


def _turns(sample: TrainingSample) -> list[TrainingSample]:
    sampled_T = sample.sampled_T.astype(bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sampled_T, [0]])))
    found: list[TrainingSample] = []
    for start, stop, turn in zip(edges[::2], edges[1::2], sample.turn_ids, strict=True):
        own = np.zeros(stop, np.uint8)
        own[start:] = 1
        found.append(
            TrainingSample.build(
                f"{sample.sample_id}t{start}",
                token_ids=sample.tokens_T[:stop],
                sampled=own,
                sampling_logprobs=sample.sampling_logprobs_T[:stop] * own,
                versions=np.where(own, sample.versions_T[:stop], -1).astype(np.int32),
                temperature=sample.temperature,
                turn_ids=(turn,),
                turn_starts=(int(start),),
            )
        )
    return found


def _distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    difference = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    return math.sqrt(difference / sum(float(tensor.double().square().sum()) for tensor in right.values()))


def _step(trainer: PolicyTrainer, batch: TrainingBatch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient, read from the first moment of a first step that clips nothing, and the metrics."""
    metrics = trainer.train_step(batch).metrics
    return {k: v.clone() for k, v in trainer.state_tensors().items() if k.startswith("exp_avg.")}, metrics


@pytest.mark.parametrize(
    "rules",
    [
        *({"algorithm": name} for name in QUICK),
        {"credit": "turn", "gamma": 0.8},
        *(pytest.param({"algorithm": name}, marks=pytest.mark.slow) for name in ALGORITHMS if name not in QUICK),
    ],
    ids=str,
)
def test_turns_timelines_and_trees_give_one_gradient(rules: dict[str, Any], make_trainer: MakeTrainer) -> None:
    settings: dict[str, Any] = rules | {"max_grad_norm": 1e9}
    wanted, turns = _step(make_trainer(prefix_tree="off", sequence_packing="off", **settings), _by_turns(_batch()))
    merged, rows = _step(make_trainer(prefix_tree="off", sequence_packing="off", **settings), _batch())
    assert _distance(merged, wanted) <= 1e-5
    for tree in TREES:
        shared, metrics = _step(make_trainer(**tree, **settings), _batch())
        assert _distance(shared, wanted) <= 1e-5
        for name in SHARED_METRICS:
            assert metrics[name] == pytest.approx(turns[name], abs=1e-5), name
        assert metrics["trained_tokens"] == turns["trained_tokens"]
        assert metrics["perf/row_tokens"] == rows["perf/row_tokens"] == rows["perf/forward_tokens"]
        assert metrics["tree/sharing"] == metrics["perf/row_tokens"] / metrics["perf/forward_tokens"] > 1.2
        assert metrics["tree/supported"] == 1.0


@pytest.mark.parametrize(
    "backend", ["nodes", *(pytest.param(x, marks=pytest.mark.slow) for x in ("mask", "depth_first"))]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"lora": LoraConfig(rank=2)},
        {"gradient_checkpointing": True},
        {"lora": LoraConfig(rank=2), "gradient_checkpointing": True, "kind": "gemma3"},
        {"kind": "gemma3", "micro_batch_tokens": 30},
        {"updates_per_batch": 2, "kind": "llama"},
    ],
)
def test_trees_change_nothing_that_is_trained(
    settings: dict[str, Any], backend: str, make_trainer: MakeTrainer
) -> None:
    common = {"max_grad_norm": 1e9} | settings
    wanted, rows = _step(make_trainer(prefix_tree="off", sequence_packing="off", **common), _batch())
    got, metrics = _step(make_trainer(prefix_tree="on", prefix_tree_backend=backend, **common), _batch())
    assert _distance(got, wanted) <= (1e-5 if settings.get("updates_per_batch", 1) == 1 else 1e-4)
    assert metrics["grad_norm"] == pytest.approx(rows["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("backend", ["mask", "nodes", "depth_first"])
def test_bfloat16_trees_are_as_close_to_float32_as_rows(backend: str, make_trainer: MakeTrainer) -> None:
    common: dict[str, Any] = {"max_grad_norm": 1e9}
    wanted, _ = _step(make_trainer(prefix_tree="off", sequence_packing="off", **common), _batch())
    rows, _ = _step(make_trainer(prefix_tree="off", sequence_packing="off", dtype=torch.bfloat16, **common), _batch())
    tree, _ = _step(
        make_trainer(prefix_tree="on", prefix_tree_backend=backend, dtype=torch.bfloat16, **common), _batch()
    )
    assert _distance(tree, wanted) <= 1.5 * _distance(rows, wanted)


@pytest.mark.parametrize("backend", ["auto", "depth_first"])
def test_replaying_a_batch_over_a_tree_gives_the_same_bits(backend: str, make_trainer: MakeTrainer) -> None:
    def trained() -> dict[str, Tensor]:
        trainer = make_trainer(prefix_tree="on", prefix_tree_backend=backend, micro_batch_tokens=50)
        for step in (1, 2):
            trainer.train_step(_batch(step))
        return {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_auto_changes_no_bit_where_nothing_is_shared(
    make_trainer: MakeTrainer, make_batch: Callable[..., TrainingBatch]
) -> None:
    off, auto = (make_trainer(prefix_tree=mode, sequence_packing="off") for mode in ("off", "auto"))
    for trainer in (off, auto):
        assert trainer.train_step(make_batch()).metrics["tree/sharing"] == 1.0
    left, right = off.state_tensors(), auto.state_tensors()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_batch_without_signal_is_measured_over_trees(make_trainer: MakeTrainer) -> None:
    batch = _batch()
    flat = msgspec.structs.replace(
        batch, episodes=tuple(msgspec.structs.replace(episode, reward=1.0) for episode in batch.episodes)
    )
    wanted = make_trainer(prefix_tree="off", sequence_packing="off").train_step(flat).metrics
    for backend in ("auto", "depth_first"):
        metrics = make_trainer(prefix_tree="on", prefix_tree_backend=backend).train_step(flat).metrics
        assert metrics["grad_norm"] == 0.0
        assert metrics["entropy"] == pytest.approx(wanted["entropy"], abs=1e-6)
        assert metrics["tree/sharing"] > 1.2


def test_a_tree_beyond_the_budget_is_forwarded_once_where_it_may_go_depth_first(make_trainer: MakeTrainer) -> None:
    def forwarded(**settings: Any) -> float:
        return make_trainer(prefix_tree="on", **settings).train_step(_batch()).metrics["perf/forward_tokens"]

    whole = forwarded()
    for backend in ("auto", "depth_first"):
        assert forwarded(prefix_tree_backend=backend, micro_batch_tokens=1) == whole
    assert forwarded(prefix_tree_backend="nodes", micro_batch_tokens=1) > 1.5 * whole
