"""A game: take one, two or three matches in turn; who takes the last one wins.

Training games are against an older self; held-out games against a fixed opponent that moves at random. The
player begins in half of them.
"""

from wingbeat import Task

MOVES = (1, 2, 3)
LARGEST_PILE = 10
PILES = range(4, LARGEST_PILE + 1)


def train_tasks() -> list[Task]:
    return [_game(pile, begins, opponent="rival") for pile in PILES for begins in (True, False)]


def eval_tasks() -> list[Task]:
    return [_game(pile, begins, opponent="random") for pile in PILES for begins in (True, False)]


def _game(pile: int, begins: bool, *, opponent: str) -> Task:
    name = f"{pile}-{'first' if begins else 'second'}"
    return Task(f"matches-{opponent}", name, {"pile": pile, "begins": begins, "opponent": opponent})
