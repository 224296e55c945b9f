"""Every field of a box's spec, kind by kind: honoured, or refused by its name.  A new field must be entered here."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wingbeat.resources import (
    Backend,
    DockerSpec,
    KubernetesSpec,
    Needs,
    Reuse,
    SandboxSpec,
    Spec,
    SubprocessSpec,
    UnsupportedField,
)
from wingbeat.resources.backends.docker import DockerBackend
from wingbeat.resources.backends.kubernetes import KubernetesBackend
from wingbeat.resources.backends.limits_homes import CONTROLLERS, Homes
from wingbeat.resources.backends.sandbox import SandboxBackend
from wingbeat.resources.backends.subprocess import SubprocessBackend
from wingbeat.resources.specs import BoxSpec, Mount

OF_THE_POOL = {
    *("kind", "label", "limit", "draw", "max_uses", "idle_ttl_s"),
    *("start_timeout_s", "reset_timeout_s", "close_timeout_s"),
}
"""Kept by the pool for whatever kind."""

VALUES: dict[str, Any] = {
    "reuse": Reuse.SHARED,
    "needs": Needs(gpus=1),
    "env": {"A": "b"},
    "files": {"a": "b"},
    "workdir": "/elsewhere",
    "mounts": (Mount(source="/tmp", target="/data"),),
    "network": False,
    "cpus": 1.0,
    "memory_mb": 300,
    "process_memory_mb": 300,
    "pids": 20,
    "disk_mb": 64,
    "file_mb": 8,
    "command_timeout_s": 3.0,
    "cpu_s": 2.0,
    "output_bytes": 1000,
}
REFUSED = {
    "sandbox": {"needs"},
    "subprocess": {"network", "workdir", "mounts", "disk_mb"},
    "docker": {"reuse", "needs", "process_memory_mb", "cpu_s"},
    "kubernetes": {"reuse", "network", "mounts", "process_memory_mb", "pids", "file_mb", "cpu_s"},
}


def kinds(homes: Homes) -> dict[str, tuple[Callable[[], Backend], type[Spec], dict[str, Any]]]:
    """How a back-end is made, its spec, and what goes into every one."""
    return {
        "sandbox": (lambda: SandboxBackend(homes=lambda: homes), SandboxSpec, {}),
        "subprocess": (lambda: SubprocessBackend(homes=lambda: homes), SubprocessSpec, {"network": True}),
        "docker": (DockerBackend, DockerSpec, {"image": "x"}),
        "kubernetes": (KubernetesBackend, KubernetesSpec, {"image": "x", "network": True}),
    }


@pytest.mark.parametrize("kind", REFUSED)
def test_a_field_is_honoured_or_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    if kind == "sandbox" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    make, spec, always = kinds(Homes(2, dict.fromkeys(CONTROLLERS, tmp_path)))[kind]
    backend = make()
    backend.check(spec(**always))
    refused: set[str] = set()
    for name, value in VALUES.items():
        try:
            backend.check(spec(**{**always, name: value}))
        except UnsupportedField as error:
            assert (error.kind, error.field.partition(".")[0]) == (kind, name)
            refused.add(name)
    assert refused == REFUSED[kind]


def test_every_field_of_a_box_is_looked_at() -> None:
    assert {*BoxSpec.model_fields} == {*OF_THE_POOL, *VALUES}
