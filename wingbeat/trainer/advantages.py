"""Advantages: how much better an episode was than the others on the same task.

One advantage per :class:`EpisodeSamples`, computed before anything is packed and then broadcast to all
its sampled tokens.  A long or forked episode (more tokens, more samples) therefore has exactly one
vote in its group's baseline.  Baselines are keyed by (group, policy, agent), those of
reinforce_plus_plus by (policy, agent): all of the batch.

Letters: ``G`` members of one baseline group, ``r`` their rewards.

A worked instance: rewards 1, 0, 1, 0, whatever numbers of samples they come in::

    reinforce   1      0      1      0
    dr_grpo     0.5   -0.5    0.5   -0.5      mean 1/2
    rloo        2/3   -2/3    2/3   -2/3      1 - (0+1+0)/3
    grpo, ...   0.866 -0.866  0.866 -0.866    0.5 / (sqrt(1/3) + eps); also dapo, cispo, gspo, sapo

and, where they are all of the batch, ``reinforce_plus_plus`` 1, -1, 1, -1: 0.5 / (sqrt(1/4) + eps).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from wingbeat.core.config.schema import Algorithm
from wingbeat.core.errors import InvalidReward
from wingbeat.core.samples import EpisodeSamples

BaselineKey = tuple[str, str, str]
"""(group_id, policy, agent)."""


def baseline_groups(episodes: Sequence[EpisodeSamples]) -> dict[BaselineKey, list[int]]:
    """Indices into ``episodes`` by baseline key, both in order of first appearance."""
    groups: dict[BaselineKey, list[int]] = {}
    for index, episode in enumerate(episodes):
        groups.setdefault((episode.group_id, episode.policy, episode.agent), []).append(index)
    return groups


def compute_advantages(episodes: Sequence[EpisodeSamples], *, algorithm: Algorithm, eps: float) -> list[float]:
    """One advantage per episode, in the order given.

    A group whose rewards are all equal gets exact zeros (no rounding residue divided by ``eps``), and
    so does a group of one: without a second member there is no baseline, hence no information.
    REINFORCE has no baseline, so neither rule applies to it; REINFORCE++ has one, the whole batch.

    ``eps`` is added to the standard deviation where there is one.  Raises InvalidReward on a reward that is
    not finite.
    """
    for episode in episodes:
        if not math.isfinite(episode.reward):
            raise InvalidReward(
                f"episode {episode.episode_id!r}: expected a finite reward, got {episode.reward}; "
                "such episodes must not reach a batch"
            )
    advantages = [0.0] * len(episodes)
    estimate = _ESTIMATORS[algorithm]
    groups = _whole_batch(episodes) if algorithm == "reinforce_plus_plus" else baseline_groups(episodes)
    for members in groups.values():
        rewards = [episodes[index].reward for index in members]
        for index, advantage in zip(members, estimate(rewards, eps), strict=True):
            advantages[index] = advantage
    return advantages


def _whole_batch(episodes: Sequence[EpisodeSamples]) -> dict[tuple[str, str], list[int]]:
    groups: dict[tuple[str, str], list[int]] = {}
    for index, episode in enumerate(episodes):
        groups.setdefault((episode.policy, episode.agent), []).append(index)
    return groups


def shuffled_advantages(advantages: Sequence[float], *, seed: int) -> list[float]:
    """Negative control: the same advantages dealt to random episodes, so that nothing can be learnt.

    Everything else (scale, gradient noise, optimiser) stays as in a real run.  A run that "learns" under
    this control is fooling itself.
    """
    shuffled = list(advantages)
    random.Random(seed).shuffle(shuffled)
    return shuffled


def is_constant(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards are all equal, so that a baseline leaves nothing to learn."""
    return min(rewards) == max(rewards)


def _raw(rewards: Sequence[float], _eps: float) -> list[float]:
    """A_i = r_i.  Williams (1992), REINFORCE without a baseline."""
    return [float(reward) for reward in rewards]


def _leave_one_out(rewards: Sequence[float], _eps: float) -> list[float]:
    """A_i = r_i - mean of the others.  Kool et al. (2019); Ahmadian et al. (2024, arXiv 2402.14740), RLOO."""
    if is_constant(rewards):
        return [0.0] * len(rewards)
    total, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def _mean_only(rewards: Sequence[float], _eps: float) -> list[float]:
    """A_i = r_i - mean(r).  Liu et al. (2025, arXiv 2503.20783), section 3: no division by the deviation."""
    if is_constant(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _standardised(rewards: Sequence[float], eps: float) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + eps).  Shao et al. (2024, arXiv 2402.03300), section 4.1.2.

    The paper leaves the estimator open; this is the sample standard deviation (divisor G - 1), as in
    the public implementations, so that their learning rates carry over.
    """
    centred = _mean_only(rewards, eps)
    if is_constant(rewards):
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + eps) for value in centred]


def _normalised(rewards: Sequence[float], eps: float) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + eps) over the whole batch.  Hu (2025, arXiv 2501.03262), REINFORCE++.

    Without discount and KL penalty every token's return is the episode's reward.  The batch is all there is,
    hence the population's standard deviation; one vote per episode, not per token.
    """
    centred = _mean_only(rewards, eps)
    std = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    return [value / (std + eps) for value in centred]


_ESTIMATORS: dict[Algorithm, Callable[[Sequence[float], float], list[float]]] = {
    "reinforce": _raw,
    "reinforce_plus_plus": _normalised,
    "rloo": _leave_one_out,
    "grpo": _standardised,
    "dr_grpo": _mean_only,
    "dapo": _standardised,
    "cispo": _standardised,
    "gspo": _standardised,
    "sapo": _standardised,
}
