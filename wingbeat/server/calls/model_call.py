"""One model call in our own terms: what every wire dialect is parsed into and answered from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.tracking.messages import Message
from wingbeat.tracking.turns import PromptPlan

if TYPE_CHECKING:
    from wingbeat.server.policies.host import PolicyHost


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation; with ``previous_turn_id`` only what is new after that turn's reply."""

    messages: tuple[Message, ...]
    previous_turn_id: str = ""
    instructions: str = ""
    """A system message in front of the whole conversation that holds for this call only: with
    ``previous_turn_id`` it stands in place of that turn's own instructions, and "" takes those away."""
    keeps_tools: bool = False
    """With ``previous_turn_id``: the call names no tools, those of that turn hold."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text to be continued, no chat template."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to be continued."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the reply may, must or must not call tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    """With ``required``: the only tools that may be called; () allows all."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One validated request."""

    policy: str
    agent: str
    prompt: Prompt
    tools: list[dict[str, Any]] | None = None
    """In OpenAI's chat shape, whatever the dialect."""
    tool_choice: ToolChoice = ToolChoice()
    one_tool_call: bool = False
    """``parallel_tool_calls: false``."""
    schema: dict[str, Any] | None = None
    """The JSON schema that the reply's content must match."""
    stream: bool = False
    include_usage: bool = False
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call with its prompt and effective sampling: nothing can be refused any more."""

    call: ModelCall
    host: PolicyHost
    version: int | None
    plan: PromptPlan
    sampling: SamplingParams
    enforced: dict[str, str]
    """Response headers that tell what the server decided."""
    turn_ids: tuple[str, ...]
    """One for each choice; the first is the response's id."""


@dataclass(slots=True)
class Choice:
    """One completed turn, as the dialects answer with it."""

    index: int
    turn_id: str
    reply: Message
    finish_reason: FinishReason
    stop_text: str
    """The stop string that ended it, or ""."""
    token_ids: list[int]
    logprobs: list[float]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Streaming: text that became final for one choice."""

    index: int
    turn_id: str
    text: str
    kind: Literal["content", "reasoning"] = "content"
