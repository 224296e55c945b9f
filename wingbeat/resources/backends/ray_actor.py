"""What runs on a node of a Ray cluster: one box, with the node's own processes, for as long as the actor lives.

Loads no ray: the cluster makes an actor of the class.  What goes wrong crosses as plain words, since Ray would rebuild
exceptions by calling their classes with one argument.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wingbeat.core.errors import ConfigError
from wingbeat.resources.backend import Backend, Instance
from wingbeat.resources.backends import default_backends
from wingbeat.resources.specs import ResourceFailed, ResourceLost
from wingbeat.resources.specs_remote import parse_spec

KNOWN: Mapping[str, type[Exception]] = {
    "lost": ResourceLost,
    "failed": ResourceFailed,
    "config": ConfigError,
    "missing": FileNotFoundError,
    "folder": IsADirectoryError,
    "no_folder": NotADirectoryError,
    "value": ValueError,
    "os": OSError,
}
"""Faults that a box tells its holder; the first that fits, so that the more special ones come first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result, or the name of a fault and its words."""

    value: Any = None
    fault: str = ""
    message: str = ""

    def result(self) -> Any:
        """Raises what the fault stands for."""
        if self.fault:
            raise KNOWN[self.fault](self.message)
        return self.value


class BoxActor:
    """A box on this node."""

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._instance: Instance | None = None

    async def start(self, spec: Mapping[str, Any]) -> Outcome:
        """Make the box; its folder, as commands see it."""
        return await self._outcome(self._start(spec))

    async def call(self, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Outcome:
        """A method of the box."""
        assert self._instance is not None, "it was started"
        return await self._outcome(getattr(self._instance.value, method)(*arguments, **options))

    async def manage(self, method: str) -> Outcome:
        """Reset, check or close it."""
        if self._instance is None:
            return Outcome()
        return await self._outcome(getattr(self._instance, method)())

    async def _start(self, data: Mapping[str, Any]) -> str:
        spec = parse_spec(data)
        self._backend = default_backends()[spec.kind]
        self._backend.check(spec)
        async with asyncio.timeout(spec.start_timeout_s):
            self._instance = await self._backend.start(spec, started=lambda handle: None)  # it dies with the actor
        return self._instance.value.workdir

    async def _outcome(self, work: Any) -> Outcome:
        try:
            return Outcome(await work)
        except TimeoutError:
            return Outcome(fault="failed", message="it did not start in time")
        except tuple(KNOWN.values()) as error:
            name = next(name for name, kind in KNOWN.items() if isinstance(error, kind))
            return Outcome(fault=name, message=str(error))
