"""PPO's critic: its values, its loss, its gradients however rows are packed, and its resume."""

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

from wingbeat.core.config import LoraConfig, PolicyConfig, TrainerConfig
from wingbeat.core.config.trainer import CriticConfig
from wingbeat.core.errors import SetupError
from wingbeat.core.samples import EpisodeSamples, TrainingBatch
from wingbeat.trainer.assignment import Assigned
from wingbeat.trainer.critic import Critic, value_loss
from wingbeat.trainer.rows import Row, build_rows
from wingbeat.trainer.single import PolicyTrainer
from wingbeat.trainer.skips import SkipRule

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

MakeTrainer = Callable[..., PolicyTrainer]
MakeBatch = Callable[..., TrainingBatch]
MakeEpisode = Callable[..., EpisodeSamples]
FORK = (-1, 0, 0, 1)
SHARING: list[dict[str, Any]] = [
    {"prefix_tree": "off", "sequence_packing": "off", "micro_batch_tokens": 1},
    {"prefix_tree": "off", "sequence_packing": "off", "micro_batch_tokens": 40},
    {"prefix_tree": "off", "sequence_packing": "on"},
    {"prefix_tree": "off", "sequence_packing": "on", "micro_batch_tokens": 40},
    *({"prefix_tree": "on", "prefix_tree_backend": backend} for backend in ("mask", "nodes", "depth_first")),
    {"prefix_tree": "on", "prefix_tree_backend": "depth_first", "micro_batch_tokens": 8},
]


@pytest.fixture
def make_critic(model_folder: Callable[[str], Path]) -> Callable[..., Critic]:
    def make(
        *,
        critic: dict[str, Any] | None = None,
        lora: LoraConfig | None = None,
        dtype: torch.dtype = torch.float64,
        **settings: Any,
    ) -> Critic:
        rates: dict[str, Any] = {"learning_rate": 0.01} | (critic or {})
        trainer = TrainerConfig(
            algorithm="ppo", critic=CriticConfig(**rates), max_grad_norm=1e9, betas=(0.0, 0.5), **settings
        )
        config = PolicyConfig(model="x", context_tokens=32, trainer=trainer, lora=lora)
        return Critic(model_folder("llama"), config=config, seed=0, device=torch.device("cpu"), dtype=dtype)

    return make


@pytest.fixture
def episodes(make_episode: MakeEpisode) -> list[EpisodeSamples]:
    """With forks, and rows of different lengths."""
    rng = np.random.default_rng(0)
    return [
        make_episode(
            rng,
            FORK[: 1 + index],
            lengths=(1, 2, 3, 1)[: 1 + index],
            rewards=rng.normal(size=1 + index).tolist(),
            episode_id=f"e{index}",
            group_id=f"g{index % 2}",
        )
        for index in range(4)
    ]


def _rows(episodes: Sequence[EpisodeSamples]) -> list[Row]:
    return build_rows(episodes, vocabulary=48)


def _with_head(critic: Critic) -> Critic:
    """With a head that is not zero, so that gradients reach the decoder."""
    state = dict(critic.state_tensors())
    head = state["critic.master.value_head.weight"]
    drawn = np.random.default_rng(7).normal(size=tuple(head.shape))
    critic.load_state(state | {"critic.master.value_head.weight": torch.from_numpy(drawn).to(head.dtype)})
    return critic


def _targets(rows: Sequence[Row]) -> list[np.ndarray]:
    """A return for each token, the same wherever its row stands."""
    return [np.cos(row.token_ids_T[row.targets_N].astype(np.float64)) * 2 for row in rows]


def _fit(critic: Critic, rows: Sequence[Row]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of one fit, read from the first moment, and its metrics."""
    values_N = critic.values(rows)
    metrics = critic.fit(rows, Assigned([], [], _targets(rows)), values_N=values_N, skips=SkipRule(0))
    return {name: t.clone() for name, t in critic.state_tensors().items() if ".exp_avg." in name}, metrics


def _distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    difference = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    return math.sqrt(difference / sum(float(tensor.double().square().sum()) for tensor in left.values()))


def _norm(module: Any, hidden: Tensor) -> Tensor:
    """Transformers' takes a detour through float32."""
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return hidden * scale * module.weight


def test_value_loss_by_hand() -> None:
    """Clip 0.5 around 1: 1.2 towards 3 as it is; 2 towards 3 counts as 1.5; 2 towards 0 as it is, it went wrong."""
    values, returns = torch.tensor([1.2, 2.0, 2.0]), torch.tensor([3.0, 3.0, 0.0])
    found = value_loss(values, returns, torch.ones(3), clip=0.5)
    assert found.tolist() == pytest.approx([0.5 * 1.8**2, 0.5 * 1.5**2, 0.5 * 2.0**2])
    assert value_loss(values, returns, torch.ones(3), clip=math.inf).tolist() == pytest.approx([1.62, 0.5, 2.0])


def test_a_clipped_value_has_no_gradient() -> None:
    values = torch.tensor([2.0, 2.0], requires_grad=True)
    value_loss(values, torch.tensor([3.0, 0.0]), torch.ones(2), clip=0.5).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 2.0]


def test_a_new_critic_expects_nothing(make_critic: Callable[..., Critic], episodes: list[EpisodeSamples]) -> None:
    assert all(values.tolist() == [0] * len(values) for values in make_critic().values(_rows(episodes)))


def test_values_and_gradient_equal_a_naive_model(
    make_critic: Callable[..., Critic], build_model: Callable[..., Any], episodes: list[EpisodeSamples]
) -> None:
    """Row by row, without packing, from the model as it is saved."""
    critic, rows = _with_head(make_critic(dtype=torch.float32)), _rows(episodes)
    model = build_model("llama")
    head = torch.nn.Linear(16, 1)
    with torch.no_grad():
        head.weight.copy_(critic.state_tensors()["critic.master.value_head.weight"])
        head.bias.zero_()
    values = [
        head(model.model(torch.from_numpy(row.token_ids_T.astype(np.int64))[None]).last_hidden_state[0])[
            torch.from_numpy(row.targets_N) - 1, 0
        ]
        for row in rows
    ]
    for found, wanted in zip(critic.values(rows), values, strict=True):
        assert found == pytest.approx(wanted.detach().numpy(), abs=1e-5)
    errors = torch.cat(values) - torch.from_numpy(np.concatenate(_targets(rows)))
    loss = 0.5 * errors.square().mean()
    loss.backward()
    gradient, metrics = _fit(critic, rows)
    naive = {f"critic.exp_avg.{name}": p.grad for name, p in model.model.named_parameters()}
    naive |= {f"critic.exp_avg.value_head.{name}": p.grad for name, p in head.named_parameters()}
    assert _distance({name: grad for name, grad in naive.items() if grad is not None}, gradient) < 1e-5
    assert metrics["critic/value_loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("sharing", SHARING)
def test_packing_and_trees_never_change_a_gradient(
    sharing: dict[str, Any],
    dtype: torch.dtype,
    tolerance: float,
    make_critic: Callable[..., Critic],
    episodes: list[EpisodeSamples],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", _norm)
    rows = _rows(episodes)
    whole, metrics = _fit(_with_head(make_critic(prefix_tree="off", sequence_packing="off", dtype=dtype)), rows)
    critic = _with_head(make_critic(dtype=dtype, **sharing))
    parts, part_metrics = _fit(critic, rows)
    assert _distance(whole, parts) <= tolerance
    assert part_metrics == pytest.approx(metrics, rel=max(tolerance, 1e-9), abs=1e-9)


def test_order_never_changes_a_gradient(make_critic: Callable[..., Critic], episodes: list[EpisodeSamples]) -> None:
    forwards, _ = _fit(_with_head(make_critic()), _rows(episodes))
    backwards, _ = _fit(_with_head(make_critic()), _rows(episodes[::-1]))
    assert _distance(forwards, backwards) <= 1e-12


def test_it_learns_what_tokens_are_worth(make_critic: Callable[..., Critic], episodes: list[EpisodeSamples]) -> None:
    critic, rows = make_critic(critic={"value_clip": "unlimited", "updates_per_batch": 5}), _rows(episodes)
    found = [_fit(critic, rows)[1] for _ in range(10)]
    assert found[0]["critic/explained_variance"] == 0
    assert found[0]["critic/return_mean"] == pytest.approx(np.concatenate(_targets(rows)).mean())
    assert found[-1]["critic/explained_variance"] > 0.95
    assert found[-1]["critic/value_loss"] < 0.05 * found[0]["critic/value_loss"]
    assert float(critic.state_tensors()["critic.step.value_head.weight"]) == 50


def test_clipped_values_move_little_in_many_updates(
    make_critic: Callable[..., Critic], episodes: list[EpisodeSamples]
) -> None:
    rows, moved = _rows(episodes), {}
    for clip in (0.05, "unlimited"):
        critic = make_critic(critic={"value_clip": clip, "updates_per_batch": 40})
        _fit(critic, rows)
        moved[clip] = np.abs(np.concatenate(critic.values(rows))).mean()
    assert moved[0.05] < 0.3 < moved["unlimited"]


def test_adapters_of_a_lora_policy_are_the_critic_s_too(
    make_critic: Callable[..., Critic], episodes: list[EpisodeSamples]
) -> None:
    critic = _with_head(make_critic(lora=LoraConfig(rank=2, alpha=4)))
    names = {name.removeprefix("critic.master.") for name in critic.state_tensors()}
    assert all("lora_" in name or name.startswith("value_head.") for name in names)
    gradient, _ = _fit(critic, _rows(episodes))
    assert any(bool(grad.any()) for name, grad in gradient.items() if "lora_" in name)


def test_bfloat16_keeps_a_float32_head(make_critic: Callable[..., Critic], episodes: list[EpisodeSamples]) -> None:
    critic = _with_head(make_critic(dtype=torch.bfloat16))
    _, metrics = _fit(critic, _rows(episodes))
    assert {tensor.dtype for tensor in critic.state_tensors().values()} == {torch.float32}
    assert math.isfinite(metrics["critic/value_loss"])


# --- in the trainer -----------------------------------------------------------------------------


def _bits(trainer: PolicyTrainer) -> dict[str, bytes]:
    tensors = trainer.published_tensors() | trainer.state_tensors()
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def test_the_policy_waits_while_the_critic_warms_up(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer(algorithm="ppo", critic={"warmup_steps": 1, "learning_rate": 0.01})
    before = {name: tensor.clone() for name, tensor in trainer.published_tensors().items()}
    metrics = trainer.train_step(make_batch()).metrics
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.published_tensors().items())
    assert (trainer.step, metrics["lr"], metrics["grad_norm"]) == (1, 0, 0)
    assert metrics["entropy"] > 0
    assert metrics["critic/grad_norm"] > 0
    assert trainer.train_step(make_batch(step=2)).metrics["lr"] == 0.01
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.published_tensors().items())


def test_resume_is_exact_with_a_critic(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """Bit-equal in float32: two steps, or one, a checkpoint, another trainer, and one more."""
    settings: dict[str, Any] = {"algorithm": "ppo", "critic": {"learning_rate": 0.01, "updates_per_batch": 2}}
    straight, stopped, resumed = (make_trainer(**settings) for _ in range(3))
    batches = [make_batch(step=1, seed=1), make_batch(step=2, seed=2)]
    results = [straight.train_step(batch) for batch in batches]
    stopped.train_step(batches[0])
    resumed.load_state({name: tensor.clone() for name, tensor in stopped.state_tensors().items()}, step=1)
    assert resumed.train_step(batches[1]).advantages == results[1].advantages
    assert _bits(resumed) == _bits(straight)


def test_checkpoints_with_and_without_a_critic_are_not_mixed_up(make_trainer: MakeTrainer) -> None:
    with_critic, without = make_trainer(algorithm="ppo"), make_trainer(algorithm="grpo")
    before = _bits(with_critic), _bits(without)
    with pytest.raises(SetupError, match="'ppo' has a critic, the checkpoint none"):
        with_critic.load_state(without.state_tensors(), step=1)
    with pytest.raises(SetupError, match="'grpo' has no critic, the checkpoint one"):
        without.load_state(with_critic.state_tensors(), step=1)
    damaged = {name: t for name, t in with_critic.state_tensors().items() if "value_head.bias" not in name}
    with pytest.raises(SetupError, match=r"value_head\.bias"):
        with_critic.load_state(damaged, step=1)
    assert (_bits(with_critic), _bits(without)) == before


def test_every_token_has_an_advantage_of_its_own(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """A constant group still teaches: there is no group baseline."""
    batch = make_batch(rewards=[1.0] * 8)
    result = make_trainer(algorithm="ppo", gamma=0.9).train_step(batch)
    assert result.metrics["advantage/std"] == pytest.approx(1, abs=1e-3)
    assert result.metrics["grad_norm"] > 0
    assert set(result.advantages) == {f"e{index}:1:" for index in range(8)}


def test_turn_rewards_reach_the_critic(make_trainer: MakeTrainer, episodes: list[EpisodeSamples]) -> None:
    batch = TrainingBatch("b", "p", 1, tuple(episodes), seed=0)
    moved = tuple(
        msgspec.structs.replace(episode, turns=tuple(msgspec.structs.replace(t, reward=0.0) for t in episode.turns))
        for episode in episodes
    )
    settings: dict[str, Any] = {"algorithm": "ppo", "gae_lambda": 1.0}
    by_turn = make_trainer(**settings).train_step(batch)
    at_the_end = make_trainer(**settings).train_step(msgspec.structs.replace(batch, episodes=moved))
    assert by_turn.advantages != at_the_end.advantages
