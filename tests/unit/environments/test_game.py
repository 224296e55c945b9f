"""The two-player game: rules, perfect play, who plays whom, and rewards that sum to zero."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import ConfigError
from wingbeat.core.types import Task
from wingbeat.environments.game.environment import GameEnvironment
from wingbeat.environments.game.nim import IllegalMove, Move, after, is_won, legal_moves, perfect_move, read_move
from wingbeat.environments.registry import make_environment

HEAPS = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple).filter(any)


@pytest.mark.parametrize(
    ("reply", "move"),
    [
        ("take 2 from 1", Move(1, 2)),
        ("I shall Take 3 from heap 2.", Move(2, 3)),
        ("take 1 from 1, yes: take 1 from 1", Move(1, 1)),
    ],
)
def test_a_reply_is_read(reply: str, move: Move) -> None:
    assert read_move(reply, (3, 3)) == move


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "say one move"),
        ("take two from 1", "say one move"),
        ("take 1 from 1 or take 2 from 1", "say one move"),
        ("take 4 from 1", "heap 1 has 3"),
        ("take 0 from 1", "heap 1 has 3"),
        ("take 1 from 3", "no heap 3"),
        ("take 1 from 0", "no heap 0"),
    ],
)
def test_what_is_no_move_is_refused(reply: str, why: str) -> None:
    with pytest.raises(IllegalMove, match=why):
        read_move(reply, (3, 3))


@given(HEAPS)
def test_perfect_play_is_perfect(heaps: tuple[int, ...]) -> None:
    """From a won position a perfect move leaves a lost one; from a lost one every move leaves a won one."""
    assert read_move(str(perfect_move(heaps)), heaps) == perfect_move(heaps)
    if is_won(heaps):
        assert not is_won(after(heaps, perfect_move(heaps)))
    else:
        assert all(is_won(after(heaps, move)) for move in legal_moves(heaps))


def test_positions_are_split_whatever_their_order() -> None:
    made = GameEnvironment({"seed": 2})
    sorts = {split: {tuple(sorted(t.payload["heaps"])) for t in made.tasks(split)} for split in ("train", "eval")}
    assert len(sorts["train"]) + len(sorts["eval"]) == 84 and len(sorts["eval"]) == 21
    assert not sorts["train"] & sorts["eval"]
    assert len({task.id for split in ("train", "eval") for task in made.tasks(split)}) == 2 * 7**3
    assert {task.payload["opponent"] for task in made.tasks("eval")} == {"random"}
    assert GameEnvironment({"seed": 2}).tasks("train") == made.tasks("train")


def test_a_text_is_scored_by_its_move() -> None:
    made = make_environment("game", {})
    task = game(heaps=[1, 3], opponent="policy")
    assert [made.score(task, reply) for reply in ("take 2 from 2", "take 1 from 2", "pass")] == [1.0, 0.0, -1.0]


def test_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="opponent"):
        make_environment("game", {"opponent": "nobody"})


def game(*, heaps: list[int], begins: bool = True, opponent: str = "policy") -> Task:
    return Task("game", "t", {"question": "", "heaps": heaps, "begins": begins, "opponent": opponent})


def heaps_of(body: dict[str, Any]) -> tuple[int, ...]:
    told = str(body["messages"][-1]["content"])
    return tuple(map(int, re.findall(r"\d+", told.rpartition("Heaps:")[2])))


def perfectly(body: dict[str, Any]) -> dict[str, Any]:
    return {"content": str(perfect_move(heaps_of(body)))}


slow = pytest.mark.slow  # loads the SDK


@slow
@pytest.mark.parametrize("begins", [True, False])
async def test_two_policies_play_each_other(open_episode: Any, begins: bool) -> None:
    asked: list[str] = []

    def says(body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body["model"])
        return perfectly(body)

    async with open_episode(game(heaps=[2, 3], begins=begins), says, policies=["left", "right"]) as episode:
        rewards = await GameEnvironment().play(episode)
    assert rewards == ({"left": 1.0, "right": -1.0} if begins else {"left": -1.0, "right": 1.0})
    order = ["left", "right"] if begins else ["right", "left"]
    assert asked == [order[turn % 2] for turn in range(len(asked))]


@slow
async def test_one_policy_plays_both_sides_with_a_conversation_for_each(open_episode: Any) -> None:
    lengths: dict[str, list[int]] = {}

    def says(body: dict[str, Any]) -> dict[str, Any]:
        lengths.setdefault(body["model"], []).append(len(body["messages"]))
        return perfectly(body)

    async with open_episode(game(heaps=[2, 2]), says, policies=["player"]) as episode:
        rewards = await GameEnvironment().play(episode)
    assert rewards == {"player:first": -1.0, "player:second": 1.0}
    assert lengths == {"player:first": [1, 3], "player:second": [1, 3]}


@slow
@pytest.mark.parametrize(("illegal", "tries"), [("loss", 1), ("ask_again", 3)])
async def test_illegal_moves_lose_at_once_or_after_some_tries(open_episode: Any, illegal: str, tries: int) -> None:
    told: list[str] = []

    def says(body: dict[str, Any]) -> dict[str, Any]:
        if body["model"] == "left":
            told.append(str(body["messages"][-1]["content"]))
            return {"content": "take 9 from 1"}
        return perfectly(body)

    async with open_episode(game(heaps=[1, 2]), says, policies=["left", "right"]) as episode:
        rewards = await GameEnvironment({"illegal": illegal, "max_asks": 3}).play(episode)
    assert rewards == {"left": -1.0, "right": 1.0}
    assert len(told) == tries
    assert all(text.startswith("No legal move: heap 1 has 1.") for text in told[1:])


@slow
async def test_against_a_fixed_opponent_each_policy_has_its_own_game(open_episode: Any) -> None:
    def says(body: dict[str, Any]) -> dict[str, Any]:
        return perfectly(body) if body["model"] == "left" else {"content": "I give up"}

    task = game(heaps=[2, 3], opponent="perfect")
    async with open_episode(task, says, policies=["left", "right"]) as episode:
        assert await GameEnvironment().play(episode) == {"left": 1.0, "right": -1.0}
    async with open_episode(game(heaps=[1], opponent="random"), says, policies=["left@3"]) as episode:
        assert await GameEnvironment().play(episode) == {"left": 1.0}


@slow
async def test_three_policies_are_refused(open_episode: Any) -> None:
    async with open_episode(game(heaps=[1]), perfectly, policies=["a", "b", "c"]) as episode:
        with pytest.raises(ValueError, match="one or two policies"):
            await GameEnvironment().play(episode)
