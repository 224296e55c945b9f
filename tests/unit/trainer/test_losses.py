"""Every loss by hand, and its gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from wingbeat.core.config.trainer import Algorithm, TrainerConfig
from wingbeat.trainer.loss_config import Corrections, LossConfig
from wingbeat.trainer.loss_stats import TokenStats, token_stats
from wingbeat.trainer.losses import policy_loss
from wingbeat.trainer.scores import TokenScores
from wingbeat.trainer.token_batch import TokenBatch
from wingbeat.trainer.updates import Totals, token_weight

TOTALS = Totals(num_episodes=2, num_tokens=4)


def _config(algorithm: Algorithm = "grpo", *, length_norm_tokens: int = 8) -> LossConfig:
    return LossConfig(algorithm=algorithm, clip_low=0.2, clip_high=0.3, length_norm_tokens=length_norm_tokens)


def _tokens(
    ratios: list[float],
    advantages: list[float],
    *,
    weights: list[float] | None = None,
    sequences: list[int] | None = None,
    on_policy: bool = True,
    scores: TokenScores | None = None,
) -> TokenBatch:
    count = len(ratios)
    return TokenBatch(
        policy_logprobs_N=torch.log(torch.tensor(ratios, dtype=torch.float64)).sub(2.0).requires_grad_(),
        sampling_logprobs_N=torch.full((count,), -2.0, dtype=torch.float64),
        entropy_N=torch.arange(count, dtype=torch.float64),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        weights_N=torch.tensor(weights or [1.0] * count, dtype=torch.float64),
        sequences_N=torch.tensor(sequences or range(count)),
        on_policy_N=torch.full((count,), on_policy),
        scores=scores or TokenScores(),
    )


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # Episode a: advantage 1, three tokens of ratio 1.  Episode b: advantage -2, one token of ratio 1.1.
        ("reinforce", -(3 * 1 - 2.2) / 2),
        ("rloo", -(3 * 1 - 2.2) / 2),
        ("grpo", -(1 - 2.2) / 2),
        ("dr_grpo", -(3 * 1 - 2.2) / (2 * 8)),
        ("dapo", -(3 * 1 - 2.2) / 4),
        ("reinforce_plus_plus", -(1 - 2.2) / 2),
        ("gspo", -(1 - 2.2) / 2),
        ("maxrl", -(3 * 1 - 2.2) / 2),
        ("ppo", -(3 * 1 - 2.2) / 4),
        ("m2po", -(3 * 1 - 2.2) / 4),
    ],
)
def test_aggregation_by_hand(algorithm: Algorithm, expected: float) -> None:
    config = _config(algorithm)
    long = token_weight(config, episode_tokens=3, totals=TOTALS)
    short = token_weight(config, episode_tokens=1, totals=TOTALS)
    tokens = _tokens([1, 1, 1, 1.1], [1, 1, 1, -2], weights=[long] * 3 + [short])
    assert policy_loss(tokens, config=config).item() == pytest.approx(expected, abs=1e-12)


def test_clip_by_hand() -> None:
    """Clip range [0.8, 1.3]: only a gain beyond it in the direction of the advantage is cut."""
    ratios = [1.5, 0.5, 1.5, 0.5, 1.0]
    advantages = [2.0, 2.0, -2.0, -2.0, 2.0]
    tokens = _tokens(ratios, advantages)
    loss = policy_loss(tokens, config=_config())
    #       cut: 1.3*2   kept: .5*2   kept: 1.5*-2   cut: .8*-2   kept: 1*2
    assert loss.item() == pytest.approx(-(2.6 + 1.0 - 3.0 - 1.6 + 2.0))
    loss.backward()
    # d rho / d logp = rho, so the gradient is -rho * A where kept and 0 where cut.
    assert tokens.policy_logprobs_N.grad is not None
    assert tokens.policy_logprobs_N.grad.tolist() == pytest.approx([0.0, -1.0, 3.0, 0.0, -2.0])


def _gradient(tokens: TokenBatch, config: LossConfig) -> list[float]:
    (gradient_N,) = torch.autograd.grad(policy_loss(tokens, config=config), tokens.policy_logprobs_N)
    return gradient_N.tolist()


def _differences(tokens: TokenBatch, config: LossConfig, *, step: float = 1e-6) -> list[float]:
    """The gradient by central differences."""

    def loss(index: int, shift: float) -> float:
        logprobs_N = tokens.policy_logprobs_N.detach().clone()
        logprobs_N[index] += shift
        return policy_loss(replace(tokens, policy_logprobs_N=logprobs_N), config=config).item()

    return [(loss(i, step) - loss(i, -step)) / (2 * step) for i in range(len(tokens.weights_N))]


def test_cispo_by_hand() -> None:
    """The weight is cut to [0.8, 1.3] whatever the sign of the advantage, and no token loses its gradient."""
    tokens = _tokens([1.5, 0.5, 1.5, 0.5, 1.0], [2.0, 2.0, -2.0, -2.0, 2.0], weights=[1, 1, 1, 1, 0.5])
    config = _config("cispo")
    logprobs = [math.log(ratio) - 2 for ratio in (1.5, 0.5, 1.5, 0.5, 1.0)]
    coefficients = [1.3 * 2, 0.8 * 2, 1.3 * -2, 0.8 * -2, 0.5 * 2]
    expected = -sum(a * b for a, b in zip(coefficients, logprobs, strict=True))
    assert policy_loss(tokens, config=config).item() == pytest.approx(expected)
    assert _gradient(tokens, config) == pytest.approx([-value for value in coefficients])
    metrics = token_stats(tokens, config=config).metrics()
    assert (metrics["clip_ratio/low"], metrics["clip_ratio/high"]) == (0.4, 0.4)


def test_gspo_by_hand() -> None:
    """Turns of ratios (4, 1/4, 1) and (1.2, 1.2 * 1.21): geometric means 1 and 1.32, the latter is cut at 1.3."""
    ratios, turns = [4.0, 0.25, 1.0, 1.2, 1.2 * 1.21], [0, 0, 0, 1, 1]
    weights = [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2]
    config = _config("gspo")
    gain = _tokens(ratios, [2, 2, 2, 3, 3], weights=weights, sequences=turns)
    assert policy_loss(gain, config=config).item() == pytest.approx(-(2.0 + 1.3 * 3))
    assert _gradient(gain, config) == pytest.approx([-2 / 3, -2 / 3, -2 / 3, 0, 0])
    assert token_stats(gain, config=config).metrics()["clip_ratio/high"] == 0.4
    blame = _tokens(ratios, [2, 2, 2, -3, -3], weights=weights, sequences=turns)
    assert policy_loss(blame, config=config).item() == pytest.approx(-(2.0 - 1.32 * 3))
    assert _gradient(blame, config) == pytest.approx([-2 / 3, -2 / 3, -2 / 3, 1.98, 1.98])
    assert _gradient(blame, config) == pytest.approx(_differences(blame, config), abs=1e-7)


def test_gspo_with_the_product_of_ratios_by_hand() -> None:
    """trl#5814: exp(sum) against exp(mean) of a sequence's log-ratios; here an option."""
    tokens = _tokens([1.1, 1.1, 0.9], [1, 1, -2], weights=[0.5, 0.5, 1.0], sequences=[0, 0, 1])
    config = replace(_config("gspo"), sequence_ratio="product")
    assert policy_loss(tokens, config=config).item() == pytest.approx(-(1.21 - 1.8))
    assert _gradient(tokens, config) == pytest.approx([-1.21, -1.21, 1.8])
    assert _gradient(tokens, config) == pytest.approx(_differences(tokens, config), abs=1e-7)


def test_sapo_by_hand() -> None:
    """tau 1 above, 2 below: 4/1 * sigmoid(1 * 0.5) * 3 and 4/2 * sigmoid(2 * 0.5) * -3."""
    tokens = _tokens([1.5, 1.5, 1.0, 1.0], [3.0, -3.0, 3.0, -3.0])
    config = replace(_config("sapo"), sapo_taus=(1.0, 2.0))
    above, below = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-1.0))
    gains = [4 * above * 3, 2 * below * -3, 4 * 0.5 * 3, 2 * 0.5 * -3]
    assert policy_loss(tokens, config=config).item() == pytest.approx(-sum(gains))
    # d gain / d logp = 4 p (1 - p) rho A; on-policy A, whatever tau.
    faded = [4 * above * (1 - above) * 1.5 * 3, 4 * below * (1 - below) * 1.5 * -3, 3.0, -3.0]
    assert _gradient(tokens, config) == pytest.approx([-value for value in faded])
    assert _gradient(tokens, config) == pytest.approx(_differences(tokens, config), abs=1e-7)


def test_decoupled_ppo_by_hand() -> None:
    """The clip is of policy / proximal, the weight is proximal / sampling: (u, w) = (1.5, 2), (1.1, 1/2), (0.5, 2)."""
    ratios, behaviour = [3.0, 0.55, 1.0], [2.0, 0.5, 2.0]
    scores = TokenScores(proximal_N=torch.tensor(behaviour, dtype=torch.float64).log() - 2)
    tokens = _tokens(ratios, [1.0, -1.0, -2.0], scores=scores)
    config = _config("decoupled_ppo")
    # Cut at 1.3; kept; cut at 0.8.
    assert policy_loss(tokens, config=config).item() == pytest.approx(-(1.3 * 2 - 1.1 / 2 - 2 * 0.8 * 2))
    assert _gradient(tokens, config) == pytest.approx([0.0, 0.55, 0.0])
    capped = replace(config, corrections=Corrections(tis_cap=1.5))
    assert policy_loss(tokens, config=capped).item() == pytest.approx(-(1.3 * 1.5 - 1.1 / 2 - 2 * 0.8 * 1.5))
    assert token_stats(tokens, config=capped).metrics()["correction/capped"] == pytest.approx(2 / 3)
    assert token_stats(tokens, config=config).metrics()["clip_ratio/high"] == pytest.approx(1 / 3)


def test_decoupled_ppo_without_an_earlier_move_is_the_plain_importance_weight() -> None:
    """Before the first update the proximal policy is the policy: nothing is clipped, however old the sample."""
    tokens = _tokens([5.0, 0.1], [1.0, -1.0])
    assert _gradient(tokens, _config("decoupled_ppo")) == pytest.approx([-5.0, 0.1])
    assert _gradient(tokens, _config("grpo")) == pytest.approx([0.0, 0.0])


def test_m2po_by_hand() -> None:
    """No clip; what the mask takes out has no gradient and stays in the denominator, here 3."""
    scores = TokenScores(kept_N=torch.tensor([True, False, True]))
    tokens = _tokens([3.0, 9.0, 0.1], [1.0, 1.0, -1.0], weights=[1 / 3] * 3, scores=scores)
    config = LossConfig.resolve(TrainerConfig(algorithm="m2po"), context_tokens=8)
    assert policy_loss(tokens, config=config).item() == pytest.approx(-(3.0 - 0.1) / 3)
    assert _gradient(tokens, config) == pytest.approx([-1.0, 0.0, 0.1 / 3])
    metrics = token_stats(tokens, config=config).metrics()
    assert metrics["correction/m2"] == metrics["correction/masked"] == pytest.approx(1 / 3)
    assert metrics["m2"] == pytest.approx((math.log(3) ** 2 + math.log(9) ** 2 + math.log(10) ** 2) / 3)


def test_distillation_by_hand() -> None:
    """The advantage is log teacher - log policy, whatever the reward: log 2 above, log 4 below; the last is even."""
    ratios = [1.0, 1.0, 1.0]
    teacher = torch.tensor([2.0, 0.25, 1.0], dtype=torch.float64).log() - 2
    tokens = _tokens(ratios, [7.0, 7.0, 7.0], scores=TokenScores(teacher_N=teacher))
    config = _config("distill")
    assert _gradient(tokens, config) == pytest.approx([-math.log(2), math.log(4), 0.0])
    expected = sum(1 / share - 1 + math.log(share) for share in (0.5, 4.0, 1.0)) / 3
    assert token_stats(tokens, config=config).metrics()["kl/teacher"] == pytest.approx(expected)


def test_distillation_has_the_gradient_of_the_reverse_kl() -> None:
    """In expectation over the policy's own tokens, with softmax logits as the parameters."""
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    teacher_V = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.1], dtype=torch.float64), -1)
    logprobs_V = torch.log_softmax(logits_V, -1)
    (wanted,) = torch.autograd.grad((logprobs_V.exp() * (logprobs_V - teacher_V)).sum(), logits_V, retain_graph=True)
    tokens = replace(
        _tokens([1.0] * 4, [0.0] * 4, scores=TokenScores(teacher_N=teacher_V)),
        policy_logprobs_N=logprobs_V,
        sampling_logprobs_N=logprobs_V.detach(),
        weights_N=logprobs_V.detach().exp(),
    )
    (got,) = torch.autograd.grad(policy_loss(tokens, config=_config("distill")), logits_V)
    assert got.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)


def test_sft_by_hand() -> None:
    """Cross-entropy of the chosen tokens, and nothing else."""
    tokens = replace(_tokens([1.0, 2.0, 0.5], [9.0, 9.0, 9.0]), sft_weights_N=torch.tensor([0.5, 0.0, 0.5]).double())
    config = LossConfig.resolve(TrainerConfig(algorithm="sft"), context_tokens=8)
    assert policy_loss(tokens, config=config).item() == pytest.approx(-(-2 + math.log(0.5) - 2) / 2)
    assert _gradient(tokens, config) == pytest.approx([-0.5, 0.0, -0.5])
    beside = replace(_config("grpo"), sft_coef=0.1)
    assert _gradient(tokens, beside) == pytest.approx([-9.05, 0.0, -4.55])


def test_the_entropy_bonus_by_hand() -> None:
    entropy_N = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    tokens = replace(_tokens([1.0, 1.0], [0.0, 1.0], weights=[0.25, 0.5]), entropy_N=entropy_N)
    config = replace(_config(), entropy_coef=0.1)
    loss = policy_loss(tokens, config=config)
    assert loss.item() == pytest.approx(-0.5 - 0.1 * (0.25 + 1.0))
    (grads,) = torch.autograd.grad(loss, entropy_N)
    assert grads.tolist() == pytest.approx([-0.025, -0.05])


@pytest.mark.parametrize("algorithm", ["grpo", "cispo", "gspo", "sapo", "m2po", "maxrl"])
def test_turns_may_be_split_over_forwards_in_any_order(algorithm: Algorithm) -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = (0.2 * torch.randn(9, generator=generator, dtype=torch.float64)).exp()
    turns = [0, 0, 0, 1, 2, 2, 3, 3, 3]
    advantages = [1.0, 1, 1, -1, 2, 2, -2, -2, -2]
    config = replace(_config(algorithm), corrections=Corrections(sequence_mask=(0.8, 1.2)))
    whole = _gradient(_tokens(ratios.tolist(), advantages, sequences=turns), config)
    found = [math.nan] * 9
    for part in ([6, 7, 8, 0, 1, 2], [4, 5], [3]):
        tokens = _tokens(
            [ratios[p].item() for p in part], [advantages[p] for p in part], sequences=[turns[p] for p in part]
        )
        for place, value in zip(part, _gradient(tokens, config), strict=True):
            found[place] = value
    assert found == pytest.approx(whole, abs=1e-12)


ON_POLICY_ALIKE = ["reinforce", "rloo", "reinforce_plus_plus", "cispo", "gspo", "sapo", "ppo", "decoupled_ppo", "maxrl"]


@pytest.mark.parametrize("algorithm", ON_POLICY_ALIKE)
def test_on_policy_gradient_is_the_plain_policy_gradient(algorithm: Algorithm) -> None:
    tokens = _tokens([1.0, 1.0], [3.0, -0.5])
    policy_loss(tokens, config=_config(algorithm)).backward()
    assert tokens.policy_logprobs_N.grad is not None
    assert tokens.policy_logprobs_N.grad.tolist() == pytest.approx([-3.0, 0.5])


def test_turns_longer_than_a_thread_s_share_give_the_same_bits() -> None:
    """A replay must; what several threads add up in the order in which they come does not."""
    torch.set_num_threads(4)
    torch.manual_seed(0)
    count = 400_000
    policy_N, weights_N = torch.randn(count) * 0.1 - 2, torch.rand(count)
    gradients = set[tuple[float, ...]]()
    for _ in range(8):
        tokens = TokenBatch(
            policy_logprobs_N=policy_N.clone().requires_grad_(),
            sampling_logprobs_N=torch.full((count,), -2.0),
            entropy_N=torch.zeros(count),
            advantages_N=torch.ones(count),
            weights_N=weights_N,
            sequences_N=torch.arange(2).repeat_interleave(count // 2),
            on_policy_N=torch.zeros(count, dtype=torch.bool),
        )
        gradients.add(tuple(_gradient(tokens, _config("gspo"))[:: count // 2]))
    assert len(gradients) == 1


def test_a_wild_ratio_stays_finite_in_float32() -> None:
    tokens = TokenBatch(
        policy_logprobs_N=torch.tensor([-0.1, -200.0], requires_grad=True),
        sampling_logprobs_N=torch.tensor([-200.0, -0.1]),
        entropy_N=torch.zeros(2),
        advantages_N=torch.tensor([-1.0, 1.0]),
        weights_N=torch.ones(2),
        sequences_N=torch.arange(2),
        on_policy_N=torch.zeros(2, dtype=torch.bool),
    )
    loss = policy_loss(tokens, config=_config())
    loss.backward()
    assert torch.isfinite(loss)
    assert tokens.policy_logprobs_N.grad is not None
    assert torch.isfinite(tokens.policy_logprobs_N.grad).all()


def test_statistics_by_hand() -> None:
    tokens = _tokens([1.5, 0.5, 1.5, 0.5], [1, -1, -1, 1])
    metrics = token_stats(tokens, config=_config()).metrics()
    kl = (2 * (1.5 - 1 - math.log(1.5)) + 2 * (0.5 - 1 - math.log(0.5))) / 4
    assert metrics == pytest.approx(
        {
            "entropy": 1.5,
            "mismatch_kl": kl,
            "clip_ratio/low": 0.25,
            "clip_ratio/high": 0.25,
            "correction/capped": 0.0,
            "correction/masked": 0.0,
            "ratio/max": 1.5,
            "mismatch_kl/on_policy": kl,
            "max_abs_logprob_diff": math.log(2),
        }
    )


def test_a_clip_counts_where_it_takes_a_gradient_away() -> None:
    """Of ratios 0.5 the two that are blamed, of ratios 1.5 the one that is praised."""
    tokens = _tokens([0.5] * 3 + [1.5] * 4, [-1, -1, 1, 1, -1, -1, -1])
    metrics = token_stats(tokens, config=_config()).metrics()
    assert (metrics["clip_ratio/low"], metrics["clip_ratio/high"]) == (2 / 7, 1 / 7)
    weights = token_stats(tokens, config=_config("cispo")).metrics()
    assert (weights["clip_ratio/low"], weights["clip_ratio/high"]) == (3 / 7, 4 / 7), "weights are cut on both sides"


def test_statistics_of_stale_tokens_say_nothing_about_numerics() -> None:
    metrics = token_stats(_tokens([1.5], [1.0], on_policy=False), config=_config()).metrics()
    assert metrics["mismatch_kl"] > 0
    assert "max_abs_logprob_diff" not in metrics
    assert "mismatch_kl/on_policy" not in metrics


def test_statistics_add_up_over_parts() -> None:
    whole = token_stats(_tokens([1.5, 0.5, 1.0], [1, -1, 1]), config=_config())
    first = token_stats(_tokens([1.5], [1]), config=_config())
    second = token_stats(_tokens([0.5, 1.0], [-1, 1]), config=_config())
    summed = first + second + TokenStats()
    assert summed.metrics() | {"entropy": 0} == pytest.approx(whole.metrics() | {"entropy": 0})
    assert TokenStats().metrics() == {}
