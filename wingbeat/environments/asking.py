"""How agents of environments ask a policy: the official ``openai`` SDK, one pool of connections for all episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from wingbeat.client import MODEL_CALL_RETRIES, Episode
from wingbeat.core.errors import ContextOverflow, DependencyMissing

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessage

Message = dict[str, Any]
"""A chat message as the API has it."""

_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, AsyncOpenAI]] = WeakKeyDictionary()
"""By event loop, which connections belong to, and by server: a client for each episode costs more than its calls."""


class OutOfContext(Exception):
    """The conversation does not fit into the policy's context any more: its episode ends with what it has earned."""


def client_of(episode: Episode) -> AsyncOpenAI:
    """The SDK's client for this episode's model calls, on the connections that all episodes share.

    Raises DependencyMissing where the SDK is not installed.
    """
    try:
        from openai import AsyncOpenAI, DefaultAioHttpClient
    except ModuleNotFoundError as error:
        raise DependencyMissing("the openai SDK is not installed here: pip install openai") from error
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    shared = pools.get(episode.base_url)
    if shared is None:
        shared = pools[episode.base_url] = AsyncOpenAI(
            base_url=episode.base_url,
            api_key=episode.api_key,
            http_client=DefaultAioHttpClient(),
            max_retries=MODEL_CALL_RETRIES,
        )
    return shared.with_options(api_key=episode.api_key)


async def ask(
    episode: Episode, messages: Sequence[Message], *, model: str | None = None, **settings: Any
) -> ChatCompletionMessage:
    """One reply of the episode's policy; ``model`` (``episode.model_for(...)``) names another policy or agent.

    ``settings`` go to the API as they are (``max_tokens``, ``tools``, ``response_format`` ...), but for those that are
    None.  Raises :class:`OutOfContext`; other errors of the API pass through, and end the episode.
    """
    client = client_of(episode)
    import openai

    given = {key: value for key, value in settings.items() if value is not None}
    try:
        completion = await client.chat.completions.create(
            model=model or episode.model,
            messages=list(messages),  # type: ignore[arg-type]
            **given,
        )
    except openai.BadRequestError as error:
        if error.code == ContextOverflow.code:
            raise OutOfContext(error.message) from error
        raise
    return completion.choices[0].message


class Conversation:
    """One side of a game, as a chat: observations are user messages, moves are replies.

    ``keep`` False forgets: every prompt is the rules and the last observation, which is short, and all that is needed
    where an observation tells the whole state of the game.
    """

    def __init__(
        self,
        episode: Episode,
        *,
        rules: str = "",
        keep: bool = True,
        max_tokens: int | None = None,
        model: str | None = None,
    ) -> None:
        self._episode = episode
        self._rules = rules
        self._keep = keep
        self._max_tokens = max_tokens
        self._model = model
        self._messages: list[Message] = []

    async def reply_to(self, observation: str) -> str:
        """What the policy says to it, which may be nothing.  Raises :class:`OutOfContext`."""
        text = observation if self._messages or not self._rules else f"{self._rules}\n\n{observation}"
        self._messages.append({"role": "user", "content": text})
        reply = await ask(self._episode, self._messages, model=self._model, max_tokens=self._max_tokens)
        if self._keep:
            self._messages.append({"content": "", **reply.model_dump(exclude_none=True)})
        else:
            self._messages.clear()
        return reply.content or ""


async def close_clients() -> None:
    """Close the connections of this event loop, for a program that goes on without them."""
    for client in _pools.pop(asyncio.get_running_loop(), {}).values():
        await client.close()
