"""How the text of a conversation continues after an earlier turn.

The tokens of an earlier turn are kept as they are, so only what the template writes *after* that turn's
end is rendered. This is exact if the template leaves the past alone. There are three ways to see it, the
cheapest first; where none holds, the template rewrites history, and the caller forks.

1. The text of the prompt that the reply was sampled on is a prefix of the new text, and the reply stands
   directly behind it, whole, up to its end-of-turn marker.
2. The shorter conversation, rendered by itself, is up to its last end-of-turn marker a prefix of the new
   text.

    shorter  <s>user: hi<end>assistant: hello<end>\\n
             └──────────── head ─────────────┘
    longer   <s>user: hi<end>assistant: hello<end>\\nuser: bye<end>assistant:
             └──────────── head ─────────────┘     └───────── remainder ───┘

3. As 1, for prompts of another process, of which only the tokens are left: rendered again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wingbeat.core.errors import RequestError
from wingbeat.tracking.excerpts import common_length, difference
from wingbeat.tracking.messages import Message
from wingbeat.tracking.probes import PROBE
from wingbeat.tracking.template import ChatTemplate
from wingbeat.tracking.turns import TextKey

REWRITES_HISTORY = "template rewrites history"
NO_CLOSED_HISTORY = "template cannot end with a reply"
NO_END_OF_TURN = "template marks no end of the turn"

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Bridge:
    """What to append to an earlier turn's tokens."""

    marker_id: int
    """The end-of-turn token that the template writes there, for replies that lack one."""
    remainder_ids: tuple[int, ...]
    """Tokens of everything after the marker, generation prompt included."""


def build_bridge(
    template: ChatTemplate,
    longer: str,
    *,
    history: Sequence[Message],
    tail: Sequence[Message],
    tools: Tools,
    asked: TextKey | None = None,
) -> Bridge | str:
    """The continuation of ``history`` (which ends with an assistant's reply) by ``tail``, or why there is none.

    ``longer``: both, rendered with the generation prompt. ``asked``: the prompt of that reply, if known.
    """
    place = None if asked is None else _end_behind(template, longer, asked=asked, reply=history[-1])
    if place is None:
        found = _end_at_the_end(template, longer, history=history, tools=tools)
        place = _end_in_context(template, longer, history, tail, tools=tools) if isinstance(found, str) else found
        if place is None:
            return found if isinstance(found, str) else NO_END_OF_TURN
    # The marker is encoded along, so that tokenizers treat the text after it as they would in its place.
    ids = template.encode(longer[place:])
    marker_place = next((i for i, token in enumerate(ids) if token in template.turn_end_ids), None)
    if marker_place is None:
        return NO_END_OF_TURN
    return Bridge(ids[marker_place], tuple(ids[marker_place + 1 :]))


def _end_behind(template: ChatTemplate, longer: str, *, asked: TextKey, reply: Message) -> int | None:
    """Where the marker stands behind the prompt and a reply without marks of its own; None where unsure."""
    if not asked.begins(longer):
        return None
    places = [at for text in template.turn_end_texts if (at := longer.find(text, asked.length)) >= 0]
    if not places:
        return None
    place = min(places)
    written, content = longer[asked.length : place].strip(), reply.content.strip()
    if reply.reasoning or reply.tool_calls:
        whole = content in written and reply.reasoning.strip() in written
        for call in reply.tool_calls:
            has_marks = any(text in call.arguments_key for text in template.turn_end_texts)
            whole = whole and call.name in written and not has_marks
    else:
        whole = written == content
    return place if whole else None


def _end_at_the_end(template: ChatTemplate, longer: str, *, history: Sequence[Message], tools: Tools) -> int | str:
    """Where the reply's marker stands in ``longer``, told by rendering ``history`` alone; or why it is not there."""
    try:
        shorter = template.render(history, tools=tools, add_generation_prompt=False)
    except RequestError:
        return NO_CLOSED_HISTORY
    place, marker = max(((shorter.rfind(text), text) for text in template.turn_end_texts), default=(-1, ""))
    if place < 0 or not _is_trailing(shorter[place + len(marker) :], template=template):
        return NO_END_OF_TURN
    # Another marker of the same meaning may stand there: one ends a turn, another the conversation.
    if longer.startswith(shorter[:place]) and longer.startswith(template.turn_end_texts, place):
        return place
    at = common_length(shorter, longer)
    return f"{REWRITES_HISTORY} at character {at} ({difference(shorter, longer, at=at)})"


def _is_trailing(text: str, *, template: ChatTemplate) -> bool:
    """Whether only white space and ends of text follow; otherwise the reply itself stands after the marker."""
    for token in template.eos_texts:
        text = text.replace(token, "")
    return not text.strip()


def _end_in_context(
    template: ChatTemplate, longer: str, history: Sequence[Message], tail: Sequence[Message], *, tools: Tools
) -> int | None:
    """Where the reply's marker stands, told by changing the reply and what follows; None where history is rewritten."""
    *asked, reply = history
    if not tail or not asked or reply.reasoning:
        return None
    other_reply = replace(reply, content=PROBE)
    other_tail = replace(tail[0], content=PROBE + tail[0].content)
    try:
        prompt = template.render(asked, tools=tools, add_generation_prompt=True)
        replied = template.render([*asked, other_reply, *tail], tools=tools, add_generation_prompt=True)
        followed = template.render([*history, other_tail, *tail[1:]], tools=tools, add_generation_prompt=True)
    except RequestError:
        return None
    if not longer.startswith(prompt) or replied.find(PROBE, len(prompt)) != len(prompt):
        return None
    common = common_length(longer, followed)
    place = max((longer.rfind(text, len(prompt), common) for text in template.turn_end_texts), default=-1)
    stands = longer[len(prompt) : max(place, 0)].strip().startswith(reply.content.strip())
    return place if place >= 0 and stands else None
