"""Whose credit: from a batch's rewards to one advantage per trained token, as the config says.

    reward (+ shaping - KL penalties)  ─▶  per episode, per turn, or per token by a critic  ─▶  tokens of rows

All of it is float64 arithmetic on the whole batch before anything is packed, so no packing changes it.

Letters: ``N`` trained tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.errors import RequestError
from wingbeat.core.samples import EpisodeSamples
from wingbeat.trainer.advantages import check_rewards, compute_advantages, shuffled_order
from wingbeat.trainer.credit import TurnTree, TurnValues, step_advantages, turn_advantages
from wingbeat.trainer.gae import tree_advantages
from wingbeat.trainer.rows import Row

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What models say of the trained tokens, [N] per row, by ``Row.index``."""

    penalties_N: Sequence[Floats] | None = None
    """Subtracted from the reward, each at its token: the KL penalty; None for none."""
    values_N: Sequence[Floats] = ()
    """The critic's; of ppo."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The credit of a batch."""

    advantages_N: list[Floats]
    """Per row, by ``Row.index``."""
    episodes: list[float]
    """One number per episode, to be shown: its advantage, or the mean over its trained tokens."""
    returns_N: list[Floats]
    """Per row, what a critic should have said; empty without one."""


def assign_credit(
    episodes: Sequence[EpisodeSamples], rows: Sequence[Row], *, config: TrainerConfig, evidence: Evidence, seed: int
) -> Assigned:
    """The advantages of all trained tokens.  ``rows`` are those of the episodes, by their index.

    - ``sft`` 1 where the shaped reward is at least ``sft_min_reward``, else 0; ``distill`` 0: its loss compares
      tokens with the teacher's;
    - ``ppo``: along the tree of turns by the critic (:mod:`wingbeat.trainer.gae`), then standardised over all trained
      tokens of the batch;
    - else by ``config.credit``, see :mod:`wingbeat.trainer.credit`.

    KL penalties go to the token's turn or token where credit is finer than an episode, and else to the episode:
    the sum over its trained tokens is subtracted before the baseline.  ``control = "shuffled_advantages"`` deals
    each episode's advantages to another one, drawn by ``seed``.

    Raises RequestError where turns are needed and the samples name none, InvalidReward where a reward is not finite,
    or below 0 with maxrl.
    """
    check_rewards(episodes)
    by_episode = _by_episode(rows, count=len(episodes))
    returns_N: list[Floats] = []
    if config.algorithm == "ppo":
        advantages_N, returns_N = _by_token(episodes, rows, config=config, evidence=evidence)
        shown = _token_means(by_episode, advantages_N)
    elif config.credit == "episode":
        shown = _by_reward(episodes, by_episode, config=config, evidence=evidence)
        advantages_N = [np.full(row.num_trained, shown[row.episode], np.float64) for row in rows]
    else:
        advantages_N = _by_turn(episodes, by_episode, config=config, evidence=evidence)
        shown = _token_means(by_episode, advantages_N)
    if config.control == "shuffled_advantages":
        advantages_N, shown = _shuffled(by_episode, advantages_N, shown, seed=seed)
    return Assigned(advantages_N, shown, returns_N)


def _by_episode(rows: Sequence[Row], *, count: int) -> list[list[Row]]:
    found: list[list[Row]] = [[] for _ in range(count)]
    for row in rows:
        found[row.episode].append(row)
    return found


def _by_reward(
    episodes: Sequence[EpisodeSamples], by_episode: list[list[Row]], *, config: TrainerConfig, evidence: Evidence
) -> list[float]:
    """One advantage per episode."""
    rewards = [episode.shaped_reward for episode in episodes]
    if evidence.penalties_N is not None:
        penalties_N = evidence.penalties_N
        rewards = [
            fsum([reward, *(-value for row in rows for value in penalties_N[row.index].tolist())])
            for reward, rows in zip(rewards, by_episode, strict=True)
        ]
    match config.algorithm:
        case "sft":
            return [float(reward >= config.sft_min_reward) for reward in rewards]
        case "distill":
            return [0.0] * len(rewards)
        case algorithm:
            return compute_advantages(episodes, algorithm=algorithm, eps=config.advantage_eps, rewards=rewards)


def _by_turn(
    episodes: Sequence[EpisodeSamples], by_episode: list[list[Row]], *, config: TrainerConfig, evidence: Evidence
) -> list[Floats]:
    """Per row, the advantage of each token's turn."""
    turns = [_turn_slices(episode, rows) for episode, rows in zip(episodes, by_episode, strict=True)]
    trees = [
        TurnTree.of(episode, penalties=_turn_penalties(slices, evidence.penalties_N))
        for episode, slices in zip(episodes, turns, strict=True)
    ]
    found: TurnValues
    if config.credit == "turn":
        found = turn_advantages(episodes, trees, config=config)
    else:
        steps = step_advantages(episodes, trees, config=config)
        whole = _by_reward(episodes, by_episode, config=config, evidence=evidence)
        found = [
            {turn: base + config.step_weight * step for turn, step in by_turn.items()}
            for base, by_turn in zip(whole, steps, strict=True)
        ]
    advantages_N = _empty(by_episode)
    for by_turn, slices in zip(found, turns, strict=True):
        for turn, (index, places_N) in slices.items():
            advantages_N[index][places_N] = by_turn[turn]
    return advantages_N


TurnSlices = dict[str, tuple[int, NDArray[np.int64]]]
"""By turn id: the index of the row in which it trains, and the places of its tokens among those that train there."""


def _turn_slices(episode: EpisodeSamples, rows: Sequence[Row]) -> TurnSlices:
    known = {turn.turn_id for turn in episode.turns}
    found: TurnSlices = {}
    for row in rows:
        if not row.num_trained:
            continue
        if not known.issuperset(row.turn_ids) or not row.turn_starts:
            raise RequestError(
                f"episode {episode.episode_id!r}: expected samples that name the turn of each token, got none: they "
                "are of an earlier release. Train them with credit = 'episode' and an algorithm without a critic, or "
                "leave them out"
            )
        turns_N = row.turns_N
        for place in np.unique(turns_N).tolist():
            turn = row.turn_ids[place]
            if turn in found:
                raise RequestError(
                    f"episode {episode.episode_id!r}: expected each turn to train in one sample, got {turn!r} in two: "
                    "the data is damaged"
                )
            found[turn] = (row.index, np.flatnonzero(turns_N == place))
    return found


def _turn_penalties(slices: TurnSlices, penalties_N: Sequence[Floats] | None) -> dict[str, float]:
    if penalties_N is None:
        return {}
    return {turn: fsum(penalties_N[index][places_N].tolist()) for turn, (index, places_N) in slices.items()}


def _by_token(
    episodes: Sequence[EpisodeSamples], rows: Sequence[Row], *, config: TrainerConfig, evidence: Evidence
) -> tuple[list[Floats], list[Floats]]:
    """Advantages and returns by the critic's values.

    Samples that name no turn at all are paths of their own, with the whole reward at their ends.
    """
    values_N = evidence.values_N
    by_episode = _by_episode(rows, count=len(episodes))
    penalties_N = _empty(by_episode) if evidence.penalties_N is None else evidence.penalties_N
    advantages_N = _empty(by_episode)
    for episode, own in zip(episodes, by_episode, strict=True):
        if episode.turns or any(row.turn_ids for row in own):
            slices, tree = _turn_slices(episode, own), TurnTree.of(episode)
        else:
            slices = {str(row.index): (row.index, np.arange(row.num_trained)) for row in own}
            ids = tuple(slices)
            tree = TurnTree(ids, (-1,) * len(ids), (0.0,) * len(ids), terminal=episode.shaped_reward)
        found = tree_advantages(
            tree,
            _by_turns(values_N, tree, slices),
            _by_turns(penalties_N, tree, slices),
            gamma=config.gamma,
            lam=config.gae_lambda,
        )
        for turn, advantages in zip(tree.ids, found, strict=True):
            if turn in slices:
                index, places_N = slices[turn]
                advantages_N[index][places_N] = advantages
    returns_N = [advantages + values for advantages, values in zip(advantages_N, values_N, strict=True)]
    return _standardised(advantages_N, eps=config.advantage_eps), returns_N


def _by_turns(values_N: Sequence[Floats], tree: TurnTree, slices: TurnSlices) -> list[Floats]:
    """The values of each turn's tokens; none of a turn that trains none."""
    found = [slices.get(turn) for turn in tree.ids]
    return [np.zeros(0) if at is None else values_N[at[0]][at[1]] for at in found]


def _standardised(advantages_N: Sequence[Floats], *, eps: float) -> list[Floats]:
    """``(A - mean) / (std + eps)`` over all trained tokens of the batch, population; zeros where all are equal."""
    values = [value for found in advantages_N for value in found.tolist()]
    if not values or min(values) == max(values):
        return [np.zeros_like(found) for found in advantages_N]
    mean = fsum(values) / len(values)
    std = (fsum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    return [(found - mean) / (std + eps) for found in advantages_N]


def _empty(by_episode: list[list[Row]]) -> list[Floats]:
    """Zeros for every row, by its index."""
    counts = {row.index: row.num_trained for rows in by_episode for row in rows}
    return [np.zeros(counts[index], np.float64) for index in range(len(counts))]


def _token_means(by_episode: list[list[Row]], advantages_N: Sequence[Floats]) -> list[float]:
    joined = [_joined(rows, advantages_N) for rows in by_episode]
    return [fsum(found.tolist()) / len(found) if len(found) else 0.0 for found in joined]


def _joined(rows: Sequence[Row], advantages_N: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *(advantages_N[row.index] for row in rows)])


def _shuffled(
    by_episode: list[list[Row]], advantages_N: Sequence[Floats], shown: list[float], *, seed: int
) -> tuple[list[Floats], list[float]]:
    """Each episode with the advantages of another, stretched over its own tokens."""
    order = shuffled_order(len(by_episode), seed=seed)
    dealt = _empty(by_episode)
    for rows, donor in zip(by_episode, order, strict=True):
        given = _joined(by_episode[donor], advantages_N)
        # One without trained tokens still has the advantage that is shown of it.
        given = given if len(given) else np.asarray([shown[donor]])
        count = sum(row.num_trained for row in rows)
        spread = given[np.arange(count) * len(given) // max(1, count)]
        stop = 0
        for row in rows:
            start, stop = stop, stop + row.num_trained
            dealt[row.index][:] = spread[start:stop]
    return dealt, [shown[donor] for donor in order]
