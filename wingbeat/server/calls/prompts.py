"""From a call's prompt to the tokens that it continues, whatever the prompt is made of."""

from __future__ import annotations

from dataclasses import replace

from wingbeat.core.errors import NotFoundError, RequestError
from wingbeat.server.calls.model_call import ChatPrompt, ModelCall, TextPrompt
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.server.policies.host import PolicyHost
from wingbeat.tracking.messages import Message
from wingbeat.tracking.turns import PromptPlan, Turn, TurnKind


def with_kept_tools(episode: OpenEpisode, call: ModelCall) -> ModelCall:
    """The call with the tools of the turn that it continues, where it leaves them unsaid."""
    prompt = call.prompt
    if not isinstance(prompt, ChatPrompt) or not prompt.keeps_tools or call.tools:
        return call
    previous = _previous(episode, call, prompt.previous_turn_id)
    return replace(call, tools=episode.tools_by_digest.get(previous.tools_digest))


def resolve_prompt(episode: OpenEpisode, host: PolicyHost, call: ModelCall) -> PromptPlan:
    """Changes nothing.  Raises RequestError, or NotFoundError for an earlier turn that is not there."""
    prompt, graph = call.prompt, episode.graph
    if isinstance(prompt, ChatPrompt):
        if call.tools and not host.template.shows_tools:
            raise RequestError(
                f"the chat template of policy {call.policy!r} does not show tools to the model: leave `tools` out, or"
                f" set policies.{call.policy}.chat_template to a template that prints them",
                param="tools",
            )
        messages, previous = _conversation(episode, call, prompt)
        return graph.resolve(
            policy=call.policy,
            agent=call.agent,
            messages=messages,
            tools=call.tools,
            template=host.template,
            reasoning=host.config.reasoning,
            previous=previous,
        )
    if isinstance(prompt, TextPrompt):
        return graph.resolve_text(policy=call.policy, agent=call.agent, text=prompt.text, template=host.template)
    unknown = max(prompt.token_ids)
    if unknown >= host.template.num_tokens:
        raise RequestError(
            f"`prompt` holds token id {unknown}, and policy {call.policy!r} has {host.template.num_tokens} tokens",
            param="prompt",
        )
    return graph.resolve_tokens(policy=call.policy, agent=call.agent, token_ids=prompt.token_ids)


def remember(episode: OpenEpisode, call: ModelCall, turn: Turn) -> None:
    """Keep of a committed call what a later one may leave unsaid."""
    if turn.tools_digest and call.tools:
        episode.tools_by_digest.setdefault(turn.tools_digest, call.tools)
    if isinstance(call.prompt, ChatPrompt) and call.prompt.instructions:
        episode.instructed.add(turn.turn_id)


def _conversation(episode: OpenEpisode, call: ModelCall, prompt: ChatPrompt) -> tuple[tuple[Message, ...], Turn | None]:
    """The messages to render, and the turn behind which they stand (None: they are the whole conversation).

    Instructions are a system message of one request: they are never carried over.  The same ones again
    extend the earlier turn; others, or none, stand before its conversation anew, which is a fork.
    """
    head = (Message("system", prompt.instructions),) if prompt.instructions else ()
    if not prompt.previous_turn_id:
        return (*head, *prompt.messages), None
    previous = _previous(episode, call, prompt.previous_turn_id)
    instructed = previous.turn_id in episode.instructed
    if prompt.instructions == (previous.messages[0].content if instructed else ""):
        return prompt.messages, previous
    earlier = previous.messages[1:] if instructed else previous.messages
    return (*head, *earlier, *prompt.messages), None


def _previous(episode: OpenEpisode, call: ModelCall, turn_id: str) -> Turn:
    """The turn that the caller continues by its id."""
    try:
        turn = episode.graph.turn(turn_id)
    except KeyError:
        turn = None
    if turn is None or (turn.policy, turn.agent) != (call.policy, call.agent) or turn.kind is not TurnKind.CHAT:
        raise NotFoundError(
            f"no response {turn_id!r} of this model is known in this episode: ids are valid within one episode"
            " and for one model; send the whole conversation",
            param="previous_turn_id",
        )
    return turn
