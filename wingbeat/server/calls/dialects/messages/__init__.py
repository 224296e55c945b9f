"""Anthropic's ``/v1/messages``, threads included, as pure functions.  ``docs/reference/messages-fields.md``."""

from wingbeat.server.calls.dialects.messages.dialect import MESSAGES, MessagesDialect

__all__ = ["MESSAGES", "MessagesDialect"]
