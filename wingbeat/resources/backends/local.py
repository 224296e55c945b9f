"""In-process objects: made, cleaned, checked and closed by functions that the spec names.

A hook may be a coroutine function.  One that is not runs on the event loop, should be quick, and cannot be
interrupted: time-outs hold for what awaits.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar

from wingbeat.core.errors import ConfigError
from wingbeat.resources.specs import LocalSpec, ResourceLost, Spec


class LocalInstance:
    """An object and its hooks."""

    __slots__ = ("_is_closed", "_spec", "value")

    def __init__(self, spec: LocalSpec, value: Any) -> None:
        self._spec = spec
        self._is_closed = False
        self.value = value

    @property
    def handle(self) -> None:
        """It dies with the process."""
        return None

    def renew(self) -> Coroutine[Any, Any, None] | None:
        """Reset and check; what remains to be awaited, or None where nothing does."""
        spec = self._spec
        if spec.reset is not None:
            result = spec.reset(self.value)
            if result is not None and inspect.isawaitable(result):
                return self._renew_after(result)
        return None if spec.health is None else self.verify()

    def verify(self) -> Coroutine[Any, Any, None] | None:
        """Check; what remains to be awaited, or None.  Raises ResourceLost where the check says no."""
        if self._is_closed:
            raise ResourceLost("the object is closed")
        if self._spec.health is None:
            return None
        answer = self._spec.health(self.value)
        if inspect.isawaitable(answer):
            return self._verify_after(answer)
        _believe(answer)
        return None

    async def _renew_after(self, result: Awaitable[Any]) -> None:
        await result
        await self.check()

    async def _verify_after(self, answer: Awaitable[Any]) -> None:
        _believe(await answer)

    async def reset(self) -> None:
        if self._spec.reset is not None:
            await _call(self._spec.reset, self.value)

    async def check(self) -> None:
        rest = self.verify()
        if rest is not None:
            await rest

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._spec.close is not None:
            await _call(self._spec.close, self.value)


class LocalBackend:
    """Calls factories."""

    kind: ClassVar[str] = "local"

    def check(self, spec: Spec) -> None:
        _local(spec)

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> LocalInstance:
        local = _local(spec)
        return LocalInstance(local, await _call(local.factory))

    async def reap(self, handle: str) -> bool:
        """Nothing of this kind outlives its process."""
        return False

    async def close(self) -> None:
        """Nothing is shared."""


def _local(spec: Spec) -> LocalSpec:
    if not isinstance(spec, LocalSpec):
        raise ConfigError(f"kind local: expected a LocalSpec, got {type(spec).__name__}")
    return spec


def _believe(answer: object) -> None:
    if not answer:
        raise ResourceLost("its health check said no")


async def _call(hook: Callable[..., Any], *arguments: Any) -> Any:
    result = hook(*arguments)
    return await result if inspect.isawaitable(result) else result
