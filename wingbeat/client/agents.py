"""``@agent``: the function that solves one episode, asynchronous or not."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, overload

from wingbeat.client.code import Code, loaded_code, split_agent
from wingbeat.client.episode import Episode
from wingbeat.client.rewards import RewardLike
from wingbeat.client.sync import LoopPort, SyncEpisode
from wingbeat.client.team_episode import TeamEpisode
from wingbeat.client.team_sync import SyncTeamEpisode, synchronous
from wingbeat.client.user_code import load_python_file
from wingbeat.core.errors import RequestError, SetupError
from wingbeat.core.types import Task

AsyncAgentFunction = (
    Callable[[Episode], Awaitable[RewardLike | None]] | Callable[[TeamEpisode], Awaitable[RewardLike | None]]
)
SyncAgentFunction = Callable[[SyncEpisode], RewardLike | None] | Callable[[SyncTeamEpisode], RewardLike | None]


class Agent:
    """A function of an episode that returns its reward, or None if it called ``episode.finish`` itself.

    A synchronous function runs in a thread of its own and gets a :class:`SyncEpisode`.  ``sources`` are the
    task sources that it can solve (None: all): its runner asks for no others.  ``resources`` are what it will lease,
    by name: specs, or functions of the task that give one.  They are started, together, as the episode begins; the
    function leases them as usual (``episode.lease(spec, name=...)``).
    """

    def __init__(
        self,
        function: AsyncAgentFunction | SyncAgentFunction,
        *,
        sources: Sequence[str] | None = None,
        resources: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(sources, str) or (sources is not None and not sources):
            raise RequestError(f"@agent expects a list of task sources, got {sources!r}", param="sources")
        self.sources = None if sources is None else tuple(sources)
        self.resources = dict(resources or {})
        if not callable(function):
            raise RequestError(f"@agent expects a function of an episode, got {function!r}")
        self._function: Callable[[Any], Any] = function
        functools.update_wrapper(self, self._function)
        self.code = Code("", ())
        """What it is made of, where it was loaded from a file."""
        self._abandoned: set[threading.Thread] = set()
        self.name = getattr(function, "__name__", type(function).__name__)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an instance whose __call__ is a coroutine function)
        )

    def __call__(self, episode: Any) -> Any:
        """Call the function itself, as its tests do."""
        return self._function(episode)

    async def run(self, episode: Episode | TeamEpisode) -> RewardLike | None:
        """What the function returns for a running episode; its exceptions pass through.

        ``sys.exit()`` in an agent becomes RuntimeError: it ends this episode, not its siblings.
        """
        try:
            if self.resources:
                episode.prefetch(self.specs_for(episode.task))
            if self.is_async:
                return await self._function(episode)
            port = LoopPort(asyncio.get_running_loop())
            function = functools.partial(self._function, synchronous(episode, port))
            return await run_in_thread(function, name=f"wingbeat-agent-{self.name}", abandoned=self._abandoned)
        except SystemExit as error:
            raise RuntimeError(f"agent {self.name} called sys.exit({error.code!r})") from error

    def specs_for(self, task: Task) -> dict[str, Any]:
        """What it declares to lease for a task, by name."""
        return {name: spec(task) if callable(spec) else spec for name, spec in self.resources.items()}

    @property
    def num_stuck(self) -> int:
        """Threads of its function that still run although nobody waits for them any more."""
        self._abandoned.difference_update([thread for thread in self._abandoned if not thread.is_alive()])
        return len(self._abandoned)

    def __repr__(self) -> str:
        return f"<agent {self.name}>"


@overload
def agent(function: AsyncAgentFunction | SyncAgentFunction) -> Agent: ...
@overload
def agent(
    *, sources: Sequence[str] | None = None, resources: Mapping[str, Any] | None = None
) -> Callable[[AsyncAgentFunction | SyncAgentFunction], Agent]: ...
def agent(
    function: AsyncAgentFunction | SyncAgentFunction | None = None,
    *,
    sources: Sequence[str] | None = None,
    resources: Mapping[str, Any] | None = None,
) -> Agent | Callable[[AsyncAgentFunction | SyncAgentFunction], Agent]:
    """Mark the function that solves an episode: ``@wingbeat.agent``.

    ``@wingbeat.agent(sources=["sums"])`` also says whose tasks it can solve, ``@wingbeat.agent(resources={"repo":
    spec_of})`` what it will lease: a spec, or a function of the task that gives one.
    """
    if function is not None:
        return Agent(function, sources=sources, resources=resources)
    return functools.partial(Agent, sources=sources, resources=resources)


async def run_in_thread(function: Callable[[], Any], *, name: str, abandoned: set[threading.Thread]) -> Any:
    """Run in a daemon thread: unlike an executor's, it cannot keep a stopped process alive.

    If the wait is cancelled the thread goes on, since nothing can end it; it is added to ``abandoned``.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as raised:  # noqa: BLE001 (a thread's boundary: carried over whole to the awaiting task)
            error = RuntimeError(f"{name} raised StopIteration") if isinstance(raised, StopIteration) else raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        if thread.is_alive():
            abandoned.add(thread)
        raise


def load_agent(path: str, *, base: Path | None = None) -> Agent:
    """The agent of a ``FILE.py`` with exactly one ``@agent`` function, or of ``FILE.py:NAME``.

    A relative path starts at ``base`` (default: the working directory).  Raises SetupError.
    """
    location, name = split_agent(path)
    file = location if base is None else base / location
    module = load_python_file(file, what="agent")
    found = _named_agent(module, name, location) if name else _only_agent(module, location)
    found.code = loaded_code(file.resolve(), name)
    return found


def _named_agent(module: ModuleType, name: str, location: Path) -> Agent:
    found: Any = getattr(module, name, None)
    if isinstance(found, Agent):
        return found
    if inspect.isfunction(found):
        return Agent(found)
    raise SetupError(f"expected an agent function {name!r} in {location}, got {found!r}")


def _only_agent(module: ModuleType, location: Path) -> Agent:
    found = {id(value): value for value in vars(module).values() if isinstance(value, Agent)}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise SetupError(f"expected one @wingbeat.agent function in {location}, got none; decorate your agent")
    names = ", ".join(sorted(value.name for value in found.values()))
    raise SetupError(f"expected one @wingbeat.agent function in {location}, got {names}; choose with {location}:NAME")
