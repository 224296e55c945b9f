"""Metrics of a batch that need no forward pass: rewards, staleness, token counts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.advantages import baseline_groups, is_constant
from wingbeat.trainer.rows import Row


def batch_metrics(batch: TrainingBatch, *, rows: Sequence[Row]) -> dict[str, float]:
    """Rewards and staleness as delivered, before any update.

    ``reward/std`` is over all episodes of the batch (population).  ``frac_reward_zero_std`` is the share
    of baseline groups whose rewards are all equal; a group of one is such a group.  Staleness, per
    sample, is the trainer's version (``batch.step - 1``) minus the lowest version that sampled in it.
    """
    rewards = [episode.reward for episode in batch.episodes]
    groups = baseline_groups(batch.episodes).values()
    constant = sum(is_constant([rewards[index] for index in members]) for members in groups)
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "frac_reward_zero_std": constant / len(groups),
        "trained_tokens": float(sum(row.num_trained for row in rows)),
        "excluded_tokens": float(sum(row.num_excluded for row in rows)),
    }
    lowest = [sample.min_version for episode in batch.episodes for sample in episode.samples]
    staleness = [batch.step - 1 - version for version in lowest if version is not None]
    if staleness:
        metrics |= {"staleness/mean": statistics.fmean(staleness), "staleness/max": float(max(staleness))}
    return metrics
