"""``/v1/completions``: text or token ids in, text (and token ids) out; no chat template.

The tables are published in ``docs/reference/completions-fields.md``; a field in none of them is refused
by name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import orjson

from wingbeat.core.errors import RequestError, UnsupportedField, WingbeatError
from wingbeat.server.calls.dialects import fields, openai
from wingbeat.server.calls.dialects.blocks import shown
from wingbeat.server.calls.model_call import Choice, ModelCall, Prepared, Prompt, TextDelta, TextPrompt, TokenPrompt
from wingbeat.server.http.error_answers import error_body

HONOURED = frozenset(
    {"model", "prompt", "stream", "stream_options", "temperature", "top_p", "top_k", "max_tokens", "n", "stop", "seed"}
    | {"logprobs", "return_token_ids"}
)
NO_EFFECT = frozenset({"user"})
REFUSED_UNLESS = {
    "best_of": (1, None),
    "echo": (None,),
    "suffix": ("", None),
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "logit_bias": ({}, None),
}
DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class CompletionsDialect:
    """See :class:`wingbeat.server.calls.dialects.base.Dialect`."""

    name = "completions"
    turn_prefix = "cmpl-"

    def parse(self, body: Any) -> ModelCall:
        body = fields.body_object(body)
        if body.get("echo") is False:
            body = {name: value for name, value in body.items() if name != "echo"}
        fields.check_fields(body, honoured=HONOURED, no_effect=NO_EFFECT, refused_unless=REFUSED_UNLESS)
        policy, agent = fields.policy_and_agent(body)
        return ModelCall(
            policy=policy,
            agent=agent,
            prompt=parse_prompt(body.get("prompt")),
            stream=fields.flag(body, "stream"),
            include_usage=fields.include_usage(body),
            temperature=fields.number(body, "temperature", low=0.0, high=10.0),
            top_p=fields.top_p(body),
            top_k=fields.top_k(body),
            max_tokens=fields.integer(body, "max_tokens", low=1, high=fields.MAX_TOKENS) or DEFAULT_MAX_TOKENS,
            n=fields.integer(body, "n", low=1, high=fields.MAX_N) or 1,
            stop=fields.stop_strings(body.get("stop")),
            seed=fields.seed(body),
            logprobs=_wants_logprobs(body.get("logprobs")),
            return_token_ids=fields.flag(body, "return_token_ids"),
        )

    def answer(self, prepared: Prepared, choices: Sequence[Choice]) -> bytes:
        return orjson.dumps(
            {
                "id": choices[0].turn_id,
                "object": "text_completion",
                "created": int(time.time()),
                "model": openai.model_name(prepared.call),
                "choices": [
                    {
                        "index": choice.index,
                        "text": choice.reply.content,
                        "finish_reason": openai.finish_reason(choice),
                        **_extras(prepared, choice),
                    }
                    for choice in choices
                ],
                "usage": openai.usage(choices),
            }
        )

    def events(self, prepared: Prepared) -> CompletionEvents:
        return CompletionEvents(prepared)

    def error(self, error: WingbeatError) -> bytes:
        return orjson.dumps(error_body(error))


class CompletionEvents:
    """``text_completion`` events: every one is a whole choice with the text that is new."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._frames = openai.Frames("text_completion", prepared.call)

    def begin(self, turn_id: str) -> bytes:
        """Nothing to tell before the text."""
        self._frames.response_id = turn_id
        return b""

    def delta(self, delta: TextDelta) -> bytes:
        return self._frames.frame([{"index": delta.index, "text": delta.text, "logprobs": None, "finish_reason": None}])

    def choice(self, choice: Choice) -> bytes:
        end = {"index": choice.index, "text": "", "finish_reason": openai.finish_reason(choice)}
        return self._frames.frame([end | _extras(self._prepared, choice)])

    def end(self, choices: Sequence[Choice]) -> bytes:
        told = self._frames.frame([], usage=openai.usage(choices)) if self._prepared.call.include_usage else b""
        return told + openai.DONE

    def error(self, error: WingbeatError) -> bytes:
        return openai.error_frame(error)


COMPLETIONS = CompletionsDialect()


def parse_prompt(value: Any) -> Prompt:
    """A text, token ids, or a list of one of either."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(_valid_text(value))
    if not isinstance(value, list) or not value:
        raise RequestError(
            f"`prompt` must be a text, or a non-empty list of token ids, got {shown(value)}", param="prompt"
        )
    if isinstance(value[0], str | list):
        raise UnsupportedField(
            f"`prompt` holds {len(value)} prompts, and a turn has one: send one request for each", param="prompt"
        )
    for place, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise RequestError(f"`prompt[{place}]` must be a token id, got {shown(token)}", param="prompt")
    return TokenPrompt(tuple(value))


def _valid_text(text: str) -> str:
    """Lone surrogates, which JSON can spell, have no bytes and hence no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"`prompt` contains a lone surrogate at character {error.start}: send valid Unicode", param="prompt"
        ) from None
    return text


def _wants_logprobs(value: Any) -> bool:
    """0 and 1 ask for the sampled token's logprob, which is the only one that is kept."""
    if value is None or value is False:
        return False
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RequestError(f"`logprobs` must be an integer from 0, got {shown(value)}", param="logprobs")
    if value > 1:
        raise UnsupportedField(
            "`logprobs` above 1 is not supported: only the sampled token's logprob is kept; send 1", param="logprobs"
        )
    return True


def _extras(prepared: Prepared, choice: Choice) -> dict[str, Any]:
    """Logprobs and token ids, where asked for."""
    extras: dict[str, Any] = {"logprobs": None}
    if prepared.call.logprobs:
        texts = [prepared.host.template.decode([token]) for token in choice.token_ids]
        offsets, at = [], 0
        for text in texts:
            offsets.append(at)
            at += len(text)
        extras["logprobs"] = {
            "tokens": texts,
            "token_logprobs": [value if math.isfinite(value) else None for value in choice.logprobs],
            "top_logprobs": None,
            "text_offset": offsets,
        }
    if prepared.call.return_token_ids:
        extras |= {"token_ids": choice.token_ids, "prompt_token_ids": prepared.plan.prompt_ids.tolist()}
    return extras
