"""OpenAI's ``/v1/responses`` as pure functions.  ``docs/reference/responses-fields.md``."""

from wingbeat.server.calls.dialects.responses.dialect import RESPONSES, ResponsesDialect

__all__ = ["RESPONSES", "ResponsesDialect"]
