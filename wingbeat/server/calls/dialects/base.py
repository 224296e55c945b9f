"""What a wire dialect is.  All of it is pure: JSON values in, bytes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from wingbeat.core.errors import WingbeatError
from wingbeat.server.calls.model_call import Choice, ModelCall, Prepared, TextDelta


class EventWriter(Protocol):
    """Server-sent events of one streamed answer, in the order of the methods; may keep state."""

    def begin(self, turn_id: str) -> bytes:
        """Before any text; ``turn_id`` is that of the first choice and becomes the response's id."""
        ...

    def delta(self, delta: TextDelta) -> bytes: ...

    def choice(self, choice: Choice) -> bytes:
        """What only a choice's end tells: tool calls, logprobs, the finish reason."""
        ...

    def end(self, choices: Sequence[Choice]) -> bytes: ...

    def error(self, error: WingbeatError) -> bytes:
        """An error after streaming began; nothing follows it."""
        ...


class Dialect(Protocol):
    """One way of asking for a turn."""

    name: str
    turn_prefix: str
    """How this dialect's response ids begin; the response id is the turn id."""

    def parse(self, body: Any) -> ModelCall:
        """Validate a decoded JSON body.  Raises RequestError (400) that names the field and the fix."""
        ...

    def answer(self, prepared: Prepared, choices: Sequence[Choice]) -> bytes: ...

    def events(self, prepared: Prepared) -> EventWriter: ...

    def error(self, error: WingbeatError) -> bytes:
        """The body of an error answer, as this dialect's SDKs read it."""
        ...
