"""Specs: what is refused, what is the same, and what travels."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from wingbeat.core.errors import ConfigError
from wingbeat.resources import (
    EndpointSpec,
    LocalSpec,
    Needs,
    RaySpec,
    Resources,
    Reuse,
    SandboxSpec,
    Spec,
    SubprocessSpec,
    parse_spec,
)

SPECS: list[Spec] = [
    SubprocessSpec(files={"b": "2", "a": "1"}, reuse=Reuse.AFTER_RESET),
    SandboxSpec(memory_mb=64, mounts=({"source": "/a", "target": "/b"},)),  # pyright: ignore[reportArgumentType]
    RaySpec(box=SandboxSpec(cpus=1), needs=Needs(cpus=0.5)),
    EndpointSpec(urls=("http://127.0.0.1:1/v1",), model="judge"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_what_travels_arrives_as_it_was(spec: Spec) -> None:
    arrived = parse_spec(json.loads(spec.model_dump_json()))
    assert (arrived, arrived.key, arrived.holds, hash(arrived)) == (spec, spec.key, spec.holds, hash(spec))
    for other in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert (other, other.key) == (spec, spec.key)
    assert spec.model_copy(update={"label": "x"}).key != spec.key


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "vm"}, "kind: expected one of docker, endpoint, .*, got 'vm'"),
        ({}, "kind: expected one of .*, got None"),
        ({"kind": "local"}, "local objects cannot leave their process"),
        ({"kind": "sandbox", "memory": 3}, "memory: there is no such field; did you mean 'memory_mb'"),
        ({"kind": "sandbox", "qqq": 3}, "qqq: there is no such field; there are kind, label, .*output_bytes"),
        ({"kind": "sandbox", "memory_mb": 0}, "memory_mb: Input should be greater than or equal to 1"),
        ({"kind": "sandbox", "cpus": float("nan")}, "cpus: Input should be .*finite number|greater than 0"),
        ({"kind": "sandbox", "file_mb": 20, "disk_mb": 10}, r"file_mb: expected at most disk_mb \(10\), got 20"),
        ({"kind": "sandbox", "files": {"../x": ""}}, "files: expected paths inside workdir.*got '../x'"),
        ({"kind": "sandbox", "files": {"/etc/x": ""}}, "files: expected paths inside workdir"),
        ({"kind": "sandbox", "env": {"A=B": ""}}, "env: expected names .*got 'A=B'"),
        ({"kind": "sandbox", "env": {"A": "secret\0"}}, "env: expected names .*got 'A'$"),
        ({"kind": "sandbox", "files": {"src/": ""}}, "files: expected paths inside workdir.*got 'src/'"),
        ({"kind": "sandbox", "files": {".": ""}}, "files: expected paths inside workdir"),
        ({"kind": "sandbox", "files": {"a\0b": ""}}, "files: expected paths inside workdir"),
        ({"kind": "sandbox", "files": {"a/b/c": "", "a": ""}}, "files: 'a' cannot be a file and the folder of 'a/b/c'"),
        ({"kind": "endpoint", "urls": ["http://x/v1?key=wb-secret"]}, r"without what follows \? or #$"),
        ({"kind": "sandbox", "max_uses": 3}, "max_uses: expected 1 or none where reuse is never, got 3"),
        ({"kind": "endpoint", "urls": []}, "urls: .*at least 1 item"),
        ({"kind": "endpoint", "urls": ["http://x/v1"], "limit": 2}, "limit: expected 1 or none where reuse is shared"),
        ({"kind": "ray", "box": {"kind": "docker", "image": "x"}}, "box"),
    ],
    ids=str,
)
def test_what_does_not_validate_is_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec(data)


def test_a_box_holds_what_its_limits_let_it_take_unless_told() -> None:
    assert SandboxSpec(cpus=2, memory_mb=64).holds == Needs(cpus=2, memory_mb=64)
    assert SandboxSpec(cpus=2, memory_mb=64, needs=Needs(cpus=0.5)).holds == Needs(cpus=0.5)
    assert SandboxSpec().holds == Needs()
    assert RaySpec(box=SandboxSpec(cpus=2)).holds == Needs(), "the cluster's, not this machine's"


def test_a_spec_cannot_be_changed() -> None:
    spec = SandboxSpec(files={"a": "1"}, env={"x": "1"})
    with pytest.raises(TypeError, match="model_copy"):
        spec.files["b"] = "2"
    with pytest.raises(TypeError, match="model_copy"):
        spec.env.clear()
    with pytest.raises(ValueError, match="frozen"):
        spec.memory_mb = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="memory_mb"):
        spec.model_copy(update={"memory_mb": -1})


async def test_a_kind_that_the_pool_does_not_have() -> None:
    async with Resources(backends={}) as pool:
        with pytest.raises(ConfigError, match="kind"):
            async with pool.lease(LocalSpec(factory=list)):
                raise AssertionError("no such back-end")
