"""The trainer through its public face: gradients, metrics, precision, adapters."""

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
from wingbeat.core.errors import ConflictError, RequestError, SetupError
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.trainer.single import PolicyTrainer

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
QUICK: tuple[Algorithm, ...] = ("grpo", "gspo", "ppo", "m2po")
"""In the unit part: the default, one with a ratio per turn, one with a critic, one with a mask over the update."""
PPO_GAIN: tuple[Algorithm, ...] = ("reinforce", "reinforce_plus_plus", "rloo", "grpo", "dr_grpo", "dapo")
MakeTrainer = Callable[..., PolicyTrainer]
MakeBatch = Callable[..., TrainingBatch]


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Relative L2 distance over all tensors."""
    assert left.keys() == right.keys()
    difference = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    return math.sqrt(difference / sum(float(tensor.double().square().sum()) for tensor in left.values()))


def _gradient(trainer: PolicyTrainer, batch: TrainingBatch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of a batch, read from the first moment of a first step that clips nothing."""
    metrics = trainer.train_step(batch).metrics
    moments = {k: v.clone() for k, v in trainer.state_tensors().items() if k.startswith("exp_avg.")}
    return moments, metrics


@pytest.mark.parametrize(
    ("algorithm", "dtype", "tolerance"),
    [
        pytest.param(name, dtype, tolerance, marks=() if name in QUICK and tolerance < 1e-9 else pytest.mark.slow)
        for name in ALGORITHMS
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5))
    ],
)
def test_micro_batching_never_changes_a_gradient(
    algorithm: Algorithm, dtype: torch.dtype, tolerance: float, make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    settings: dict[str, Any] = {"kind": "llama", "dtype": dtype, "algorithm": algorithm, "max_grad_norm": 1e9}
    settings |= {"sequence_packing": "off"}  # its float64 proof is in test_credit_training
    whole, metrics = _gradient(make_trainer(micro_batch_tokens=100_000, **settings), make_batch())
    for tokens, chunk in ((1, 1000), (45, 3)):
        trainer = make_trainer(micro_batch_tokens=tokens, logprob_chunk_tokens=chunk, **settings)
        parts, part_metrics = _gradient(trainer, make_batch())
        assert _distance(whole, parts) <= tolerance
        assert part_metrics["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
        assert part_metrics["entropy"] == pytest.approx(metrics["entropy"], rel=1e-5)


@pytest.mark.parametrize(
    "rules",
    [
        {"sequence_mask_low": 0.15, "sequence_mask_high": 3.0},
        pytest.param({"tis_cap": 1.1}, marks=pytest.mark.slow),
        {"algorithm": "gspo", "sequence_mask_low": 0.15},
        pytest.param({"algorithm": "gspo", "sequence_ratio": "product"}, marks=pytest.mark.slow),
    ],
)
def test_micro_batching_never_changes_a_correction(
    rules: dict[str, Any], make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    settings: dict[str, Any] = {"kind": "llama", "dtype": torch.float64, "max_grad_norm": 1e9} | rules
    settings |= {"sequence_packing": "off"}
    whole, metrics = _gradient(make_trainer(micro_batch_tokens=100_000, **settings), make_batch())
    parts, part_metrics = _gradient(make_trainer(micro_batch_tokens=1, **settings), make_batch())
    assert _distance(whole, parts) <= 1e-12
    for name in ("correction/masked", "correction/capped"):
        assert part_metrics[name] == pytest.approx(metrics[name])
        assert metrics[name] < 1
    assert (metrics["correction/masked"] > 0) == ("sequence_mask_low" in rules)
    assert (metrics["correction/capped"] > 0) == ("tis_cap" in rules)


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name in ("grpo", "rloo") else pytest.mark.slow) for name in PPO_GAIN]
)
def test_gradient_equals_a_naive_loss_over_whole_logits(
    algorithm: Algorithm, make_trainer: MakeTrainer, make_batch: MakeBatch, build_model: Callable[..., Any]
) -> None:
    """The whole path (packing, weights, chunks) against a loss written out per episode."""
    batch = make_batch(seed=5)
    trainer = make_trainer(kind="llama", algorithm=algorithm, max_grad_norm=1e9, betas=(0.0, 0.5), clip_high=0.4)
    result = trainer.train_step(batch)
    model = build_model("llama")
    losses = []
    for episode in batch.episodes:
        advantage = result.advantages[f"{episode.episode_id}:1:"]
        terms = torch.cat([_token_gains(model, sample, advantage) for sample in episode.samples])
        mean = float(len(terms))
        divisor = {"grpo": mean, "reinforce_plus_plus": mean, "dr_grpo": 32.0}.get(algorithm, 1.0)
        losses.append(-terms.sum() / divisor)
    denominator = sum(e.num_sampled for e in batch.episodes) if algorithm == "dapo" else len(batch.episodes)
    loss = torch.stack(losses).sum() / denominator
    loss.backward()
    assert result.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    naive = {f"exp_avg.{name}": p.grad for name, p in model.named_parameters()}
    ours = {k: v for k, v in trainer.state_tensors().items() if k.startswith("exp_avg.")}
    assert _distance(naive, ours) < 1e-5


def _token_gains(model: Any, sample: TrainingSample, advantage: float) -> Tensor:
    ids = torch.from_numpy(sample.tokens_T.astype(np.int64))[None]
    logprobs_TV = model(input_ids=ids).logits[0].log_softmax(-1)
    positions = torch.from_numpy(np.flatnonzero(sample.sampled_T))
    sampling = torch.from_numpy(sample.sampling_logprobs_T.copy())[positions]
    ratio = (logprobs_TV[positions - 1, ids[0, positions]] - sampling).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.4) * advantage)


def test_zero_advantage_episodes_cost_nothing_and_change_nothing(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    """A constant group counts in every denominator but is not forwarded."""
    rewards = [1.0, 0.0, 1.0, 0.0] + [5.0] * 4
    batch = make_batch(rewards=rewards)
    full, metrics = _gradient(make_trainer(algorithm="dapo", max_grad_norm=1e9), batch)
    only = msgspec.structs.replace(batch, episodes=batch.episodes[:4])
    half, half_metrics = _gradient(make_trainer(algorithm="dapo", max_grad_norm=1e9), only)
    share = half_metrics["trained_tokens"] / metrics["trained_tokens"]
    assert share < 0.7
    assert _distance({k: v * share for k, v in half.items()}, full) < 1e-6
    for name in ("entropy", "mismatch_kl", "clip_ratio/low", "ratio/max"):
        assert metrics[name] == pytest.approx(half_metrics[name])
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / 8)


def test_a_batch_without_signal_is_still_measured(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer()
    before = _copy(trainer.published_tensors())
    metrics = trainer.train_step(make_batch(rewards=[1.0] * 8)).metrics
    assert metrics["grad_norm"] == 0.0
    assert metrics["loss"] == 0.0
    assert metrics["entropy"] > 0.5
    assert metrics["mismatch_kl"] > 0
    assert trainer.step == 1
    assert _distance(before, trainer.published_tensors()) == 0.0


def test_metrics(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    times = iter([10.0, 12.0])
    batch = make_batch(rewards=[1, 0, 1, 0, 2, 2, 2, 2])
    metrics = make_trainer().train_step(batch, clock=lambda: next(times)).metrics
    assert metrics["time/train_s"] == 2.0
    active = sum(sample.num_tokens for episode in batch.episodes[:4] for sample in episode.samples)
    assert metrics["perf/tokens_per_s"] == active / 2
    assert metrics["trained_tokens"] == sum(episode.num_sampled for episode in batch.episodes)
    assert metrics["excluded_tokens"] == 0
    assert metrics["reward/std"] == pytest.approx(np.std([1, 0, 1, 0, 2, 2, 2, 2]))
    assert metrics["lr"] == 1e-2
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (0, 0)
    assert metrics.keys() >= {
        "loss", "grad_norm", "entropy", "mismatch_kl", "clip_ratio/low", "clip_ratio/high", "max_abs_logprob_diff",
    }  # fmt: skip
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


def test_staleness_is_measured_from_the_lowest_version_of_each_sample(
    make_trainer: MakeTrainer, make_sample: Callable[..., TrainingSample]
) -> None:
    rng = np.random.default_rng(0)
    trainer = make_trainer()
    trainer.load_state(trainer.state_tensors(), step=6)
    episodes = tuple(
        EpisodeSamples(f"e{v}", 1, "g", "p", "", float(v), (make_sample(rng, f"s{v}", length=8, version=v),))
        for v in (6, 6, 3)
    )
    metrics = trainer.train_step(TrainingBatch("b", "p", 7, episodes, 0)).metrics
    assert metrics["staleness/mean"] == 1.0
    assert metrics["staleness/max"] == 3.0


def test_on_policy_logprobs_agree(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """Samples scored by the very model at temperature 0.6 have ratio 1, no mismatch and no clipping."""
    trainer = make_trainer(kind="gemma2")
    batch = _rescored(make_batch(), trainer, temperature=0.6)
    metrics = trainer.train_step(batch).metrics
    assert metrics["max_abs_logprob_diff"] < 1e-5
    assert metrics["mismatch_kl"] < 1e-9
    assert metrics["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_ratio/low"] == metrics["clip_ratio/high"] == 0


def _rescored(batch: TrainingBatch, trainer: PolicyTrainer, *, temperature: float) -> TrainingBatch:
    """The batch with sampling logprobs as an engine that serves the trainer's model would report them."""
    model = trainer.model
    episodes: list[EpisodeSamples] = []
    for episode in batch.episodes:
        samples: list[TrainingSample] = []
        for sample in episode.samples:
            ids = torch.from_numpy(sample.tokens_T.astype(np.int64))
            with torch.no_grad():
                logprobs_TV = (model(input_ids=ids[None]).logits[0].float() / temperature).log_softmax(-1)
            logprobs = np.zeros(len(ids), np.float32)
            logprobs[1:] = logprobs_TV[:-1].gather(1, ids[1:, None])[:, 0].numpy() * sample.sampled_T[1:]
            samples.append(
                msgspec.structs.replace(sample, sampling_logprobs=logprobs.tobytes(), temperature=temperature)
            )
        episodes.append(msgspec.structs.replace(episode, samples=tuple(samples)))
    return msgspec.structs.replace(batch, episodes=tuple(episodes))


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALGORITHMS]
)
def test_excluded_tokens_are_counted_and_leave_the_rest_alone(
    algorithm: Algorithm, make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    """A token without logprob equals a token that was not sampled."""
    batch = make_batch()
    victim = batch.episodes[0].samples[0]
    logprobs, sampled = victim.sampling_logprobs_T.copy(), victim.sampled_T.copy()
    logprobs[-1], sampled[-1] = math.nan, 0
    with_nan = _with_first_sample(batch, msgspec.structs.replace(victim, sampling_logprobs=logprobs.tobytes()))
    without = _with_first_sample(batch, msgspec.structs.replace(victim, sampled=sampled.tobytes()))
    left, metrics = _gradient(make_trainer(algorithm=algorithm), with_nan)
    right, _ = _gradient(make_trainer(algorithm=algorithm), without)
    assert metrics["excluded_tokens"] == 1
    assert _distance(left, right) == 0


def _with_first_sample(batch: TrainingBatch, sample: TrainingSample) -> TrainingBatch:
    first = batch.episodes[0]
    changed = msgspec.structs.replace(first, samples=(sample, *first.samples[1:]))
    return msgspec.structs.replace(batch, episodes=(changed, *batch.episodes[1:]))


def test_training_raises_the_probability_of_what_was_rewarded(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer(learning_rate=3e-3, algorithm="grpo")
    batch = _rescored(make_batch(rewards=[1, 0, 0, 0, 1, 0, 0, 0]), trainer, temperature=1.0)
    before = _total_logprob(trainer, batch, reward=1)
    for step in range(1, 6):
        trainer.train_step(msgspec.structs.replace(batch, step=step))
    assert _total_logprob(trainer, batch, reward=1) > before + 0.5


def _total_logprob(trainer: PolicyTrainer, batch: TrainingBatch, *, reward: float) -> float:
    rescored = _rescored(batch, trainer, temperature=1.0)
    chosen = [e for e in rescored.episodes if e.reward == reward]
    return float(sum(s.sampling_logprobs_T.sum() for e in chosen for s in e.samples))


def test_several_updates_per_batch_are_deterministic_and_seeded(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    def trained(seed: int, updates: int) -> dict[str, Tensor]:
        trainer = make_trainer(updates_per_batch=updates)
        trainer.train_step(msgspec.structs.replace(make_batch(groups=4), seed=seed))
        assert int(trainer.state_tensors()["step.model.norm.weight"]) == min(updates, 4)
        return _copy(trainer.published_tensors())

    assert _distance(trained(1, 2), trained(1, 2)) == 0
    assert _distance(trained(1, 2), trained(2, 2)) > 0
    trained(1, 9)


def test_a_step_leaves_the_callers_random_state_alone(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer()
    before = torch.get_rng_state()
    trainer.train_step(make_batch())
    assert torch.equal(before, torch.get_rng_state())


def test_shuffled_advantages_are_the_same_values_elsewhere(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    real = make_trainer().train_step(make_batch()).advantages
    control = make_trainer(control="shuffled_advantages").train_step(make_batch()).advantages
    assert sorted(real.values()) == sorted(control.values())
    assert real != control
    assert list(real) == [f"e{index}:1:" for index in range(8)]


def test_schedule_reaches_the_optimizer(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer(schedule="linear", warmup_steps=2, learning_rate=1.0e-3, total_steps=4)
    lrs = [trainer.train_step(make_batch(step=step)).metrics["lr"] for step in (1, 2, 3, 4)]
    assert lrs == pytest.approx([0.5e-3, 1e-3, 0.5e-3, 0])


def test_wrong_batches_are_refused(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer()
    with pytest.raises(ConflictError, match="stands at step 0; send step 1"):
        trainer.train_step(make_batch(step=2))
    with pytest.raises(RequestError, match="no episodes"):
        trainer.train_step(msgspec.structs.replace(make_batch(), episodes=()))
    with pytest.raises(RequestError, match="'e0' is of 'p'"):
        trainer.train_step(msgspec.structs.replace(make_batch(), policy="other"))
    assert trainer.step == 0


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_full_fine_tuning_publishes_every_parameter_once(
    kind: str, make_trainer: MakeTrainer, make_batch: MakeBatch, build_model: Callable[..., Any]
) -> None:
    trainer = make_trainer(kind=kind)
    trainer.train_step(make_batch())
    tensors = trainer.published_tensors()
    model = build_model(kind, seed=9)
    assert tensors.keys() == {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in tensors) == (kind == "llama")
    assert trainer.kind == "full"
    model.load_state_dict(tensors, strict=False)
    ids = torch.arange(8)[None]
    assert torch.equal(model(input_ids=ids).logits, trainer.model(input_ids=ids).logits)


def test_lora_trains_only_adapters(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer(lora=LoraConfig(rank=2, alpha=4))
    before = _copy(trainer.model.state_dict())
    for step in (1, 2):
        trainer.train_step(make_batch(step=step))
    after = trainer.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_" in name}
    tensors = trainer.published_tensors()
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    assert len(tensors) == len(changed)
    assert trainer.kind == "adapter"
    assert {name.removeprefix("master.") for name in trainer.state_tensors() if name.startswith("master.")} == changed


def test_lora_starts_as_the_base_model_whatever_its_seed(
    make_trainer: MakeTrainer, build_model: Callable[..., Any]
) -> None:
    trainer = make_trainer(lora=LoraConfig(rank=2))
    ids = torch.arange(8)[None]
    expected = build_model("qwen3")(input_ids=ids).logits
    assert torch.equal(trainer.model(input_ids=ids).logits, expected)
    again = make_trainer(lora=LoraConfig(rank=2)).published_tensors()
    assert _distance(trainer.published_tensors(), again) == 0


def test_lora_gradients_do_not_depend_on_micro_batches(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    lora = LoraConfig(rank=2, targets=["q_proj", "down_proj"])
    whole, _ = _gradient(make_trainer(lora=lora, max_grad_norm=1e9), make_batch())
    parts, _ = _gradient(make_trainer(lora=lora, max_grad_norm=1e9, micro_batch_tokens=1), make_batch())
    assert _distance(whole, parts) <= 1e-5


def test_unknown_lora_targets_are_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(SetupError, match="'nowhere'"):
        make_trainer(lora=LoraConfig(targets=["nowhere"]))


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_bfloat16_trains_through_float32(
    lora: LoraConfig | None, make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    trainer = make_trainer(dtype=torch.bfloat16, lora=lora, learning_rate=1e-4)
    before = _copy(trainer.state_tensors())
    metrics = trainer.train_step(make_batch()).metrics
    state = trainer.state_tensors()
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert any(not torch.equal(before[name], state[name]) for name in before)
    assert math.isfinite(metrics["loss"])
    published = trainer.published_tensors()
    expected = torch.bfloat16 if lora is None else torch.float32
    assert {tensor.dtype for tensor in published.values()} == {expected}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_gradient_checkpointing_changes_nothing(
    lora: LoraConfig | None, make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    plain, _ = _gradient(make_trainer(lora=lora), make_batch())
    recomputed, _ = _gradient(make_trainer(lora=lora, gradient_checkpointing=True), make_batch())
    assert _distance(plain, recomputed) <= 1e-6


def test_samples_of_many_lengths_are_packed_and_of_one_length_padded(
    make_trainer: MakeTrainer, make_batch: MakeBatch, make_sample: Callable[..., TrainingSample]
) -> None:
    settings: dict[str, Any] = {"prefix_tree": "off", "max_grad_norm": 1e9}
    padded, plain = _gradient(make_trainer(sequence_packing="off", **settings), make_batch())
    packed, metrics = _gradient(make_trainer(**settings), make_batch())
    assert plain["perf/fill"] < 0.9
    assert metrics["perf/fill"] == 1.0
    assert _distance(padded, packed) <= 1e-5
    rng = np.random.default_rng(0)
    alike = [
        msgspec.structs.replace(episode, samples=(make_sample(rng, episode.episode_id, length=12),))
        for episode in make_batch().episodes
    ]
    batch = msgspec.structs.replace(make_batch(), episodes=tuple(alike))
    for mode in ("auto", "off"):
        assert (
            make_trainer(sequence_packing=mode, **settings).train_step(batch).metrics["perf/forward_tokens"] == 12 * 8
        )
    assert make_trainer(sequence_packing="on", **settings).train_step(batch).metrics["perf/forward_tokens"] < 12 * 8


@pytest.mark.parametrize("tree", ["off", "auto"])
def test_packed_samples_are_each_forwarded_whole(
    tree: str, make_trainer: MakeTrainer, make_batch: MakeBatch, make_sample: Callable[..., TrainingSample]
) -> None:
    """Those that begin alike, too, where prefix trees are off; the last token of each explains nothing."""
    rng = np.random.default_rng(0)
    tokens = np.zeros(18, np.int32)
    episodes = [
        msgspec.structs.replace(
            episode,
            samples=(
                msgspec.structs.replace(
                    make_sample(rng, episode.episode_id, length=length), token_ids=tokens[:length].tobytes()
                ),
            ),
        )
        for episode, length in zip(make_batch().episodes, range(10, 18), strict=True)
    ]
    batch = msgspec.structs.replace(make_batch(), episodes=tuple(episodes))
    settings: dict[str, Any] = {"prefix_tree": tree, "sequence_packing": "on"}
    metrics = make_trainer(**settings).train_step(batch).metrics
    assert metrics["perf/forward_tokens"] == (sum(range(9, 17)) if tree == "off" else 16)
