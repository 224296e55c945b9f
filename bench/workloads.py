"""What the engine benchmark serves: equal requests, and a long-tailed multi-turn trace with shared prefixes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

VOCABULARY = 512
EQUAL_PROMPT_TOKENS = 32
EQUAL_SAMPLED_TOKENS = 128

GROUP_SIZE = 8
TURNS = 3
SYSTEM_TOKENS = 64
TASK_TOKENS = 32
TOOL_TOKENS = 16
MEDIAN_SAMPLED_TOKENS = 24
SIGMA = 1.0
MIN_SAMPLED_TOKENS, MAX_SAMPLED_TOKENS = 4, 256


@dataclass(slots=True)
class Episode:
    """One agent's conversation; every turn's prompt is everything before it."""

    name: str
    tokens: list[int]
    sampled_tokens: tuple[int, ...]
    """How many tokens each turn samples."""
    tool_tokens: tuple[tuple[int, ...], ...]
    """What follows each turn but the last."""
    turn: int = field(default=0)

    @property
    def due(self) -> int:
        """Tokens that the current turn samples."""
        return self.sampled_tokens[self.turn]

    def advance(self, sampled: list[int]) -> bool:
        """Take a turn's tokens; False after the last turn."""
        self.tokens.extend(sampled)
        self.turn += 1
        if self.turn == len(self.sampled_tokens):
            return False
        self.tokens.extend(self.tool_tokens[self.turn - 1])
        return True


def useful_tokens(episodes: list[Episode]) -> int:
    return sum(sum(e.sampled_tokens) for e in episodes)


def equal_workload(count: int, *, seed: int) -> list[Episode]:
    """Single-turn requests of one length with nothing in common."""
    rng = random.Random(seed)
    return [Episode(f"equal-{i}", _tokens(rng, EQUAL_PROMPT_TOKENS), (EQUAL_SAMPLED_TOKENS,), ()) for i in range(count)]


def trace_workload(count: int, *, seed: int) -> list[Episode]:
    """Groups of episodes of one task: a common system prompt, a prompt per group, three turns with tool
    results, log-normal lengths (median 24, sigma 1, clipped to 4..256)."""
    rng = random.Random(seed)
    system = _tokens(rng, SYSTEM_TOKENS)
    episodes: list[Episode] = []
    task: list[int] = []
    for i in range(count):
        if i % GROUP_SIZE == 0:
            task = _tokens(rng, TASK_TOKENS)
        lengths = tuple(_length(rng) for _ in range(TURNS))
        tools = tuple(tuple(_tokens(rng, TOOL_TOKENS)) for _ in range(TURNS - 1))
        episodes.append(Episode(f"trace-{i}", [*system, *task], lengths, tools))
    return episodes


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _length(rng: random.Random) -> int:
    drawn = round(rng.lognormvariate(math.log(MEDIAN_SAMPLED_TOKENS), SIGMA))
    return min(max(drawn, MIN_SAMPLED_TOKENS), MAX_SAMPLED_TOKENS)
