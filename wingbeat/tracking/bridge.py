"""How the text of a conversation continues after an earlier turn.

The tokens of an earlier turn are kept as they are, so only what the template writes *after* that
turn's end is rendered. This is exact if the template leaves the past alone: the shorter conversation,
up to its last end-of-turn marker, must be a string prefix of the longer one. Templates that strip old
reasoning or rewrite earlier turns fail this, and the caller forks.

    shorter  <s>user: hi<end>assistant: hello<end>\\n
             └────────────── head ─────────────┘
    longer   <s>user: hi<end>assistant: hello<end>\\nuser: bye<end>assistant:
             └────────────── head ─────────────┘└───────── remainder ───────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wingbeat.core.errors import RequestError
from wingbeat.tracking.messages import Message
from wingbeat.tracking.template import ChatTemplate

REWRITES_HISTORY = "template rewrites history"
NO_CLOSED_HISTORY = "template cannot end with a reply"
NO_END_OF_TURN = "template marks no end of the turn"


@dataclass(frozen=True, slots=True)
class Bridge:
    """What to append to an earlier turn's tokens."""

    marker_id: int
    """The end-of-turn token that the template writes there, for replies that lack one."""
    remainder_ids: tuple[int, ...]
    """Tokens of everything after the marker, generation prompt included."""


def build_bridge(
    template: ChatTemplate,
    *,
    history: Sequence[Message],
    tail: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
) -> Bridge | str:
    """The continuation of ``history`` (which ends with an assistant's reply) by ``tail``, or why there is none.

    Raises RequestError where the template refuses the whole conversation.
    """
    longer = template.render([*history, *tail], tools=tools, add_generation_prompt=True)
    try:
        shorter = template.render(history, tools=tools, add_generation_prompt=False)
    except RequestError:
        return NO_CLOSED_HISTORY
    place, marker = max(((shorter.rfind(text), text) for text in template.turn_end_texts), default=(-1, ""))
    if place < 0 or not _is_trailing(shorter[place + len(marker) :], template=template):
        return NO_END_OF_TURN
    if not longer.startswith(shorter[: place + len(marker)]):
        return REWRITES_HISTORY
    # The marker is encoded along, so that tokenizers treat the text after it as they would in its place.
    ids = template.encode(longer[place:])
    marker_place = next((i for i, token in enumerate(ids) if token in template.turn_end_ids), None)
    if marker_place is None:
        return NO_END_OF_TURN
    return Bridge(ids[marker_place], tuple(ids[marker_place + 1 :]))


def _is_trailing(text: str, *, template: ChatTemplate) -> bool:
    """Whether only white space and ends of text follow; otherwise the reply itself stands after the marker."""
    for token in template.eos_texts:
        text = text.replace(token, "")
    return not text.strip()
