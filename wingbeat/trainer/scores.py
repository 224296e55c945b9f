"""What models other than the policy in training say of a batch's tokens, known before the first gradient.

Found once for all rows (:mod:`wingbeat.trainer.scoring`) and looked up per row afterwards, so packing and trees see
the same numbers.

Letters: ``N`` trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wingbeat.trainer.rows import Row

PerRow = Sequence[NDArray[Any]]
"""One value per trained token of each row of a batch, by ``Row.index``."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of some tokens, all [N]; None where nothing needs it."""

    proximal_N: Tensor | None = None
    """The policy's logprobs at the step's start."""
    reference_N: Tensor | None = None
    teacher_N: Tensor | None = None
    kept_N: Tensor | None = None
    """bool: whether m2po's global mask leaves the token."""

    def take(self, places: Tensor) -> TokenScores:
        """Some of the tokens."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return TokenScores(**{name: None if values is None else values[places] for name, values in found.items()})


@dataclass(frozen=True, slots=True)
class Scores:
    """Of a whole batch: the fields of :class:`TokenScores`."""

    proximal_N: PerRow | None = None
    reference_N: PerRow | None = None
    teacher_N: PerRow | None = None
    kept_N: PerRow | None = None

    def of_rows(self, rows: Sequence[Row], *, device: torch.device) -> TokenScores:
        """Those of all rows' trained tokens, row by row."""

        def joined(values: PerRow | None) -> Tensor | None:
            if values is None:
                return None
            return torch.from_numpy(np.concatenate([values[row.index] for row in rows])).to(device)

        return TokenScores(**{item.name: joined(getattr(self, item.name)) for item in fields(self)})
