"""Each budget that instances hold is kept, by the same rule."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_backend import FakeBackend, fake

from wingbeat.core.errors import ConfigError
from wingbeat.resources import Budgets, Needs, Resources, Reuse


@pytest.mark.parametrize("name", ["cpus", "memory_mb", "gpus"])
async def test_what_instances_hold_is_kept_within_its_budget_and_more_is_refused_at_once(
    name: str, tmp_path: Path
) -> None:
    backend = FakeBackend()
    spec = fake(reuse=Reuse.NEVER, needs=Needs.model_validate({name: 1}))
    budgets = Budgets.model_validate({name: 2})
    async with Resources(budgets, backends={"fake": backend}, ledger=tmp_path) as pool:

        async def use() -> None:
            async with pool.lease(spec):
                await asyncio.sleep(0)

        await asyncio.gather(*(use() for _ in range(8)))
        assert (len(backend.made), backend.num_alive_at_most) == (8, 2)
        (held,) = pool.budgets()
        assert (held.name, held.capacity, held.used, held.waiting) == (name, 2, 0, 0)
        with pytest.raises(ConfigError, match=rf"{name}: expected at most 2.*got 3"):
            async with pool.lease(fake(needs=Needs.model_validate({name: 3}))):
                raise AssertionError("it can never fit")
