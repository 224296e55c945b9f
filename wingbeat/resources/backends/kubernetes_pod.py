"""What a box is as a pod: its manifest, and what its status says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubernetes import client

from wingbeat.resources.backends import container_scripts as scripts
from wingbeat.resources.backends.container_spec import disk_parts, environment_of
from wingbeat.resources.backends.kubernetes_exec import CONTAINER
from wingbeat.resources.specs_remote import KubernetesSpec, Pull

BOX_LABEL = "wingbeat.dev/box"
NETWORK_LABEL = "wingbeat.dev/network"
NO_NETWORK = "none"
POLICY = "wingbeat-no-network"
GPU = "nvidia.com/gpu"
HOPELESS = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Why a container waits that will not run by itself."""


def manifest(spec: KubernetesSpec, *, name: str, box: str) -> client.V1Pod:
    """A pod whose one container waits for commands."""
    uid, _, gid = spec.user.partition(":")
    labels = {
        "app.kubernetes.io/managed-by": "wingbeat",
        BOX_LABEL: box,
        NETWORK_LABEL: "any" if spec.network else NO_NETWORK,
    }
    container = client.V1Container(
        name=CONTAINER,
        image=spec.image,
        image_pull_policy="Never" if spec.pull is Pull.NEVER else "IfNotPresent",
        command=["/bin/sh", "-c", scripts.FIRST, scripts.MARK],
        working_dir=spec.workdir,
        env=[client.V1EnvVar(name=key, value=value) for key, value in environment_of(spec).items()],
        resources=_resources(spec),
        security_context=client.V1SecurityContext(
            allow_privilege_escalation=False,
            privileged=False,
            read_only_root_filesystem=True,
            capabilities=client.V1Capabilities(drop=["ALL"]),
        ),
        volume_mounts=[client.V1VolumeMount(name=key, mount_path=path) for key, (path, _) in _folders(spec).items()],
    )
    return client.V1Pod(
        api_version="v1",
        kind="Pod",
        metadata=client.V1ObjectMeta(name=name, labels=labels),
        spec=client.V1PodSpec(
            containers=[container],
            volumes=[_volume(key, size) for key, (_, size) in _folders(spec).items()],
            restart_policy="Always",  # one that ran out of memory keeps its files, as a box does
            automount_service_account_token=False,
            enable_service_links=False,
            termination_grace_period_seconds=1,
            service_account_name=spec.service_account or None,
            node_selector=dict(spec.node_selector) or None,
            security_context=client.V1PodSecurityContext(
                run_as_non_root=True,
                run_as_user=int(uid),
                run_as_group=int(gid or uid),
                fs_group=int(gid or uid),
                seccomp_profile=client.V1SeccompProfile(type="RuntimeDefault"),
            ),
        ),
    )


def network_policy() -> client.V1NetworkPolicy:
    """Nothing in and nothing out, of all boxes without a network."""
    selector = client.V1LabelSelector(match_labels={NETWORK_LABEL: NO_NETWORK})
    return client.V1NetworkPolicy(
        api_version="networking.k8s.io/v1",
        kind="NetworkPolicy",
        metadata=client.V1ObjectMeta(name=POLICY, labels={"app.kubernetes.io/managed-by": "wingbeat"}),
        spec=client.V1NetworkPolicySpec(pod_selector=selector, policy_types=["Ingress", "Egress"]),
    )


def _resources(spec: KubernetesSpec) -> client.V1ResourceRequirements:
    limits: dict[str, str] = {}
    if spec.cpus is not None:
        limits["cpu"] = f"{max(1, round(spec.cpus * 1000))}m"
    if spec.memory_mb is not None:
        limits["memory"] = f"{spec.memory_mb}Mi"
    if spec.needs is not None and spec.needs.gpus:
        limits[GPU] = str(spec.needs.gpus)
    return client.V1ResourceRequirements(limits=limits or None, requests=limits or None)


def _folders(spec: KubernetesSpec) -> Mapping[str, tuple[str, int | None]]:
    """Volume -> path and megabytes."""
    work_mb, small_mb = disk_parts(spec)
    folders: dict[str, tuple[str, int | None]] = {"work": (spec.workdir, work_mb), "tmp": ("/tmp", small_mb)}
    return folders if small_mb is None else {**folders, "shm": ("/dev/shm", small_mb)}


def _volume(name: str, megabytes: int | None) -> client.V1Volume:
    """In memory, where a size is a limit and not a reason to evict the pod."""
    size = None if megabytes is None else f"{megabytes}Mi"
    return client.V1Volume(name=name, empty_dir=client.V1EmptyDirVolumeSource(medium="Memory", size_limit=size))


class PodStatus:
    """What a pod, as JSON, says of itself."""

    def __init__(self, pod: Mapping[str, Any]) -> None:
        status = pod.get("status") or {}
        self.phase: str = status.get("phase") or "Pending"
        self._message: str = status.get("message") or status.get("reason") or ""
        containers = status.get("containerStatuses") or [{}]
        self._container: Mapping[str, Any] = containers[0]
        self._is_leaving = bool((pod.get("metadata") or {}).get("deletionTimestamp"))

    @property
    def runs(self) -> bool:
        return self.phase == "Running" and bool(self._state("state").get("running")) and not self._is_leaving

    @property
    def restarts(self) -> int:
        return int(self._container.get("restartCount") or 0)

    @property
    def out_of_memory(self) -> bool:
        """Whether that is how its last container ended."""
        for name in ("state", "lastState"):
            ended = self._state(name).get("terminated")
            if ended:
                return ended.get("reason") == "OOMKilled"
        return False

    @property
    def hopeless(self) -> str:
        """Why it will not run, or will not run again; "" where it may."""
        waiting = self._state("state").get("waiting") or {}
        if self.phase in ("Failed", "Succeeded") or self._is_leaving:
            return self._message or ("it is being deleted" if self._is_leaving else f"its phase is {self.phase}")
        if waiting.get("reason") in HOPELESS:
            return f"{waiting['reason']}: {waiting.get('message') or 'no message'}"
        return ""

    def _state(self, name: str) -> Mapping[str, Any]:
        return self._container.get(name) or {}
