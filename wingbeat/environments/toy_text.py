"""The toy-text games of gymnasium, as conversations (``tasks.environment = "gymnasium:FrozenLake-v1"``).

The library's own environments run unchanged; what is added around them:

- Tasks.  A task fixes the start: a map (FrozenLake), a state (Taxi, CliffWalking) or a seed (Blackjack), and the seed
  of whatever is drawn later.  No start of a held-out task is one of training, but for Blackjack, whose few openings
  recur with other cards to come.
- Words.  Observations are text, moves are names of actions (:func:`move_of`).  A reply that names no move, or several,
  is told so, and costs a turn.
- Rewards from 0 to 1 (:class:`Game`): 0 where the goal is not reached within ``max_turns`` replies.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from wingbeat.client import Episode
from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.core.types import Split, Task
from wingbeat.environments.asking import Conversation, OutOfContext
from wingbeat.environments.kinds import Kind
from wingbeat.environments.options import Options, read_options, read_split

Starts = Callable[["ToyTextOptions", random.Random], Iterator[Mapping[str, Any]]]

_REPLY_CHARS = 2000
"""Of the end of a reply, in which a move is looked for."""


class ToyTextOptions(Options):
    """Which starts, and how long a game may be."""

    size: int | None = Field(default=None, ge=1, description="Tasks to train on; unset: by the game.")
    eval_size: int | None = Field(default=None, ge=1, description="Held-out tasks; unset: by the game.")
    seed: int = Field(default=0, ge=0, description="Draws the starts.")
    max_turns: int | None = Field(default=None, ge=1, description="Replies of a game; unset: by the game.")
    max_tokens: int | None = Field(default=None, ge=1, description="Tokens of a reply.")
    history: Literal["full", "last"] = Field(
        default="full", description="What a prompt holds: the game so far, or the last observation alone."
    )
    rules: bool = Field(default=True, description="Whether the first observation explains the game.")
    slippery: bool = Field(default=False, description="FrozenLake, CliffWalking: moves may slide elsewhere.")
    map_size: int = Field(default=4, ge=2, le=16, description="FrozenLake: rows and columns of the random maps.")


@dataclass(frozen=True, slots=True)
class Game:
    """One of the library's environments in words."""

    id: str
    actions: Sequence[str]
    """Names, in the order of the library's numbers."""
    rules: str
    starts: Starts
    """Payloads of tasks without end (or until there are no more), each with the ``seed`` of a reset."""
    view: Callable[[Any, Any], str]
    """The text of (unwrapped environment, observation)."""
    reward: Callable[[float], float]
    """From 0 to 1, of the sum of the library's rewards in a game that came to its end."""
    max_turns: int
    sizes: tuple[int, int] = (500, 100)
    """Tasks to train on, and held out."""
    settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda payload: {}
    """What the library's ``make`` takes, of a payload."""
    state: str = ""
    """The attribute that a start sets, where a reset cannot."""
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Other words for an action."""


class ToyTextEnvironment:
    """One game.  A payload holds the start."""

    def __init__(self, game: str, options: Mapping[str, Any] | None = None) -> None:
        self.name = f"gymnasium:{game}"
        if game not in GAMES:
            raise ConfigError(f"expected one of gymnasium's {', '.join(GAMES)}, got {game or 'no name'}")
        self._game = GAMES[game]
        self._options = read_options(ToyTextOptions, options or {}, environment=self.name)
        self._library()
        self._max_turns = self._options.max_turns or self._game.max_turns
        self._tasks = self._make_tasks()

    def tasks(self, split: str) -> Sequence[Task]:
        """Games with distinct starts; no start is in both splits."""
        return self._tasks[read_split(split)]

    def score(self, task: Task, answer: str) -> float:
        """The reward of a whole game that is written as one answer: its moves, one in each line."""
        play = self._begin(task)
        for line in answer.splitlines()[: self._max_turns]:
            if play.over:
                break
            play.take(line)
        return play.reward

    async def play(self, episode: Episode) -> float:
        """Observation, move, observation ... to the end of the game, of the turns, or of the context."""
        play = self._begin(episode.task)
        talk = Conversation(
            episode,
            rules=self._game.rules if self._options.rules else "",
            keep=self._options.history == "full",
            max_tokens=self._options.max_tokens,
        )
        observation = play.view()
        for _ in range(self._max_turns):
            try:
                reply = await talk.reply_to(observation)
            except OutOfContext:
                break
            observation = play.take(reply)
            if play.over:
                break
        return play.reward

    def _begin(self, task: Task) -> _Play:
        return _Play(self._game, self._library(), task.payload)

    def _library(self) -> Any:
        try:
            return importlib.import_module("gymnasium")
        except ModuleNotFoundError as error:
            raise DependencyMissing(
                "gymnasium is not installed; install it with `pip install 'wingbeat[environments]'`"
            ) from error

    def _make_tasks(self) -> dict[Split, tuple[Task, ...]]:
        options = self._options
        size, eval_size = options.size or self._game.sizes[0], options.eval_size or self._game.sizes[1]
        starts = list(islice(self._game.starts(options, random.Random(options.seed)), size + eval_size))
        if len(starts) < size + eval_size:
            raise ConfigError(
                f"{self.name}: expected {size} + {eval_size} different starts, and there are {len(starts)}; lower"
                " `size` or `eval_size`"
            )
        tasks = [Task(self.name, f"{self._game.id}-{number}", dict(start)) for number, start in enumerate(starts)]
        return {Split.EVAL: tuple(tasks[:eval_size]), Split.TRAIN: tuple(tasks[eval_size:])}


class _Play:
    """A game under way."""

    def __init__(self, game: Game, library: Any, start: Mapping[str, Any]) -> None:
        self._game = game
        self._env = library.make(game.id, **game.settings(start))
        self._observation, _ = self._env.reset(seed=start["seed"])
        if game.state:
            setattr(self._env.unwrapped, game.state, start["state"])
            self._observation = start["state"]
        self._total = 0.0
        self._ended = False
        self.over = False

    @property
    def reward(self) -> float:
        """Of what was played: 0 for a game that was not played to its end."""
        return min(1.0, max(0.0, self._game.reward(self._total))) if self._ended else 0.0

    def view(self) -> str:
        return self._game.view(self._env.unwrapped, self._observation)

    def take(self, reply: str) -> str:
        """Make the move that a reply names; the observation that follows."""
        move = move_of(reply, self._game.actions, self._game.aliases)
        if move is None:
            return f"Reply with exactly one of: {', '.join(self._game.actions)}.\n\n{self.view()}"
        self._observation, reward, ended, cut, _ = self._env.step(self._game.actions.index(move))
        self._total += float(reward)
        self._ended = bool(ended)
        self.over = self._ended or bool(cut)
        return self.view()


def move_of(reply: str, actions: Sequence[str], aliases: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """The one action that a reply names, in its last line that names any; None where that names none, or several."""
    words = {**{action.lower(): action for action in actions}, **aliases}
    pattern = re.compile(
        rf"(?<!\w)({'|'.join(re.escape(word) for word in sorted(words, key=len, reverse=True))})(?!\w)"
    )
    for line in reversed(reply[-_REPLY_CHARS:].lower().splitlines()):
        named = {words[found] for found in pattern.findall(line)}
        if named:
            return named.pop() if len(named) == 1 else None
    return None


# --- FrozenLake -------------------------------------------------------------------------------


def _lake_starts(options: ToyTextOptions, rng: random.Random) -> Iterator[Mapping[str, Any]]:
    maps: Any = importlib.import_module("gymnasium.envs.toy_text.frozen_lake")
    seen: set[tuple[str, ...]] = set()
    for _ in range(100_000):
        drawn = tuple(maps.generate_random_map(size=options.map_size, seed=rng.randrange(2**31)))
        if drawn not in seen:
            seen.add(drawn)
            yield {"seed": rng.randrange(2**31), "map": list(drawn), "slippery": options.slippery}


def _lake_view(env: Any, state: int) -> str:
    rows = [[cell.decode() for cell in row] for row in env.desc]
    row, column = divmod(int(state), len(rows[0]))
    rows[row][column] = "@"
    return "\n".join("".join(cells) for cells in rows)


# --- Taxi -------------------------------------------------------------------------------------

_PLACES = ("R (top left)", "G (top right)", "Y (bottom left)", "B (bottom right)", "in the taxi")


def _taxi_starts(options: ToyTextOptions, rng: random.Random) -> Iterator[Mapping[str, Any]]:
    """Every state in which a passenger waits at one place to be taken to another: 25 x 4 x 3."""
    states = [
        ((row * 5 + column) * 5 + place) * 4 + target
        for row in range(5)
        for column in range(5)
        for place in range(4)
        for target in range(4)
        if place != target
    ]
    rng.shuffle(states)
    yield from ({"seed": rng.randrange(2**31), "state": state} for state in states)


def _taxi_view(env: Any, state: int) -> str:
    row, column, place, target = map(int, env.decode(int(state)))
    lines = [bytes(b"".join(cells)).decode() for cells in env.desc]
    line = list(lines[row + 1])
    line[2 * column + 1] = "@"
    lines[row + 1] = "".join(line)
    return "\n".join([*lines, f"Passenger: {_PLACES[place]}. Destination: {_PLACES[target]}."])


# --- CliffWalking -----------------------------------------------------------------------------


def _cliff_starts(options: ToyTextOptions, rng: random.Random) -> Iterator[Mapping[str, Any]]:
    """Every cell of the grid but for the cliff and the goal: 36 + 1."""
    states = list(range(37))
    rng.shuffle(states)
    yield from ({"seed": rng.randrange(2**31), "state": state, "slippery": options.slippery} for state in states)


def _cliff_view(env: Any, state: int) -> str:
    cells = [["."] * 12 for _ in range(3)] + [[".", *"C" * 10, "G"]]
    row, column = divmod(int(state), 12)
    cells[row][column] = "@"
    return "\n".join("".join(line) for line in cells)


# --- Blackjack --------------------------------------------------------------------------------


def _seeds(options: ToyTextOptions, rng: random.Random) -> Iterator[Mapping[str, Any]]:
    seen: set[int] = set()
    while True:
        seed = rng.randrange(2**31)
        if seed not in seen:
            seen.add(seed)
            yield {"seed": seed}


def _blackjack_view(env: Any, observation: tuple[int, int, int]) -> str:
    total, dealer, ace = map(int, observation)
    shown = "an ace" if dealer == 1 else str(dealer)
    return f"Your sum: {total}{' (an ace counts 11)' if ace else ''}. The dealer shows: {shown}."


# --- all --------------------------------------------------------------------------------------

_GAMES = (
    Game(
        "FrozenLake-v1",
        actions=("left", "down", "right", "up"),
        rules="Cross the frozen lake from S to G. You are at @; F is ice, H is a hole, which ends the game, as does G."
        " Move by replying left, down, right or up.",
        starts=_lake_starts,
        settings=lambda start: {"desc": start["map"], "is_slippery": start["slippery"]},
        view=_lake_view,
        reward=lambda total: total,  # the library's 1 at the goal, 0 in a hole
        max_turns=30,
        sizes=(200, 50),
    ),
    Game(
        "Taxi-v4",
        actions=("south", "north", "east", "west", "pickup", "dropoff"),
        rules="You drive the taxi @ in a walled grid: | is a wall, : is none. Fetch the passenger where he waits and"
        " bring him to his destination. Reply south, north, east, west, pickup or dropoff.",
        starts=_taxi_starts,
        state="s",
        view=_taxi_view,
        reward=lambda total: (total + 40) / 60,  # 20 for the delivery, -1 a step, -10 for what is not possible
        max_turns=40,
        sizes=(200, 100),
        aliases=MappingProxyType({"pick up": "pickup", "drop off": "dropoff"}),
    ),
    Game(
        "CliffWalking-v1",
        actions=("up", "right", "down", "left"),
        rules="Walk from @ to G. C is a cliff: whoever steps there falls, and is back at the bottom left. Move by"
        " replying up, right, down or left.",
        starts=_cliff_starts,
        settings=lambda start: {"is_slippery": start["slippery"]},
        state="s",
        view=_cliff_view,
        reward=lambda total: (total + 100) / 100,  # -1 a step, -100 for a fall
        max_turns=40,
        sizes=(25, 12),
    ),
    Game(
        "Blackjack-v1",
        actions=("stick", "hit"),
        rules="Blackjack: come closer to 21 than the dealer without passing it. Reply hit for another card, or stick.",
        starts=_seeds,
        view=_blackjack_view,
        reward=lambda total: (total + 1) / 2,  # lost 0, drawn 0.5, won 1
        max_turns=12,
        aliases=MappingProxyType({"stand": "stick"}),
    ),
)

GAMES: Mapping[str, Game] = MappingProxyType({game.id: game for game in _GAMES})

KIND = Kind(
    ToyTextEnvironment,
    summary="gymnasium's toy text: FrozenLake-v1, Taxi-v4, CliffWalking-v1, Blackjack-v1",
    example="gymnasium:FrozenLake-v1",
    preset={
        "run": {"steps": 60},
        "policies": {"solver": {"model": "builtin:frozen-lake", "context_tokens": 128}},
        "tasks": {
            "options": {
                "map_size": 3,
                "size": 36,
                "eval_size": 15,
                "max_turns": 8,
                "max_tokens": 4,
                "history": "last",
                "rules": False,
            }
        },
    },
)
