"""Ten thousand turns of eight thousand tokens fit into one process; nothing grows with turns times length."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable

import pytest

from wingbeat.tracking import ChatTemplate, EpisodeGraph, Message, Turn
from wingbeat.tracking.conversation import Conversation, Conversations

GIGABYTE = 2**30
SCRIPT = """
import resource, sys
import numpy as np
from wingbeat.core.types import FinishReason
from wingbeat.tracking import EpisodeGraph, Message, PromptPlan

TURNS, TOKENS = 10_000, 8_000
rng = np.random.default_rng(0)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def text(number, length):
    return f"{number:08}" + "words of the task " * (length // 18)


def add(graph, number, parent, *, segment, sampled, news, reply):
    own = rng.integers(0, 150_000, segment, np.int32)
    plan = PromptPlan(
        policy="solver",
        agent="",
        parent=parent,
        prompt_ids=np.empty((0 if parent is None else parent.end) + segment, np.int32),
        segment=own,
        news=(Message("user", news),),
    )
    return graph.commit(
        plan,
        turn_id=f"turn-{number}",
        token_ids=rng.integers(0, 150_000, sampled, np.int32),
        logprobs=np.full(sampled, -0.5, np.float32),
        versions=[(0, sampled)],
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        reply=Message("assistant", reply),
    )


def forks(graph):
    "Every turn has a prompt of its own, and the text of it."
    for number in range(TURNS):
        add(graph, number, None, segment=6_000, sampled=2_000, news=text(number, 24_000), reply=text(number, 8_000))


def grown(graph):
    "Conversations of twenty turns, the last of which has 8,000 tokens."
    for number in range(TURNS):
        parent = None if number % 20 == 0 else graph.turn(f"turn-{number - 1}")
        add(graph, number, parent, segment=300, sampled=100, news=text(number, 1_200), reply=text(number, 400))


def endless(graph):
    "One conversation of all turns: twenty thousand messages."
    parent = None
    for number in range(TURNS):
        parent = add(graph, number, parent, segment=6, sampled=2, news=f"question {number}", reply=f"answer {number}")


before = peak()
graph = EpisodeGraph("e")
globals()[sys.argv[1]](graph)
assert graph.num_turns == TURNS
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "limit_bytes"), [("forks", GIGABYTE), ("grown", GIGABYTE // 8), ("endless", GIGABYTE // 16)]
)
def test_ten_thousand_turns_stay_under_a_gigabyte(case: str, limit_bytes: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, case], check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < limit_bytes


def test_prompts_do_not_outlive_their_request(chatml: ChatTemplate, say: Callable[..., Turn]) -> None:
    """A continued turn keeps its own segment; the whole prompt belongs to the plan and goes with it."""
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [Message("user", "hello")], "as<|im_end|>")
    plan = graph.resolve(
        policy="solver", agent="", messages=[*first.messages, Message("user", "so")], tools=None, template=chatml
    )
    whole = weakref.ref(plan.prompt_ids)
    say(graph, chatml, plan.messages, "he<|im_end|>")
    del plan
    gc.collect()
    assert whole() is None


def talk(chatml: ChatTemplate, say: Callable[..., Turn]) -> None:
    """An episode of four turns, of which three continue the first, two of them alike."""
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [Message("user", "hello")], "as<|im_end|>")
    for text in ("so", "and", "so"):
        say(graph, chatml, [*first.messages, Message("user", text)], "he<|im_end|>")


def test_a_graph_is_freed_without_the_collector(chatml: ChatTemplate, say: Callable[..., Turn]) -> None:
    """Control looks for cycles rarely: thousands of episodes would stay in memory meanwhile."""
    kinds = (EpisodeGraph, Turn, Conversation, Message)
    gc.collect()
    gc.disable()
    before = Counter(type(found) for found in gc.get_objects())
    try:
        for _ in range(3):
            talk(chatml, say)
        after = Counter(type(found) for found in gc.get_objects())
    finally:
        gc.enable()
    assert {kind: after[kind] - before[kind] for kind in kinds} == dict.fromkeys(kinds, 0)


def test_a_long_conversation_is_freed_without_deep_recursion() -> None:
    known = Conversations()
    last = known.extend(known.start, (Message("user", str(number)) for number in range(50_000)))
    assert last.depth == 50_000
    del known, last


def test_a_fork_shares_the_messages_of_its_history(chatml: ChatTemplate, say: Callable[..., Turn]) -> None:
    graph = EpisodeGraph("e")
    history = tuple(Message("user" if n % 2 == 0 else "assistant", f"text {n}") for n in range(40))
    for number in range(20):
        copies = [Message(message.role, str(message.content)) for message in history]
        say(graph, chatml, [*copies, Message("user", f"fork {number}")], "as<|im_end|>")
    assert len({id(message) for turn in graph.turns for message in turn.messages}) == 40 + 20 * 2
