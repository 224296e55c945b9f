"""Metrics of a batch that need no forward pass: rewards, advantages, staleness, token counts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.advantages import baseline_groups, is_constant
from wingbeat.trainer.rows import Row


def batch_metrics(batch: TrainingBatch, *, rows: Sequence[Row]) -> dict[str, float]:
    """Rewards and staleness as delivered, before any update.

    ``reward/mean``, ``reward/mean/SOURCE`` and ``reward/std`` (population) are of the rewards as reported,
    ``reward/shaped_mean`` of what operators made of them.  ``frac_reward_zero_std`` is the share of baseline groups
    whose shaped rewards are all equal; a group of one is such a group.  ``masked_tokens`` were taken out of training
    for their age, ``excluded_tokens`` cannot train.  ``batch/episodes`` counts attempts by agent.  Staleness, per
    sample, is the trainer's version (``batch.step - 1``) minus the lowest version that sampled in it.
    """
    rewards = [episode.reward for episode in batch.episodes]
    shaped = [episode.shaped_reward for episode in batch.episodes]
    groups = baseline_groups(batch.episodes).values()
    constant = sum(is_constant([shaped[index] for index in members]) for members in groups)
    count = len({(episode.episode_id, episode.attempt, episode.agent) for episode in batch.episodes})
    trained = float(sum(row.num_trained for row in rows))
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/shaped_mean": statistics.fmean(shaped),
        "frac_reward_zero_std": constant / len(groups),
        "trained_tokens": trained,
        "excluded_tokens": float(sum(row.num_excluded for row in rows)),
        "masked_tokens": float(sum(episode.masked for episode in batch.episodes)),
        "batch/episodes": float(count),
        "batch/tokens_per_episode": trained / count,
    }
    by_source: dict[str, list[float]] = {}
    for episode in batch.episodes:
        if episode.source:
            by_source.setdefault(episode.source, []).append(episode.reward)
    metrics |= {f"reward/mean/{source}": statistics.fmean(found) for source, found in sorted(by_source.items())}
    lowest = [sample.min_version for episode in batch.episodes for sample in episode.samples]
    staleness = [batch.step - 1 - version for version in lowest if version is not None]
    if staleness:
        metrics |= {"staleness/mean": statistics.fmean(staleness), "staleness/max": float(max(staleness))}
    return metrics


def advantage_metrics(advantages_N: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    """Of all trained tokens; ``advantage/zero`` is the share of those without one.  No token, no metric."""
    values = np.concatenate([np.zeros(0), *advantages_N])
    if not values.size:
        return {}
    return {
        "advantage/mean": float(values.mean()),
        "advantage/std": float(values.std()),
        "advantage/max_abs": float(np.abs(values).max()),
        "advantage/zero": float((values == 0).mean()),
    }
