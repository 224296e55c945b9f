"""Plain completions: what a request means, and answers as the official client's own types read them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from wingbeat.core.errors import RequestError, UnsupportedField
from wingbeat.core.types import FinishReason, Split, Task
from wingbeat.core.worker_protocol import Generate
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.calls.dialects.completions import COMPLETIONS, HONOURED, NO_EFFECT, REFUSED_UNLESS
from wingbeat.server.calls.model_call import Choice, ModelCall, TextDelta, TextPrompt, TokenPrompt
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.tracking.graph import EpisodeGraph

FIELDS = sorted(HONOURED | NO_EFFECT | set(REFUSED_UNLESS) | {"made_up"})


def parse(**fields: Any) -> ModelCall:
    return COMPLETIONS.parse({"model": "solver", "prompt": "hi", **fields})


def test_the_smallest_request_has_openais_defaults() -> None:
    assert parse() == ModelCall(policy="solver", agent="", prompt=TextPrompt("hi"), max_tokens=16)


@pytest.mark.parametrize(
    ("value", "prompt"),
    [
        ("hi", TextPrompt("hi")),
        (["hi"], TextPrompt("hi")),
        ("", TextPrompt("")),
        ([1, 2], TokenPrompt((1, 2))),
        ([[1, 2]], TokenPrompt((1, 2))),
        ([7], TokenPrompt((7,))),
    ],
)
def test_every_form_of_prompt(value: Any, prompt: Any) -> None:
    assert parse(prompt=value).prompt == prompt


def test_every_honoured_field_arrives() -> None:
    call = parse(
        model="solver:critic",
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.5,
        top_p=0.5,
        top_k=-1,
        max_tokens=7,
        n=2,
        stop="a",
        seed=3,
        logprobs=0,
        return_token_ids=True,
        echo=False,
        user="me",
    )
    assert (call.policy, call.agent, call.stream, call.include_usage) == ("solver", "critic", True, True)
    assert (call.temperature, call.top_p, call.top_k, call.max_tokens, call.n) == (0.5, 0.5, 0, 7, 2)
    assert (call.stop, call.seed, call.logprobs, call.return_token_ids) == (("a",), 3, True, True)


BAD = {
    "prompt": [None, [], 5, {}, ["a", "b"], [[1], [2]], [1, "a"], [-1], [2**31], [True], ["a\ud800"], [[]]],
    "echo": [True, "yes"],
    "suffix": ["b"],
    "best_of": [2],
    "logprobs": [2, -1, True, "1"],
    "logit_bias": [{"5": 1}],
    "max_tokens": [0, 1.5],
    "messages": [[]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_every_error_names_the_field_at_fault(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        parse(**{name: value})
    assert error.value.param == name
    assert name in error.value.message


@pytest.mark.parametrize("name", sorted(REFUSED_UNLESS))
def test_fields_that_say_nothing_pass_and_others_are_refused_by_name(name: str) -> None:
    for harmless in REFUSED_UNLESS[name]:
        assert parse(**{name: harmless}) == parse()
    with pytest.raises(UnsupportedField, match=f"`{name}`"):
        parse(**{name: 7})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)


@given(JSON | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_any_json_gives_a_call_or_a_request_error(data: Any) -> None:
    try:
        COMPLETIONS.parse(data)
    except RequestError as error:
        assert error.message


# --- answers ---------------------------------------------------------------------------------------


class Talk:
    """An episode on a desk with one engine that says what the test tells it."""

    def __init__(self, desk: Any, join_engine: Any) -> None:
        self.desk, self.engine = desk, join_engine(desk.engines)
        self.engine.serve()
        self.template = desk.solver.template
        group = GroupSpec("g", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 0})
        self.episode = OpenEpisode("ep", 1, group, {"solver": None}, "", "digest", 100.0, 0.0, 0.0, EpisodeGraph("ep"))

    def prepare(self, **fields: Any) -> Any:
        return self.desk.gateway.prepare(self.episode, parse(**fields), turn_prefix=COMPLETIONS.turn_prefix)

    async def say(self, text: str, finish: FinishReason, *, stream: bool) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        request, ids = self.engine.of(Generate)[-1].request_id, self.template.encode(text)
        pieces = [[i] for i in ids] if stream else [ids]
        for number, piece in enumerate(pieces, start=1):
            self.engine.say(request, *piece, finish=finish if number == len(pieces) else None)

    async def complete(self, text: str, finish: FinishReason = FinishReason.STOP, **fields: Any) -> Completion:
        prepared = self.prepare(**fields)
        call = asyncio.create_task(self.desk.gateway.complete(self.episode, prepared))
        await self.say(text, finish, stream=bool(fields.get("stop")))
        return Completion.model_validate(json.loads(COMPLETIONS.answer(prepared, await call)), strict=True)


@pytest.fixture
def talk(open_desk: Any, join_engine: Any) -> Talk:
    return Talk(open_desk(), join_engine)


async def test_a_plain_answer_has_no_markup_read_into_it(talk: Talk) -> None:
    text = "<think>x</think><tool_call>{}"
    answer = await talk.complete(text + "<|im_end|>", logprobs=1, return_token_ids=True, max_tokens=50)
    (choice,) = answer.choices
    assert answer.id == "cmpl-ep-1-0" and answer.model == "solver" and answer.object == "text_completion"
    assert (choice.text, choice.finish_reason) == (text, "stop")
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert set(choice.logprobs.token_logprobs) == {-0.5}
    told: dict[str, Any] = choice.model_dump()
    assert told["prompt_token_ids"] == talk.template.encode("hi")
    assert told["token_ids"] == talk.template.encode(text + "<|im_end|>")
    assert answer.usage is not None and answer.usage.prompt_tokens == 2


async def test_text_turns_continue_each_other_with_a_stop_string_that_the_caller_puts_back(talk: Talk) -> None:
    first = await talk.complete("a STOP", stop=["STOP"])
    assert first.choices[0].text == "a "
    await talk.complete("b", prompt="hia STOP then")
    one, two = talk.episode.graph.turns
    assert two.parent_id == one.turn_id
    assert talk.template.decode(talk.episode.graph.prompt_ids(two).tolist()) == "hia STOP then"


async def test_token_turns_continue_each_other(talk: Talk) -> None:
    first = await talk.complete("ab", FinishReason.LENGTH, prompt=[1, 2], return_token_ids=True)
    told: dict[str, Any] = first.choices[0].model_dump()
    await talk.complete("c", prompt=[*told["prompt_token_ids"], *told["token_ids"], 9])
    one, two = talk.episode.graph.turns
    assert (two.parent_id, two.segment.tolist()) == (one.turn_id, [9])
    assert first.choices[0].finish_reason == "length"


async def test_a_token_that_the_model_does_not_have_is_refused(talk: Talk) -> None:
    with pytest.raises(RequestError, match="token id 9999") as error:
        talk.prepare(prompt=[1, 9999])
    assert error.value.param == "prompt"


async def test_a_stream_is_text_end_and_usage(talk: Talk) -> None:
    prepared = talk.prepare(stream=True, stream_options={"include_usage": True})
    writer, frames, done = COMPLETIONS.events(prepared), [b""], []
    speaking = asyncio.create_task(talk.say("hey €<|im_end|>", FinishReason.STOP, stream=True))
    async for item in talk.desk.gateway.stream(talk.episode, prepared):
        if isinstance(item, Choice):
            done.append(item)
            frames.append(writer.choice(item))
        else:
            frames.append(writer.delta(item) if isinstance(item, TextDelta) else writer.begin(prepared.turn_ids[0]))
    frames.append(writer.end(done))
    await speaking
    *events, last = b"".join(frames).decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    *chunks, told = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hey €"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]
    assert told["choices"] == [] and told["usage"]["completion_tokens"] == 8
    assert {chunk["id"] for chunk in (*chunks, told)} == {"cmpl-ep-1-0"}
