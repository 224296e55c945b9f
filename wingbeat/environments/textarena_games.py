"""Games of the textarena library for one or two players (``tasks.environment = "textarena:TicTacToe-v0"``).

The library's games run unchanged, in their `-raw` form: a player is told only what is new, which is a user message, and
its replies are its moves.  Rules, faults of moves and their price are the game's own: mostly a second fault in a row
loses.

- A task is a seed, and of a game for two the player that the policy is.  Of a game for one, no held-out game is one of
  training (compared by the state that the seed makes).
- The opponent draws a legal move, is a function of the user's, or another policy (``policy:NAME``), which then earns
  what the first one loses.
- Rewards are from 0 to 1: of two players lost 0, drawn 0.5, won 1; of one what the game says.  A game that is not over
  after ``max_turns`` moves scores 0.
- The library draws from Python's global generator.  Each game gets a state of it of its own for the time of a call, so
  that games at once do not disturb each other, and a task is the same game everywhere.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import logging
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from wingbeat.client import Episode
from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.core.types import Split, Task
from wingbeat.environments.asking import Conversation, OutOfContext
from wingbeat.environments.kinds import Kind
from wingbeat.environments.options import Options, read_options, read_split

logger = logging.getLogger("wingbeat.environments")

Mover = Callable[[str], Awaitable[str]]
"""Takes what is new to a player, and moves."""

POLICY = "policy:"
"""Begins the name of an opponent that is another policy."""

MOVES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "ConnectFour": [f"[{column}]" for column in range(7)],
        "IteratedMatchingPennies": ["[heads]", "[tails]"],
        "IteratedRockPaperScissors": ["[rock]", "[paper]", "[scissors]"],
        "KuhnPoker": ["[check]", "[bet]", "[call]", "[fold]"],
        "Nim": [f"[{pile} {count}]" for pile in range(5) for count in range(1, 12)],
        "PigDice": ["[roll]", "[hold]"],
        "TicTacToe": [f"[{cell}]" for cell in range(9)],
    }
)
"""What the random opponent draws from, by the game's name without its version; what is not legal it draws again."""

_MAX_DRAWS_PER_TASK = 20
_MAX_MOVE_CHARS = 8000
"""Of the end of a reply, which is what the game is told."""
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError)
"""What games raise where they are not made for what they got."""
_WORD_LISTS = re.compile(r"\b(nltk|EnglishDictionary)\b")
"""In the module of a game that wants what is not in the library's package; the latter is its reader of NLTK's lists."""
_STATE = re.compile(r" at 0x[0-9a-f]+")


class TextArenaOptions(Options):
    """Which games, and against whom."""

    size: int = Field(default=200, ge=1, description="Tasks to train on.")
    eval_size: int = Field(default=50, ge=1, description="Held-out tasks.")
    seed: int = Field(default=0, ge=0, description="Draws the games.")
    opponent: str = Field(
        default="random",
        description="Of two players: `random`, `policy:NAME`, or `MODULE:FUNCTION` of (what is new, a random.Random).",
    )
    player: Literal["both", "first", "second"] = Field(
        default="both", description="Of two players, which one the policy is; `both`: in turn."
    )
    max_turns: int = Field(default=60, ge=1, description="Moves of a game, of all players.")
    max_tokens: int | None = Field(default=None, ge=1, description="Tokens of a reply.")
    history: Literal["full", "last"] = Field(
        default="full", description="What a prompt holds: all that the player was told, or what is new."
    )
    game: dict[str, Any] = Field(default={}, description="Arguments of the game, as `{max_turns = 10}`.")


class TextArenaEnvironment:
    """One game.  A payload holds its seed, and whom the policy plays."""

    def __init__(self, game: str, options: Mapping[str, Any] | None = None) -> None:
        self.name = f"textarena:{game}"
        self._id = game
        self._options = read_options(TextArenaOptions, options or {}, environment=self.name)
        self._library = _library()
        self._check_known()
        self._check_offline()
        self.num_players = self._probe()
        self._function = self._opponent_function() if self.num_players == 2 else None
        self._tasks = self._make_tasks()

    def tasks(self, split: str) -> Sequence[Task]:
        """Games with distinct seeds; of games for one, also with distinct states."""
        return self._tasks[read_split(split)]

    def score(self, task: Task, answer: str) -> float:
        """The reward of a game whose moves are the lines of one answer; the opponent moves at random, if need be."""
        match = self.begin(task)
        lines = iter(answer.splitlines())
        for _ in range(self._options.max_turns):
            if match.over:
                break
            if match.player == match.seat:
                line = next(lines, None)
                if line is None:
                    break
                match.move(line)
            else:
                match.move(match.random_move(MOVES.get(self._base, ())) or "")
        return match.reward

    async def play(self, episode: Episode) -> float | dict[str, float]:
        """To the end of the game, of the turns, or of a context; both rewards where the opponent is a policy."""
        match = self.begin(episode.task)
        movers = self._movers(episode, match)
        for _ in range(self._options.max_turns):
            if match.over:
                break
            try:
                match.move(await movers[match.player](match.news()))
            except OutOfContext:
                match.leave()
        if not self._options.opponent.startswith(POLICY) or self.num_players == 1:
            return match.reward
        other = self._options.opponent.removeprefix(POLICY)
        return {episode.policies[0]: match.reward, other: match.reward_of(1 - match.seat)}

    def _movers(self, episode: Episode, match: Match) -> dict[int, Mover]:
        def of_policy(model: str | None) -> Mover:
            options = self._options
            talk = Conversation(episode, keep=options.history == "full", max_tokens=options.max_tokens, model=model)
            return talk.reply_to

        opponent = self._options.opponent
        movers = {match.seat: of_policy(None)}
        if self.num_players == 1:
            return movers
        if opponent.startswith(POLICY):
            movers[1 - match.seat] = of_policy(episode.model_for(opponent.removeprefix(POLICY)))
            return movers

        async def other(news: str) -> str:
            if self._function is not None:
                return str(self._function(news, match.rng))
            return match.random_move(MOVES.get(self._base, ())) or ""

        movers[1 - match.seat] = other
        return movers

    @property
    def _base(self) -> str:
        return self._id.partition("-v")[0]

    # --- what is refused --------------------------------------------------------------------

    def _check_known(self) -> None:
        registry = _registry()
        if f"{self._id}-raw" not in registry:
            known = ", ".join(sorted(name.removesuffix("-raw") for name in registry if name.endswith("-v0-raw")))
            raise ConfigError(f"expected a game of textarena, got {self._id or 'no name'}; there are: {known}")

    def _check_offline(self) -> None:
        """Its module is read before it is imported, which would be the download."""
        entry = str(_registry()[f"{self._id}-raw"].entry_point)
        spec = importlib.util.find_spec(entry.partition(":")[0])
        if spec is None or spec.origin is None:
            return  # what cannot be imported, the probe tells
        if _WORD_LISTS.search(Path(spec.origin).read_text("utf-8")):
            raise ConfigError(
                f"{self.name} cannot be used: it needs word lists of NLTK, a download that it tries whenever it is"
                " imported, which here nothing does"
            )

    def _probe(self) -> int:
        """How many players the game wants; refuses one that cannot be made here, or differs from time to time."""
        faults: list[str] = []
        for count in (2, 1):
            try:
                first, second = (Match(self._library, self._id, self._options.game, 1, 0, count) for _ in range(2))
                news = first.news()
            except (*_FAULTS, OSError, ImportError, SyntaxError) as error:
                faults.append(f"{count} players: {' '.join(str(error).split())[:200] or type(error).__name__}")
                continue
            if news != second.news():
                raise ConfigError(f"{self.name} cannot be used: one seed makes different games")
            return count
        raise ConfigError(f"{self.name} cannot be used, as a game for one or two players ({'; '.join(faults)})")

    def _opponent_function(self) -> Callable[[str, random.Random], str] | None:
        opponent = self._options.opponent
        if opponent == "random":
            match = Match(self._library, self._id, self._options.game, 1, 1, 2)
            if match.random_move(MOVES.get(self._base, ())) is None:
                raise ConfigError(
                    f"{self.name}: the random opponent knows no move of this game; set `opponent` to policy:NAME, or to"
                    f" MODULE:FUNCTION. It plays {', '.join(MOVES)}, and games that list their moves as '[move]'"
                )
            return None
        if opponent.startswith(POLICY) and opponent != POLICY:
            return None
        module, _, name = opponent.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"`tasks.options.opponent` of {self.name}: expected random, policy:NAME or MODULE:FUNCTION, got"
                f" {opponent!r} ({error})"
            ) from error
        return found

    # --- tasks ------------------------------------------------------------------------------

    def begin(self, task: Task) -> Match:
        """The game of a task."""
        payload = task.payload
        return Match(self._library, self._id, self._options.game, payload["seed"], payload["player"], self.num_players)

    def _make_tasks(self) -> dict[Split, tuple[Task, ...]]:
        options = self._options
        wanted = options.size + options.eval_size
        tasks = [
            Task(self.name, f"{self._id}-{seed}", {"seed": seed, "player": self._seat(number)})
            for number, seed in zip(range(wanted), self._seeds(wanted), strict=False)
        ]
        if len(tasks) < wanted:
            raise ConfigError(
                f"{self.name}: expected {options.size} + {options.eval_size} different games, got {len(tasks)}; lower"
                " `size` or `eval_size`"
            )
        return {Split.EVAL: tuple(tasks[: options.eval_size]), Split.TRAIN: tuple(tasks[options.eval_size :])}

    def _seat(self, number: int) -> int:
        if self.num_players == 1:
            return 0
        return {"both": number % 2, "first": 0, "second": 1}[self._options.player]

    def _seeds(self, wanted: int) -> Iterator[int]:
        """Seeds of distinct games."""
        rng = random.Random(self._options.seed)
        seeds, states = set[int](), set[str]()
        for _ in range(_MAX_DRAWS_PER_TASK * wanted):
            seed = rng.randrange(2**31)
            if seed in seeds:
                continue
            seeds.add(seed)
            if self.num_players == 1:
                state = Match(self._library, self._id, self._options.game, seed, 0, 1).state
                if state in states:
                    continue
                states.add(state)
            yield seed


class Match:
    """A game under way, with its own part of the global generator."""

    def __init__(
        self, library: Any, game: str, arguments: Mapping[str, Any], seed: int, seat: int, num_players: int
    ) -> None:
        self.seat = seat
        """The player that the policy is."""
        self.rng = random.Random(seed)
        """Of the opponent."""
        self._num_players = num_players
        self._global = random.Random(seed).getstate()
        self._left: int | None = None
        with self._own_generator():
            self._env = library.make(f"{game}-raw", **arguments)
            self._env.reset(num_players=num_players, seed=seed)

    @contextlib.contextmanager
    def _own_generator(self) -> Iterator[None]:
        """Around every call of the library; what it prints is dropped."""
        theirs = random.getstate()
        random.setstate(self._global)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            self._global = random.getstate()
            random.setstate(theirs)

    @property
    def over(self) -> bool:
        return self._left is not None or bool(self._env.state.done)

    @property
    def player(self) -> int:
        """Whose turn it is."""
        return int(self._env.state.current_player_id)

    @property
    def state(self) -> str:
        """What the seed made of the game."""
        return _STATE.sub("", repr(self._env.state.game_state))

    @property
    def reward(self) -> float:
        """The policy's."""
        return self.reward_of(self.seat)

    def reward_of(self, player: int) -> float:
        """From 0 to 1; of one who left nothing, and of the other one as much as of a draw."""
        if self._left is not None:
            return 0.0 if player == self._left else 0.5
        rewards: Mapping[int, float] | None = self._env.state.rewards
        if not self._env.state.done or rewards is None:
            return 0.0
        reward = float(rewards[player])
        return min(1.0, max(0.0, (reward + 1) / 2 if self._num_players == 2 else reward))

    def news(self) -> str:
        """What the player whose turn it is has not been told yet; not what it said itself."""
        player = self.player
        with self._own_generator():
            _, told = self._env.get_observation()
        said = [
            (f"Player {sender}: " if sender >= 0 else "", str(text).strip())
            for sender, text, *_ in told
            if sender != player
        ]
        return "\n\n".join(f"{who}{text}" for who, text in said)

    def move(self, text: str) -> None:
        """What that player says; where the game's own code breaks on it, the player is out."""
        try:
            with self._own_generator():
                self._env.step(text[-_MAX_MOVE_CHARS:])
        except _FAULTS as error:
            logger.debug("a game raised %s: %s on %.80r", type(error).__name__, error, text)
            self.leave()

    def leave(self) -> None:
        """The player whose turn it is cannot go on: it gets nothing."""
        self._left = self.player

    def random_move(self, moves: Sequence[str]) -> str | None:
        """A legal one, out of ``moves`` or those that the game lists as '[move]'; None where none is found."""
        listed = list(dict.fromkeys(moves)) or self._listed()
        self.rng.shuffle(listed)
        return next((move for move in listed if self._is_legal(move)), None)

    def _listed(self) -> list[str]:
        told = self._env.state.observations[self.player]
        found = [move for _, text, *_ in told for move in re.findall(r"'(\[[^\[\]'\n]{1,30}\])'", str(text))]
        return list(dict.fromkeys(found))

    def _is_legal(self, move: str) -> bool:
        """Tried on a copy, with the generator put back."""
        before = self._global
        trial = copy.deepcopy(self._env)
        player, errors = self.player, int(trial.state.error_count)
        try:
            with self._own_generator():
                trial.step(move)
        except _FAULTS:
            return False
        finally:
            self._global = before
        state = trial.state
        return int(state.error_count) <= errors and not state.game_info[player].get("invalid_move", False)


def _registry() -> Mapping[str, Any]:
    """The library's games by id."""
    return importlib.import_module("textarena.envs.registration").ENV_REGISTRY


def _library() -> Any:
    try:
        return importlib.import_module("textarena")
    except ModuleNotFoundError as error:
        raise DependencyMissing(
            f"textarena is not installed, or without its {error.name!r}; install it with"
            " `pip install 'wingbeat[environments]'`"
        ) from error


KIND = Kind(
    TextArenaEnvironment,
    summary="games of textarena for one or two players: TicTacToe-v0, KuhnPoker-v0, Mastermind-v0, Sudoku-v0 ...",
    example="textarena:TicTacToe-v0",
    preset={
        "run": {"steps": 60},
        "policies": {"solver": {"model": "builtin:tic-tac-toe", "context_tokens": 512}},
        "tasks": {"options": {"history": "last", "max_tokens": 4}},
    },
)
