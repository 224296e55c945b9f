"""The events of a streamed response, numbered from 0.

Items come one after the other, each opened, filled and closed::

    response.created response.in_progress
      (response.output_item.added ... response.output_item.done)*
    response.completed | response.incomplete
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from wingbeat.core.errors import WingbeatError
from wingbeat.server.calls.dialects.blocks import event
from wingbeat.server.calls.dialects.responses import answer
from wingbeat.server.calls.dialects.responses.answer import Item
from wingbeat.server.calls.model_call import Choice, Prepared, TextDelta

Kind = Literal["content", "reasoning"]

EVENTS: dict[Kind, str] = {"content": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseEvents:
    """Writes one streamed response."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._turn_id = ""
        self._created_at = 0
        self._num_events = 0
        self._num_items = 0
        self._open: Kind | None = None
        self._told: dict[Kind, str] = {"content": "", "reasoning": ""}

    def begin(self, turn_id: str) -> bytes:
        self._turn_id = turn_id
        self._created_at = int(time.time())
        response = answer.started(self._prepared, turn_id, created_at=self._created_at)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: TextDelta) -> bytes:
        return self._tell(delta.kind, delta.text) if delta.text else b""

    def choice(self, choice: Choice) -> bytes:
        """Closes the open item and tells the function calls, each whole."""
        calls = choice.reply.tool_calls
        begun = self._begin("content") if not self._num_items and not calls else b""
        closed = self._close(choice, status="completed" if calls else answer.status(choice))
        return begun + closed + b"".join(self._function_call(answer.function_item(call)) for call in calls)

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        response = answer.finished(self._prepared, choice, created_at=self._created_at)
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: WingbeatError) -> bytes:
        """Both flat, as the API has it, and under ``error``, on which OpenAI's SDK raises."""
        inner = answer.error_body(error)["error"]
        return self._event("error", code=inner["code"], message=inner["message"], param=inner["param"], error=inner)

    def _tell(self, kind: Kind, text: str) -> bytes:
        out = b""
        if self._open != kind:
            out = self._close(None, status="completed") + self._begin(kind)
        self._told[kind] += text
        more = {"logprobs": []} if kind == "content" else {}
        return out + self._part_event(f"{EVENTS[kind]}.delta", kind, delta=text, **more)

    def _begin(self, kind: Kind) -> bytes:
        self._open = kind
        self._num_items += 1
        item = {**self._item(kind), "content": [], "status": "in_progress"}
        return self._event(
            "response.output_item.added", output_index=self._num_items - 1, item=item
        ) + self._part_event("response.content_part.added", kind, part=_part(kind, ""))

    def _close(self, choice: Choice | None, *, status: str) -> bytes:
        """End the open item; logprobs are known once the choice is."""
        kind = self._open
        if kind is None:
            return b""
        self._open = None
        text = self._told[kind]
        part, more = _part(kind, text), {}
        if kind == "content":
            part["logprobs"] = more["logprobs"] = answer.token_logprobs(self._prepared, choice) if choice else []
        item = {**self._item(kind), "content": [part], "status": status}
        return (
            self._part_event(f"{EVENTS[kind]}.done", kind, text=text, **more)
            + self._part_event("response.content_part.done", kind, part=part)
            + self._event("response.output_item.done", output_index=self._num_items - 1, item=item)
        )

    def _item(self, kind: Kind) -> Item:
        if kind == "reasoning":
            return answer.reasoning_item(self._prepared, self._turn_id, self._told[kind])
        return {"type": "message", "id": self._item_id(kind), "role": "assistant"}

    def _item_id(self, kind: Kind) -> str:
        return answer.item_id("msg_" if kind == "content" else "rs_", self._turn_id)

    def _function_call(self, item: Item) -> bytes:
        self._num_items += 1
        index = self._num_items - 1
        place = {"item_id": item["id"], "output_index": index}
        arguments, begun = item["arguments"], {**item, "arguments": "", "status": "in_progress"}
        kind = "response.function_call_arguments"
        return (
            self._event("response.output_item.added", output_index=index, item=begun)
            + self._event(f"{kind}.delta", **place, delta=arguments)
            + self._event(f"{kind}.done", **place, name=item["name"], arguments=arguments)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _part_event(self, name: str, kind: Kind, **data: Any) -> bytes:
        """An event of the open item's only part."""
        place = {"item_id": self._item_id(kind), "output_index": self._num_items - 1, "content_index": 0}
        return self._event(name, **place, **data)

    def _event(self, name: str, /, **data: Any) -> bytes:
        self._num_events += 1
        return event(name, {"sequence_number": self._num_events - 1, **data})


def _part(kind: Kind, text: str) -> Item:
    return answer.text_part(text) if kind == "content" else {"type": "reasoning_text", "text": text}
