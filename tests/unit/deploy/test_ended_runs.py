"""A run whose training stopped on the way says where to go on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.core.errors import SetupError
from wingbeat.deploy.training import check_trained


class Server:
    def __init__(self, version: int, *, ended: str = "") -> None:
        policies = [SimpleNamespace(name="solver", trainer="ready", version=version)]
        self._status = SimpleNamespace(
            ended=ended, total_steps=5, blockers=["an alarm stopped training"], policies=policies
        )

    async def status(self) -> Any:
        return self._status


async def test_a_policy_that_stopped_names_the_run_to_continue(tmp_path: Path) -> None:
    told = f"policy 'solver' stopped at step 3 of 5: an alarm stopped training; .* --resume {tmp_path}$"
    with pytest.raises(SetupError, match=told):
        await check_trained(Server(3), tmp_path)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("server", [Server(5), Server(3, ended="the tasks are exhausted")])
async def test_a_run_that_came_to_its_end_is_no_fault(server: Any, tmp_path: Path) -> None:
    await check_trained(server, tmp_path)
