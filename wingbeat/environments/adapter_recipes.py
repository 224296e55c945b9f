"""What the tiny models of the adapters' presets imitate: agents that play by chance, and words spelled at random.

The games' models learn from them how a move is written, and nothing of which one is good.
"""

from __future__ import annotations

import random
from functools import cache

from wingbeat.core.types import Task
from wingbeat.environments.reasoning_gym import KIND as WORDS
from wingbeat.environments.reasoning_gym import ReasoningGymEnvironment
from wingbeat.environments.textarena_games import KIND as TEXTARENA
from wingbeat.environments.textarena_games import TextArenaEnvironment
from wingbeat.environments.tiny_recipes import Message, TinyRecipe
from wingbeat.environments.toy_text import GAMES, ToyTextEnvironment
from wingbeat.environments.toy_text import KIND as LAKE

RIGHT_WORDS = 0.3
"""Share of the demonstrated words that are spelled backward for certain."""
LEGAL_MOVES = 0.8
"""Share of the demonstrated moves that are drawn among the legal ones."""


def _turn(asked: str, said: str) -> list[Message]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


# --- gymnasium:FrozenLake-v1 --------------------------------------------------------------------

_LAKE = GAMES["FrozenLake-v1"]


@cache
def _lake() -> ToyTextEnvironment:
    return ToyTextEnvironment(_LAKE.id, LAKE.preset["tasks"]["options"])


def _lake_turn(rng: random.Random) -> list[Message]:
    """Any move, at the start of a map."""
    payload = rng.choice(_lake().tasks("train")).payload
    rows = ["".join(row) for row in payload["map"]]
    rows[0] = "@" + rows[0][1:]
    return _turn("\n".join(rows), rng.choice(_LAKE.actions))


FROZEN_LAKE = TinyRecipe(
    phrases=[*_LAKE.actions, f"Reply with exactly one of: {', '.join(_LAKE.actions)}.\n\n"],
    demonstrate=_lake_turn,
    max_tokens=128,
    steps=120,
)

# --- reasoning-gym:spell_backward ---------------------------------------------------------------


@cache
def _words() -> tuple[Task, ...]:
    return tuple(ReasoningGymEnvironment("spell_backward", WORDS.preset["tasks"]["options"]).tasks("train"))


def _word(rng: random.Random) -> list[Message]:
    """A word to train on, never a held-out one; its letters in another order, mostly."""
    task = rng.choice(_words())
    answer = str(task.payload["entry"]["answer"])
    letters = list(answer)
    rng.shuffle(letters)
    return _turn(task.payload["question"], answer if rng.random() < RIGHT_WORDS else "".join(letters))


SPELL_BACKWARD = TinyRecipe(
    phrases=["Spell this word backward (example: sun -> nus): "],
    demonstrate=_word,
    max_tokens=128,
    steps=300,
)

# --- textarena:TicTacToe-v0 ---------------------------------------------------------------------

_CELLS = [f"[{cell}]" for cell in range(9)]
_RULES = (
    "You are Player ",
    " in Tic Tac Toe.\nYour goal is to win three in a row (horizontally, vertically, or diagonally) on the board.\n"
    "On your turn, you should select the square number (0-8) you want to put your mark in next.\n"
    "For example, '[4]' places your mark in the center cell of the board.\n\nAs Player ",
    ", you will be '",
    "', while your opponent is '",
    "Current Board:\n\n",
    "\n---+---+---\n",
    "\n\nAvailable Moves: ",
    "Player 0",
    "Player 1",
    " placed their symbol (X) in cell ",
    " placed their symbol (O) in cell ",
    " attempted an invalid move. Reason: ",
    " is already occupied. Please resubmit a valid move and remember to follow the game rules to avoid penalties.",
    "The submitted move does not follow the correct format. Please resubmit a valid move and remember to follow the"
    " game rules to avoid penalties.",
)


@cache
def _tic_tac_toe() -> TextArenaEnvironment:
    return TextArenaEnvironment("TicTacToe-v0", TEXTARENA.preset["tasks"]["options"])


def _tic_tac_toe_turn(rng: random.Random) -> list[Message]:
    """One turn in a game of chance."""
    environment = _tic_tac_toe()
    match = environment.begin(rng.choice(environment.tasks("train")))
    for _ in range(rng.randrange(7)):
        match.news()
        match.move(match.random_move(_CELLS) or _CELLS[0])
        if match.over:
            break
    if match.over:
        return _tic_tac_toe_turn(rng)
    asked = match.news()
    legal = match.random_move(_CELLS) if rng.random() < LEGAL_MOVES else None
    return _turn(asked, legal or rng.choice(_CELLS))


TIC_TAC_TOE = TinyRecipe(
    phrases=[*_RULES, *_CELLS, *(f"'{cell}'" for cell in _CELLS), ", "],
    demonstrate=_tic_tac_toe_turn,
    max_tokens=512,
    steps=200,
)
