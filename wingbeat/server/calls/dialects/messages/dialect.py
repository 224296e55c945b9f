"""The dialect itself: its name, its parser, its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wingbeat.core.errors import WingbeatError
from wingbeat.server.calls.dialects.base import EventWriter
from wingbeat.server.calls.dialects.messages import answer, parse
from wingbeat.server.calls.dialects.messages.stream import MessageEvents
from wingbeat.server.calls.model_call import Choice, ModelCall, Prepared


class MessagesDialect:
    """One Anthropic message per turn."""

    name = "messages"
    turn_prefix = "msg_"

    def parse(self, body: Any) -> ModelCall:
        return parse.parse_messages_call(body)

    def parse_count(self, body: Any) -> ModelCall:
        """The call of ``/v1/messages/count_tokens``, which asks only for the length of the prompt."""
        return parse.parse_count_call(body)

    def answer(self, prepared: Prepared, choices: Sequence[Choice]) -> bytes:
        return answer.message(prepared, choices[0])

    def count(self, prepared: Prepared) -> bytes:
        """The answer of ``/v1/messages/count_tokens``."""
        return answer.token_count(prepared)

    def events(self, prepared: Prepared) -> EventWriter:
        return MessageEvents(prepared)

    def error(self, error: WingbeatError) -> bytes:
        return answer.error_body(error)


MESSAGES = MessagesDialect()
