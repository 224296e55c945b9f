"""The adapters of gymnasium and textarena: what moves mean, what games are worth, and that games do not meet."""

from __future__ import annotations

import random
import sys
from collections import deque
from typing import Any

import pytest

from wingbeat.core.errors import ConfigError
from wingbeat.core.types import Task
from wingbeat.environments import make_environment

pytest.importorskip("gymnasium")
pytest.importorskip("textarena")

from wingbeat.environments.textarena_games import TextArenaEnvironment
from wingbeat.environments.toy_text import ToyTextEnvironment, move_of

SMALL = {"size": 4, "eval_size": 2}
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


@pytest.mark.parametrize(
    ("reply", "move"),
    [
        ("left", "left"),
        ("I was left alone.\nSo: Right!", "right"),
        ("left or right?", None),
        ("up\n\n", "up"),
        ("leftover", None),
        ("", None),
        ("pick up", "pickup"),
        ("x" * 5000 + " down", "down"),
    ],
)
def test_a_move_is_the_action_that_the_last_line_with_any_names(reply: str, move: str | None) -> None:
    assert move_of(reply, ["left", "right", "up", "down", "pickup"], {"pick up": "pickup"}) == move


def shortest_way(rows: list[str]) -> list[str]:
    """From S to G, without a hole."""
    ways: deque[tuple[tuple[int, int], list[str]]] = deque([((0, 0), [])])
    seen = {(0, 0)}
    while ways:
        (row, column), way = ways.popleft()
        if rows[row][column] == "G":
            return way
        for name, (down, right) in MOVES.items():
            place = (row + down, column + right)
            inside = 0 <= place[0] < len(rows) and 0 <= place[1] < len(rows)
            if inside and place not in seen and rows[place[0]][place[1]] != "H":
                seen.add(place)
                ways.append((place, [*way, name]))
    raise AssertionError("the library makes maps with a way")


def test_the_lake_is_worth_one_where_it_is_crossed() -> None:
    lake = ToyTextEnvironment("FrozenLake-v1", SMALL)
    for task in lake.tasks("train"):
        way = shortest_way(task.payload["map"])
        assert lake.score(task, "\n".join(way)) == 1.0
        assert lake.score(task, "\n".join(way[:-1])) == 0.0
        assert lake.score(task, "\n".join(["what?", *way])) == 1.0  # it costs a turn, and there are more
    short = ToyTextEnvironment("FrozenLake-v1", {**SMALL, "max_turns": 1})
    assert short.score(task, "\n".join(way)) == 0.0


def test_the_cliff_costs_every_step_and_all_for_a_fall() -> None:
    cliff = ToyTextEnvironment("CliffWalking-v1", SMALL)
    start = Task(cliff.name, "x", {"seed": 1, "state": 36, "slippery": False})
    way = ["up", *["right"] * 11, "down"]
    assert cliff.score(start, "\n".join(way)) == pytest.approx((100 - 13) / 100)
    assert cliff.score(start, "\n".join(["right", *way])) == 0.0  # fell, is back, and walked: -100 - 13


def test_a_delivered_passenger_is_worth_more_the_sooner() -> None:
    taxi = ToyTextEnvironment("Taxi-v4", SMALL)
    # row 0, column 0, waits at R (0), wants to Y (2): pick up, four rows south, drop off
    start = Task(taxi.name, "x", {"seed": 1, "state": ((0 * 5 + 0) * 5 + 0) * 4 + 2})
    way = ["pickup", *["south"] * 4, "dropoff"]
    assert taxi.score(start, "\n".join(way)) == pytest.approx((40 - 5 + 20) / 60)
    assert taxi.score(start, "\n".join(["dropoff", *way])) == pytest.approx((40 - 10 - 5 + 20) / 60)
    assert taxi.score(start, "\n".join(way[:-1])) == 0.0


def test_more_starts_than_there_are_and_unknown_games_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are 37"):
        make_environment("gymnasium:CliffWalking-v1", {"size": 30, "eval_size": 8})
    with pytest.raises(ConfigError, match="FrozenLake-v1, Taxi-v4, CliffWalking-v1, Blackjack-v1, got Pong-v5"):
        make_environment("gymnasium:Pong-v5")
    with pytest.raises(ConfigError, match=r"tasks\.options\.speed"):
        make_environment("gymnasium:Taxi-v4", {"speed": 2})


# --- textarena --------------------------------------------------------------------------------


def tic_tac_toe(**options: Any) -> TextArenaEnvironment:
    return TextArenaEnvironment("TicTacToe-v0", {**SMALL, **options})


def first_free(news: str, rng: random.Random) -> str:
    """A scripted opponent: the first cell that is free."""
    return news.rsplit("Available Moves: ", 1)[-1].split("'")[1]


def test_games_for_two_are_worth_nothing_half_or_one() -> None:
    environment = tic_tac_toe(player="first")
    task = environment.tasks("train")[0]
    for moves, expected in (
        ("0 3 1 4 2", 1.0),  # the top row
        ("0 3 1 4 8 5", 0.0),  # the other one's middle row
        ("0 4 8 1 7 6 2 5 3", 0.5),  # full, and nobody has three
        ("0 3", 0.0),  # not over
    ):
        match = environment.begin(task)
        for move in moves.split():
            match.move(f"[{move}]")
        assert match.reward == expected, moves


def test_a_player_is_told_what_is_new_to_it() -> None:
    match = tic_tac_toe(player="first").begin(Task("t", "t", {"seed": 5, "player": 0}))
    first = match.news()
    assert "You are Player 0 in Tic Tac Toe" in first
    match.move("[4]")
    match.news()
    match.move("[0]")
    told = match.news()
    assert "Player 1: [0]" in told and "[4]" not in told.replace("'[4]'", "") and "You are Player" not in told


def test_the_opponent_can_be_a_function_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("own_opponents")
    module.first_free = first_free  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_opponents", module)
    assert tic_tac_toe(opponent="own_opponents:first_free").tasks("train")
    for opponent in ("own_opponents:nobody", "nowhere:x", "stockfish", "policy:"):
        with pytest.raises(ConfigError, match="expected random, policy:NAME or MODULE:FUNCTION"):
            tic_tac_toe(opponent=opponent)


def test_games_at_once_do_not_disturb_each_other_nor_anyone_elses_randomness() -> None:
    environment = TextArenaEnvironment("PigDice-v0", SMALL)
    task = environment.tasks("train")[0]

    def told(interleave: bool) -> list[str]:
        match, other = environment.begin(task), environment.begin(environment.tasks("train")[1])
        said: list[str] = []
        for _ in range(6):
            said.append(match.news())
            match.move("[roll]")
            if interleave:
                other.move("[roll]")
                random.random()
        return said

    random.seed(3)
    before = random.getstate()
    alone = told(interleave=False)
    assert random.getstate() == before
    assert told(interleave=True) == alone


def test_half_of_the_games_are_begun_by_the_other_player() -> None:
    assert {task.payload["player"] for task in tic_tac_toe().tasks("train")} == {0, 1}
    assert {task.payload["player"] for task in tic_tac_toe(player="second").tasks("train")} == {1}


@pytest.mark.parametrize(
    ("game", "options", "says"),
    [
        ("Wordle-v0", {}, "word lists of NLTK, a download"),
        ("SpellingBee-v0", {}, "word lists of NLTK, a download"),
        ("Tetris-v0", {}, "expected a game of textarena, got Tetris-v0"),
        ("TowerOfHanoi-v0", SMALL, "different games, got 1"),
        ("Breakthrough-v0", SMALL, "knows no move of this game"),
        ("TicTacToe-v0", {**SMALL, "game": {"size": 9}}, "unexpected keyword argument 'size'"),
    ],
)
def test_games_that_cannot_be_used_are_refused(game: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_environment(f"textarena:{game}", options)


def test_a_game_that_would_download_is_refused_before_it_is_imported() -> None:
    with pytest.raises(ConfigError, match="Hangman-v0 cannot be used"):
        make_environment("textarena:Hangman-v0", {})
    assert "textarena.envs.Hangman.env" not in sys.modules
