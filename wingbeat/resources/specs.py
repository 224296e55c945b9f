"""What to lease: how a resource is made, checked, cleaned and ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from wingbeat.core.errors import UnavailableError

Hook = Callable[[Any], Any | Awaitable[Any]]


class Reuse(StrEnum):
    """Whether a resource that was given back serves again."""

    NEVER = "never"
    """It is closed: nothing of one episode can reach another."""
    AFTER_RESET = "after_reset"
    """It serves again once its reset succeeded and it is healthy."""


class ResourceFailed(UnavailableError):
    """A resource could not be made: a failure of infrastructure, which never becomes a reward."""

    code = "resource_failed"
    retryable = False


@dataclass(frozen=True, slots=True)
class LocalSpec:
    """An in-process object.  Hooks may be coroutine functions; equal specs share reusable objects."""

    factory: Callable[[], Any | Awaitable[Any]]
    """Makes one; called for every new object."""
    reuse: Reuse = Reuse.NEVER
    reset: Hook | None = None
    """Makes a used object as good as new.  ``AFTER_RESET`` needs it."""
    health: Callable[[Any], bool | Awaitable[bool]] | None = None
    """Whether an object may be handed out again."""
    close: Hook | None = None
    """Frees what the object holds."""
    limit: int | None = None
    """Objects of this spec at once; further leases wait their turn."""

    def __post_init__(self) -> None:
        if self.reuse is Reuse.AFTER_RESET and self.reset is None:
            raise ValueError("reuse after_reset: expected a reset hook, got none")
        if self.reuse is Reuse.NEVER and self.reset is not None:
            raise ValueError("reuse never: expected no reset hook, since it would not be called")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: expected at least 1, got {self.limit}")
