"""DeepSeek: a block of calls at the end of the reply.

Each call is ``function``, a separator, its name and fenced JSON, or (newer) its name, a separator and bare JSON.
"""

from __future__ import annotations

from wingbeat.tracking.formats import DEEPSEEK_CALL, DEEPSEEK_CALLS, DEEPSEEK_SEPARATOR
from wingbeat.tracking.messages import ToolCall
from wingbeat.tracking.parsing.calls import Extracted, NewId, make_call, parse_json

FENCE = "```"


def extract_deepseek(text: str, new_id: NewId) -> Extracted:
    """Calls that cannot be read stay in the content, with the marks of the block."""
    content, mark, block = text.partition(DEEPSEEK_CALLS[0])
    if not mark:
        return Extracted(text)
    block = block.partition(DEEPSEEK_CALLS[1])[0]
    parts = block.split(DEEPSEEK_CALL[0])[1:]
    calls = tuple(call for part in parts if (call := _read(part, new_id=new_id)) is not None)
    if not calls or len(calls) < len(parts):
        return Extracted(text, malformed=max(1, len(parts) - len(calls)))
    return Extracted(content, calls)


def _read(part: str, *, new_id: NewId) -> ToolCall | None:
    body, closed, _ = part.partition(DEEPSEEK_CALL[1])
    head, mark, rest = body.partition(DEEPSEEK_SEPARATOR)
    if not closed or not mark:
        return None
    name, fence, fenced = rest.partition(FENCE)
    if head.strip() != "function" or not fence:
        return make_call(head.strip(), parse_json(rest), new_id=new_id)
    arguments, _, after = fenced.removeprefix("json").rpartition(FENCE)
    return None if after.strip() else make_call(name.strip(), parse_json(arguments), new_id=new_id)
