"""Which prompt a call continues: by its messages, by an earlier response's id, with or without instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wingbeat.core.errors import NotFoundError, RequestError
from wingbeat.core.types import FinishReason, Split, Task
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.calls.model_call import ChatPrompt, ModelCall, TextPrompt
from wingbeat.server.calls.prompts import remember, resolve_prompt, with_kept_tools
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.messages import Message
from wingbeat.tracking.turns import PromptPlan, Turn

TOOLS = [{"type": "function", "function": {"name": "f"}}]
HI, MORE = Message("user", "hi"), Message("user", "more")


class Talk:
    """One episode whose turns all answer "yes"."""

    def __init__(self, desk: Any) -> None:
        group = GroupSpec("g", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 0})
        self.host = desk.solver
        self.episode = OpenEpisode("ep", 1, group, {"solver": None}, "", "digest", 9.0, 0.0, 0.0, EpisodeGraph("ep"))

    def call(self, *messages: Message, previous: str = "", instructions: str = "", **more: Any) -> ModelCall:
        prompt = ChatPrompt(messages, previous, instructions, keeps_tools=more.pop("keeps_tools", False))
        return ModelCall(**{"policy": "solver", "agent": "", "prompt": prompt, **more})

    def plan(self, *messages: Message, **more: Any) -> PromptPlan:
        return resolve_prompt(self.episode, self.host, self.call(*messages, **more))

    def take(self, *messages: Message, **more: Any) -> Turn:
        call = self.call(*messages, **more)
        ids = self.host.template.encode("yes<|im_end|>")
        turn = self.episode.graph.commit(
            resolve_prompt(self.episode, self.host, call),
            turn_id=self.episode.new_turn_id(),
            token_ids=ids,
            logprobs=[-1.0] * len(ids),
            versions=((0, len(ids)),),
            temperature=1.0,
            finish_reason=FinishReason.STOP,
            reply=Message("assistant", "yes"),
        )
        remember(self.episode, call, turn)
        return turn


@pytest.fixture
def talk(open_desk: Any) -> Talk:
    return Talk(open_desk())


def test_a_response_id_stands_for_the_conversation_before_it(talk: Talk) -> None:
    first = talk.take(HI)
    plan = talk.plan(MORE, previous=first.turn_id)
    assert plan.parent is first and plan.news == (MORE,)
    assert plan.prompt_ids.tolist() == talk.plan(HI, Message("assistant", "yes"), MORE).prompt_ids.tolist()


@pytest.mark.parametrize(
    ("before", "after", "extends"),
    [("", "", True), ("be brief", "be brief", True), ("be brief", "be long", False), ("be brief", "", False)],
)
def test_instructions_hold_for_one_request(talk: Talk, before: str, after: str, extends: bool) -> None:
    first = talk.take(HI, instructions=before)
    plan = talk.plan(MORE, previous=first.turn_id, instructions=after)
    assert (plan.parent is first) is extends
    head = (Message("system", after),) if after else ()
    assert plan.messages == (*head, HI, Message("assistant", "yes"), MORE)
    assert bool(plan.fork_reason) is not extends


def test_instructions_that_come_later_stand_before_the_whole_conversation(talk: Talk) -> None:
    first = talk.take(HI)
    plan = talk.plan(MORE, previous=first.turn_id, instructions="be brief")
    assert plan.parent is None and plan.messages[0] == Message("system", "be brief")


def test_a_system_message_of_the_conversation_itself_stays(talk: Talk) -> None:
    system = Message("system", "rules")
    first = talk.take(system, HI)
    assert talk.plan(MORE, previous=first.turn_id).messages[0] == system


@pytest.mark.parametrize("turn_id", ["resp_x", "chatcmpl-ep-1-0"])
def test_an_unknown_response_is_named(talk: Talk, turn_id: str) -> None:
    """Also that of another agent, which is not this model's."""
    talk.take(HI, agent="critic")
    with pytest.raises(NotFoundError, match=turn_id) as error:
        talk.plan(MORE, previous=turn_id)
    assert error.value.param == "previous_turn_id"


def test_a_call_may_leave_the_tools_of_its_thread_unsaid(talk: Talk) -> None:
    first = talk.take(HI, tools=TOOLS)
    call = talk.call(MORE, previous=first.turn_id, keeps_tools=True)
    kept = with_kept_tools(talk.episode, call)
    assert kept == replace(call, tools=TOOLS)
    assert resolve_prompt(talk.episode, talk.host, kept).parent is first
    other = [{"type": "function", "function": {"name": "g"}}]
    assert with_kept_tools(talk.episode, replace(call, tools=other)).tools == other
    text = ModelCall(policy="solver", agent="", prompt=TextPrompt("a"))
    assert with_kept_tools(talk.episode, text) is text


def test_tools_that_a_template_hides_are_refused_with_the_policys_name(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk.host.template, "shows_tools", False)
    with pytest.raises(RequestError) as caught:
        talk.plan(HI, tools=TOOLS)
    assert caught.value.param == "tools"
    assert "policy 'solver' does not show tools" in caught.value.message
    assert "policies.solver.chat_template" in caught.value.message
