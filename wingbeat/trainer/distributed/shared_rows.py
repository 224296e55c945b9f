"""Rows dealt among processes, what each found put together, and failures that all share.

Letters: ``N`` trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wingbeat.core.errors import UnavailableError
from wingbeat.trainer.distributed.balance import RowCost, deal
from wingbeat.trainer.distributed.world import World
from wingbeat.trainer.loss_stats import TokenStats
from wingbeat.trainer.memory import DoesNotFit, ForwardSize
from wingbeat.trainer.rows import Row
from wingbeat.trainer.sharding import Sharding
from wingbeat.trainer.update import PassResult


class SharedRows(Sharding):
    """Rows are dealt; each process has a whole copy of the model."""

    def __init__(self, world: World, *, cost: Callable[[], RowCost]) -> None:
        self._world = world
        self._cost = cost

    def replica(self) -> Sharding:
        return self

    @contextmanager
    def running(self, *, gradient: bool) -> Iterator[None]:
        if gradient:
            raise ValueError("a model of which each process has a copy takes no gradient: it would be no sum")
        yield from self.alike()

    def own(self, rows: Sequence[Row], *, shares: bool) -> list[Row]:
        if not rows:
            return []
        places = self._dealt(rows, shares=shares)[self._world.rank]
        return [rows[place] for place in places]

    def joined(self, rows: Sequence[Row], found: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        own = [found[row.index] for row in rows if row.index in found]
        dtype = own[0].dtype.str if own else ""
        places = sorted(found)
        values = _Values(dtype, places, b"".join(found[place].tobytes() for place in places))
        said = self._world.gather(msgspec.msgpack.encode(values))
        counts = {row.index: row.num_trained for row in rows}
        merged: dict[int, NDArray[Any]] = {}
        for part in (msgspec.msgpack.decode(data, type=_Values) for data in said):
            if not part.rows:
                continue
            flat_N = np.frombuffer(part.values, np.dtype(part.dtype))
            stops = np.cumsum([counts[index] for index in part.rows])
            merged |= dict(zip(part.rows, np.split(flat_N, stops[:-1]), strict=True))
        return merged

    def summed(self, result: PassResult) -> PassResult:
        said = self._world.gather(msgspec.msgpack.encode(asdict(result)))
        parts = [msgspec.msgpack.decode(data) for data in said]
        return sum((PassResult(**(part | {"stats": TokenStats(**part["stats"])})) for part in parts), PassResult())

    def global_norm(self, norm: Tensor) -> Tensor:
        said = self._world.gather(np.float64(float(norm)).tobytes())
        total = np.sqrt(sum(float(np.frombuffer(data, np.float64)[0]) ** 2 for data in said))
        return torch.tensor(float(total), dtype=norm.dtype, device=norm.device)

    def _dealt(self, rows: Sequence[Row], *, shares: bool) -> Sequence[Sequence[int]]:
        return deal(rows, ranks=self._world.size, cost=self._cost(), shares=shares).ranks

    def alike(self, clean: Callable[[], object] = lambda: None) -> Iterator[None]:
        """What fails in one process fails in all of them: what did not fit is repeated by all, and alike."""
        failure: _Failure | None = _Failure("an error that its log shows")
        try:
            yield
            failure = None
        except DoesNotFit as error:
            failure = _Failure.of(error)
        finally:
            said = self._world.gather(b"" if failure is None else msgspec.msgpack.encode(failure))
            found = {rank: msgspec.msgpack.decode(data, type=_Failure) for rank, data in enumerate(said) if data}
            if found:
                clean()
        if found:
            # What cannot be repeated comes first: whoever failed so will not join the others in a repetition.
            rank = min(found, key=lambda rank: (found[rank].size is not None, rank))
            raise found[rank].error(rank)


class _Values(msgspec.Struct, array_like=True):
    dtype: str
    rows: list[int]
    values: bytes


class _Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a process gave up a pass, to be told to the others."""

    reason: str
    size: ForwardSize | None = None
    """Of the forward that did not fit into memory; None: it was something else."""

    @classmethod
    def of(cls, error: DoesNotFit) -> _Failure:
        return cls(str(error), error.size)

    def error(self, rank: int) -> Exception:
        if self.size is None:
            return UnavailableError(f"rank {rank} gave up this step, and so do all, by {self.reason}")
        return DoesNotFit(self.size, f"rank {rank}: {self.reason}")
