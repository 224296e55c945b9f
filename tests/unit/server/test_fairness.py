"""Who is served next: shares, order, and what a flooder gets."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from wingbeat.server.calls.fairness import FORGET_ABOVE, FairQueue, FairShares


def test_a_flooder_gets_its_share_only() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(1000):
        queue.push("flooder", f"f{i}", cost=100)
    for i in range(10):
        queue.push("good", f"g{i}", cost=100)
    first = [queue.pop() for _ in range(20)]
    assert [item for item in first if item.startswith("g")] == [f"g{i}" for i in range(10)]
    assert len(queue) == 990


def test_turns_are_of_cost_not_of_number() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.push("long", "long", cost=400)
        queue.push("short", "short", cost=100)
    served = Counter(queue.pop() for _ in range(50))
    assert served == {"long": 10, "short": 40}


def test_who_was_away_has_saved_up_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(200):
        queue.push("busy", "busy", cost=1)
    for _ in range(100):
        queue.pop()
    for _ in range(100):
        queue.push("back", "back", cost=1)
    assert Counter(queue.pop() for _ in range(20)) == {"busy": 10, "back": 10}


def test_what_comes_back_is_next_and_free() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "a0", cost=5)
    queue.push("a", "a1", cost=5)
    taken = queue.pop()
    queue.push("b", "b0", cost=5)
    queue.push_back("a", taken)
    assert list(queue) == ["a0", "a1", "b0"] and queue.peek() == "a0"
    assert [queue.pop() for _ in range(3)] == ["a0", "b0", "a1"]
    queue.push_back("a", taken)
    assert queue.remove("a", taken) and len(queue) == 0 and queue.peek() is None


def test_clocks_of_absent_clients_are_let_go() -> None:
    shares = FairShares()
    for number in range(10 * FORGET_ABOVE):
        shares.charge(f"client-{number}")
    assert len(shares._clocks) <= FORGET_ABOVE + 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "pop", "remove"]), st.sampled_from("abcd"), st.integers(1, 50)),
        max_size=120,
    )
)
def test_every_item_comes_out_once_and_in_its_clients_order(steps: list[tuple[str, str, int]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    waiting: dict[str, list[tuple[str, int]]] = {name: [] for name in "abcd"}
    for number, (step, client, cost) in enumerate(steps):
        if step == "push":
            new = (client, number)
            queue.push(client, new, cost=cost)
            waiting[client].append(new)
        elif step == "remove" and waiting[client]:
            item = waiting[client].pop(number % len(waiting[client]))
            assert queue.remove(client, item)
        elif step == "remove":
            assert not queue.remove(client, (client, number))
        elif any(waiting.values()):
            peeked = queue.peek()
            item = queue.pop()
            assert item is peeked and item == waiting[item[0]].pop(0)
        assert len(queue) == sum(map(len, waiting.values()))
    assert sorted(queue) == sorted(item for own in waiting.values() for item in own)


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_busy_clients_get_equal_service(seed: int, num_clients: int) -> None:
    """Whatever the costs: two clients that always wait never differ by more than their two largest items."""
    rng = random.Random(seed)
    queue: FairQueue[tuple[str, float]] = FairQueue()
    served: Counter[str] = Counter()
    names = [f"c{i}" for i in range(num_clients)]
    for name in names * 3:
        cost = rng.uniform(1, 100)
        queue.push(name, (name, cost), cost=cost)
    for _ in range(300):
        name, cost = queue.pop()
        served[name] += cost  # type: ignore[assignment]
        more = rng.uniform(1, 100)
        queue.push(name, (name, more), cost=more)
        assert max(served[n] for n in names) - min(served[n] for n in names) <= 200
