"""Boxes on the nodes of a Ray cluster: each in an actor of its own, which dies with whoever leased it.

Ray chooses the node by what the box takes (``box.needs``, else its limits).  An actor is never detached and never
started again: a box that came back empty would be another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.resources.backends.ray_actor import BoxActor, Outcome
from wingbeat.resources.boxes import Finished
from wingbeat.resources.specs import ResourceFailed, ResourceLost, Reuse, Spec, UnsupportedField
from wingbeat.resources.specs_remote import RaySpec

logger = logging.getLogger("wingbeat.resources")

NAMESPACE = "wingbeat"
ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Ray's own: the cluster of whoever names none."""
CALLS_AT_ONCE = 1000
MEGABYTE = 1 << 20
CLOSE_S = 10.0
"""For a box to end in peace; its actor is ended after that in any case."""
OF_THE_LEASE = ("label", "reuse", "limit", "draw", "reset_timeout_s", "close_timeout_s", "idle_ttl_s", "max_uses")
"""Fields of the box's spec that say how it is leased, which the Ray spec says."""


class RayBox:
    """A box on another node (``wingbeat.resources.boxes.Box``)."""

    def __init__(self, actor: Any, *, workdir: str) -> None:
        self._actor = actor
        self._workdir = workdir

    @property
    def workdir(self) -> str:
        return self._workdir

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Finished:
        given = command if isinstance(command, str) else list(command)
        plain_env = None if env is None else dict(env)
        return await self._call("run", given, stdin=stdin, timeout_s=timeout_s, env=plain_env, cwd=cwd)

    async def write(self, path: str, data: bytes) -> None:
        await self._call("write", path, data)

    async def read(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        return await self._call("read", path, max_bytes=max_bytes)

    async def list(self, path: str = ".") -> list[str]:
        return await self._call("list", path)

    async def end_processes(self) -> None:
        await self._call("end_processes")

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return (await ask(self._actor.call.remote(method, arguments, options))).result()


class RayInstance:
    """A started actor (``wingbeat.resources.backend.Instance``); it has no handle, since it dies with its owner."""

    handle: str | None = None

    def __init__(self, actor: Any, *, workdir: str) -> None:
        self._actor = actor
        self.value = RayBox(actor, workdir=workdir)

    async def reset(self) -> None:
        (await ask(self._actor.manage.remote("reset"))).result()

    async def check(self) -> None:
        (await ask(self._actor.manage.remote("check"))).result()

    async def close(self) -> None:
        """End the box in peace, then its actor."""
        with contextlib.suppress(TimeoutError, ResourceLost):  # the actor, and the box with it, is ended anyway
            async with asyncio.timeout(CLOSE_S):
                outcome = await ask(self._actor.manage.remote("close"))
                if outcome.fault:
                    logger.warning("closing a box on another node failed: %s", outcome.message)
        await asyncio.to_thread(kill, self._actor)


class RayBackend:
    """Makes boxes on a cluster (``wingbeat.resources.backend.Backend``)."""

    kind: ClassVar[str] = "ray"

    def __init__(self) -> None:
        """Raises DependencyMissing."""
        load_ray()
        self._has_connected = False
        self._connecting = asyncio.Lock()

    def check(self, spec: Spec) -> None:
        """What the box's own kind refuses, its node refuses when it starts: nodes differ."""
        assert isinstance(spec, RaySpec)
        if spec.reuse is Reuse.SHARED:
            raise UnsupportedField(self.kind, "reuse", "a box has one holder: never or after_reset")
        for name in OF_THE_LEASE:
            if getattr(spec.box, name) != type(spec.box).model_fields[name].default:
                raise UnsupportedField(self.kind, f"box.{name}", f"say {name} of the ray spec: it is what is leased")
        if "://" in (spec.address or os.environ.get(ADDRESS_VARIABLE, "")):
            raise UnsupportedField(
                self.kind, "address", "Ray's client mode is not supported: run on a node, and say HOST:PORT or auto"
            )

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> RayInstance:
        assert isinstance(spec, RaySpec)
        async with self._connecting:
            await asyncio.to_thread(self._connect, spec.address)
        ray = load_ray()
        holds = spec.box.holds
        options: dict[str, Any] = {
            "num_cpus": holds.cpus,
            "num_gpus": holds.gpus,
            "memory": holds.memory_mb * MEGABYTE or None,
            "max_restarts": 0,
            "max_concurrency": CALLS_AT_ONCE,
        }
        try:
            actor = ray.remote(BoxActor).options(**options).remote()
        except ray.exceptions.RayError as error:
            raise ResourceFailed(f"no actor could be made for a box: {error}") from error
        try:
            # the start time of the Ray spec includes waiting for a node with room
            plain = spec.box.model_dump(mode="json") | {"start_timeout_s": spec.start_timeout_s}
            workdir = (await ask(actor.start.remote(plain))).result()
        except BaseException:
            await asyncio.shield(asyncio.to_thread(kill, actor))
            raise
        return RayInstance(actor, workdir=workdir)

    async def reap(self, handle: str) -> bool:
        """Ray ends the actors of an owner that died."""
        return False

    async def close(self) -> None:
        """Leave the cluster, if it was joined here."""
        if self._has_connected:
            self._has_connected = False
            await asyncio.to_thread(load_ray().shutdown)

    def _connect(self, address: str) -> None:
        """Raises ResourceFailed where there is no such cluster, ConfigError where this process is in another one."""
        ray = load_ray()
        if ray.is_initialized():
            joined = ray.get_runtime_context().gcs_address
            if address not in ("", "auto", joined):
                raise ConfigError(
                    f"address: expected the cluster that this process is in ({joined}), got {address!r}",
                    param="address",
                )
            return
        address = address or os.environ.get(ADDRESS_VARIABLE, "")
        if not address:
            raise ConfigError(
                f"address: expected HOST:PORT of a Ray cluster, or auto, since this process is in none and"
                f" {ADDRESS_VARIABLE} is not set",
                param="address",
            )
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ResourceFailed(f"no Ray cluster at {address!r}: {error}") from error
        self._has_connected = True


def load_ray() -> Any:
    """Only where it is asked for.  Raises DependencyMissing."""
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        raise DependencyMissing("kind 'ray' needs the ray package: pip install 'wingbeat[ray]'") from error
    return ray


async def ask(reference: Awaitable[Outcome]) -> Outcome:
    """What an actor answers; a caller that is cancelled cancels it there, too.  Raises ResourceLost."""
    ray = load_ray()
    try:
        return await reference
    except asyncio.CancelledError:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.cancel(reference)
        raise
    except ray.exceptions.RayError as error:
        words = " ".join(str(error).split())[:300]
        raise ResourceLost(f"the actor of a box died, or its node did: {words}") from error


def kill(actor: Any) -> None:
    """End an actor and what it runs; blocks, harmless where it is gone."""
    ray = load_ray()
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(actor)
