"""Pods as boxes: the official client against a fake API server whose containers are real ones."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import conformance
import fake_container
import pytest
import websocket
from fake_kubernetes import V4, V5, FakeKubernetes
from kubernetes import client

from wingbeat.core.errors import ConfigError
from wingbeat.resources import KubernetesSpec, Mount, Needs, ResourceFailed, ResourceLost, Reuse, UnsupportedField
from wingbeat.resources.backends import kubernetes, kubernetes_exec
from wingbeat.resources.backends.kubernetes import KubernetesBackend, KubernetesInstance
from wingbeat.resources.backends.kubernetes_pod import PodStatus, manifest, network_policy

needs_containers = pytest.mark.skipif(bool(fake_container.WHY_NOT), reason=fake_container.WHY_NOT)
IMAGE = "python:3.12-slim"


@pytest.fixture
def fake() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as made:
        yield made


def spec_of(**more: Any) -> KubernetesSpec:
    return KubernetesSpec(**{"image": IMAGE, "network_policies": True, "reuse": Reuse.AFTER_RESET, **more})


def backend_of(fake: FakeKubernetes) -> KubernetesBackend:
    return KubernetesBackend(client.Configuration(host=fake.url))


@asynccontextmanager
async def started(fake: FakeKubernetes, spec: KubernetesSpec) -> AsyncIterator[KubernetesInstance]:
    backend = backend_of(fake)
    backend.check(spec)
    instance = await backend.start(spec, started=lambda handle: None)
    try:
        yield instance
    finally:
        await instance.close()
        await backend.close()


def plain(made: Any) -> Any:
    return client.ApiClient().sanitize_for_serialization(made)


def test_a_pod_has_the_limits_of_its_spec_and_no_way_out() -> None:
    spec = spec_of(
        env={"MODE": "test"},
        cpus=0.5,
        memory_mb=256,
        disk_mb=64,
        needs=Needs(gpus=1),
        service_account="boxes",
        node_selector={"pool": "boxes"},
        user="1000:2000",
        pull="never",
    )
    pod = plain(manifest(spec, name="wingbeat-1-0", box="1"))
    assert pod["metadata"]["labels"]["wingbeat.dev/box"] == "1"
    assert pod["metadata"]["labels"]["wingbeat.dev/network"] == "none"
    inner = pod["spec"]
    assert (inner["automountServiceAccountToken"], inner["enableServiceLinks"]) == (False, False)
    assert (inner["restartPolicy"], inner["serviceAccountName"]) == ("Always", "boxes")
    assert inner["nodeSelector"] == {"pool": "boxes"}
    assert inner["securityContext"] == {
        "fsGroup": 2000,
        "runAsGroup": 2000,
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    [container] = inner["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
    }
    limits = {"cpu": "500m", "memory": "256Mi", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"limits": limits, "requests": limits}
    assert (container["image"], container["imagePullPolicy"]) == (IMAGE, "Never")
    assert {"name": "MODE", "value": "test"} in container["env"]
    sizes = {volume["name"]: volume["emptyDir"] for volume in inner["volumes"]}
    assert sizes == {
        "work": {"medium": "Memory", "sizeLimit": "48Mi"},
        "tmp": {"medium": "Memory", "sizeLimit": "8Mi"},
        "shm": {"medium": "Memory", "sizeLimit": "8Mi"},
    }
    assert [m["mountPath"] for m in container["volumeMounts"]] == ["/work", "/tmp", "/dev/shm"]


def test_boxes_without_a_network_are_shut_off_by_a_policy() -> None:
    policy = plain(network_policy())["spec"]
    assert policy["podSelector"] == {"matchLabels": {"wingbeat.dev/network": "none"}}
    assert policy["policyTypes"] == ["Ingress", "Egress"] and "ingress" not in policy and "egress" not in policy


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"network_policies": False}, "network"),
        ({"pids": 10}, "pids"),
        ({"file_mb": 1}, "file_mb"),
        ({"cpu_s": 1}, "cpu_s"),
        ({"mounts": (Mount(source="/a", target="/b"),)}, "mounts"),
        ({"reuse": Reuse.SHARED}, "reuse"),
    ],
)
def test_what_kubernetes_cannot_honour_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedField, match=f"'{named}'"):
        KubernetesBackend().check(spec_of(**fields))
    KubernetesBackend().check(spec_of(network=True, network_policies=False))


@pytest.mark.parametrize(
    ("status", "runs", "hopeless"),
    [
        ({}, False, ""),
        (
            {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
            False,
            "",
        ),
        ({"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}, False, ""),
        ({"phase": "Running", "containerStatuses": [{"state": {"running": {"startedAt": "x"}}}]}, True, ""),
        ({"phase": "Failed", "reason": "Evicted", "message": "out of disk"}, False, "out of disk"),
        (
            {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]},
            False,
            "ErrImagePull: no message",
        ),
    ],
)
def test_what_a_pod_says_of_itself(status: dict[str, Any], runs: bool, hopeless: str) -> None:
    read = PodStatus({"status": status})
    assert (read.runs, read.hopeless) == (runs, hopeless)
    leaving = PodStatus({"status": status, "metadata": {"deletionTimestamp": "x"}})
    assert not leaving.runs and leaving.hopeless


async def test_without_a_cluster_the_context_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises((ConfigError, ResourceFailed), match="context"):
        await KubernetesBackend().start(spec_of(context="away"), started=lambda handle: None)


@needs_containers
@pytest.mark.slow
@pytest.mark.parametrize("subprotocol", [V5, V4])
async def test_commands_and_files_cross_the_streams(
    fake: FakeKubernetes, subprotocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings: list[object] = []
    ping = websocket.WebSocket.ping
    monkeypatch.setattr(kubernetes_exec, "PING_S", 0.02)
    monkeypatch.setattr(websocket.WebSocket, "ping", lambda self: (pings.append(self), ping(self)))
    fake.subprotocols = (subprotocol,)
    async with started(fake, spec_of(files={"a/b.txt": "given"}, output_bytes=600_000)) as instance:
        box = instance.value
        assert (await box.run(["cat", "a/b.txt"])).stdout == b"given"
        ended = await box.run("echo out; echo err >&2; exit 7")
        assert (ended.exit_code, ended.stdout, ended.stderr) == (7, b"out\n", b"err\n")
        assert (await box.run(["no-such-program"])).exit_code == 127
        big = bytes(range(256)) * 2000
        assert (await box.run("cat", stdin=big)).stdout == big
        await box.write("x/big", big)
        assert await box.read("x/big") == big and await box.list() == ["a/", "x/"]
        late = await box.run("sleep 300", timeout_s=0.2)
        assert (late.exit_code, late.stopped_by) == (-9, "timeout")
        assert pings, "a silent connection is kept"
        loud = await box.run("yes")
        assert (loud.stopped_by, loud.truncated, len(loud.stdout)) == ("output", True, 600_000)
        with pytest.raises(ValueError, match="leaves"):
            await box.run("ln -s /etc out")
            await box.read("out/passwd")
    assert set(fake.used) == {subprotocol}
    assert list(fake.policies) == ["wingbeat-no-network"] and fake.pods == {}


@needs_containers
@pytest.mark.slow
async def test_a_start_outlasts_its_watches(fake: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_AGAIN_S", 0.01)
    fake.hold_start, fake.watch_s = True, 0.02
    backend = backend_of(fake)
    starting = asyncio.create_task(backend.start(spec_of(), started=lambda handle: None))
    async with asyncio.timeout(10):
        while fake.num_watches < 3:
            await asyncio.to_thread(lambda: None)
    await asyncio.to_thread(fake.release, *fake.pods)
    instance = await starting
    await instance.close()
    await backend.close()


@needs_containers
@pytest.mark.slow
async def test_a_box_that_ran_out_of_memory_keeps_its_files(fake: FakeKubernetes) -> None:
    async with started(fake, spec_of(memory_mb=64)) as instance:
        box = instance.value
        await box.write("kept", b"x")
        running = asyncio.create_task(box.run("touch begun; sleep 300"))
        async with asyncio.timeout(10):
            while "begun" not in await box.list():
                pass
        [name] = fake.pods
        await asyncio.to_thread(fake.out_of_memory, name)
        ended = await running
        assert (ended.exit_code, ended.stopped_by) == (-9, "memory")
        assert await box.read("kept") == b"x"
        await instance.check()


@needs_containers
@pytest.mark.slow
async def test_a_pod_that_is_gone_is_lost(fake: FakeKubernetes) -> None:
    async with started(fake, spec_of()) as instance:
        running = asyncio.create_task(instance.value.run("touch begun; sleep 300"))
        async with asyncio.timeout(10):
            while "begun" not in await instance.value.list():
                pass
        [name] = fake.pods
        await asyncio.to_thread(fake.kill, name)
        with pytest.raises(ResourceLost, match="is gone"):
            await running
        with pytest.raises(ResourceLost, match="is gone"):
            await instance.value.run("true")


@needs_containers
@pytest.mark.slow
async def test_a_reset_replaces_the_pod(fake: FakeKubernetes) -> None:
    async with started(fake, spec_of(files={"given": "x"})) as instance:
        [before] = fake.pods
        handle = instance.handle
        await instance.value.run("echo y > given; touch more")
        await instance.reset()
        [after] = fake.pods
        assert before != after and handle == instance.handle
        assert await instance.value.list() == ["given"] and await instance.value.read("given") == b"x"


@needs_containers
@pytest.mark.slow
async def test_what_cannot_start_says_why_and_leaves_nothing(fake: FakeKubernetes) -> None:
    backend = backend_of(fake)
    with pytest.raises(ResourceFailed, match="ErrImagePull: absent: not found"):
        await backend.start(spec_of(image="absent"), started=lambda handle: None)
    fake.hold_start = True
    with pytest.raises(ResourceFailed, match="did not run in 1 s"):
        await backend.start(spec_of(start_timeout_s=1), started=lambda handle: None)
    start = asyncio.create_task(backend.start(spec_of(), started=lambda handle: None))
    async with asyncio.timeout(10):
        while not fake.pods:  # noqa: ASYNC110 - another thread's
            await asyncio.sleep(0.01)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert fake.pods == {}
    await backend.close()


ABANDON = """
import asyncio, sys
from wingbeat.resources import KubernetesSpec
from wingbeat.resources.backends.kubernetes import KubernetesBackend

async def main():
    spec = KubernetesSpec(image=sys.argv[1], network=True, context="fake")
    instance = await KubernetesBackend().start(spec, started=lambda _: None)
    print(instance.handle, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@needs_containers
@pytest.mark.slow
@pytest.mark.parametrize("check", conformance.ALL, ids=conformance.name_of)
async def test_kubernetes_conforms(fake: FakeKubernetes, check: conformance.Check, tmp_path: Path) -> None:
    async def kill(instance: conformance.Instance) -> None:
        [name] = fake.pods
        await asyncio.to_thread(fake.kill, name)

    def abandon() -> str:
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": {"server": fake.url}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "fake", "context": {"cluster": "it", "user": "me"}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(kubeconfig))
        env = {**os.environ, "KUBECONFIG": str(path)}
        with subprocess.Popen([sys.executable, "-c", ABANDON, IMAGE], env=env, stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            handle = owner.stdout.readline().decode().strip()
            owner.kill()
        return handle

    case = conformance.Case(
        backend=lambda: backend_of(fake),
        spec=spec_of(files={"given.txt": "x"}),
        num_alive=lambda: len(fake.pods),
        refused=spec_of(pids=1),
        refused_field="pids",
        kill=kill,
        abandon=abandon,
        is_box=True,
    )
    await check(case)
