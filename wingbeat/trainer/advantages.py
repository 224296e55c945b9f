"""Advantages: how much better an episode was than the others on the same task.

One advantage per :class:`EpisodeSamples`, computed before anything is packed and then broadcast to all
its sampled tokens.  A long or forked episode (more tokens, more samples) therefore has exactly one
vote in its group's baseline.  Baselines are keyed by (group, policy, agent), those of
reinforce_plus_plus by (policy, agent): all of the batch.  Credit per turn (:mod:`wingbeat.trainer.credit`)
goes through the same estimators: there, a member may vote with several values, which share its one vote.

Letters: ``G`` members of one baseline group, ``r`` their rewards.

A worked instance: rewards 1, 0, 1, 0, whatever numbers of samples they come in::

    reinforce   1      0      1      0
    dr_grpo     0.5   -0.5    0.5   -0.5      mean 1/2
    rloo        2/3   -2/3    2/3   -2/3      1 - (0+1+0)/3
    maxrl       1     -1      1     -1        0.5 / 0.5
    grpo, ...   0.866 -0.866  0.866 -0.866    0.5 / (sqrt(1/3) + eps); also dapo, cispo, gspo, sapo, m2po, decoupled_ppo

and, where they are all of the batch, ``reinforce_plus_plus`` 1, -1, 1, -1: 0.5 / (sqrt(1/4) + eps).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean

from wingbeat.core.config.trainer import Algorithm
from wingbeat.core.errors import InvalidReward
from wingbeat.core.samples import EpisodeSamples

BaselineKey = tuple[str, str, str]
"""(group_id, policy, agent)."""
Votes = Sequence[Sequence[float]]
"""What the members of a baseline group got, each at least once; all values of a member together are one vote."""


def baseline_groups(episodes: Sequence[EpisodeSamples]) -> dict[BaselineKey, list[int]]:
    """Indices into ``episodes`` by baseline key, both in order of first appearance."""
    groups: dict[BaselineKey, list[int]] = {}
    for index, episode in enumerate(episodes):
        groups.setdefault((episode.group_id, episode.policy, episode.agent), []).append(index)
    return groups


def compared(episodes: Sequence[EpisodeSamples], *, algorithm: Algorithm) -> list[list[int]]:
    """Indices of the episodes that share a baseline: of one group, or of the batch for reinforce_plus_plus."""
    if algorithm != "reinforce_plus_plus":
        return list(baseline_groups(episodes).values())
    batch: dict[tuple[str, str], list[int]] = {}
    for index, episode in enumerate(episodes):
        batch.setdefault((episode.policy, episode.agent), []).append(index)
    return list(batch.values())


def compute_advantages(
    episodes: Sequence[EpisodeSamples], *, algorithm: Algorithm, eps: float, rewards: Sequence[float] | None = None
) -> list[float]:
    """One advantage per episode, in the order given, from ``rewards`` (unset: the episodes' shaped rewards).

    A group whose rewards are all equal gets exact zeros (no rounding residue divided by ``eps``), and
    so does a group of one: without a second member there is no baseline, hence no information.
    REINFORCE has no baseline, so neither rule applies to it; REINFORCE++ has one, the whole batch.

    ``eps`` is added to the standard deviation where there is one.  Raises InvalidReward on a reward that is
    not finite, and on one below 0 for maxrl.
    """
    check_rewards(episodes)
    rewards = [episode.shaped_reward for episode in episodes] if rewards is None else rewards
    advantages = [0.0] * len(episodes)
    for members in compared(episodes, algorithm=algorithm):
        estimates = estimate([[rewards[index]] for index in members], algorithm=algorithm, eps=eps)
        for index, (advantage,) in zip(members, estimates, strict=True):
            advantages[index] = advantage
    return advantages


def check_rewards(episodes: Sequence[EpisodeSamples]) -> None:
    """Raises InvalidReward where a reward, its shaping included, or that of a turn is not finite."""
    for episode in episodes:
        for reward in (episode.shaped_reward, *(turn.reward for turn in episode.turns)):
            if not math.isfinite(reward):
                raise InvalidReward(
                    f"episode {episode.episode_id!r}: expected finite rewards, got {reward} (reported "
                    f"{episode.reward}, shaping {episode.shaping}); such an episode must not reach a batch: correct "
                    "what reports its rewards, or the operator that shapes them"
                )


def estimate(votes: Votes, *, algorithm: Algorithm, eps: float) -> list[list[float]]:
    """The advantages of all values of one baseline group, by member.

    Algorithms whose advantages come from elsewhere (the critic of ppo, the teacher of distill, the threshold
    of sft) have no estimator: KeyError.
    """
    return _ESTIMATORS[algorithm](votes, eps)


def shuffled_order(count: int, *, seed: int) -> list[int]:
    """Negative control: whose advantages each episode gets, so that nothing can be learnt.

    Everything else (scale, gradient noise, optimiser) stays as in a real run.  A run that "learns" under
    this control is fooling itself.
    """
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def is_constant(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards are all equal, so that a baseline leaves nothing to learn."""
    return min(rewards) == max(rewards)


def _is_flat(votes: Votes) -> bool:
    """Whether a baseline leaves nothing: one member only, or all values equal."""
    return len(votes) == 1 or is_constant([value for member in votes for value in member])


def _zeros(votes: Votes) -> list[list[float]]:
    return [[0.0] * len(member) for member in votes]


def _mean(votes: Votes) -> float:
    return math.fsum(fmean(member) for member in votes) / len(votes)


def _raw(votes: Votes, _eps: float) -> list[list[float]]:
    """A_i = r_i.  Williams (1992), REINFORCE without a baseline."""
    return [[float(value) for value in member] for member in votes]


def _leave_one_out(votes: Votes, _eps: float) -> list[list[float]]:
    """A_i = r_i - mean of the others.  Kool et al. (2019); Ahmadian et al. (2024, arXiv 2402.14740), RLOO."""
    if _is_flat(votes):
        return _zeros(votes)
    means, others = [fmean(member) for member in votes], len(votes) - 1
    total = math.fsum(means)
    return [[value - (total - mean) / others for value in member] for member, mean in zip(votes, means, strict=True)]


def _mean_only(votes: Votes, _eps: float) -> list[list[float]]:
    """A_i = r_i - mean(r).  Liu et al. (2025, arXiv 2503.20783), section 3: no division by the deviation."""
    if _is_flat(votes):
        return _zeros(votes)
    mean = _mean(votes)
    return [[value - mean for value in member] for member in votes]


def _relative(votes: Votes, _eps: float) -> list[list[float]]:
    """A_i = (r_i - mean(r)) / mean(r).  MaxRL (2026, arXiv 2602.02710): for 0/1 rewards this is the gradient of the
    logarithm of the success rate, so that rare successes weigh more.  Zeros where nothing succeeded.
    """
    lowest = min(value for member in votes for value in member)
    if lowest < 0:
        raise InvalidReward(
            f"maxrl divides by the mean reward and needs rewards of at least 0, got {lowest}; shift or clip the "
            "rewards (operators, KL in reward included), or choose another algorithm"
        )
    mean = _mean(votes)
    if _is_flat(votes) or not mean:
        return _zeros(votes)
    return [[(value - mean) / mean for value in member] for member in votes]


def _standardised(votes: Votes, eps: float) -> list[list[float]]:
    """A_i = (r_i - mean(r)) / (std(r) + eps).  Shao et al. (2024, arXiv 2402.03300), section 4.1.2.

    The paper leaves the estimator open; this is the sample standard deviation (divisor G - 1), as in
    the public implementations, so that their learning rates carry over.
    """
    return _over_deviation(votes, eps, divisor=len(votes) - 1)


def _normalised(votes: Votes, eps: float) -> list[list[float]]:
    """A_i = (r_i - mean(r)) / (std(r) + eps) over the whole batch.  Hu (2025, arXiv 2501.03262), REINFORCE++.

    Without discount and KL penalty every token's return is the episode's reward.  The batch is all there is,
    hence the population's standard deviation; one vote per episode, not per token.
    """
    return _over_deviation(votes, eps, divisor=len(votes))


def _over_deviation(votes: Votes, eps: float, *, divisor: int) -> list[list[float]]:
    centred = _mean_only(votes, eps)
    if _is_flat(votes):
        return centred
    std = math.sqrt(math.fsum(fmean([value * value for value in member]) for member in centred) / divisor)
    return [[value / (std + eps) for value in member] for member in centred]


_ESTIMATORS: dict[Algorithm, Callable[[Votes, float], list[list[float]]]] = {
    "reinforce": _raw,
    "reinforce_plus_plus": _normalised,
    "rloo": _leave_one_out,
    "grpo": _standardised,
    "dr_grpo": _mean_only,
    "dapo": _standardised,
    "cispo": _standardised,
    "gspo": _standardised,
    "sapo": _standardised,
    "m2po": _standardised,
    "decoupled_ppo": _standardised,
    "maxrl": _relative,
}
