"""Tool calls as text, for models whose chat template knows no tools.

The agent's instructions list the tools; a reply acts by ending in one block

    ```action
    {"name": "shell", "arguments": {"command": "ls"}}
    ```

and reads the observation in the next message.  A reply without such a block ends the episode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from wingbeat.tools import Toolbox, ToolResult

_BLOCK = re.compile(r"```action\s*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def instructions(schemas: Sequence[dict[str, Any]]) -> str:
    """How to act, and with what."""
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in schemas]
    return (
        "You act by ending your reply in one block like this:\n"
        '```action\n{"name": "list_files", "arguments": {"path": "."}}\n```\n'
        "The next message shows what came of it. These are the tools, with the JSON schema of their arguments:\n"
        + "\n".join(lines)
    )


def has_action(text: str) -> bool:
    return _BLOCK.search(text) is not None


async def act(text: str, tools: Toolbox) -> ToolResult:
    """The result of a reply's first block; what is wrong with a block is an observation, too."""
    block = _BLOCK.search(text)
    assert block is not None, "the caller asks has_action first"
    try:
        action = json.loads(block.group(1))
        name, arguments = str(action["name"]), action.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"error: expected a JSON object with name and arguments in the action block ({error})"
        return ToolResult(said, is_error=True)
    return await tools.call(name, arguments if isinstance(arguments, dict) else json.dumps(arguments))
