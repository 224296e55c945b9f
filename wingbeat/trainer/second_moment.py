"""m2po's mask: which tokens of a whole update are trained, Zheng et al. (2025, arXiv 2510.01161).

The trust region is a bound on the second moment of the log-ratios, ``M2 = mean (log rho)^2``, not on each ratio.
Tokens are taken out, the farthest first, until what remains is within it.  Only tokens that would move further away
are candidates (``A > 0`` and rho above 1, or ``A < 0`` and rho below 1: those that PPO might clip); the others come
back by themselves, are kept and do not count.

M2 is a property of the update, not of a forward: a mask per micro-batch would depend on how rows are packed.  So all
rows of the update are scored first, without gradient, and the mask is made once.

Letters: ``N`` trained tokens of a row, ``C`` candidates of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wingbeat.trainer.token_batch import MAX_LOG_RATIO

Floats = NDArray[np.floating[Any]]


def candidates(log_ratio_N: Floats, advantages_N: Floats) -> NDArray[np.bool_]:
    """[N] the tokens whose gradient moves them further from where they were sampled."""
    return log_ratio_N * advantages_N > 0


def second_moment_kept(
    log_ratios: Sequence[Floats], advantages: Sequence[Floats], *, threshold: float
) -> list[NDArray[np.bool_]]:
    """[N] per row: whether the token is trained.

    The smallest set of the farthest candidates is taken out after which M2 <= ``threshold``; tokens of equal distance
    go together, so that the order of rows does not matter.
    """
    cut = [np.clip(row.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO) for row in log_ratios]
    chosen = [candidates(row, earned) for row, earned in zip(cut, advantages, strict=True)]
    squares_C = np.sort(np.concatenate([row[own] ** 2 for row, own in zip(cut, chosen, strict=True)] or [np.zeros(0)]))
    # By length of the kept part: its mean grows with it, so the longest within the bound is the last one.
    means_C = np.cumsum(squares_C) / np.arange(1, len(squares_C) + 1)
    count = int(np.searchsorted(means_C, threshold, side="right"))
    if count == len(squares_C):
        return [np.ones(len(row), np.bool_) for row in cut]
    first_out = squares_C[count]
    return [~(own & (row**2 >= first_out)) for row, own in zip(cut, chosen, strict=True)]
