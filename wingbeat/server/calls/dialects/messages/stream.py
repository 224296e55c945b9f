"""The events of a streamed message.

One block is open at a time::

    message_start ping (content_block_start content_block_delta* content_block_stop)* message_delta message_stop
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from wingbeat.core.errors import WingbeatError
from wingbeat.server.calls.dialects.blocks import event
from wingbeat.server.calls.dialects.messages import answer
from wingbeat.server.calls.model_call import Choice, Prepared, TextDelta

Block = Literal["thinking", "text"]

EMPTY: Mapping[Block, Mapping[str, str]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessageEvents:
    """Writes one streamed message."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._open: Block | None = None
        self._num_blocks = 0
        self._thinking = ""
        """What was told of the thinking so far."""

    def begin(self, turn_id: str) -> bytes:
        return event("message_start", {"message": answer.opening(self._prepared, turn_id)}) + event("ping", {})

    def delta(self, delta: TextDelta) -> bytes:
        if not delta.text:
            return b""
        return self._tell("thinking" if delta.kind == "reasoning" else "text", delta.text)

    def choice(self, choice: Choice) -> bytes:
        """Ends the open block and tells the tool calls, each whole."""
        out = self._close()
        for call in choice.reply.tool_calls:
            out += self._start(answer.tool_use(call))
            out += self._change({"type": "input_json_delta", "partial_json": answer.input_json(call)})
            out += self._stop()
        if not self._num_blocks:
            out += self._start(EMPTY["text"]) + self._stop()
        return out

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        delta = {
            "delta": answer.stop(choice),
            "usage": answer.usage(choice.num_prompt_tokens, len(choice.token_ids)),
        }
        return event("message_delta", delta) + event("message_stop", {})

    def error(self, error: WingbeatError) -> bytes:
        return event("error", {"error": answer.error_object(error)})

    def _tell(self, block: Block, text: str) -> bytes:
        out = b""
        if self._open != block:
            out = self._close() + self._start(EMPTY[block])
            self._open = block
        if block == "thinking":
            self._thinking += text
        return out + self._change({"type": f"{block}_delta", block: text})

    def _close(self) -> bytes:
        """End the open block; a thinking block ends with its signature."""
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._change({"type": "signature_delta", "signature": answer.signature(self._thinking)})
        self._open = None
        return signed + self._stop()

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._num_blocks += 1
        return event("content_block_start", {"index": self._num_blocks - 1, "content_block": block})

    def _change(self, delta: Mapping[str, str]) -> bytes:
        return event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _stop(self) -> bytes:
        return event("content_block_stop", {"index": self._num_blocks - 1})
