"""The task dealer: epochs, mixing, replacement and resume."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import NotFoundError, RequestError
from wingbeat.core.types import Split, Task
from wingbeat.dataflow.dealer import MAX_REFUNDS, TaskDealer

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute


def tasks(source: str, count: int) -> list[Task]:
    return [Task(source, str(i)) for i in range(count)]


def add(dealer: TaskDealer, **sizes: int) -> TaskDealer:
    for source, size in sizes.items():
        dealer.add_source(source, Split.TRAIN, tasks(source, size))
    return dealer


def new_dealer(seed: int = 0, **sizes: int) -> TaskDealer:
    return add(TaskDealer(seed), **sizes)


def deal(dealer: TaskDealer, count: int, sources: tuple[str, ...] | None = None) -> list[tuple[str, str]]:
    found = [dealer.next_task(sources) for _ in range(count)]
    return [(task.source, task.id) for task in found if task is not None]


def counts(dealt: list[tuple[str, str]]) -> Counter[str]:
    return Counter(source for source, _ in dealt)


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
    assert counts(deal(dealer, 20)) == {"a": 10, "b": 10}


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
        add(resumed, **sizes)
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


def test_a_state_from_before_ratios_loads():
    old = {"seed": 0, "sources": {"a": {"epoch": 2, "position": 1, "pass_": 2.25, "digest": "other tasks"}}}
    dealer = TaskDealer(0)
    dealer.load_state_dict(old)
    add(dealer, a=4)
    assert dealer.places()["a"].epoch == 3


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
    assert dealer.next_task() is None and not dealer.is_exhausted
    with pytest.raises(NotFoundError, match="sources with eval tasks: a, b"):
        dealer.eval_tasks("c")


def test_a_limit_of_eval_tasks_is_spread_over_the_sources():
    dealer = TaskDealer(0)
    for source, size in {"a": 9, "b": 1, "c": 9}.items():
        dealer.add_source(source, Split.EVAL, tasks(source, size))
    chosen = [(t.source, t.id) for t in dealer.eval_tasks(limit=6)]
    assert chosen == [("a", "0"), ("a", "1"), ("a", "2"), ("b", "0"), ("c", "0"), ("c", "1")]
    assert [t.id for t in dealer.eval_tasks("c", limit=2)] == ["0", "1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [([], "at least one"), ([Task("b", "1")], "names source 'b'"), ([Task("a", "1"), Task("a", "1")], "unique")],
)
def test_bad_sources_are_refused(given, message):
    with pytest.raises(RequestError, match=message):
        TaskDealer(0).add_source("a", Split.TRAIN, given)


# --- ratios ------------------------------------------------------------------------------------

RATIOS = {"a": 0.5, "b": 0.3, "c": 0.2}
SIZES = {"a": 3, "b": 50, "c": 7}


def new_mix(**more) -> TaskDealer:
    return add(TaskDealer(3, ratios=RATIOS, **more), **SIZES)


def test_ratios_hold_whatever_the_sizes():
    assert counts(deal(new_mix(), 1000)) == {"a": 500, "b": 300, "c": 200}


shares_of = st.lists(st.integers(1, 20), min_size=1, max_size=5).map(
    lambda parts: {f"s{i}": part / sum(parts) for i, part in enumerate(parts)}
)


@given(shares_of, st.integers(1, 300), st.randoms(use_true_random=False))
def test_shares_of_counted_groups_hold_at_every_moment(ratios, count, rng):
    """Some groups do not count; their sources are dealt again for them."""
    dealer = add(TaskDealer(0, ratios=ratios), **dict.fromkeys(ratios, 4))
    counted: Counter[str] = Counter()
    for _ in range(count):
        (source, _), *_ = deal(dealer, 1)
        if rng.random() < 0.5:
            dealer.counted(source)
            counted[source] += 1
        else:
            dealer.refund(source)
    total = sum(counted.values())
    for name, ratio in ratios.items():
        assert abs(counted[name] - ratio * total) <= len(ratios)
        assert dealer.places()[name].counted == counted[name]


@given(shares_of, st.lists(st.integers(0, 4), max_size=120), st.integers(1, 4))
def test_no_source_is_further_from_its_share_than_the_slack(ratios, asks, slack):
    """Each client runs one source, and they ask in any order."""
    dealer = add(TaskDealer(0, ratios=ratios, slack=slack), **dict.fromkeys(ratios, 5))
    dealt: Counter[str] = Counter()
    for number in asks:
        source = f"s{number % len(ratios)}"
        if (task := dealer.next_task((source,))) is not None:
            dealt[task.source] += 1
        total = sum(dealt.values())
        for name, ratio in ratios.items():
            assert -max(slack, len(ratios) - 1) - 1e-6 <= dealt[name] - ratio * total <= slack + 1e-6
    assert dealer.next_task() is not None, "whoever is furthest behind may always be dealt"


@given(st.integers(0, 80), st.lists(st.sampled_from("abc"), max_size=80), st.integers(2, 5))
def test_every_task_comes_once_per_epoch_and_a_restart_changes_nothing(position, asks, epochs):
    """Whoever asks for what, and wherever the run was cut."""
    reference, cut = new_mix(epochs=epochs), new_mix(epochs=epochs)
    dealt: list[tuple[str, str]] = []
    for step, source in enumerate(asks):
        if step == position:
            state = msgspec.json.decode(msgspec.json.encode(cut.state_dict()))
            cut = new_mix(epochs=epochs)
            cut.load_state_dict(state)
        expected, got = deal(reference, 1, (source,)), deal(cut, 1, (source,))
        assert got == expected
        dealt += got
        if step % 3 == 0 and got:
            reference.refund(source)
            cut.refund(source)
    for source, size in SIZES.items():
        order = [task for name, task in dealt if name == source]
        for start in range(0, len(order), size):
            assert len(set(order[start : start + size])) == len(order[start : start + size])


def test_without_ratios_nobody_waits_and_an_absent_source_keeps_a_little_of_its_claim():
    dealer = add(TaskDealer(0, slack=3), a=10, b=10)
    assert len(deal(dealer, 100, ("a",))) == 100
    assert dealer.held_back(("a",)) == ()
    assert counts(deal(dealer, 24)) == {"a": 10, "b": 14}


def test_a_client_of_one_source_waits_for_those_behind_and_is_told_for_whom():
    dealer = new_mix(slack=2)
    assert len(deal(dealer, 10, ("a",))) == 2, "2 of 2 groups are 1 above the share of a half, and 2 sources are behind"
    assert len(deal(dealer, 10, ("a", "c"))) > 0
    assert dealer.held_back(("a", "c")) == ("b",)
    assert -2 <= dealer.places()["b"].ahead < 0
    assert dealer.held_back(("a", "b")) == ()


def test_nothing_is_dealt_before_every_source_of_the_ratios_has_come():
    dealer = add(TaskDealer(0, ratios=RATIOS), a=3, b=3)
    assert dealer.next_task() is None and dealer.missing == ("c",) and not dealer.is_exhausted
    assert dealer.places()["c"].num_tasks == 0
    add(dealer, c=3)
    assert counts(deal(dealer, 10)) == {"a": 5, "b": 3, "c": 2}


def test_ratios_change_while_the_run_goes_on_and_outlast_a_restart():
    dealer = new_mix()
    deal(dealer, 100)
    dealer.set_ratios({"a": 0.1, "b": 0.9, "c": 0})
    assert counts(deal(dealer, 100)) == {"a": 10, "b": 90}
    resumed = new_mix()
    resumed.load_state_dict(dealer.state_dict())
    assert resumed.ratios == {"a": 0.1, "b": 0.9, "c": 0}
    changed = add(TaskDealer(3, ratios={"a": 0.4, "b": 0.4, "c": 0.2}), **SIZES)
    changed.load_state_dict(dealer.state_dict())
    assert changed.ratios["a"] == 0.4, "a configuration that says something new wins"
    assert counts(deal(changed, 10)) == {"a": 4, "b": 4, "c": 2}
    dealer.set_ratios({})
    assert dealer.ratios == {} and counts(deal(dealer, 60)) == SIZES


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({"a": 0.5, "b": 0.5, "d": 0.0, "c": 0.0}, "no training tasks of source 'd'; sources are: a, b, c"),
        ({"a": 0.5, "b": 0.5}, "leave out source 'c'; give it a share, or 0"),
        ({"a": 0.5, "b": 0.4, "c": 0.2}, "sum to 1, got a = 0.5, b = 0.4, c = 0.2, which sums to 1.1"),
        ({"a": 1.5, "b": -0.5, "c": 0.0}, "0 or more"),
        ({"a": float("nan"), "b": 0.5, "c": 0.5}, "0 or more"),
        ({"a": 1e-310, "b": 0.5, "c": 0.5}, "the share of 'a' is 1e-310; expected 1e-06 or more, or 0"),
    ],
)
def test_ratios_that_are_no_shares_are_refused(ratios, message):
    dealer = new_mix()
    with pytest.raises(RequestError, match=message):
        dealer.set_ratios(ratios)
    assert dealer.ratios == RATIOS


def test_a_source_joins_with_a_ratio_and_the_others_shrink():
    dealer = new_mix()
    with pytest.raises(RequestError, match="leave nothing for source 'd': send its `ratio` along"):
        dealer.join("d", None)
    for ratio in (1e-310, 1 - 1e-12, 1.0, 0.0):
        with pytest.raises(RequestError, match=r"expected 1e-06 to 0\.999999"):
            dealer.join("d", ratio)
    dealer.join("d", 0.2)
    add(dealer, d=5)
    assert dealer.ratios == pytest.approx({"a": 0.4, "b": 0.24, "c": 0.16, "d": 0.2})
    dealer.join("d", 0.9)
    assert dealer.ratios["d"] == 0.2, "a share once given is changed for all sources together"
    assert counts(deal(dealer, 100)) == {"a": 40, "b": 24, "c": 16, "d": 20}
    with pytest.raises(RequestError, match="no ratios are set"):
        new_dealer(a=1).join("b", 0.5)


def test_a_removed_source_is_dealt_no_more_and_the_others_keep_their_proportions():
    dealer = new_mix()
    dealer.add_source("b", Split.EVAL, tasks("b", 2))
    deal(dealer, 10)
    dealer.remove("b")
    assert dealer.ratios == pytest.approx({"a": 5 / 7, "c": 2 / 7})
    assert counts(deal(dealer, 70)) == {"a": 50, "c": 20}
    assert dealer.num_tasks(Split.EVAL) == 0 and "b" not in dealer.state_dict()["sources"]
    dealer.refund("b")
    dealer.counted("b")
    with pytest.raises(NotFoundError, match="no source 'b'; sources are: a, c"):
        dealer.remove("b")
    dealer.join("b", None)
    assert dealer.ratios["b"] == 0.3, "a configured source comes back with its configured share"


def test_what_is_on_its_way_is_waited_for_unless_it_was_removed():
    dealer = add(TaskDealer(0, expected=["a", "b", "c"]), a=3, b=3)
    assert dealer.next_task() is None and dealer.missing == ("c",)
    dealer.remove("c")
    dealer.remove("b")
    assert dealer.next_task() is not None
    restarted = add(TaskDealer(0, expected=["a", "b", "c"]), a=3)
    restarted.load_state_dict(dealer.state_dict())
    assert restarted.missing == () and restarted.next_task() is not None
    add(restarted, c=2)
    assert restarted.state_dict()["removed"] == ["b"]


def test_a_source_from_which_nothing_counts_does_not_take_all_rollouts():
    dealer = add(TaskDealer(0, ratios={"good": 0.5, "bad": 0.5}), good=4, bad=4)
    dealt: Counter[str] = Counter()
    for _ in range(1000):
        ((source, _),) = deal(dealer, 1)
        dealt[source] += 1
        (dealer.counted if source == "good" else dealer.refund)(source)
    assert dealt["bad"] - dealt["good"] <= MAX_REFUNDS + 1
    dealer.counted("bad")
    for _ in range(3):
        ((source, _),) = deal(dealer, 1)
        (dealer.counted if source == "good" else dealer.refund)(source)


def test_a_skipped_task_costs_its_source_nothing():
    dealer = new_mix()
    dealt: Counter[str] = Counter()
    rng = random.Random(0)
    while sum(dealt.values()) < 200:
        ((source, _),) = deal(dealer, 1)
        if rng.random() < 0.4:
            dealer.skip(source)
        else:
            dealt[source] += 1
    assert dealt == {"a": 100, "b": 60, "c": 40}


def test_a_source_that_joins_does_not_make_up_for_what_others_lack():
    by_ratio = add(TaskDealer(0, ratios={"absent": 0.05, "b": 0.95}, slack=8), absent=10, b=1000)
    deal(by_ratio, 500, ("b",))
    assert by_ratio.places()["absent"].ahead == pytest.approx(-8)
    by_ratio.join("new", 0.5)
    add(by_ratio, new=10)
    assert by_ratio.places()["new"].ahead == pytest.approx(0)
    assert 49 <= counts(deal(by_ratio, 100))["new"] <= 51
    by_size = add(TaskDealer(0, slack=8), absent=10, b=1000)
    deal(by_size, 2000, ("b",))
    add(by_size, new=10_000)
    assert counts(deal(by_size, 1100, ("b", "new")))["b"] > 90


def test_a_share_of_0_stays_0_when_the_source_with_all_of_it_goes():
    dealer = add(TaskDealer(0, epochs=2), a=5, extra=5)
    dealer.set_ratios({"a": 0, "extra": 1})
    assert not dealer.has_no_share
    dealer.remove("extra")
    assert dealer.ratios == {"a": 0} and dealer.next_task() is None
    assert dealer.has_no_share and not dealer.is_exhausted
    resumed = add(TaskDealer(0, epochs=2), a=5)
    resumed.load_state_dict(dealer.state_dict())
    assert resumed.has_no_share
    resumed.join("d", 0.2)
    add(resumed, d=5)
    assert resumed.ratios == {"a": 0, "d": 1} and not resumed.has_no_share
    dealer.set_ratios({"a": 1})
    assert counts(deal(dealer, 4)) == {"a": 4}
    dealer.remove("a")
    assert dealer.ratios == {} and not dealer.has_no_share


@pytest.mark.parametrize("order", ["bc", "cb"])
def test_removed_sources_of_the_configuration_come_back_to_their_shares_in_any_order(order):
    dealer = new_mix()
    dealer.remove("b")
    dealer.remove("c")
    for source in order:
        dealer.join(source, None)
        add(dealer, **{source: SIZES[source]})
    assert dealer.ratios == pytest.approx(RATIOS)
    for source in RATIOS:
        dealer.remove(source)
    assert dealer.ratios == {}
    for source in RATIOS:
        dealer.join(source, None)
        add(dealer, **{source: SIZES[source]})
    assert dealer.ratios == pytest.approx(RATIOS), "not by size, since nobody asked for that"


def test_a_source_comes_back_beside_others_than_the_configured():
    dealer = add(TaskDealer(0, ratios={"a": 1.0}), a=5)
    dealer.join("d", 0.2)
    add(dealer, d=5)
    dealer.remove("a")
    dealer.join("a", None)
    assert dealer.ratios == {"d": 0.5, "a": 0.5}, "all of it for a would leave d nothing"
    mixed = new_mix()
    mixed.set_ratios({"a": 0.1, "b": 0.1, "c": 0.8})
    mixed.remove("b")
    mixed.join("b", None)
    assert mixed.ratios == pytest.approx({"a": 0.7 / 9, "c": 5.6 / 9, "b": 0.3})


def test_who_chose_to_mix_by_size_keeps_it_when_a_configured_source_comes_back():
    dealer = new_mix()
    dealer.set_ratios({})
    dealer.remove("b")
    dealer.join("b", None)
    assert dealer.ratios == {}


names = st.sampled_from("abcd")
operations = st.lists(
    st.one_of(
        st.tuples(st.just("deal"), st.sets(names, min_size=1).map(tuple), st.booleans()),
        st.tuples(st.just("join"), names, st.floats(0.05, 0.6)),
        st.tuples(st.just("remove"), names),
        st.tuples(st.just("replace"), names, st.integers(1, 30)),
        st.tuples(st.just("mix"), st.lists(st.integers(1, 9), min_size=4, max_size=4)),
        st.tuples(st.just("restart")),
    ),
    max_size=60,
)


@given(operations)
def test_shares_hold_from_wherever_a_run_has_got_to(steps):
    """Clients of some sources, groups that do not count, and a mix that changes all the time, restarts among it."""
    sizes = {"a": 9, "b": 5, "c": 2}
    dealer = add(TaskDealer(0, ratios=RATIOS, slack=6), **sizes)
    for step in steps:
        match step:
            case ("deal", asked, counts_):
                for _ in range(5):
                    if (task := dealer.next_task(asked)) is not None:
                        (dealer.counted if counts_ else dealer.refund)(task.source)
            case ("join", name, ratio) if name not in sizes and sizes:
                dealer.join(name, ratio)
                sizes[name] = 4
                add(dealer, **{name: 4})
                assert dealer.places()[name].ahead == pytest.approx(0, abs=1e-6)
            case ("remove", name) if name in sizes and len(sizes) > 1:
                del sizes[name]
                dealer.remove(name)
            case ("replace", name, size) if name in sizes:
                sizes[name] = size
                add(dealer, **{name: size})
            case ("mix", parts):
                chosen = dict(zip(sorted(sizes), parts, strict=False))
                dealer.set_ratios({name: part / sum(chosen.values()) for name, part in chosen.items()})
            case ("restart",):
                state = msgspec.json.decode(msgspec.json.encode(dealer.state_dict()))
                dealer = add(TaskDealer(0, ratios=RATIOS, slack=6), **sizes)
                dealer.load_state_dict(state)
                assert dealer.state_dict() == state
            case _:
                pass
        assert sum(dealer.ratios.values()) == pytest.approx(1) and set(dealer.ratios) == set(sizes)
    before, total = dealer.places(), 400
    got = counts(deal(dealer, total))
    assert got.total() == total, "with clients of all sources nobody ever waits"
    for name, place in before.items():
        assert abs(got[name] + place.ahead - dealer.ratios[name] * total) <= len(sizes)


# --- epochs ------------------------------------------------------------------------------------


def test_a_source_is_exhausted_after_its_epochs_and_leaves_the_mix():
    dealer = new_mix(epochs=2)
    assert len(deal(dealer, 1000)) == 2 * sum(SIZES.values())
    assert dealer.is_exhausted and all(place.is_exhausted for place in dealer.places().values())
    resumed = new_mix(epochs=2)
    resumed.load_state_dict(dealer.state_dict())
    assert resumed.is_exhausted and resumed.next_task() is None
    more = new_mix(epochs=3)
    more.load_state_dict(dealer.state_dict())
    assert len(deal(more, 1000)) == sum(SIZES.values()), "a resumed run may be given another epoch"


def test_when_one_source_is_exhausted_the_others_keep_their_proportions():
    dealer = new_mix(epochs=1)
    dealt = deal(dealer, 8)
    assert counts(dealt)["a"] == 3
    assert counts(deal(dealer, 10)) == {"b": 6, "c": 4}


def test_an_exhausted_source_with_new_tasks_begins_its_epochs_anew_without_catching_up():
    dealer = add(TaskDealer(0, epochs=1), a=4, b=100)
    deal(dealer, 60)
    dealer.add_source("a", Split.TRAIN, tasks("a", 50))
    assert counts(deal(dealer, 30))["a"] <= 11
    assert not dealer.places()["a"].is_exhausted


def test_another_epoch_does_not_begin_with_what_an_exhausted_source_missed():
    shares = {"a": 0.5, "b": 0.5}
    dealer = add(TaskDealer(0, ratios=shares, epochs=1), a=100, b=1000)
    assert len(deal(dealer, 2000)) == 1100
    resumed = add(TaskDealer(0, ratios=shares, epochs=2), a=100, b=1000)
    resumed.load_state_dict(dealer.state_dict())
    assert 49 <= counts(deal(resumed, 100))["a"] <= 51


@pytest.mark.parametrize("name", ["", ".", "..", "a\nb", "x" * 201, "\ud800"])
def test_names_that_cannot_stand_in_a_path_are_refused(name):
    with pytest.raises(RequestError, match="expected a name of 1 to 200 printable characters"):
        TaskDealer(0).add_source(name, Split.TRAIN, tasks(name, 1))
