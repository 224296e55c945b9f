"""Many tools, one turn, one episode."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.client import Episode
from wingbeat.core.errors import ConfigError
from wingbeat.resources import LocalSpec, ResourceLost, Resources
from wingbeat.tools import Fault, Tool, Toolbox, ToolRefused, tool


def asked(name: str, arguments: str = "{}", *, call_id: str = "c") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def sdk(name: str, arguments: str = "{}", *, call_id: str = "c") -> Any:
    """As the SDK's objects are."""
    function = SimpleNamespace(name=name, arguments=arguments)
    return SimpleNamespace(id=call_id, type="function", function=function)


@tool
def add(a: int, b: int) -> int:
    "Add."
    return a + b


class Counter:
    """State for each episode."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.count = 0

    @tool
    async def count(self, by: int = 1) -> int:
        """Count.

        Args:
            by: how far
        """
        before = self.count_now
        await asyncio.sleep(0)
        self.count_now = before + by
        return self.count_now

    count_now = 0


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Resources]:
    async with Resources(ledger=tmp_path) as resources:
        yield resources


async def test_tool_calls_in_and_tool_messages_out() -> None:
    toolbox = Toolbox([add])
    calls = [sdk("add", '{"a": 1, "b": 2}', call_id="x"), asked("add", '{"a": 3, "b": 4}', call_id="y")]
    assert await toolbox.answer(calls) == [
        {"role": "tool", "tool_call_id": "x", "content": "3"},
        {"role": "tool", "tool_call_id": "y", "content": "7"},
    ]
    assert await toolbox.answer(None) == []


async def test_what_is_no_call_of_a_known_tool_is_told() -> None:
    toolbox = Toolbox([add])
    custom = {"id": "c", "type": "custom", "custom": {"name": "sql", "input": "SELECT"}}
    results = await toolbox.call_all([asked("subtract"), custom, {"id": None}, sdk("add", None)])  # type: ignore[arg-type]
    assert [result.fault for result in results] == [Fault.UNKNOWN_TOOL] + [Fault.ARGUMENTS] * 3
    assert results[0].content == 'error: there is no tool "subtract"; the tools are add'
    assert results[1].content == 'error: expected a call of type function, got "custom"'
    half = await toolbox.call("add\ud83d")
    assert half.content.encode() == b'error: there is no tool "add?"; the tools are add', "it can be sent"


async def test_calls_of_one_turn_run_at_once_and_keep_their_order() -> None:
    arrived, all_there = 0, asyncio.Event()

    @tool
    async def meet(number: int) -> int:
        "Meet."
        nonlocal arrived
        arrived += 1
        if arrived == 5:
            all_there.set()
        await all_there.wait()
        return number

    results = await Toolbox([meet]).call_all([asked("meet", f'{{"number": {n}}}', call_id=str(n)) for n in range(5)])
    assert [(result.call_id, result.data) for result in results] == [(str(n), n) for n in range(5)]


async def test_calls_that_share_state_run_in_the_order_of_the_model() -> None:
    async with Toolbox([Counter, add]).for_episode(SimpleNamespace()) as tools:  # type: ignore[arg-type]
        results = await tools.call_all([asked("count", '{"by": 2}'), asked("add", '{"a": 1, "b": 1}'), asked("count")])
    assert [result.content for result in results] == ["2", "2", "3"]


async def test_a_tool_that_does_not_mind_the_order_of_its_calls_says_so() -> None:
    class Meeting:
        """Its calls wait for each other."""

        def __init__(self) -> None:
            self.barrier = asyncio.Barrier(2)

        @tool(in_order=False)
        async def meet(self) -> str:
            "Meet."
            await self.barrier.wait()
            return "met"

    async with Toolbox([Meeting]).for_episode(SimpleNamespace()) as tools:  # type: ignore[arg-type]
        assert [result.content for result in await tools.call_all([asked("meet"), asked("meet")])] == ["met", "met"]


async def test_if_infrastructure_fails_the_other_calls_are_cancelled_and_its_error_is_raised() -> None:
    started, cancelled = asyncio.Event(), []

    @tool
    async def wait() -> None:
        "Wait."
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    @tool
    async def lose() -> None:
        "Lose."
        await started.wait()
        raise ResourceLost("the box is gone") from OSError("no such process")

    with pytest.raises(ResourceLost, match="the box is gone") as caught:
        await Toolbox([wait, lose]).call_all([asked("wait"), asked("lose")])
    assert cancelled == [True]
    assert isinstance(caught.value.__cause__, OSError)


async def test_each_episode_has_an_instance_of_each_class() -> None:
    Counter.made = 0
    toolbox = Toolbox([Counter])
    assert Counter.made == 0 and toolbox.names == ("count",)
    owners: Any = SimpleNamespace()
    async with toolbox.for_episode(owners) as one, toolbox.for_episode(owners) as two:
        await one.call("count", '{"by": 5}')
        assert (await two.call("count")).content == "1"
        assert one.schemas() == toolbox.schemas()
    assert Counter.made == 2


async def test_an_instance_serves_all_episodes() -> None:
    toolbox = Toolbox([Counter()])
    await toolbox.call("count")
    async with toolbox.for_episode(SimpleNamespace()) as tools:  # type: ignore[arg-type]
        assert (await tools.call("count")).content == "2"


async def test_a_tool_that_needs_an_episode_says_so_without_one() -> None:
    with pytest.raises(ConfigError, match=r"tool count: expected .*for_episode"):
        await Toolbox([Counter]).call("count")


SHELF = LocalSpec(factory=list, label="shelf")


class Notebook:
    """Tools on a leased thing, entered and left with the episode."""

    log: list[str] = []  # noqa: RUF012

    def __init__(self, shelf: list[str], title: str = "notes") -> None:
        self.shelf, self.title = shelf, title

    async def __aenter__(self) -> None:
        self.log.append("entered")

    async def __aexit__(self, *_: BaseException | type[BaseException] | TracebackType | None) -> None:
        self.log.append("left")

    @tool
    def note(self, text: str) -> int:
        "Note."
        self.shelf.append(f"{self.title}: {text}")
        return len(self.shelf)


tool(resources={"shelf": SHELF})(Notebook)


@tool(resources={"shelf": SHELF})
def read(shelf: list[str]) -> list[str]:
    "Read."
    return shelf


async def test_tools_and_reward_hold_the_same_resource(pool: Resources) -> None:
    toolbox = Toolbox([Notebook, read])
    assert dict(toolbox.resources) == {"shelf": SHELF}
    async with toolbox.for_owner(pool, "episode 1") as tools:
        await tools.call("note", '{"text": "milk"}')
        assert (await tools.call("read")).data == ["notes: milk"]
        assert tools.lease("shelf").value == ["notes: milk"]
        async with pool.lease(SHELF, name="shelf", owner="episode 1") as lease:
            assert lease.value is tools.lease("shelf").value
        async with toolbox.for_owner(pool, "episode 2") as others:
            assert others.lease("shelf").value == []
        with pytest.raises(ConfigError, match="expected one of the toolbox's resources \\(shelf\\), got 'box'"):
            tools.lease("box")
    assert Notebook.log[-1] == "left"
    assert pool.num_leases == 0


async def test_several_resources_are_leased_together(pool: Resources) -> None:
    other = LocalSpec(factory=dict)

    @tool(resources={"shelf": SHELF, "index": other})
    def file(text: str, shelf: list[str], index: dict[str, int]) -> int:
        "File."
        index[text] = len(shelf)
        shelf.append(text)
        return index[text]

    async with Toolbox([file]).for_owner(pool, "me") as tools:
        results = await tools.call_all([asked("file", '{"text": "a"}'), asked("file", '{"text": "b"}')])
        assert [result.content for result in results] == ["0", "1"]
        assert tools.lease("index").value == {"a": 0, "b": 1}


async def test_a_resource_that_is_not_to_be_had_is_raised_before_the_episode_begins(pool: Resources) -> None:
    def fail() -> list[str]:
        raise OSError("disk full")

    @tool(resources={"shelf": LocalSpec(factory=fail)})
    def look(shelf: list[str]) -> None:
        "Look."

    with pytest.raises(Exception, match="disk full"):
        async with Toolbox([look]).for_owner(pool, "me"):
            raise AssertionError("never entered")
    assert pool.num_leases == 0


def test_clashes_are_refused() -> None:
    @tool(name="add")
    def plus(a: int) -> int:
        "Plus."
        return a

    @tool(resources={"shelf": LocalSpec(factory=dict)})
    def other(shelf: dict[str, str]) -> None:
        "Other."

    with pytest.raises(ToolRefused, match="two tools are called 'add'"):
        Toolbox([add, plus])
    assert Toolbox([add, plus.renamed("plus")]).names == ("add", "plus")
    with pytest.raises(ToolRefused, match="the resource 'shelf' is declared with two different specs"):
        Toolbox([read, other])
    with pytest.raises(ToolRefused, match="decorate it with @tool"):
        Toolbox([len])
    with pytest.raises(ToolRefused, match="max_threads"):
        Toolbox([add], max_threads=0)


class Diary:
    """Wants the episode."""

    def __init__(self, owner: Episode, places: Nowhere = ()) -> None:  # type: ignore[name-defined]  # noqa: F821
        self.owner = owner

    @tool
    def whose(self) -> str:
        "Tell whose."
        return self.owner.id


async def test_a_class_may_ask_for_the_episode() -> None:
    async with Toolbox([Diary]).for_episode(SimpleNamespace(id="e7")) as tools:  # type: ignore[arg-type]
        assert (await tools.call("whose")).content == "e7"


class Album(Notebook):
    """Inherits tools, and what ``__init__`` gets."""

    @tool
    async def slowly(self) -> int:
        "Look, and be overtaken if nobody minds the order."
        before = len(self.shelf)
        await asyncio.sleep(0)
        return before


async def test_what_a_class_inherits_holds_too(pool: Resources) -> None:
    async with Toolbox([Album, read]).for_owner(pool, "me") as tools:
        assert tools.names == ("note", "slowly", "read")
        results = await tools.call_all([asked("slowly"), asked("note", '{"text": "a"}'), asked("read")])
        assert [result.data for result in results] == [0, 1, ["notes: a"]]


async def test_tools_of_an_instance_and_of_its_resource_run_in_order(pool: Resources) -> None:
    """A class and a function share the shelf, though not the instance."""

    @tool(resources={"shelf": SHELF})
    async def clear(shelf: list[str]) -> None:
        "Clear."
        for _ in range(3):
            await asyncio.sleep(0)
        shelf.clear()

    async with Toolbox([Notebook, clear]).for_owner(pool, "me") as tools:
        calls = [asked("note", '{"text": "a"}'), asked("clear"), asked("note", '{"text": "b"}')]
        assert [result.data for result in await tools.call_all(calls)] == [1, None, 1]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "both", "free"]), st.integers(0, 4)), max_size=12))
def test_whatever_is_called_what_shares_state_never_overlaps(turn: list[tuple[str, int]]) -> None:
    log: list[tuple[str, str, int]] = []

    def made(name: str, *state: object) -> Tool:
        @tool(name=name)
        async def step(number: int, pauses: int) -> int:
            "Step."
            log.append((name, "begin", number))
            for _ in range(pauses):
                await asyncio.sleep(0)
            log.append((name, "end", number))
            return number

        return dataclasses.replace(step, state=state)

    one, two = object(), object()
    toolbox = Toolbox([made("a", one), made("b", two), made("both", one, two), made("free")])
    calls = [asked(name, f'{{"number": {n}, "pauses": {pauses}}}') for n, (name, pauses) in enumerate(turn)]
    results = asyncio.run(toolbox.call_all(calls))
    assert [result.data for result in results] == list(range(len(turn)))
    for shared in ({"a", "both"}, {"b", "both"}):
        seen = [(what, number) for name, what, number in log if name in shared]
        numbers = [number for number, (name, _) in enumerate(turn) if name in shared]
        assert seen == [(what, number) for number in numbers for what in ("begin", "end")]
