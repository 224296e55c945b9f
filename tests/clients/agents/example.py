"""What the example agents share: where the model is, the question, the tool, and how the answer is told.

    python AGENT.py MODE BASE_URL API_KEY MODEL

``BASE_URL`` ends in ``/v1``, as OpenAI's SDK wants it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import BaseModel

QUESTION = "what is 2 plus 3 ?"
MAX_TOKENS = 256


class Arguments(BaseModel):
    """Adds two whole numbers."""

    a: int
    b: int
    note: str


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}},
    "required": ["a", "b", "note"],
    "additionalProperties": False,
}


def add(a: int, b: int, note: str) -> str:
    """Adds two whole numbers.

    Args:
        a: the first number
        b: the second number
        note: what the sum is for
    """
    return str(a + b)


def call_add(arguments: str) -> str:
    """The tool's answer to a call's arguments."""
    return add(**Arguments.model_validate_json(arguments).model_dump())


class Setting:
    """The command line."""

    def __init__(self) -> None:
        self.mode, self.base_url, self.api_key, self.model = sys.argv[1:]

    @property
    def anthropic_url(self) -> str:
        """Anthropic's SDK adds ``/v1`` itself."""
        return self.base_url.removesuffix("/v1")


def tell(answer: str, *, num_texts: int = 0) -> None:
    """The agent's last words: one line of JSON.  ``num_texts``: how many pieces of text streamed in."""
    sys.stdout.write("\n" + json.dumps({"answer": answer, "num_texts": num_texts}) + "\n")
