"""Credit per turn: what each turn of an episode returned, and what that is compared with.

An agent's turns form a forest: a turn's parent is the turn whose tokens it extends.  Rewards reported for a
turn are earned there; the rest of the agent's reward, shaping included, is earned at every end of the forest,
because each branch is a path that came to an end.

    return of a turn   G = r + gamma * mean over its children of their G,   at an end:  G = r + terminal

``credit = "turn"`` (:func:`turn_advantages`): G compared with the returns at the same depth of the episodes that
share a baseline, by the estimator of the algorithm.  Every episode has one vote at every depth: its turns there
share it, and an episode that ended before votes with its deepest turns.  So, without turn rewards and at gamma 1,
every G is the episode's reward and the advantages are those of ``credit = "episode"``, however long the episodes.

``credit = "step_groups"`` (:func:`step_advantages`): GiGPO, Feng et al. (2025, arXiv 2505.10978), section 4.
``A = A_episode + step_weight * A_step``, where A_step compares G among all turns of one group that saw the same
(equal ``state``), each of which has a vote, by the estimator of the algorithm.  A turn that nobody else's equals
has A_step 0.

A worked instance: two episodes of two turns in a row, turn rewards (1, 0) and (0, 0), each with 0 or 1 at the end
(rewards 1 and 1), gamma 0.5::

    G   first episode   1 + 0.5 * 0 = 1     0         dr_grpo at depth 0:  1 - 0.75, 0.5 - 0.75
        second episode  0 + 0.5 * 1 = 0.5   1                  at depth 1:  0 - 0.5,  1 - 0.5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.errors import RequestError
from wingbeat.core.samples import EpisodeSamples
from wingbeat.trainer.advantages import baseline_groups, compared, estimate


@dataclass(frozen=True, slots=True)
class TurnTree:
    """The turns of one agent in one episode; every parent comes before its children."""

    ids: tuple[str, ...]
    parents: tuple[int, ...]
    """Places in ``ids``, -1 for a root."""
    rewards: tuple[float, ...]
    terminal: float
    """Earned at every turn without children, on top of its own reward."""

    @classmethod
    def of(cls, episode: EpisodeSamples, *, penalties: Mapping[str, float] | None = None) -> TurnTree:
        """The tree of an episode; ``penalties`` are subtracted from the rewards of turns, by turn id.

        A parent that is none of the agent's own turns makes a root.  Raises RequestError where a turn comes
        before its parent or twice.
        """
        places = {turn.turn_id: place for place, turn in enumerate(episode.turns)}
        parents = tuple(places.get(turn.parent_id, -1) for turn in episode.turns)
        if len(places) < len(episode.turns) or any(parent >= place for place, parent in enumerate(parents)):
            raise RequestError(
                f"episode {episode.episode_id!r}: expected each turn once and behind its parent, got turns in another "
                "order: the data is damaged"
            )
        taken = penalties or {}
        return cls(
            ids=tuple(places),
            parents=parents,
            rewards=tuple(turn.reward - taken.get(turn.turn_id, 0.0) for turn in episode.turns),
            terminal=fsum([episode.shaped_reward, *(-turn.reward for turn in episode.turns)]),
        )

    def children(self) -> list[list[int]]:
        """The places of the turns that continue each turn."""
        children: list[list[int]] = [[] for _ in self.ids]
        for place, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(place)
        return children

    def depths(self) -> list[int]:
        """How many of the agent's turns are above each turn."""
        found: list[int] = []
        for parent in self.parents:
            found.append(found[parent] + 1 if parent >= 0 else 0)
        return found

    def returns(self, *, gamma: float) -> list[float]:
        """G of each turn."""
        found, children = [0.0] * len(self.ids), self.children()
        for place in reversed(range(len(self.ids))):
            below = [found[child] for child in children[place]]
            found[place] = self.rewards[place] + (gamma * fmean(below) if below else self.terminal)
        return found


TurnValues = list[dict[str, float]]
"""Of each episode, by turn id."""


def turn_advantages(
    episodes: Sequence[EpisodeSamples], trees: Sequence[TurnTree], *, config: TrainerConfig
) -> TurnValues:
    """The advantage of every turn: its return, compared with the returns at its depth (see the module)."""
    advantages: TurnValues = [{} for _ in episodes]
    levels = [_levels(tree) for tree in trees]
    returns = [tree.returns(gamma=config.gamma) for tree in trees]
    for members in compared(episodes, algorithm=config.algorithm):
        for depth in range(max(len(levels[index]) for index in members)):
            votes = [_votes(trees[index], levels[index], returns[index], depth=depth) for index in members]
            estimates = estimate(votes, algorithm=config.algorithm, eps=config.advantage_eps)
            for index, found in zip(members, estimates, strict=True):
                if depth < len(levels[index]):
                    ids = [trees[index].ids[place] for place in levels[index][depth]]
                    advantages[index] |= dict(zip(ids, found, strict=True))
    return advantages


def step_advantages(
    episodes: Sequence[EpisodeSamples], trees: Sequence[TurnTree], *, config: TrainerConfig
) -> TurnValues:
    """A_step of every turn: its return, compared with those of the group's turns that saw the same."""
    advantages: TurnValues = [dict.fromkeys(tree.ids, 0.0) for tree in trees]
    returns = [tree.returns(gamma=config.gamma) for tree in trees]
    for members in baseline_groups(episodes).values():
        alike: dict[str, list[tuple[int, int]]] = {}
        for index in members:
            for place, turn in enumerate(episodes[index].turns):
                if turn.state:
                    alike.setdefault(turn.state, []).append((index, place))
        for turns in alike.values():
            votes = [[returns[index][place]] for index, place in turns]
            estimates = estimate(votes, algorithm=config.algorithm, eps=config.advantage_eps)
            for (index, place), (found,) in zip(turns, estimates, strict=True):
                advantages[index][trees[index].ids[place]] = found
    return advantages


def _levels(tree: TurnTree) -> list[list[int]]:
    """The places of the turns, by depth."""
    levels: list[list[int]] = []
    for place, depth in enumerate(tree.depths()):
        if depth == len(levels):
            levels.append([])
        levels[depth].append(place)
    return levels


def _votes(tree: TurnTree, levels: list[list[int]], returns: list[float], *, depth: int) -> list[float]:
    """What an episode votes with at a depth; one without turns with its reward, as an end without a turn."""
    if not levels:
        return [tree.terminal]
    return [returns[place] for place in levels[min(depth, len(levels) - 1)]]
