"""What the tiny model of ``builtin:retrieval`` imitates: search for the name in the question, copy an answer.

The demonstrating agent makes two mistakes, each independent of the question: it looks for somebody else, and it
answers with another fact of what it found.  Every demonstration is of somebody new, whom no world has: so there are no
facts to remember, only the way to find one.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from wingbeat.environments import Message, TinyRecipe
from wingbeat.environments.retrieval import names
from wingbeat.environments.retrieval.environment import INSTRUCTION
from wingbeat.environments.retrieval.questions import ONE_HOP
from wingbeat.environments.retrieval.world import TEXTS, Entity, Kind, Pools, draw_entity

RIGHT_NAME = 0.7
RIGHT_FACT = 0.6
PEOPLE = 0.7
"""How often a question is about a person: in a world most are."""
MAX_ID = 500

POOLS = Pools(names.draw_people(random.Random(0), 2000), names.TOWNS, names.FIRMS, names.TITLES)


def demonstrate(rng: random.Random) -> list[Message]:
    """One episode of a careless agent."""
    asked = _somebody(rng)
    relation = rng.choice(list(asked.facts))
    found = asked if rng.random() < RIGHT_NAME else _somebody(rng)
    answer = found.facts.get(relation)
    if answer is None or rng.random() >= RIGHT_FACT:
        answer = rng.choice(list(found.facts.values()))
    function = {"name": "search", "arguments": json.dumps({"query": found.name})}
    call = {"id": "c", "type": "function", "function": function}
    return [
        {"role": "user", "content": INSTRUCTION + ONE_HOP[asked.kind, relation].format(name=asked.name)},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": f"[{rng.randint(1, MAX_ID)}] {found.name}\n{found.text}"},
        {"role": "assistant", "content": answer},
    ]


def _somebody(rng: random.Random) -> Entity:
    kind = Kind.PERSON if rng.random() < PEOPLE else rng.choice([Kind.TOWN, Kind.FIRM, Kind.BOOK])
    return draw_entity(kind, rng.choice(POOLS.of_kind(kind)), POOLS, rng)


def phrases() -> tuple[str, ...]:
    """Parts of sentences, and names; years are spelled."""
    templates = [*ONE_HOP.values(), *(form for forms in TEXTS.values() for form in forms)]
    sentences: list[Any] = [part for template in templates for part in re.split(r"\{\w+\}", template)]
    values = [*names.REGIONS, *names.RIVERS, *names.PROFESSIONS, *names.PRODUCTS]
    people = [*names.FIRST_NAMES, *names.LAST_NAMES]
    pieces = ['{"query": "', "search", INSTRUCTION, *sentences, *values, *people]
    pieces += [*names.TOWNS, *names.FIRMS, *names.TITLES]
    return tuple(piece for piece in pieces if len(piece) > 1)


RECIPE = TinyRecipe(phrases=phrases(), demonstrate=demonstrate, tools=("search",), max_tokens=256, steps=600, batch=32)
