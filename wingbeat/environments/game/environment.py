"""A two-player game between policies: each sees its own side of the table, and one's win is the other's loss.

Who plays follows from the episode's policies.  Two play each other; one plays both sides, as two agents with
baselines of their own; a policy that is frozen or a snapshot is an opponent like any other.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from wingbeat import Task
from wingbeat.environments import Conversation, Options, OutOfContext, read_options, read_split
from wingbeat.environments.game.nim import (
    RULES,
    Heaps,
    IllegalMove,
    Move,
    after,
    is_won,
    perfect_move,
    random_move,
    read_move,
)

if TYPE_CHECKING:
    from wingbeat import Episode

SOURCE = "game"
WIN, LOSS = 1.0, -1.0
SIDES = ("first", "second")
"""The agents of a policy that plays both sides."""

OpponentName = Literal["policy", "random", "perfect"]
Mover = Callable[[Heaps, Move | None], Awaitable[Move | None]]
"""Given the heaps and the other's last move, a player's own; None forfeits the game."""


class GameOptions(Options):
    """Which positions, and against whom."""

    seed: int = Field(default=0, ge=0, description="Draws the split and the order of positions.")
    num_heaps: int = Field(default=3, ge=1, le=5, description="Heaps of matches.")
    max_heap: int = Field(default=7, ge=2, le=20, description="Matches of the largest heap.")
    opponent: OpponentName = Field(
        default="policy",
        description="In training: the episode's other policy (itself, if it has one), random moves, or perfect ones.",
    )
    eval_opponent: OpponentName = Field(default="random", description="In held-out games.")
    illegal: Literal["loss", "ask_again"] = Field(
        default="loss", description="A reply that is no legal move loses the game, or is told so."
    )
    max_asks: int = Field(default=3, ge=1, description="With `ask_again`, replies to one position; then it is lost.")
    max_tokens: int | None = Field(default=32, ge=1, description="Of a reply; unset: what the policy allows.")


class GameEnvironment:
    """Nim from many positions."""

    name = SOURCE

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = read_options(GameOptions, options or {}, environment=self.name)
        self._tasks = make_tasks(self.options)

    def tasks(self, split: str) -> Sequence[Task]:
        """No position of one split is one of the other with its heaps in another order."""
        return self._tasks[read_split(split).value]

    def score(self, task: Task, answer: str) -> float:
        """What a text says of its first move: 1 for a winning one, 0 for a legal one, -1 for none."""
        heaps = tuple(task.payload["heaps"])
        try:
            move = read_move(answer, heaps)
        except IllegalMove:
            return LOSS
        return 0.0 if is_won(after(heaps, move)) else WIN

    async def play(self, episode: Episode) -> dict[str, float]:
        """Play the task's game; rewards by policy (and side), which sum to zero between policies.

        Against random or perfect play each policy of the episode has a game of its own.
        """
        opponent: str = episode.task.payload["opponent"]
        names = [name.partition("@")[0] for name in episode.policies]
        if opponent != "policy":
            return {name: await self._against(episode, name, opponent) for name in names}
        if len(names) > 2:
            raise ValueError(
                f"{SOURCE}: expected one or two policies, got {', '.join(names)}; begin it with two of them"
            )
        seats = [(name, "") for name in names] if len(names) == 2 else [(names[0], side) for side in SIDES]
        players = [self._policy(episode, name, side) for name, side in seats]
        winner = await self._game(episode.task, players)
        keys = [f"{name}:{side}" if side else name for name, side in seats]
        return {key: WIN if seat == winner else LOSS for seat, key in enumerate(keys)}

    async def _against(self, episode: Episode, name: str, opponent: str) -> float:
        rng = random.Random(f"{episode.id} {name}")

        async def move(heaps: Heaps, last: Move | None) -> Move:
            return random_move(heaps, rng) if opponent == "random" else perfect_move(heaps)

        return WIN if await self._game(episode.task, [self._policy(episode, name, ""), move]) == 0 else LOSS

    async def _game(self, task: Task, players: Sequence[Mover]) -> int:
        """The number of the player who wins."""
        heaps: Heaps = tuple(task.payload["heaps"])
        last: Move | None = None
        for seat in itertools.cycle((0, 1) if task.payload["begins"] else (1, 0)):
            move = await players[seat](heaps, last)
            if move is None:
                return 1 - seat
            heaps, last = after(heaps, move), move
            if not any(heaps):
                return seat
        raise AssertionError("every move takes a match, so the game ends")

    def _policy(self, episode: Episode, name: str, side: str) -> Mover:
        """A player that asks a policy, with a conversation of its own."""
        model = episode.model_for(name, agent=side)
        talk = Conversation(episode, rules=RULES, max_tokens=self.options.max_tokens, model=model)
        tries = self.options.max_asks if self.options.illegal == "ask_again" else 1

        async def move(heaps: Heaps, last: Move | None) -> Move | None:
            told = position(heaps, last)
            for _ in range(tries):
                try:
                    return read_move(await talk.reply_to(told), heaps)
                except IllegalMove as error:
                    told = f"No legal move: {error}. {position(heaps, last)}"
                except OutOfContext:
                    return None
            return None

        return move


def position(heaps: Heaps, last: Move | None) -> str:
    """What a player is told before its move."""
    before = "You begin. " if last is None else f"The other: {last}. "
    return f"{before}Heaps: {' '.join(map(str, heaps))}"


def make_tasks(options: GameOptions) -> dict[str, tuple[Task, ...]]:
    """Every position, begun by the first player and by the second; one in four sorts of heaps is held out."""
    rng = random.Random(options.seed)
    sorts = list(itertools.combinations_with_replacement(range(1, options.max_heap + 1), options.num_heaps))
    rng.shuffle(sorts)
    cut = max(1, len(sorts) // 4)
    made: dict[str, tuple[Task, ...]] = {}
    for split, members, opponent in (
        ("train", sorts[cut:], options.opponent),
        ("eval", sorts[:cut], options.eval_opponent),
    ):
        positions = [heaps for sort in members for heaps in sorted(set(itertools.permutations(sort)))]
        tasks = [_task(heaps, begins, opponent) for heaps in positions for begins in (True, False)]
        rng.shuffle(tasks)
        made[split] = tuple(tasks)
    return made


def _task(heaps: Heaps, begins: bool, opponent: str) -> Task:
    name = f"{'-'.join(map(str, heaps))}/{SIDES[0] if begins else SIDES[1]}"
    question = f"{RULES}\n\n{position(heaps, None)}"
    payload = {"question": question, "heaps": list(heaps), "begins": begins, "opponent": opponent}
    return Task(SOURCE, name, payload)
