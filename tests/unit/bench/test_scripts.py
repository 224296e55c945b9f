"""Scripts: which reply a call gets."""

from __future__ import annotations

import json

import pytest

from bench.scripts import Reply, Rule, ScriptedCall, as_script, by_rules, in_order, load_script
from wingbeat.core.types import FinishReason


def call(turn: int = 0, *, prompt: str = "") -> ScriptedCall:
    return ScriptedCall("solver", "e", turn, 0, 8, False, lambda: prompt)


def test_replies_come_in_order_per_episode_and_one_too_many_fails():
    script = as_script(["a", Reply("b", FinishReason.LENGTH)])
    assert [script(call(0)), script(call(1)), script(call(0))] == ["a", Reply("b", FinishReason.LENGTH), "a"]
    beyond = script(call(2))
    assert isinstance(beyond, Reply)
    assert beyond.finish is FinishReason.ERROR and "there are 2 replies, and this is call 3" in beyond.text


def test_repeating_replies_start_over():
    script = in_order(["a", "b"], repeat=True)
    assert [script(call(turn)) for turn in range(5)] == ["a", "b", "a", "b", "a"]


def test_first_matching_rule_answers_and_counts_for_itself():
    script = by_rules([Rule("system.*agent one", ["1", "2"]), Rule("agent two", ["x"])])
    assert script(call(prompt="system\nagent one")) == "1"
    assert script(call(prompt="agent two")) == "x"
    assert script(call(prompt="system\nagent one")) == "2"
    unmatched = script(call(prompt="someone else"))
    assert isinstance(unmatched, Reply) and "someone else" in unmatched.text


def test_decoding_happens_once_and_only_if_asked_for():
    decoded = []
    asked = ScriptedCall("solver", "e", 0, 0, 8, False, lambda: decoded.append(1) or "text")
    assert in_order(["a"])(asked) == "a" and decoded == []
    assert asked.prompt == asked.prompt == "text" and decoded == [1]


def test_scripts_load_from_json(tmp_path):
    path = tmp_path / "script.json"
    path.write_text(json.dumps(["a", {"text": "b", "finish": "length", "hold_after": 2}]))
    script = load_script(path)
    assert [script(call(0)), script(call(1))] == ["a", Reply("b", FinishReason.LENGTH, hold_after=2)]
    path.write_text(json.dumps({"rules": [{"pattern": "p", "replies": ["c"], "repeat": True}, {"replies": ["d"]}]}))
    script = load_script(path)
    assert [script(call(prompt=p)) for p in ("p", "q", "p")] == ["c", "d", "c"]
    path.write_text('{"replies": ["a"]}')
    with pytest.raises(ValueError, match="expected a list of replies"):
        load_script(path)
