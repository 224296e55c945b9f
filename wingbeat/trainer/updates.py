"""From a batch to optimiser updates: which rows, and what each of their tokens weighs.

Every weight is known before an update's first forward.  Letters: ``N`` trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from wingbeat.core.samples import EpisodeSamples, TrainingBatch
from wingbeat.trainer.batching import Credit
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.rows import Row, split_by_group
from wingbeat.trainer.scores import PerRow, Scores


@dataclass(frozen=True, slots=True)
class Totals:
    """The global denominators of one optimiser update."""

    num_episodes: int
    """All episodes, also those with zero advantage or without a trained token."""
    num_tokens: int
    """All trained tokens, also those with zero advantage; excluded tokens do not count."""
    num_groups: int = 1
    """All groups, likewise."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimiser update's share of a batch."""

    rows: list[Row]
    """Those with trained tokens."""
    credit: Credit
    on_policy_version: int | None
    """Tokens of this version were sampled by the weights that score them now; None: no token was."""
    scores: Scores = field(default_factory=Scores)


def token_weight(config: LossConfig, *, episode_tokens: int, totals: Totals, group_tokens: int | None = None) -> float:
    """The weight of every trained token of an episode that has ``episode_tokens`` of them in all its samples.

    - reinforce, rloo, maxrl: ``1 / episodes``.  The whole episode is one action whose log-probability is the
      sum over its tokens: Ahmadian et al. (2024, arXiv 2402.14740), section on REINFORCE and RLOO; Tajwar et al.
      (2026, arXiv 2602.02710).
    - grpo: ``1 / (episodes * episode_tokens)``, mean over tokens and then over episodes: Shao et al.
      (2024, arXiv 2402.03300), eq. 3.  Per episode, not per sample: a fork is not a second vote.
    - dr_grpo: ``1 / (episodes * length_norm_tokens)``: Liu et al. (2025, arXiv 2503.20783), section 3,
      where a constant replaces the length so that long failures are not favoured.
    - dapo: ``1 / tokens``: Yu et al. (2025, arXiv 2503.14476), eq. 8.  Its sum is over the members of one prompt;
      public implementations take it over the whole update.  ``token_mean`` says which: ``batch`` (the update), or
      ``prompt``: ``1 / (groups * group_tokens)``, of which ``group_tokens`` are those of the episode's group.
    - cispo, ppo, decoupled_ppo, m2po, distill, sft: as dapo: MiniMax (2025, arXiv 2506.13585), eq. 4; Fu et al.
      (2025, arXiv 2505.24298); Zheng et al. (2025, arXiv 2510.01161).
    - gspo, sapo, reinforce_plus_plus: as grpo, mean over tokens and then over episodes: Zheng et al. (2025,
      arXiv 2507.18071), eq. 5, where the tokens of a turn share one gain; Qwen team (2025, arXiv 2511.20347);
      Hu (2025, arXiv 2501.03262).
    """
    match config.algorithm:
        case "reinforce" | "rloo" | "maxrl":
            return 1.0 / totals.num_episodes
        case "grpo" | "gspo" | "sapo" | "reinforce_plus_plus":
            return 1.0 / (totals.num_episodes * episode_tokens)
        case "dr_grpo":
            return 1.0 / (totals.num_episodes * config.length_norm_tokens)
        case "dapo" | "cispo" | "ppo" | "decoupled_ppo" | "m2po" | "distill" | "sft":
            if config.token_mean == "batch":
                return 1.0 / totals.num_tokens
            if group_tokens is None:
                raise ValueError("token_mean = 'prompt' needs the tokens of the episode's group")
            return 1.0 / (totals.num_groups * group_tokens)
        case _:
            assert_never(config.algorithm)


def plan_updates(
    batch: TrainingBatch,
    *,
    rows: Sequence[Row],
    advantages_N: PerRow,
    scores: Scores,
    config: LossConfig,
    parts: int,
) -> list[Update]:
    """Split the batch into ``parts`` by whole groups; each update has its own denominators."""
    tokens = [0] * len(batch.episodes)
    for row in rows:
        tokens[row.episode] += row.num_trained
    updates: list[Update] = []
    for members in split_by_group(batch.episodes, parts=parts, seed=batch.seed):
        weights = _weights(batch.episodes, members, tokens=tokens, config=config)
        sft_weights = _sft_weights(batch.episodes, members, tokens=tokens, config=config)
        updates.append(
            Update(
                rows=[row for row in rows if row.num_trained and weights[row.episode]],
                credit=Credit(advantages_N, weights, sft_weights),
                on_policy_version=None if updates else batch.step - 1,
                scores=scores,
            )
        )
    return updates


def _weights(
    episodes: Sequence[EpisodeSamples], members: Sequence[int], *, tokens: Sequence[int], config: LossConfig
) -> list[float]:
    """Of every episode of the batch; 0 for those of other updates."""
    group_tokens: dict[str, int] = {}
    for index in members:
        group = episodes[index].group_id
        group_tokens[group] = group_tokens.get(group, 0) + tokens[index]
    totals = Totals(
        num_episodes=len(members), num_tokens=sum(group_tokens.values()), num_groups=max(1, len(group_tokens))
    )
    weights = [0.0] * len(episodes)
    for index in members:
        if tokens[index]:
            weights[index] = token_weight(
                config,
                episode_tokens=tokens[index],
                totals=totals,
                group_tokens=group_tokens[episodes[index].group_id],
            )
    return weights


def _sft_weights(
    episodes: Sequence[EpisodeSamples], members: Sequence[int], *, tokens: Sequence[int], config: LossConfig
) -> list[float]:
    """One over the tokens of the chosen episodes, for these; () where no cross-entropy is trained.

    Rejection sampling fine-tuning: of the policy's own episodes, those of at least ``sft_min_reward``, shaped.
    Dong et al. (2023, arXiv 2304.06767), RAFT.
    """
    if not config.sft_coef:
        return []
    chosen = [index for index in members if episodes[index].shaped_reward >= config.sft_min_reward]
    total = sum(tokens[index] for index in chosen)
    weights = [0.0] * len(episodes)
    for index in chosen:
        weights[index] = 1.0 / total if total else 0.0
    return weights
