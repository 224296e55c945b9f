"""How many engines are wanted: what PUT notes for the supervisor, and what GET says of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from fastapi.routing import APIRoute

from wingbeat.core.deployment import MAX_ENGINES, Wanted, read_wanted
from wingbeat.core.errors import RequestError
from wingbeat.server.http.routes_deployment import deployment_routes
from wingbeat.server.keys.principals import MAY_ADMINISTRATE, MAY_RUN_AGENTS


class Deployment:
    """The two routes over a control that has two engines."""

    def __init__(self, run_dir: Path) -> None:
        config = SimpleNamespace(engine=SimpleNamespace(count=2))
        links = [SimpleNamespace(worker_id=name) for name in ("engine-1", "engine-0")]
        self.keys, self.events = Mock(), Mock()
        engines = SimpleNamespace(links=links)
        control: Any = SimpleNamespace(config=config, run_dir=run_dir, engines=engines, events=self.events)
        self._routes = {
            method: route.endpoint
            for route in deployment_routes(control, self.keys).routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }

    async def call(self, method: str, body: bytes = b"") -> Any:
        return await self._routes[method](Mock(headers={}, body=AsyncMock(return_value=body)))


async def test_what_is_put_is_noted_for_the_supervisor_and_got(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    before = await deployment.call("GET")
    assert (before.engines, before.connected) == (2, ["engine-0", "engine-1"])
    assert (await deployment.call("PUT", b'{"engines": 0}')).engines == 0
    assert read_wanted(tmp_path, configured=2) == Wanted(engines=0, configured=2)
    assert (await deployment.call("GET")).engines == 0
    deployment.events.emit.assert_called_once_with("scaled", engines=0)
    assert [call.args[1] for call in deployment.keys.require.call_args_list] == [
        *(MAY_RUN_AGENTS, MAY_ADMINISTRATE, MAY_RUN_AGENTS),
    ]


@pytest.mark.parametrize(
    "body", [b'{"engines": -1}', b'{"engines": %d}' % (MAX_ENGINES + 1), b'{"engines": "2"}', b"{}"]
)
async def test_what_is_no_number_of_engines_is_refused(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(RequestError, match="engines"):
        await Deployment(tmp_path).call("PUT", body)
    assert read_wanted(tmp_path, configured=2) is None
