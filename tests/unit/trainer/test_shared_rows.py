"""What a process that fails tells the others, and what they make of it; the other processes are played."""

from __future__ import annotations

from typing import cast

import pytest

from wingbeat.core.errors import SetupError, UnavailableError
from wingbeat.trainer.distributed.balance import RowCost
from wingbeat.trainer.distributed.shared_rows import SharedRows
from wingbeat.trainer.distributed.world import World, check_releases
from wingbeat.trainer.memory import DoesNotFit, ForwardSize

SIZE = ForwardSize(num_rows=2, num_tokens=64, longest=32)


class Played:
    """A world whose other ranks have said what they say."""

    def __init__(self, rank: int, others: dict[int, bytes]) -> None:
        self.rank, self.size = rank, len(others) + 1
        self.said = b""
        self._others = others

    def gather(self, data: bytes) -> list[bytes]:
        self.said = data
        return [data if rank == self.rank else self._others[rank] for rank in range(self.size)]


def outcome(world: Played, error: Exception | None) -> Exception | None:
    rows = SharedRows(cast(World, world), cost=lambda: RowCost(1.0, 0.0))
    try:
        with rows.running(gradient=False):
            if error is not None:
                raise error
    except Exception as raised:  # noqa: BLE001 - whatever it is, it is looked at
        return raised
    return None


def said_of(error: Exception) -> bytes:
    world = Played(0, {})
    outcome(world, error)
    return world.said


def test_what_did_not_fit_in_one_is_repeated_by_all() -> None:
    said = said_of(DoesNotFit(SIZE, "out of memory"))
    for rank, others in ((0, {1: said}), (1, {0: said})):
        raised = outcome(Played(rank, others), None)
        assert isinstance(raised, DoesNotFit) and raised.size == SIZE
        assert str(raised) == f"rank {1 - rank}: out of memory"
    assert outcome(Played(0, {1: b""}), None) is None


@pytest.mark.parametrize("first", [0, 1])
def test_nobody_repeats_what_another_one_will_not(first: int) -> None:
    """One had no room, one has another error, at the same time, in either order; and a third is well."""
    errors: list[Exception] = [DoesNotFit(SIZE, "out of memory"), ValueError("a bad row")]
    said = {first: said_of(errors[0]), 1 - first: said_of(errors[1])}
    well = outcome(Played(2, said), None)
    full = outcome(Played(first, {1 - first: said[1 - first], 2: b""}), errors[0])
    bad = outcome(Played(1 - first, {first: said[first], 2: b""}), errors[1])
    assert isinstance(well, UnavailableError) and isinstance(full, UnavailableError)
    assert bad is errors[1]
    assert str(well) == str(full)


def test_processes_of_other_releases_are_refused() -> None:
    own = Played(0, {})
    check_releases(cast(World, own))
    check_releases(cast(World, Played(0, {1: own.said})))
    other = own.said.replace(b"torch 2", b"torch 1")
    with pytest.raises(SetupError, match=r"torch 2.* on rank 0 and .*torch 1.* on rank 1"):
        check_releases(cast(World, Played(0, {1: other})))
