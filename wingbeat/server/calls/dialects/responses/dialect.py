"""The dialect itself: its name, its parser, its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from wingbeat.core.errors import WingbeatError
from wingbeat.server.calls.dialects.base import EventWriter
from wingbeat.server.calls.dialects.responses import answer, parse
from wingbeat.server.calls.dialects.responses.stream import ResponseEvents
from wingbeat.server.calls.model_call import Choice, ModelCall, Prepared


class ResponsesDialect:
    """One response object per turn."""

    name = "responses"
    turn_prefix = "resp_"

    def parse(self, body: Any) -> ModelCall:
        return parse.parse_responses_call(body)

    def answer(self, prepared: Prepared, choices: Sequence[Choice]) -> bytes:
        return orjson.dumps(answer.finished(prepared, choices[0]))

    def events(self, prepared: Prepared) -> EventWriter:
        return ResponseEvents(prepared)

    def error(self, error: WingbeatError) -> bytes:
        return orjson.dumps(answer.error_body(error))


RESPONSES = ResponsesDialect()
