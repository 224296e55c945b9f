"""What is leased from a resources server does what it does anywhere, through a real server on loopback."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import conformance
import pytest
import test_box_conformance as here
import test_endpoint
import test_model_resource
from lending import RemoteBackend, RemoteInstance, lender

from wingbeat.core.errors import PermissionDenied, RequestError
from wingbeat.resources import EndpointSpec, Instance, ModelSpec, ResourceFailed, ResourceLost, Reuse
from wingbeat.resources.backends.endpoint import EndpointBackend
from wingbeat.resources.backends.model import ModelBackend
from wingbeat.resources.backends.sandbox_process import FOLDER_PREFIX
from wingbeat.resources.remote import RemotePool

CHECKS = (
    conformance.starts_and_is_used,
    conformance.reset_cleans,
    conformance.check_detects_death,
    conformance.close_is_idempotent,
    conformance.cancel_during_start_leaks_nothing,
    conformance.unsupported_is_refused,
    conformance.through_the_pool,
)
"""All but those of handles: what a server left is its own ledger's affair."""


async def kill(instance: Instance) -> None:
    assert isinstance(instance, RemoteInstance)
    await here.kill(instance.inner())


@pytest.mark.slow
@pytest.mark.parametrize("kind", here.CASES)
@pytest.mark.parametrize("check", CHECKS, ids=conformance.name_of)
async def test_remote_boxes_conform(
    kind: str, check: conformance.Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "sandbox" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(conformance, "MAX_AWAITS", 12)
    local = here.CASES[kind]
    case = replace(
        local,
        backend=lambda: RemoteBackend(kind, local.backend),
        spec=local.spec.model_copy(update={"idle_ttl_s": 0.05}),
        kill=kill,
        abandon=None,
    )
    await check(case)
    assert [name for name in os.listdir(tmp_path) if name.startswith(FOLDER_PREFIX)] == []


# --- endpoints and models


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("WINGBEAT_KEY", test_model_resource.KEY)
    return "WINGBEAT_KEY"


def lending_of(url: str, key: str) -> dict[str, Any]:
    return {"urls": [url], "key_variables": {key: [url]}}


@pytest.mark.parametrize("check", CHECKS, ids=conformance.name_of)
async def test_remote_endpoints_conform(check: conformance.Check, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "MAX_AWAITS", 12)

    async def use(value: Any) -> None:
        assert str(await value.chat("x")) == "yes"

    async with test_endpoint.serving() as [judge]:
        case = conformance.Case(
            backend=lambda: RemoteBackend("endpoint", EndpointBackend, lending_of(judge.url, key)),
            spec=EndpointSpec(urls=(judge.url,), model="judge", api_key_env=key),
            num_alive=lambda: 0,
            use=use,
        )
        await check(case)
        assert {request[2]["authorization"] for request in judge.requests} <= {f"Bearer {test_model_resource.KEY}"}


@pytest.mark.parametrize("check", CHECKS, ids=conformance.name_of)
async def test_remote_models_conform(check: conformance.Check, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "MAX_AWAITS", 12)

    async def use(value: Any) -> None:
        assert str(await value.chat("x")) == "fine"

    async with test_model_resource.serving() as server:

        async def is_clean(value: Any) -> bool:
            return not any(episode in server.open.values() for episode, _ in server.calls)

        case = conformance.Case(
            backend=lambda: RemoteBackend("model", ModelBackend, lending_of(server.url, key)),
            spec=ModelSpec(
                url=server.url, policy="judge", key_env=key, reuse=Reuse.AFTER_RESET, idle_ttl_s=0.02, retry_budget_s=0
            ),
            num_alive=lambda: len(server.open),
            use=use,
            dirty=use,
            is_clean=is_clean,
            refused=ModelSpec(url=server.url, policy="judge", key_env=key, reuse=Reuse.SHARED),
            refused_field="reuse",
        )
        await check(case)


async def test_a_leased_model_is_an_episode_of_the_server_with_the_server_s_key(key: str) -> None:
    async with (
        test_model_resource.serving() as policies,
        lender(kinds=["model"], heartbeat_s=0.1, **lending_of(policies.url, key)) as server,
    ):
        pool = RemotePool(server.url, retry_budget_s=0.0)
        spec = ModelSpec(url=policies.url, policy="judge", key_env=key, version=7)
        async with pool.lease(spec) as lease:
            reply = await lease.value.chat("is it good?", temperature=0)
            assert (str(reply), reply.usage.total_tokens, lease.value.model) == ("fine", 5, "judge")
            assert policies.begun[0].policies == ["judge@7"]
            with pytest.raises(RequestError, match="shorter, please"):
                await lease.value.chat("too long")
            policies.open.clear()  # it was idle for too long there
            assert str(await lease.value.chat("still there?")) == "fine"
            assert [episode for episode, _ in policies.calls] == ["episode-1", "episode-1", "episode-2"]
        assert policies.finished == ["episode-2"] and policies.open == {}
        with pytest.raises(ResourceFailed, match="no policy 'jury' here"):
            async with pool.lease(spec.model_copy(update={"policy": "jury", "version": None})):
                pass
        with pytest.raises(PermissionDenied, match=r"key_env: HOME is not lent here.*resources\.key_variables"):
            async with pool.lease(spec.model_copy(update={"key_env": "HOME"})):
                pass
        async with pool.lease(spec) as lease:  # of a client that is gone
            assert pool._heart is not None  # pyright: ignore[reportPrivateUsage]
            pool._heart.cancel()  # pyright: ignore[reportPrivateUsage]
            async with asyncio.timeout(10):
                while policies.open:  # noqa: ASYNC110, it is another program
                    await asyncio.sleep(0.01)
            with pytest.raises(ResourceLost, match="silent"):
                await lease.value.chat("anybody?")
        await pool.close()
