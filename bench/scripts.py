"""What a scripted engine says: replies, and the rules that choose one for a call.

A script is a function from a :class:`ScriptedCall` to a :class:`Reply` (or its text).  Most are made by
:func:`in_order` (the n-th call of an episode gets the n-th reply) or :func:`by_rules` (as :func:`in_order`,
but first a regular expression on the prompt chooses the list).
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wingbeat.core.types import FinishReason


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted answer."""

    text: str
    """What is "sampled"; special tokens in it count as such.  With finish ERROR, the engine's message."""
    finish: FinishReason = FinishReason.STOP
    """STOP ends with the template's end-of-turn token, LENGTH leaves the turn open."""
    delay_s: float = 0.0
    """Before each token of a streamed call, or before the whole of another."""
    hold_after: int | None = None
    """After so many tokens nothing comes until the engine's ``release`` (or an abort)."""


@dataclass(slots=True)
class ScriptedCall:
    """One generation that is asked for."""

    policy: str
    cache_key: str
    """The episode's id."""
    turn: int
    """How many calls with this cache key came before."""
    num_prompt_tokens: int
    max_tokens: int
    stream: bool
    decode: Callable[[], str] = field(repr=False)
    _text: str | None = field(default=None, repr=False)

    @property
    def prompt(self) -> str:
        """The prompt's text, special tokens included."""
        if self._text is None:
            self._text = self.decode()
        return self._text


Script = Callable[[ScriptedCall], Reply | str]
AnyScript = Script | Sequence[Reply | str]


@dataclass(frozen=True, slots=True)
class Rule:
    """Replies for the calls whose prompt matches."""

    pattern: str
    """Searched for in the prompt ("" matches every prompt; "." matches newlines, too)."""
    replies: Sequence[Reply | str]
    repeat: bool = False
    """Start over after the last reply, instead of failing the call."""


def in_order(replies: Sequence[Reply | str], *, repeat: bool = False) -> Script:
    """The n-th call of an episode gets the n-th reply; one beyond the last fails (or starts over)."""
    return lambda call: _nth(replies, call.turn, repeat=repeat)


def by_rules(rules: Sequence[Rule]) -> Script:
    """The first rule whose pattern matches answers, in order among the episode's calls that it answered."""
    compiled = [(re.compile(rule.pattern, re.DOTALL) if rule.pattern else None, rule) for rule in rules]
    counts: defaultdict[tuple[str, int], itertools.count[int]] = defaultdict(itertools.count)

    def choose(call: ScriptedCall) -> Reply | str:
        for index, (pattern, rule) in enumerate(compiled):
            if pattern is None or pattern.search(call.prompt):
                return _nth(rule.replies, next(counts[call.cache_key, index]), repeat=rule.repeat)
        return _error(f"no rule matches the prompt that ends with {call.prompt[-200:]!r}")

    return choose


def _nth(replies: Sequence[Reply | str], number: int, *, repeat: bool) -> Reply | str:
    if repeat:
        number %= len(replies)
    if number < len(replies):
        return replies[number]
    return _error(f"there are {len(replies)} replies, and this is call {number + 1}")


def _error(message: str) -> Reply:
    return Reply(f"script: {message}", FinishReason.ERROR)


def as_script(script: AnyScript) -> Script:
    """A list of replies is meant :func:`in_order`."""
    return script if callable(script) else in_order(script)


def load_script(path: Path) -> Script:
    """A JSON file: a list of replies, or ``{"rules": [{"pattern", "replies", "repeat"}]}``.

    A reply is a text or an object with the fields of :class:`Reply`.  Raises ValueError for anything else.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, list):
        return in_order([_reply(item) for item in data])
    try:
        rules = [
            Rule(rule.get("pattern", ""), [_reply(item) for item in rule["replies"]], bool(rule.get("repeat", False)))
            for rule in data["rules"]
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f'{path}: expected a list of replies or {{"rules": [{{"replies": ...}}]}}: {error}') from error
    return by_rules(rules)


def _reply(item: Any) -> Reply | str:
    if isinstance(item, str):
        return item
    fields = dict(item)
    if "finish" in fields:
        fields["finish"] = FinishReason(fields["finish"])
    return Reply(**fields)
