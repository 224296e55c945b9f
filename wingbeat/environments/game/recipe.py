"""What the tiny model of ``builtin:game`` imitates: the rules.  Any legal move, each as likely as the others."""

from __future__ import annotations

import random

from wingbeat.environments import Message, TinyRecipe
from wingbeat.environments.game.environment import GameOptions, make_tasks, position
from wingbeat.environments.game.nim import RULES, Heaps, Move, after, random_move

OPTIONS = {"num_heaps": 2, "max_heap": 5}
"""Of the preset: a game that a hundred thousand parameters can master."""
_STARTS = [tuple(task.payload["heaps"]) for task in make_tasks(GameOptions.model_validate(OPTIONS))["train"]]


def demonstrate(rng: random.Random) -> list[Message]:
    """One side of a game between two players who move at random."""
    heaps: Heaps = rng.choice(_STARTS)
    messages: list[Message] = []
    last: Move | None = None
    if rng.random() < 0.5:
        last = random_move(heaps, rng)
        heaps = after(heaps, last)
    while any(heaps):
        told = position(heaps, last)
        mine = random_move(heaps, rng)
        messages.append({"role": "user", "content": told if messages else f"{RULES}\n\n{told}"})
        messages.append({"role": "assistant", "content": str(mine)})
        heaps = after(heaps, mine)
        if any(heaps):
            last = random_move(heaps, rng)
            heaps = after(heaps, last)
    return messages or demonstrate(rng)


RECIPE = TinyRecipe(
    phrases=(f"{RULES}\n\n", "You begin. ", "The other: ", ". Heaps: ", "Heaps: ", "take ", " from "),
    demonstrate=demonstrate,
    max_tokens=192,
    steps=300,
    batch=32,
)
