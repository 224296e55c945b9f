"""Garbage in, defined answers out: no dialect lets anything but a RequestError through.

Runs for WINGBEAT_FUZZ_S seconds over all targets (20 by default, `make fuzz` 300), from a random seed that
a failure names.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import corpus
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mutations import damaged

from wingbeat.core.errors import NotFoundError, RequestError
from wingbeat.core.worker_protocol import TokenChunk
from wingbeat.environments.calculator.tokenizer import write_tokenizer
from wingbeat.server.calls.dialects.base import Dialect
from wingbeat.server.calls.model_call import ChatPrompt
from wingbeat.server.calls.routes import DIALECTS
from wingbeat.server.calls.text import Generated, TextStream
from wingbeat.server.calls.visible import TextRules
from wingbeat.server.http.requests import decode_json
from wingbeat.tracking import ChatTemplate, EpisodeGraph, parse_reply

SECONDS = float(os.environ.get("WINGBEAT_FUZZ_S", "20"))
BODIES = {
    "/v1/chat/completions": corpus.CHAT,
    "/v1/completions": corpus.COMPLETIONS,
    "/v1/responses": corpus.RESPONSES,
    "/v1/messages": corpus.MESSAGES,
}
TARGETS = len(BODIES) + 2
MARKUP = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "add", "arguments": ', "{", "}", '"', "\n"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("fuzz")
    write_tokenizer(folder)
    return ChatTemplate.load(folder)


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Rounds of examples until this target's share of the time is over."""
    end = time.monotonic() + SECONDS / TARGETS
    first = secrets.randbits(32)
    for number in itertools.count(first):
        run = settings(
            max_examples=100, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
        )(given(strategy)(check))
        seed(number)(run)()
        if time.monotonic() > end:
            return


@pytest.mark.parametrize("path", sorted(BODIES))
def test_any_body_is_answered_or_refused_by_name(path: str, template: ChatTemplate) -> None:
    dialect = DIALECTS[path]

    def check(body: Any) -> None:
        try:
            prompt_of(dialect, json.dumps(body).encode(), template)
        except (RequestError, NotFoundError) as error:
            assert error.message
            json.loads(dialect.error(error))

    fuzz(damaged(BODIES[path]), check)


def prompt_of(dialect: Dialect, data: bytes, template: ChatTemplate) -> None:
    """From bytes to prompt tokens, as the gateway goes."""
    call = dialect.parse(decode_json(data))
    graph = EpisodeGraph("episode")
    if isinstance(call.prompt, ChatPrompt) and not call.prompt.previous_turn_id:
        graph.resolve(
            policy=call.policy,
            agent=call.agent,
            messages=call.prompt.messages,
            tools=call.tools,
            template=template,
        )


def test_undecodable_bytes_are_refused() -> None:
    def check(data: bytes) -> None:
        for dialect in DIALECTS.values():
            try:
                dialect.parse(decode_json(data))
            except RequestError as error:
                assert error.message

    fuzz(st.binary(max_size=200) | st.binary(max_size=40).map(lambda raw: b'{"model": "' + raw + b'"}'), check)


def test_whatever_a_model_writes_is_a_message_and_streams_as_it_ends(template: ChatTemplate) -> None:
    pieces = st.lists(st.sampled_from(MARKUP) | st.text(max_size=8), max_size=12).map("".join)
    cuts = st.lists(st.integers(1, 6), max_size=20)

    def check(example: tuple[str, Sequence[int], bool]) -> None:
        written, sizes, tools_given = example
        ids = template.encode(written)
        reply = parse_reply(template, ids, tools_given=tools_given, new_id=lambda: secrets.token_hex(4))
        stream = TextStream(template, TextRules(tools_given=tools_given))
        generated, sent, rest = Generated(), {"reasoning": "", "content": ""}, list(ids)
        for size in [*sizes, len(ids) or 1]:
            now, rest = rest[:size], rest[size:]
            generated.extend(TokenChunk("request", tuple(now), tuple(-1.0 for _ in now), 0))
            stream.feed(generated)
            for kind, text in stream.deltas():
                sent[kind] += text
        for kind, text in stream.rest(reply.message):
            sent[kind] += text
        assert sent == {"reasoning": reply.message.reasoning, "content": reply.message.content}

    fuzz(st.tuples(pieces, cuts, st.booleans()), check)
