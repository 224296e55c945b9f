"""Pods as boxes, through the official ``kubernetes`` package.

A pod is one container with a read-only root, no capability and a user that is not root; what it writes is in memory and
counts as such.  A reset replaces the pod.  All pods of a box carry its label, so that those of an owner that died are
found, whichever of them was the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.resources.backends.container_box import Channel, ContainerBox
from wingbeat.resources.backends.container_spec import check_box
from wingbeat.resources.backends.container_threads import Threads
from wingbeat.resources.specs import ResourceFailed, ResourceLost, Spec, UnsupportedField
from wingbeat.resources.specs_remote import KubernetesSpec

try:
    from kubernetes import client, config, watch
    from urllib3.exceptions import HTTPError, ProtocolError, ReadTimeoutError

    from wingbeat.resources.backends.kubernetes_exec import start_exec
    from wingbeat.resources.backends.kubernetes_pod import BOX_LABEL, PodStatus, manifest, network_policy
except ModuleNotFoundError as error:
    raise DependencyMissing(
        "kind 'kubernetes' needs the kubernetes package: pip install 'wingbeat[kubernetes]'"
    ) from error

logger = logging.getLogger("wingbeat.resources")

OUR_BOX = re.compile(r"[0-9a-f]{20}")
NOT_FOUND, CONFLICT = 404, 409
CONNECTIONS = 256
TOLD_S = 15
"""Until the cluster knows why a container ended."""
AGAIN_S = 60
"""For a container that ended to run again."""
API_TIMEOUT_S = (10, 60)
"""For a connection, and for an answer: calls block a thread each, and a cluster may be cut off without a word."""
LATE_S = 120.0
"""A cluster that is asked for a pod has it by then, or never: twice what its API server gives a request."""
WATCH_AGAIN_S = 0.5
FAULTS = (client.ApiException, HTTPError, OSError)
"""What the official client raises."""


class Cluster:
    """The calls of one cluster; those without ``async`` block."""

    def __init__(self, configuration: client.Configuration) -> None:
        self.configuration = configuration
        self._client = client.ApiClient(configuration)
        self.core = client.CoreV1Api(self._client)
        self.networking = client.NetworkingV1Api(self._client)
        self._shut_off: set[str] = set()
        """Namespaces with our network policy."""

    def create(self, spec: KubernetesSpec, name: str, box: str) -> None:
        if not spec.network:
            self._shut_network(spec.namespace)
        pod = manifest(spec, name=name, box=box)
        self.core.create_namespaced_pod(spec.namespace, pod, _request_timeout=API_TIMEOUT_S)

    def read(self, namespace: str, name: str) -> PodStatus:
        read = self.core.read_namespaced_pod(name, namespace, _request_timeout=API_TIMEOUT_S)
        pod: Any = self._client.sanitize_for_serialization(read)
        return PodStatus(pod)

    def wait(
        self, namespace: str, name: str, is_it: Callable[[PodStatus], bool], *, seconds: float
    ) -> PodStatus | None:
        """The first status for which ``is_it``; None once the pod is deleted or time is over."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(ProtocolError, ReadTimeoutError):  # what is on the way ends what takes long
                for event in self._events(namespace, name, seconds=left):
                    if event["type"] == "DELETED":
                        return None
                    if is_it(status := PodStatus(event["raw_object"])):
                        return status
            time.sleep(min(WATCH_AGAIN_S, max(0.0, until - time.monotonic())))
        return None

    def _events(self, namespace: str, name: str, *, seconds: float) -> Iterator[Any]:
        watching = watch.Watch()
        whole = max(1, math.ceil(seconds))
        events = watching.stream(
            self.core.list_namespaced_pod,
            namespace,
            field_selector=f"metadata.name={name}",
            timeout_seconds=whole,
            _request_timeout=(API_TIMEOUT_S[0], whole + API_TIMEOUT_S[0]),
        )
        try:
            yield from cast(Iterator[Any], events)
        finally:
            watching.stop()

    def delete(self, namespace: str, name: str) -> bool:
        """Whether it was there."""
        try:
            self.core.delete_namespaced_pod(name, namespace, _request_timeout=API_TIMEOUT_S)
        except client.ApiException as error:
            if error.status != NOT_FOUND:
                raise
            return False
        return True

    def delete_box(self, namespace: str, box: str) -> bool:
        """All pods of a box; whether there were some."""
        selector = f"{BOX_LABEL}={box}"
        pods = self.core.list_namespaced_pod(namespace, label_selector=selector, _request_timeout=API_TIMEOUT_S).items
        names = [pod.metadata.name for pod in pods if pod.metadata is not None and pod.metadata.name]
        return True in [self.delete(namespace, name) for name in names]

    def close(self) -> None:
        self._client.close()

    def _shut_network(self, namespace: str) -> None:
        if namespace in self._shut_off:
            return
        try:
            policy = network_policy()
            self.networking.create_namespaced_network_policy(namespace, policy, _request_timeout=API_TIMEOUT_S)
        except client.ApiException as error:
            if error.status != CONFLICT:  # it is there
                raise
        self._shut_off.add(namespace)


class PodContainer:
    """The container of a box's pod (``container_box.Container``)."""

    def __init__(self, cluster: Cluster, spec: KubernetesSpec, box: str, threads: Threads) -> None:
        self.cluster = cluster
        self.box = box
        self._spec = spec
        self._threads = threads
        self._generation = 0
        self._restarts = 0

    @property
    def name(self) -> str:
        """Of its pod now."""
        return f"wingbeat-{self.box}-{self._generation}"

    async def create(self) -> None:
        """A pod that runs.  Raises ResourceFailed and the client's errors; cancelled, it leaves nothing."""
        spec = self._spec
        making: asyncio.Future[Any] = self._threads.begin(self.cluster.create, spec, self.name, self.box)
        try:
            await asyncio.shield(making)
            status = await self._wait(lambda status: status.runs or bool(status.hopeless), spec.start_timeout_s)
            if status is None or status.hopeless:
                why = status.hopeless if status else f"it was deleted, or did not run in {spec.start_timeout_s:.0f} s"
                raise ResourceFailed(f"a pod of {spec.image!r} could not be started: {why}")
        except BaseException:
            await asyncio.shield(self._threads.clean(self._discard(making)))
            raise
        self._restarts = status.restarts

    async def replace(self) -> None:
        """Another pod in the place of this one."""
        await self._threads.call(self.cluster.delete, self._spec.namespace, self.name)
        self._generation += 1
        await self.create()

    def open(self, argv: Sequence[str], stdin: bytes) -> Channel:
        return start_exec(self.cluster.configuration, self._spec.namespace, self.name, argv, stdin)

    async def ran_out_of_memory(self, *, broke: bool) -> bool:
        """The cluster tells of whole containers only: a process that was killed for it in one that goes on is not
        told apart."""
        status, known = await self.status(), self._restarts
        if status.runs and status.restarts == known and not broke:
            return False
        try:
            told = await self._wait(lambda s: s.restarts > known or s.out_of_memory or bool(s.hopeless), TOLD_S)
            if told is None or not told.out_of_memory:
                return False
            back = await self._wait(lambda s: s.restarts > known and s.runs, AGAIN_S)
        except FAULTS as error:
            raise await self.fault(error) from error
        if back is None:
            raise await self.fault(
                ResourceLost(f"its container ran out of memory and did not come back in {AGAIN_S} s")
            )
        self._restarts = back.restarts
        return True

    async def fault(self, error: BaseException) -> ResourceLost:
        try:
            status = await self.status()
        except ResourceLost as lost:
            return lost
        if not status.runs:
            return ResourceLost(f"pod {self.name} does not run: {status.hopeless or status.phase}")
        if status.restarts != self._restarts:
            return ResourceLost(f"pod {self.name} runs again, but not as it did: its container ended")
        return ResourceLost(f"pod {self.name}: {error}")

    async def status(self) -> PodStatus:
        """Raises ResourceLost."""
        try:
            return await self._threads.call(self.cluster.read, self._spec.namespace, self.name)
        except FAULTS as error:
            raise ResourceLost(f"pod {self.name} is gone, or its cluster is: {words(error)}") from error

    async def check(self) -> None:
        """Raises ResourceLost where it does not run, or is not the container that it was."""
        status = await self.status()
        if not status.runs or status.restarts != self._restarts:
            why = status.hopeless or f"phase {status.phase}, {status.restarts} restarts"
            raise ResourceLost(f"pod {self.name} does not run as it did: {why}")

    async def _wait(self, is_it: Callable[[PodStatus], bool], seconds: float) -> PodStatus | None:
        return await self._threads.call(self.cluster.wait, self._spec.namespace, self.name, is_it, seconds=seconds)

    async def _discard(self, making: asyncio.Future[Any]) -> None:
        await asyncio.wait({making})
        try:
            await self._threads.call(self.cluster.delete, self._spec.namespace, self.name)
        except FAULTS as error:
            logger.warning("pod %s may be left in its cluster: %s", self.name, words(error))


class KubernetesInstance:
    """A started pod (``wingbeat.resources.backend.Instance``)."""

    def __init__(self, spec: KubernetesSpec, container: PodContainer, threads: Threads) -> None:
        self._spec = spec
        self._container = container
        self._threads = threads
        self.handle: str | None = handle_of(spec, container.box)
        self.value = ContainerBox(spec, container, threads)

    async def reset(self) -> None:
        """Another pod."""
        try:
            await self._container.replace()
        except FAULTS as error:
            raise ResourceLost(f"pod {self._container.name} could not be replaced: {words(error)}") from error
        await self.value.prepare()

    async def check(self) -> None:
        await self._container.check()

    async def close(self) -> None:
        try:
            await self._threads.call(self._container.cluster.delete_box, self._spec.namespace, self._container.box)
        except FAULTS as error:
            raise ResourceFailed(f"pod {self._container.name} could not be deleted: {words(error)}") from error


class KubernetesBackend:
    """Makes boxes of pods (``wingbeat.resources.backend.Backend``)."""

    kind: ClassVar[str] = "kubernetes"
    late_s: ClassVar[float] = LATE_S

    def __init__(self, configuration: client.Configuration | None = None) -> None:
        """``configuration``: of the cluster of all specs; None: what their ``context`` says."""
        self._given = configuration
        self._threads = Threads("wingbeat-kubernetes")
        self._clusters: dict[str, Cluster] = {}
        """By context."""

    def check(self, spec: Spec) -> None:
        assert isinstance(spec, KubernetesSpec)
        check_box(spec)
        refused = {
            "pids": (
                spec.pids,
                "pods have no such field: podPidsLimit of the nodes' kubelets is for all pods",
            ),
            "file_mb": (spec.file_mb, "pods have no such field: use disk_mb"),
            "mounts": (spec.mounts or None, "a node's folders are not for boxes: use files, or an image that has them"),
        }
        for name, (value, instead) in refused.items():
            if value is not None:
                raise UnsupportedField(self.kind, name, instead)
        if not spec.network and not spec.network_policies:
            raise UnsupportedField(
                self.kind,
                "network",
                "without a network plugin that enforces NetworkPolicy a pod has one: say network_policies=True if the"
                " cluster has such a plugin, else network=True",
            )

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> KubernetesInstance:
        assert isinstance(spec, KubernetesSpec)
        cluster = await self._cluster(spec.context)
        container = PodContainer(cluster, spec, uuid.uuid4().hex[:20], self._threads)
        started(handle_of(spec, container.box))
        try:
            await container.create()
            instance = KubernetesInstance(spec, container, self._threads)
            try:
                await instance.value.prepare()
            except BaseException:
                await asyncio.shield(self._threads.clean(instance.close()))
                raise
        except FAULTS as error:
            raise ResourceFailed(f"a pod of {spec.image!r} could not be started: {words(error)}") from error
        return instance

    async def reap(self, handle: str) -> bool:
        """Delete the pods of a box that a dead process left.  Raises ResourceFailed where the cluster is away."""
        box, namespace, context = f"{handle}  ".split(" ", 2)
        if not OUR_BOX.fullmatch(box):
            return False
        cluster = await self._cluster(context.strip())
        try:
            return await self._threads.call(cluster.delete_box, namespace, box)
        except FAULTS as error:
            raise ResourceFailed(f"the pods of box {box} could not be deleted: {words(error)}") from error

    async def close(self) -> None:
        await self._threads.close()
        clusters, self._clusters = self._clusters, {}
        for cluster in clusters.values():
            await self._threads.call(cluster.close)

    async def _cluster(self, context: str) -> Cluster:
        if context not in self._clusters:
            made = await self._threads.call(self._connect, context)
            self._clusters.setdefault(context, made)
        return self._clusters[context]

    def _connect(self, context: str) -> Cluster:
        """Raises ResourceFailed, ConfigError."""
        if self._given is not None:
            return Cluster(self._given)
        made = client.Configuration()
        try:
            if context:
                config.load_kube_config(context=context, client_configuration=made)
            else:
                config.load_config(client_configuration=made)
        except config.ConfigException as error:
            raise ConfigError(
                f"context: expected a cluster in the kubeconfig, or to run in a pod, got: {error}", param="context"
            ) from error
        made.connection_pool_maxsize = CONNECTIONS
        return Cluster(made)


def handle_of(spec: KubernetesSpec, box: str) -> str:
    return f"{box} {spec.namespace} {spec.context}".rstrip()


def words(error: BaseException) -> str:
    """Of the client's errors, which quote whole answers."""
    if isinstance(error, client.ApiException):
        return f"HTTP {error.status} {error.reason}: {' '.join(str(error.body or '').split())[:300]}".rstrip(": ")
    return " ".join(str(error).split())[:300]
