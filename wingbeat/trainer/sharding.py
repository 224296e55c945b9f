"""What a trainer asks of the processes with which it shares its work.

One process asks nobody: :data:`ALONE` is that answer to every question.  Several share the rows of each batch and
hold a part each of weights and moments (:mod:`wingbeat.trainer.distributed`).  Every question is asked by all
processes, in the same order: what one of them decides for itself must not decide whether it asks.

Letters: ``N`` trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:
    from wingbeat.trainer.logprobs import LogprobModel
    from wingbeat.trainer.row_forwards import Forward
    from wingbeat.trainer.rows import Row
    from wingbeat.trainer.update import PassResult

Item = TypeVar("Item")


class Sharding:
    """The answers of a process that is alone; those of several override all of them."""

    def attach(self, base: Any, *, logprobs: LogprobModel) -> None:
        """Take over the parameters of a model whose probes are done, before an optimiser takes them."""

    def replica(self) -> Sharding:
        """For a model of which every process has a whole copy: rows are shared, weights are not."""
        return self

    @contextmanager
    def running(self, *, gradient: bool) -> Iterator[None]:
        """Around all forwards of a pass, and their backwards where a ``gradient`` is gathered.

        On leaving, the gradient is summed over all processes.  Where one of them fails, all do, alike.
        """
        yield

    def own(self, rows: Sequence[Row], *, shares: bool) -> list[Row]:
        """The rows that this process forwards; with ``shares``, rows that begin alike are better off together."""
        return list(rows)

    def matched(self, forwards: Iterable[Forward]) -> Iterable[Forward]:
        """Forwards of this process, and whatever others need of it meanwhile."""
        return forwards

    def joined(self, rows: Sequence[Row], found: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """The values [N] of all ``rows``, by ``Row.index``, from those that each process found of its own."""
        return dict(found)

    def summed(self, result: PassResult) -> PassResult:
        """What all processes measured."""
        return result

    @property
    def walks(self) -> bool:
        """Whether a process may run forwards and backwards in an order of its own, as a depth-first walk does."""
        return True

    def release(self) -> None:
        """Let go of whole weights: they are about to change."""

    def local(self, parameter: nn.Parameter) -> Tensor:
        """The part of a parameter that this process trains, sharing its memory; the parameter, if that is all of it."""
        return parameter

    def local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Take the gathered gradient of that part; None where there is none."""
        raise AssertionError("the whole parameter is trained here: its gradient is where it always is")

    def global_norm(self, norm: Tensor) -> Tensor:
        """The norm of a vector, from the norm of this process's part of it."""
        return norm


ALONE = Sharding()


def whole_run(run: Any) -> Any:
    """A forward of decoder and head of a model whose weights are all there."""
    return run()
