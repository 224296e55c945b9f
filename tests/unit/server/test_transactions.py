"""Two-phase finishes, exhaustively: every order of messages and every crash, over the real state machines.

The world is small: one client (which may die and have a successor), its journal, two or three servers, and messages
that arrive late, twice, or never.  Whatever happens, all servers count the episode or none does; and once
everybody is back, nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from wingbeat.client.team_protocol import Answer, Coordinator, Phase, Verb
from wingbeat.core.errors import ConflictError, NotFoundError
from wingbeat.server.teams.transactions import (
    FIRST_ASK_S,
    MAX_ASK_S,
    TRANSITIONS,
    Doubt,
    Move,
    TransactionEvent,
    TransactionState,
    after,
    after_answer,
    next_move,
)

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

UNKNOWN, PREPARED = TransactionState.UNKNOWN, TransactionState.PREPARED
COMMITTED, ABORTED = TransactionState.COMMITTED, TransactionState.ABORTED
DECIDER = 0
TIMEOUT_S = 600.0
EVENTS = {
    Verb.PREPARE: TransactionEvent.PREPARE,
    Verb.COMMIT: TransactionEvent.COMMIT,
    Verb.ABORT: TransactionEvent.ABORT,
}


@dataclass(frozen=True)
class Rules:
    """Which world: who keeps what, and who may ask whom."""

    has_journal: bool
    may_ask: bool
    deaths: int = 1
    start: Callable[[tuple[str, ...]], Coordinator] = Coordinator
    is_careless: bool = False
    """The client says "commit" before its journal does: what the checker must find."""


@dataclass(frozen=True)
class World:
    servers: tuple[TransactionState, ...]
    client: Coordinator | None
    """None: dead."""
    journal: bool | None = None
    """Whether it says "commit"; None: no entry."""
    sent: frozenset[tuple[int, Verb]] = frozenset()
    """Requests on the network; each may arrive any number of times, or not."""
    replies: frozenset[tuple[int, Verb, Answer]] = frozenset()
    told: frozenset[tuple[int, TransactionState]] = frozenset()
    """The decider's answers on their way to a server that asked."""
    presumed: bool = False
    """The decider told somebody that it will never commit this, and keeps that in memory only."""
    deaths: int = 0


def moves(world: World, rules: Rules) -> Iterator[tuple[bool, World]]:
    """What may happen next; False marks what is a fault."""
    client = world.client
    if client is not None:
        for name, verb in client.todo():
            server = int(name)
            if verb is Verb.COMMIT and rules.has_journal and not (world.journal or rules.is_careless):
                yield True, replace(world, journal=True)
            else:
                yield True, replace(world, sent=world.sent | {(server, verb)})
            for answer in Answer:
                if (server, verb, answer) in world.replies:
                    yield True, replace(world, client=client.after(name, answer))
        if world.deaths < rules.deaths:
            yield False, replace(world, client=None, replies=frozenset(), deaths=world.deaths + 1)
    elif rules.has_journal:
        names = tuple(map(str, range(len(world.servers))))
        yield True, replace(world, client=Coordinator.resumed(names, was_committing=bool(world.journal)))
    for server, verb in world.sent:
        yield True, delivered(world, server, verb)
        if verb is Verb.PREPARE and world.servers[server] is UNKNOWN:  # its slot is gone, its reward is wrong ...
            yield False, replace(world, replies=world.replies | {(server, verb, Answer.REFUSED)})
    yield from doubts(world, rules)
    if world.presumed:
        yield False, replace(world, presumed=False)  # the decider restarts
    if world.replies:
        yield False, replace(world, replies=frozenset())


def stands(world: World, server: int) -> TransactionState:
    state = world.servers[server]
    return ABORTED if state is UNKNOWN and server == DECIDER and world.presumed else state


def delivered(world: World, server: int, verb: Verb) -> World:
    """As the server answers: with the state machine's word, or its refusal."""
    try:
        state = after("t", stands(world, server), EVENTS[verb])
    except (ConflictError, NotFoundError):
        return replace(world, replies=world.replies | {(server, verb, Answer.REFUSED)})
    servers = (*world.servers[:server], state, *world.servers[server + 1 :])
    return replace(world, servers=servers, replies=world.replies | {(server, verb, Answer.DONE)})


def doubts(world: World, rules: Rules) -> Iterator[tuple[bool, World]]:
    for server, state in enumerate(world.servers):
        if state is not PREPARED:
            continue
        doubt = Doubt(waiting_s=TIMEOUT_S, is_decider=server == DECIDER, may_ask=rules.may_ask)
        move = next_move(doubt, timeout_s=TIMEOUT_S)
        if move is Move.ABORT:
            yield True, decided(world, server, TransactionEvent.ABORT)
        elif move is Move.PRESUME:
            known = stands(world, DECIDER)
            asked = decided(world, DECIDER, TransactionEvent.ABORT) if known is PREPARED else world
            answer = ABORTED if known in (PREPARED, UNKNOWN) else known
            asked = replace(asked, presumed=asked.presumed or known is UNKNOWN)
            yield True, replace(asked, told=asked.told | {(server, answer)})
        for told_server, answer in world.told:
            event = after_answer(Move.ASK, answer) if told_server == server else None
            if event is not None:
                yield True, decided(world, server, event)


def decided(world: World, server: int, event: TransactionEvent) -> World:
    servers = list(world.servers)
    servers[server] = after("t", servers[server], event)
    return replace(world, servers=tuple(servers))


def explore(
    size: int, rules: Rules, *, until_torn: bool = False
) -> tuple[dict[World, list[tuple[bool, World]]], list[World]]:
    """All reachable worlds with their successors, and those in which some count and some do not."""
    start = World((UNKNOWN,) * size, rules.start(tuple(map(str, range(size)))), False if rules.has_journal else None)
    graph: dict[World, list[tuple[bool, World]]] = {}
    torn: list[World] = []
    waiting = [start]
    while waiting:
        world = waiting.pop()
        if world in graph:
            continue
        graph[world] = [(good, found) for good, found in moves(world, rules) if found != world]
        waiting += [found for _, found in graph[world]]
        if COMMITTED in world.servers and not {*world.servers} <= {COMMITTED, PREPARED}:
            torn.append(world)
            if until_torn:
                break
    return graph, torn


def hopeless(graph: dict[World, list[tuple[bool, World]]]) -> set[World]:
    """Worlds from which no way without further faults leads to one in which nobody waits."""
    before: dict[World, list[World]] = {world: [] for world in graph}
    for world, found in graph.items():
        for good, following in found:
            if good:
                before[following].append(world)
    reached = {world for world in graph if PREPARED not in world.servers}
    waiting = list(reached)
    while waiting:
        for world in before[waiting.pop()]:
            if world not in reached:
                reached.add(world)
                waiting.append(world)
    return set(graph) - reached


@pytest.mark.parametrize(
    ("size", "rules"),
    [
        (2, Rules(has_journal=True, may_ask=True, deaths=2)),
        (2, Rules(has_journal=True, may_ask=False, deaths=2)),
        (2, Rules(has_journal=False, may_ask=True)),
        pytest.param(3, Rules(has_journal=True, may_ask=False), marks=pytest.mark.slow),
    ],
    ids=["two", "two-strangers", "two-no-journal", "three-strangers"],
)
def test_all_servers_count_an_episode_or_none_and_nobody_waits_for_ever(size: int, rules: Rules) -> None:
    graph, torn = explore(size, rules)
    assert not torn
    assert not hopeless(graph)
    for world in graph:
        client = world.client
        if client is not None and client.phase in (Phase.TELLING, Phase.DONE):
            assert client.committed == (world.servers[DECIDER] is COMMITTED)
            assert not client.contrary
    ends = {world.servers for world, found in graph.items() if not any(good for good, _ in found)}
    assert {(COMMITTED,) * size} <= ends  # it does commit, where nothing goes wrong


def test_without_journal_and_peers_only_the_decider_is_sure_to_end() -> None:
    graph, torn = explore(2, Rules(has_journal=False, may_ask=False))
    assert not torn
    stuck = hopeless(graph)
    assert stuck
    assert all(world.client is None for world in stuck)  # docs: an admin, or a journal
    assert {world.servers for world in stuck if world.servers[DECIDER] is PREPARED} <= {(PREPARED, PREPARED)}


@dataclass(frozen=True, slots=True)
class Hasty(Coordinator):
    """Does not wait for the decider's commit: what the checker must find."""

    def todo(self) -> tuple[tuple[str, Verb], ...]:
        if self.phase is Phase.COMMITTING:
            return tuple((server, Verb.COMMIT) for server in self.servers if server not in self.heard)
        return Coordinator.todo(self)


@dataclass(frozen=True, slots=True)
class Parallel(Coordinator):
    """Does not let the decider prepare before the others: who asks it then is told of an abort that it may forget."""

    def todo(self) -> tuple[tuple[str, Verb], ...]:
        if self.phase is Phase.PREPARING:
            return tuple((server, Verb.PREPARE) for server in self.servers if server not in self.heard)
        return Coordinator.todo(self)


@pytest.mark.parametrize(
    "rules",
    [
        Rules(has_journal=False, may_ask=True, start=Hasty),
        Rules(has_journal=False, may_ask=True, start=Parallel),
        Rules(has_journal=True, may_ask=False, deaths=2, is_careless=True),
    ],
    ids=["commits at all at once", "prepares at all at once", "writes its journal too late"],
)
def test_the_checker_finds_a_client_that(rules: Rules) -> None:
    _, torn = explore(2, rules, until_torn=True)
    assert torn


def test_the_table_says_for_every_event_what_follows_or_why_not() -> None:
    for state in TransactionState:
        for event in TransactionEvent:
            if (state, event) in TRANSITIONS:
                assert after("t", state, event) is TRANSITIONS[state, event]
            else:
                with pytest.raises(NotFoundError if state is UNKNOWN else ConflictError, match="t"):
                    after("t", state, event)


def test_who_is_asked_when() -> None:
    mine = Doubt(waiting_s=TIMEOUT_S - 1, is_decider=True, may_ask=False)
    assert next_move(mine, timeout_s=TIMEOUT_S) is Move.WAIT
    assert next_move(replace(mine, waiting_s=TIMEOUT_S), timeout_s=TIMEOUT_S) is Move.ABORT
    stranger = Doubt(waiting_s=1e9, is_decider=False, may_ask=False)
    assert next_move(stranger, timeout_s=TIMEOUT_S) is Move.WAIT
    peer = Doubt(waiting_s=FIRST_ASK_S, is_decider=False, may_ask=True)
    assert next_move(replace(peer, waiting_s=FIRST_ASK_S - 1), timeout_s=TIMEOUT_S) is Move.WAIT
    assert next_move(peer, timeout_s=TIMEOUT_S) is Move.ASK
    asked = replace(peer, waiting_s=100.0, num_asked=30, since_asked_s=MAX_ASK_S - 1)
    assert next_move(asked, timeout_s=TIMEOUT_S) is Move.WAIT
    assert next_move(replace(asked, since_asked_s=MAX_ASK_S), timeout_s=TIMEOUT_S) is Move.ASK
    over = replace(asked, waiting_s=TIMEOUT_S)
    assert next_move(over, timeout_s=TIMEOUT_S) is Move.PRESUME
    assert next_move(replace(over, since_asked_s=0.0), timeout_s=TIMEOUT_S) is Move.WAIT


def test_what_the_deciders_answer_means() -> None:
    assert after_answer(Move.ASK, COMMITTED) is TransactionEvent.COMMIT
    assert after_answer(Move.ASK, ABORTED) is TransactionEvent.ABORT
    assert after_answer(Move.ASK, PREPARED) is None
    assert after_answer(Move.ASK, UNKNOWN) is None
    assert after_answer(Move.PRESUME, UNKNOWN) is TransactionEvent.ABORT
