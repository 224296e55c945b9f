"""Boxes leased from a resources server do what boxes do, through a real server on loopback."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import conformance
import pytest
import test_box_conformance as here
from lending import RemoteBackend, RemoteInstance

from wingbeat.resources import Instance
from wingbeat.resources.backends.sandbox_process import FOLDER_PREFIX

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
