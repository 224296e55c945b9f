"""What a chat template can show, and in which form it wants to be told: found by rendering probes.

Nothing declares this. Templates are code of many hands: some print arguments of calls as JSON, others paste
them as text; some refuse a role, others leave it out without a word, which would train a model on prompts
that lack what its agent said.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wingbeat.core.errors import RequestError
from wingbeat.tracking.json_values import shared_arguments
from wingbeat.tracking.messages import Message, ToolCall

PROBE = "wingbeatprobe"
"""A word that no template treats specially."""
ARGUMENTS_SHOWN = re.compile(r'"wbkey"\s*:\s*"wbvalue"')

SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The ids of calls that Mistral's templates accept."""


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """How a template wants messages to be spelled."""

    arguments_as_text: bool = False
    """Arguments of calls as JSON text, not as objects."""
    short_ids: bool = False
    """Ids of calls with nine letters or digits."""
    empty_content: str | None = ""
    """What stands for no content beside tool calls."""

    def spell(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as templates read them; results of tools carry the name of their tool."""
        names: dict[str, str] = {}
        spelled: list[dict[str, Any]] = []
        for message in messages:
            data = message.to_template_dict()
            if message.tool_calls:
                names.update({call.id: call.name for call in message.tool_calls})
                data["tool_calls"] = [self._spell_call(call) for call in message.tool_calls]
                if not message.content:
                    data["content"] = self.empty_content
            elif message.tool_call_id:
                data["tool_call_id"] = self._spell_id(message.tool_call_id)
                if not message.name and message.tool_call_id in names:
                    data["name"] = names[message.tool_call_id]
            spelled.append(data)
        return spelled

    def _spell_call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.arguments_text if self.arguments_as_text else shared_arguments(call)
        function = {"name": call.name, "arguments": arguments}
        return {"id": self._spell_id(call.id), "type": "function", "function": function}

    def _spell_id(self, call_id: str) -> str:
        if not self.short_ids or SHORT_ID.fullmatch(call_id):
            return call_id
        return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]


FORMS = tuple(
    TemplateForm(arguments_as_text=as_text, short_ids=short, empty_content=empty)
    for empty in ("", None)
    for short in (False, True)
    for as_text in (False, True)
)
"""The usual one first."""

Render = Callable[[Sequence[Message], TemplateForm, "Sequence[Mapping[str, Any]] | None"], str]
"""The prompt text, generation prompt included; raises RequestError where the template refuses."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What was found."""

    form: TemplateForm
    shows_tools: bool
    """Tool schemas of a request reach the prompt."""
    refuses_system: str = ""
    """Why a system message at the front cannot be shown; "" where it can."""
    refuses_later_system: str = ""
    refuses_calls: str = ""
    refuses_parallel_calls: str = ""
    refuses_results: str = ""

    @property
    def shows_all(self) -> bool:
        """Whether there is no kind of message that cannot be shown."""
        system = self.refuses_system or self.refuses_later_system
        return not (system or self.refuses_calls or self.refuses_parallel_calls or self.refuses_results)


LEFT_OUT = "it leaves them out"
USER = Message("user", PROBE)
ANSWER = Message("assistant", "x")
SYSTEM = Message("system", f"{PROBE}system")
CALL_NAME = f"{PROBE}call"
CALL = Message("assistant", tool_calls=(ToolCall.of("call_0", name=CALL_NAME, arguments='{"wbkey": "wbvalue"}'),))
OTHER_NAME = f"{PROBE}other"
CALLS = replace(CALL, tool_calls=(*CALL.tool_calls, ToolCall.of("call_1", name=OTHER_NAME, arguments="{}")))
RESULT = Message("tool", f"{PROBE}result", tool_call_id="call_0")
TOOL_NAME = f"{PROBE}tool"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": TOOL_NAME, "description": "x", "parameters": {"type": "object"}}}
]


def find_traits(render: Render) -> Traits:
    """Render a few short conversations and look what of them is there."""
    shows_tools = not _refusal(render, [USER], FORMS[0], TOOL_NAME, tools=TOOLS)
    tools = TOOLS if shows_tools else None
    form = _best_form(render, [USER, CALL, RESULT], tools) or _best_form(render, [USER, CALL], tools) or FORMS[0]
    refuses_results = _refusal(render, [USER, CALL, RESULT], form, RESULT.content, tools=tools)
    rest = [] if refuses_results else [RESULT]
    other = [] if refuses_results else [replace(RESULT, tool_call_id="call_1")]
    return Traits(
        form=form,
        shows_tools=shows_tools,
        refuses_system=_refusal(render, [SYSTEM, USER], form, SYSTEM.content),
        refuses_later_system=_refusal(render, [USER, ANSWER, SYSTEM, USER], form, SYSTEM.content),
        refuses_calls=_refusal(render, [USER, CALL, *rest], form, CALL_NAME, tools=tools),
        refuses_parallel_calls=_refusal(render, [USER, CALLS, *rest, *other], form, OTHER_NAME, tools=tools),
        refuses_results=refuses_results,
    )


Tools = Sequence[Mapping[str, Any]] | None


def _best_form(render: Render, messages: Sequence[Message], tools: Tools) -> TemplateForm | None:
    """The first form in which the call's arguments are shown as JSON, else in which the call is shown at all."""
    shown: list[TemplateForm] = []
    for form in FORMS:
        try:
            text = render(messages, form, tools)
        except RequestError:
            continue
        if ARGUMENTS_SHOWN.search(text):
            return form
        if CALL_NAME in text:
            shown.append(form)
    return next(iter(shown), None)


def _refusal(
    render: Render, messages: Sequence[Message], form: TemplateForm, wanted: str, *, tools: Tools = None
) -> str:
    """ "" where ``wanted`` is shown, else why it is not."""
    try:
        return "" if wanted in render(messages, form, tools) else LEFT_OUT
    except RequestError as error:
        return str(error.__cause__ or error)


def check_messages(messages: Sequence[Message], traits: Traits) -> None:
    """Raises RequestError for the first message that the template cannot show."""
    for index, message in enumerate(messages):
        field, what, why = "role", "", ""
        if message.role == "system":
            what = "a system message" if index == 0 else "a system message after the first place"
            why = traits.refuses_system if index == 0 else traits.refuses_later_system
        elif message.role == "tool":
            what, why = "results of tools", traits.refuses_results
        elif message.tool_calls:
            field, what, why = "tool_calls", "calls of tools", traits.refuses_calls
            if not why and len(message.tool_calls) > 1:
                what, why = "several calls in one message", traits.refuses_parallel_calls
        if why:
            param = f"messages[{index}].{field}"
            raise RequestError(
                f"{param}: the chat template of this policy cannot show {what} ({why}): say it in a user message, or"
                " set policies.NAME.chat_template to a template that prints them",
                param=param,
            )
