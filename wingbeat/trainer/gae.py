"""Advantages of tokens from a critic's values: generalised advantage estimation, along a tree.

Schulman et al. (2016, arXiv 1506.02438), eq. 16: ``A_n = delta_n + gamma lambda A_(n+1)``, with
``delta_n = r_n + gamma V_(n+1) - V_n``.  ``V_n`` values the tokens before the trained token ``n``; the next one is
the next trained token of the turn, or the first of the turn that continues it.  Where several turns continue
one, the mean over them stands for what comes next, so each token has one advantage, as it has in the loss.

A turn's reward comes at its last trained token, a penalty (KL in the reward) at its own token, and the rest of
the agent's reward at every end of the tree, where no value follows.  A turn that trains nothing passes on what
comes after it, undiscounted, with its own reward.

Letters: ``N`` trained tokens of a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from wingbeat.trainer.credit import TurnTree

Floats = NDArray[np.float64]


def tree_advantages(
    tree: TurnTree, values_N: Sequence[Floats], penalties_N: Sequence[Floats], *, gamma: float, lam: float
) -> list[Floats]:
    """The advantage of each trained token of each turn of the tree; ``V + A`` is the return to fit values to."""
    found: list[Floats] = [np.zeros(0)] * len(tree.ids)
    worth, children = [0.0] * len(tree.ids), tree.children()
    for place in reversed(range(len(tree.ids))):
        after = [worth[child] for child in children[place]]
        tail = tree.rewards[place] + (fmean(after) if after else tree.terminal)
        found[place] = _turn_advantages(values_N[place], penalties_N[place], tail=tail, gamma=gamma, lam=lam)
        # What a turn is worth to the token before it: gamma V + gamma lambda A of its own first token.
        worth[place] = gamma * (values_N[place][0] + lam * found[place][0]) if len(found[place]) else tail
    return found


def _turn_advantages(values_N: Floats, penalties_N: Floats, *, tail: float, gamma: float, lam: float) -> Floats:
    """``tail`` is what the last token gets besides its penalty."""
    advantages: list[float] = []
    following = tail
    for value, penalty in zip(reversed(values_N.tolist()), reversed(penalties_N.tolist()), strict=True):
        advantage = following - penalty - value
        advantages.append(advantage)
        following = gamma * (value + lam * advantage)
    return np.asarray(advantages[::-1], np.float64)
