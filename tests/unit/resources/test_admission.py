"""Who goes next: the pure core against its own rule, under random events."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from wingbeat.resources.admission import Admission, Book, Slot, Ticket
from wingbeat.resources.pots import AmountPot, CostPot, RatePot, TicketState
from wingbeat.resources.states import ResourceState


class World:
    """Budgets of 4 processors and 10 MiB, and specs that want parts of them."""

    def __init__(self) -> None:
        self.cpus, self.memory = AmountPot("cpus", 4), AmountPot("memory", 10)
        self.few = AmountPot("limit of few", 2)
        self.admission = Admission(max_idle=3)
        self.books = {
            "free": Book("free", None, holds=[]),
            "small": Book("small", None, holds=[(self.cpus, 1)]),
            "big": Book("big", None, holds=[(self.cpus, 4), (self.memory, 6)]),
            "fat": Book("fat", None, holds=[(self.memory, 7)]),
            "few": Book("few", None, holds=[(self.few, 1)]),
            "shared": Book("shared", None, holds=[(self.cpus, 2)], is_shared=True),
        }
        self.admission.books.update(self.books)

    @property
    def pots(self) -> tuple[AmountPot, ...]:
        return self.cpus, self.memory, self.few


def ask(world: World, *names: str) -> Ticket:
    counts = [(world.books[name], names.count(name)) for name in dict.fromkeys(names)]
    ticket = Ticket(counts)
    world.admission.ask(ticket, 0.0)
    return ticket


def free(world: World, ticket: Ticket) -> list[Ticket]:
    """Its instances are closed."""
    let_in: list[Ticket] = []
    for slot in ticket.slots:
        slot.state = ResourceState.CLOSED
        let_in += world.admission.gone(slot, 0.0)
    return let_in


def test_a_big_one_is_not_starved_by_small_ones_that_come_later() -> None:
    world = World()
    first = ask(world, "small")
    big, later = ask(world, "big"), ask(world, "small")
    assert (big.state, later.state) == (TicketState.WAITING, TicketState.WAITING)
    assert free(world, first) == [big]
    assert later.state is TicketState.WAITING
    assert free(world, big) == [later]


def test_a_big_one_that_waits_does_not_delay_those_that_want_nothing_of_it() -> None:
    world = World()
    ask(world, "small")
    assert ask(world, "big").state is TicketState.WAITING
    assert ask(world, "few").state is TicketState.LET_IN
    assert ask(world, "free").state is TicketState.LET_IN
    assert ask(world, "fat").state is TicketState.WAITING, "it would take the memory that the big one waits for"


def test_who_gives_up_lets_those_behind_it_go() -> None:
    world = World()
    ask(world, "small")
    big, later = ask(world, "big"), ask(world, "small")
    assert world.admission.withdraw(big, 0.0) == [later]


def test_several_at_once_are_taken_together_or_not_at_all() -> None:
    world = World()
    held = [ask(world, "few"), ask(world, "fat")]
    both = ask(world, "few", "fat")
    assert both.state is TicketState.WAITING
    assert ask(world, "few").state is TicketState.WAITING, "one is free, but it is the first one's turn"
    assert free(world, held[1]) == [both]


def test_idle_instances_of_others_make_room_oldest_first() -> None:
    world = World()
    slots = [ask(world, "small").slots[0] for _ in range(4)]
    for slot in slots:
        slot.num_users = 0
        slot.state = ResourceState.READY
        world.admission.rest(slot, 0.0)
    assert world.admission.evicted == slots[:1], "three may rest"
    waiting = ask(world, "shared")
    assert world.admission.evicted == slots[:2], "the one that goes already counts"
    assert waiting.state is TicketState.WAITING, "until they are gone"
    assert world.admission.gone(slots[0], 0.0) == []
    assert world.admission.gone(slots[1], 0.0) == [waiting]


def test_rates_come_back_with_time_and_money_does_not() -> None:
    rate, money = RatePot("rate", 60.0, 0.0), CostPot("money", 1.0)
    admission = Admission()
    assert admission.ask(Ticket((), [(rate, 60.0)]), 0.0)
    waiting = Ticket((), [(rate, 30.0)])
    assert not admission.ask(waiting, 0.0)
    assert rate.ready_at(30.0, 0.0) == 30.0
    assert not admission.look([rate], 29.0)
    assert admission.look([rate], 30.0) == [waiting]
    money.take(0.75, 0.0)
    assert money.has(0.25, 1e9)
    assert not money.has(0.26, 1e9)


class Events(RuleBasedStateMachine):
    """Random events; after each of them the rule holds and nobody who could go still waits."""

    waiting = Bundle("waiting")
    held = Bundle("held")
    resting = Bundle("resting")

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.order: list[Ticket] = []
        """Those that wait, in order of asking."""
        self.users: dict[Slot, int] = {}
        self.closing: list[Slot] = []

    def settle(self, let_in: Sequence[Ticket]) -> None:
        for ticket in let_in:
            for earlier in self.order[: self.order.index(ticket)]:
                shared = set(earlier.pots) & set(ticket.pots)
                assert earlier.state is not TicketState.WAITING or not shared, "overtaken"
            self.taken(ticket)
        self.order = [ticket for ticket in self.order if ticket.state is TicketState.WAITING]
        self.evictions()

    def taken(self, ticket: Ticket) -> None:
        for slot in ticket.slots:
            self.users[slot] = self.users.get(slot, 0) + 1
            if slot.state is ResourceState.STARTING:
                slot.move(ResourceState.READY)
                slot.move(ResourceState.LEASED)

    def evictions(self) -> None:
        self.closing += self.world.admission.evicted
        self.world.admission.evicted.clear()

    @rule(
        target=waiting,
        names=st.lists(st.sampled_from(["free", "small", "big", "few", "shared"]), min_size=1, max_size=2)
        | st.just(["fat"]),
    )
    def ask(self, names: list[str]) -> Ticket:
        if names.count("big") == 2 or {"big", "small"} <= set(names) or {"big", "shared"} <= set(names):
            names = ["big"]
        ticket = ask(self.world, *names)
        if ticket.state is TicketState.LET_IN:
            for earlier in self.order:
                assert not set(earlier.pots) & set(ticket.pots), "overtaken"
            self.taken(ticket)
        else:
            self.order.append(ticket)
        self.evictions()
        return ticket

    @rule(ticket=consumes(waiting))
    def leave(self, ticket: Ticket) -> None:
        """Give up, or give back."""
        admission = self.world.admission
        if ticket.state is TicketState.WAITING:
            self.settle(admission.withdraw(ticket, 0.0))
            return
        for number, slot in enumerate(ticket.slots):
            self.users[slot] -= 1
            slot.num_users -= 1
            if slot.num_users:
                continue
            if number % 2 or slot.is_going:
                slot.move(ResourceState.CLOSED)
                admission.detach(slot)
                self.closing.append(slot)
            else:
                slot.move(ResourceState.READY)
                self.settle(admission.rest(slot, 0.0))
        self.evictions()

    @rule()
    def one_is_gone(self) -> None:
        if self.closing:
            self.settle(self.world.admission.gone(self.closing.pop(0), 0.0))

    @rule()
    def the_idle_are_swept(self) -> None:
        for slot in list(self.world.admission.idle)[:1]:
            self.world.admission.evict(slot)
        self.evictions()

    @invariant()
    def books_agree(self) -> None:
        for pot in self.world.pots:
            assert 0 <= pot.free <= pot.capacity
            assert pot.returning >= 0
        for slot in self.users:
            assert slot.book.is_shared or slot.num_users <= 1
            assert slot.num_users == self.users[slot]

    @invariant()
    def nobody_waits_who_could_go(self) -> None:
        """And nobody waits for what idle instances hold."""
        for ticket in self.order:
            if any(set(earlier.pots) & set(ticket.pots) for earlier in self.order[: self.order.index(ticket)]):
                continue
            if not self.closing:
                lacking = dict.fromkeys(self.world.pots, 0)
                for book, count in ticket.counts:
                    new = (book.shared is None) if book.is_shared else max(0, count - len(book.idle))
                    for pot, amount in book.holds:
                        lacking[pot] += new * amount
                in_use = sum(self.users.values())
                assert in_use and any(pot.free < amount for pot, amount in lacking.items()), "a lost wake-up"

    def teardown(self) -> None:
        """Once everything is given back and gone, everybody's turn has come and the budgets are whole."""
        admission = self.world.admission
        for _ in range(1000):
            self.evictions()
            held = [slot for slot, users in self.users.items() if users and slot.state is not ResourceState.CLOSED]
            for slot in held:
                self.users[slot] = slot.num_users = 0
                slot.move(ResourceState.CLOSED)
                admission.detach(slot)
                self.closing.append(slot)
            for slot in list(admission.idle):
                admission.evict(slot)
            self.evictions()
            if not self.closing:
                break
            self.settle(admission.gone(self.closing.pop(), 0.0))
        assert self.order == []
        assert all((pot.free, pot.returning) == (pot.capacity, 0) for pot in self.world.pots)
        assert all((book.num_live, book.num_waiting) == (0, 0) for book in self.world.books.values())


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40))
@settings(max_examples=50)
def test_whatever_they_want_all_have_their_turn_in_order(wanted: list[int]) -> None:
    """One pot: strictly first come, first served."""
    pot = AmountPot("units", 4)
    admission = Admission()
    books = {n: Book(n, None, holds=[(pot, n)]) for n in range(1, 5)}
    tickets = [Ticket([(books[n], 1)]) for n in wanted]
    went: list[Ticket] = []
    for ticket in tickets:
        went += admission.ask(ticket, 0.0)
    done = 0
    while done < len(went):
        slot = went[done].slots[0]
        slot.state = ResourceState.CLOSED
        went += admission.gone(slot, 0.0)
        done += 1
    assert went == tickets
