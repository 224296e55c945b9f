"""The task dealer: epochs, mixing, replacement and resume."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import NotFoundError, RequestError
from wingbeat.core.types import Split, Task
from wingbeat.dataflow.dealer import TaskDealer


def tasks(source: str, count: int) -> list[Task]:
    return [Task(source, str(i)) for i in range(count)]


def new_dealer(seed: int = 0, **sizes: int) -> TaskDealer:
    dealer = TaskDealer(seed)
    for source, size in sizes.items():
        dealer.add_source(source, Split.TRAIN, tasks(source, size))
    return dealer


def deal(dealer: TaskDealer, count: int) -> list[tuple[str, str]]:
    return [(task.source, task.id) for task in (dealer.next_task() for _ in range(count))]


def test_each_epoch_is_a_new_permutation():
    dealer = new_dealer(a=20)
    epochs = [deal(dealer, 20) for _ in range(3)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(("a", str(i)) for i in range(20))
    assert all(first != second for first, second in pairwise(epochs))


def test_order_depends_on_the_seed_alone():
    assert deal(new_dealer(1, a=10, b=5), 40) == deal(new_dealer(1, a=10, b=5), 40)
    assert deal(new_dealer(1, a=10, b=5), 40) != deal(new_dealer(2, a=10, b=5), 40)


def test_sources_mix_in_proportion_to_size():
    dealt = deal(new_dealer(a=30, b=10), 40)
    for end in range(4, 41, 4):
        assert abs(sum(source == "b" for source, _ in dealt[:end]) - end / 4) <= 1


def test_late_source_neither_starves_nor_waits():
    dealer = new_dealer(a=10)
    deal(dealer, 1000)
    dealer.add_source("b", Split.TRAIN, tasks("b", 10))
    counts = Counter(source for source, _ in deal(dealer, 20))
    assert counts == {"a": 10, "b": 10}


def test_same_tasks_again_change_nothing_and_others_start_an_epoch():
    dealer = new_dealer(a=10)
    first = deal(dealer, 4)
    dealer.add_source("a", Split.TRAIN, tasks("a", 10))
    rest = deal(dealer, 6)
    assert len(set(first + rest)) == 10
    deal(dealer, 3)
    dealer.add_source("a", Split.TRAIN, tasks("a", 12))
    assert len(set(deal(dealer, 12))) == 12


@given(st.integers(0, 60), st.booleans())
def test_resume_deals_on_exactly(position, sources_first):
    sizes = {"a": 7, "b": 3}
    reference = deal(new_dealer(5, **sizes), position + 30)
    dealer = new_dealer(5, **sizes)
    deal(dealer, position)
    state = msgspec.json.decode(msgspec.json.encode(dealer.state_dict()))
    resumed = new_dealer(5, **sizes) if sources_first else TaskDealer(5)
    resumed.load_state_dict(state)
    if not sources_first:
        for source, size in sizes.items():
            resumed.add_source(source, Split.TRAIN, tasks(source, size))
    assert resumed.state_dict() == state
    assert deal(resumed, 30) == reference[position:]


def test_resume_keeps_the_place_of_sources_that_are_not_back_yet():
    dealer = new_dealer(a=4, b=4)
    deal(dealer, 3)
    resumed = new_dealer(a=4)
    resumed.load_state_dict(dealer.state_dict())
    assert resumed.state_dict() == dealer.state_dict()


def test_resume_with_changed_tasks_starts_the_next_epoch():
    dealer = new_dealer(a=4)
    deal(dealer, 3)
    resumed = new_dealer(a=5)
    resumed.load_state_dict(dealer.state_dict())
    assert resumed.state_dict()["sources"]["a"]["epoch"] == 1
    assert len(set(deal(resumed, 5))) == 5


def test_wrong_states_are_refused():
    with pytest.raises(ValueError, match="seed 1"):
        new_dealer(2).load_state_dict(new_dealer(1).state_dict())
    with pytest.raises(msgspec.ValidationError):
        new_dealer().load_state_dict({"seed": "x"})


def test_eval_tasks_come_in_order_and_never_train():
    dealer = TaskDealer(0)
    dealer.add_source("a", Split.EVAL, tasks("a", 3))
    dealer.add_source("b", Split.EVAL, tasks("b", 1))
    assert [t.id for t in dealer.eval_tasks("a")] == ["0", "1", "2"]
    assert len(dealer.eval_tasks()) == dealer.num_tasks(Split.EVAL) == 4
    assert dealer.num_tasks(Split.TRAIN) == 0
    with pytest.raises(NotFoundError, match="training task source"):
        dealer.next_task()
    with pytest.raises(NotFoundError, match="sources with eval tasks: a, b"):
        dealer.eval_tasks("c")


@pytest.mark.parametrize(
    ("given", "message"),
    [([], "at least one"), ([Task("b", "1")], "names source 'b'"), ([Task("a", "1"), Task("a", "1")], "unique")],
)
def test_bad_sources_are_refused(given, message):
    with pytest.raises(RequestError, match=message):
        TaskDealer(0).add_source("a", Split.TRAIN, given)
