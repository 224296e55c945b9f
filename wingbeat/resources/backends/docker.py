"""Docker containers as boxes, through the official ``docker`` package.

A container has a read-only root, no capability, no way to new privileges and a user that is not root; what it writes
is in memory and counts as such.  It is named before it is made, so that one whose owner died in between is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.resources.backends import container_scripts as scripts
from wingbeat.resources.backends.container_box import Channel, ContainerBox
from wingbeat.resources.backends.container_spec import check_box, disk_parts, environment_of
from wingbeat.resources.backends.container_threads import Threads
from wingbeat.resources.specs import ResourceFailed, ResourceLost, Reuse, Spec, UnsupportedField
from wingbeat.resources.specs_remote import DockerSpec, Pull

try:
    from docker import APIClient, DockerClient
    from docker.errors import APIError, DockerException, ImageNotFound, NotFound
    from docker.types import LogConfig, Mount, Ulimit
    from docker.utils import parse_repository_tag

    from wingbeat.resources.backends.docker_exec import start_exec
except ModuleNotFoundError as error:
    raise DependencyMissing("kind 'docker' needs the docker package: pip install 'wingbeat[docker]'") from error

logger = logging.getLogger("wingbeat.resources")

LABEL = "wingbeat.box"
"""Its value is the container's name: a container without it is a stranger's."""
OUR_NAME = re.compile(r"wingbeat-[0-9a-f]{32}")
API_TIMEOUT_S = 60.0
LATE_S = 120.0
"""A daemon that is asked for a container has made it by then, or will not: twice what it may take to answer."""
CONNECTIONS = 256
MEGABYTE = 1 << 20
NANO = 1_000_000_000
CONFLICT = 409
NO_SSH = (
    "its channels cannot be waited for: forward the daemon's socket (ssh -L PATH:/var/run/docker.sock) to unix://PATH"
)


class DockerContainer:
    """A running container (``container_box.Container``)."""

    def __init__(self, client: APIClient, name: str, threads: Threads) -> None:
        self.client = client
        self.name = name
        self._threads = threads

    def open(self, argv: Sequence[str], stdin: bytes) -> Channel:
        return start_exec(self.client, self.name, argv, stdin)

    async def ran_out_of_memory(self, *, broke: bool) -> bool:
        state = await self.state()
        if not state.get("Running"):
            raise _ended(self.name, state)
        return bool(state.get("OOMKilled")) and not broke

    async def fault(self, error: BaseException) -> ResourceLost:
        try:
            state = await self.state()
        except ResourceLost as lost:
            return lost
        if state.get("Running"):
            return ResourceLost(f"container {self.name}: {error}")
        return _ended(self.name, state)

    async def state(self) -> dict[str, Any]:
        """As the daemon tells it.  Raises ResourceLost."""
        try:
            return (await self._threads.call(self.client.inspect_container, self.name))["State"]
        except (DockerException, OSError) as error:
            raise ResourceLost(f"container {self.name} is gone, or its daemon is: {error}") from error


class DockerInstance:
    """A started container (``wingbeat.resources.backend.Instance``)."""

    def __init__(self, spec: DockerSpec, container: DockerContainer, threads: Threads) -> None:
        self._container = container
        self._threads = threads
        self.handle: str | None = handle_of(container.name, spec.host)
        self.value = ContainerBox(spec, container, threads)

    async def reset(self) -> None:
        """Start the container again: its processes end, and all it wrote was in memory."""
        client, name = self._container.client, self._container.name
        try:
            await self._threads.call(client.restart, name, timeout=0)
        except (DockerException, OSError) as error:
            raise ResourceLost(f"container {name} could not be restarted: {error}") from error
        await self.value.prepare()

    async def check(self) -> None:
        state = await self._container.state()
        if not state.get("Running"):
            raise _ended(self._container.name, state)

    async def close(self) -> None:
        await self._threads.call(remove, self._container.client, self._container.name)


class DockerBackend:
    """Makes boxes of containers (``wingbeat.resources.backend.Backend``)."""

    kind: ClassVar[str] = "docker"
    late_s: ClassVar[float] = LATE_S

    def __init__(self) -> None:
        self._threads = Threads("wingbeat-docker")
        self._clients: dict[str, APIClient] = {}
        """By the daemon's address."""
        self._pulls: dict[tuple[str, str], asyncio.Lock] = {}

    def check(self, spec: Spec) -> None:
        assert isinstance(spec, DockerSpec)
        check_box(spec)
        if spec.needs is not None and spec.needs.gpus:
            raise UnsupportedField(
                self.kind, "needs.gpus", "use kind kubernetes, which gives pods devices of their own"
            )
        if spec.host.startswith("ssh:"):
            raise UnsupportedField(self.kind, "host", NO_SSH)
        if spec.reuse is Reuse.AFTER_RESET and any(not mount.read_only for mount in spec.mounts):
            raise UnsupportedField(
                self.kind, "mounts", "a reset cannot undo what is written there: read_only, or reuse never"
            )

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> DockerInstance:
        assert isinstance(spec, DockerSpec)
        client = await self._client(spec.host)
        name = f"wingbeat-{uuid.uuid4().hex}"
        started(handle_of(name, spec.host))
        making: asyncio.Future[None] = self._threads.begin(make, client, name, spec)
        try:
            try:
                await asyncio.shield(making)
            except ImageNotFound as error:
                if spec.pull is Pull.NEVER:
                    raise ResourceFailed(f"the daemon has no image {spec.image!r}, and pull is never") from error
                await self._pull(client, spec)
                making = self._threads.begin(make, client, name, spec)
                await asyncio.shield(making)
            instance = DockerInstance(spec, DockerContainer(client, name, self._threads), self._threads)
            await instance.value.prepare()
        except BaseException as error:
            await asyncio.shield(self._threads.clean(self._discard(making, client, name)))
            if isinstance(error, DockerException | OSError):
                raise ResourceFailed(f"a container of {spec.image!r} could not be started: {error}") from error
            raise
        return instance

    async def reap(self, handle: str) -> bool:
        """Remove a container of ours that a dead process left.  Raises ResourceFailed where the daemon is away."""
        name, _, host = handle.partition(" ")
        if not OUR_NAME.fullmatch(name):
            return False
        return await self._threads.call(remove, await self._client(host), name)

    async def close(self) -> None:
        await self._threads.close()
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await self._threads.call(client.close)

    async def _client(self, host: str) -> APIClient:
        if host not in self._clients:
            made = await self._threads.call(self._connect, host)
            self._clients.setdefault(host, made)
        return self._clients[host]

    def _connect(self, host: str) -> APIClient:
        options: dict[str, Any] = {"timeout": int(API_TIMEOUT_S), "max_pool_size": CONNECTIONS}
        try:
            if host:
                return APIClient(base_url=host, version="auto", **options)
            if os.environ.get("DOCKER_HOST", "").startswith("ssh:"):
                raise ConfigError(f"DOCKER_HOST: expected unix:// or tcp://, got ssh://; {NO_SSH}")
            return DockerClient.from_env(version="auto", **options).api
        except DockerException as error:
            where = f"at {host}" if host else "that DOCKER_HOST names"
            raise ResourceFailed(f"no Docker daemon {where}: {error}") from error

    async def _pull(self, client: APIClient, spec: DockerSpec) -> None:
        """Once for all who wait for the same image."""
        async with self._pulls.setdefault((spec.host, spec.image), asyncio.Lock()):
            has_it = self._threads.call(has_image, client, spec.image)
            if not await has_it:
                logger.info("pulling the image %s", spec.image)
                await self._threads.call(pull, client, spec.image)

    async def _discard(self, making: asyncio.Future[None], client: APIClient, name: str) -> None:
        """What was being made when it failed or was cancelled."""
        await asyncio.wait({making})
        try:
            await self._threads.call(remove, client, name)
        except ResourceFailed as error:
            logger.warning("container %s may be left on its daemon: %s", name, error.message)


def _ended(name: str, state: Mapping[str, Any]) -> ResourceLost:
    why = "out of memory" if state.get("OOMKilled") else f"exit code {state.get('ExitCode')}"
    return ResourceLost(f"container {name} has ended: {why}")


def handle_of(name: str, host: str) -> str:
    return f"{name} {host}".rstrip()


def host_config(client: APIClient, spec: DockerSpec) -> dict[str, Any]:
    """The limits."""
    uid, _, gid = spec.user.partition(":")
    work_mb, small_mb = disk_parts(spec)

    def tmpfs(megabytes: int | None, mode: str) -> str:
        size = "" if megabytes is None else f",size={megabytes}m"
        return f"rw,exec,nosuid,nodev,uid={uid},gid={gid or uid},mode={mode}{size}"

    limits: dict[str, Any] = {}
    if spec.memory_mb is not None:  # without swap
        limits |= {"mem_limit": spec.memory_mb * MEGABYTE, "memswap_limit": spec.memory_mb * MEGABYTE}
    if spec.cpus is not None:
        limits["nano_cpus"] = round(spec.cpus * NANO)
    if spec.pids is not None:
        limits["pids_limit"] = spec.pids + scripts.NUM_HELPERS
    if spec.file_mb is not None:
        size = spec.file_mb * MEGABYTE
        limits["ulimits"] = [Ulimit(name="fsize", soft=size, hard=size)]
    if small_mb is not None:
        limits["shm_size"] = small_mb * MEGABYTE
    return client.create_host_config(
        read_only=True,
        tmpfs={spec.workdir: tmpfs(work_mb, "0755"), "/tmp": tmpfs(small_mb, "1777")},
        mounts=[Mount(m.target, m.source, type="bind", read_only=m.read_only) for m in spec.mounts],
        network_mode="bridge" if spec.network else "none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        privileged=False,
        log_config=LogConfig(type="none"),
        **limits,
    )


def make(client: APIClient, name: str, spec: DockerSpec) -> None:
    """Create and start a container; blocks.  Raises the library's errors."""
    client.create_container(
        spec.image,
        name=name,
        entrypoint=["/bin/sh", "-c", scripts.FIRST, scripts.MARK],
        command=[],
        user=spec.user,
        environment=environment_of(spec),
        working_dir=spec.workdir,
        labels={LABEL: name},
        host_config=host_config(client, spec),
    )
    client.start(name)


def remove(client: APIClient, name: str) -> bool:
    """End and delete a container of ours; whether it was there; blocks.  Raises ResourceFailed."""
    try:
        labels = client.inspect_container(name)["Config"].get("Labels") or {}
        if labels.get(LABEL) != name:
            return False
        client.remove_container(name, v=True, force=True)
    except NotFound:
        return False
    except APIError as error:
        if error.status_code == CONFLICT:  # it is being removed already
            return True
        raise ResourceFailed(f"container {name} could not be removed: {error}") from error
    except (DockerException, OSError) as error:
        raise ResourceFailed(f"container {name} could not be removed: {error}") from error
    return True


def has_image(client: APIClient, image: str) -> bool:
    with contextlib.suppress(ImageNotFound):
        client.inspect_image(image)
        return True
    return False


def pull(client: APIClient, image: str) -> None:
    """Blocks.  Raises ResourceFailed with the registry's words."""
    repository, tag = parse_repository_tag(image)
    for event in client.pull(repository, tag=tag or "latest", stream=True, decode=True):
        if "error" in event:
            raise ResourceFailed(f"the image {image!r} could not be pulled: {event['error']}")
