"""Versions of an agent: who is here, and whose turn it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.core.errors import RequestError
from wingbeat.core.types import Variant
from wingbeat.dataflow.variants import Asker, Presence, VariantMix

A, B = Variant("a", "aa"), Variant("b", "bb")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# --- who is here


def test_a_version_is_gone_once_it_neither_asks_nor_works():
    clock = Clock()
    presence = Presence(wait_s=30, clock=clock)
    one = Asker("p1", A)
    presence.ask(one, trains=True)
    assert presence.here() == {A} and presence.competing() == {"a"}
    clock.now = 100
    assert presence.here() == {A}, "it still asks"
    presence.answered(one, trains=True)
    clock.now = 120
    presence.observe([one])
    clock.now = 145
    presence.observe([])
    assert presence.here() == {A} and presence.competing() == frozenset(), "it works, and asks for nothing"
    clock.now = 151
    assert presence.here() == frozenset() and presence.is_gone(A)


def test_whoever_leaves_is_gone_at_once_whatever_it_still_runs():
    clock = Clock()
    presence = Presence(wait_s=30, clock=clock)
    one, other = Asker("p1", A), Asker("p2", A)
    for asker in (one, other):
        presence.ask(asker, trains=True)
    presence.leave(one)
    presence.answered(one, trains=True)
    presence.observe([one])
    assert presence.here() == {A}, "another process has the same code"
    presence.answered(other, trains=True)
    presence.leave(other)
    assert presence.here() == frozenset() and presence.is_gone(A)
    presence.ask(one, trains=True)
    assert presence.here() == {A}, "it came back"


def test_after_a_restart_nobody_is_gone_before_the_wait_is_over():
    clock = Clock()
    clock.now = 50
    presence = Presence(wait_s=30, clock=clock)
    assert not presence.is_gone(A)
    clock.now = 81
    assert presence.is_gone(A)


# --- whose turn it is


def deal(mix: VariantMix, rng: random.Random, *, num_counted: int, weights_of: dict[str, float], counts: float) -> None:
    """All labels ask in random order; a group at a time is dealt, and it counts with this probability."""
    while sum(place.counted for place in mix.places().values()) < num_counted:
        labels = list(weights_of)
        rng.shuffle(labels)
        label = next(label for label in labels if mix.may_deal(label, labels))
        mix.dealt(label, labels)
        mix.settled(label, rng.random() < counts, labels)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 20), min_size=2, max_size=5), st.floats(0.3, 1))
@settings(max_examples=12, deadline=None)
def test_shares_of_groups_that_count_are_the_weights(seed: int, parts: list[int], counts: float):
    weights = {f"v{i}": part / sum(parts) for i, part in enumerate(parts)}
    mix = VariantMix(weights)
    deal(mix, random.Random(seed), num_counted=300, weights_of=weights, counts=counts)
    for label, place in mix.places().items():
        assert place.share == pytest.approx(weights[label], abs=0.02)


def test_labels_without_a_weight_share_what_is_left():
    mix = VariantMix({"a": 0.5})
    deal(mix, random.Random(1), num_counted=400, weights_of={"a": 0, "b": 0, "c": 0}, counts=1)
    shares = {label: place.share for label, place in mix.places().items()}
    assert shares == {
        "a": pytest.approx(0.5, abs=0.02),
        "b": pytest.approx(0.25, abs=0.02),
        "c": pytest.approx(0.25, abs=0.02),
    }


def test_a_label_that_is_away_holds_nobody_up_and_catches_up_on_little():
    mix = VariantMix({"a": 0.5, "b": 0.5})
    for _ in range(100):
        assert mix.may_deal("a", ["a"])
        mix.dealt("a", ["a"])
    assert mix.may_deal("b", ["a", "b"])
    run = 0
    while not mix.may_deal("a", ["a", "b"]):
        assert mix.may_deal("b", ["a", "b"])
        mix.dealt("b", ["a", "b"])
        run += 1
    assert run <= 20, "b does not get the hundred groups that it missed"


def test_a_label_whose_turn_is_in_vain_holds_nobody_up():
    mix = VariantMix({"a": 0.5, "b": 0.5})
    while mix.may_deal("a", ["a", "b"]):
        mix.dealt("a", ["a", "b"])
    mix.empty_handed("b")
    assert mix.may_deal("a", ["a", "b"])
    assert mix.may_deal("b", ["a", "b"]), "it may always try again"


def test_a_weight_of_0_deals_nothing_and_no_weight_at_all_bars_nobody():
    mix = VariantMix({"a": 0.0})
    assert not mix.may_deal("a", ["a"]) and mix.may_deal("b", ["a", "b"])
    full = VariantMix({"a": 1.0})
    assert not full.may_deal("b", ["a", "b"]), "nothing is left for it while a is here"
    assert full.may_deal("b", ["b"])
    assert VariantMix().may_deal("anybody", ["anybody", "else"])


@given(
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 0.3)),
    st.lists(st.tuples(st.sets(st.sampled_from("abcde"), min_size=1), st.integers(0, 4), st.booleans()), max_size=60),
)
@settings(max_examples=40, deadline=None)
def test_somebody_who_competes_may_always_be_dealt_to(
    weights: dict[str, float], history: list[tuple[set[str], int, bool]]
):
    mix = VariantMix(weights)
    for competing, choice, counts in history:
        able = [label for label in sorted(competing) if mix.may_deal(label, competing)]
        assert able or all(weights.get(label) == 0 for label in competing)
        if able:
            label = able[choice % len(able)]
            mix.dealt(label, competing)
            mix.settled(label, counts, competing)


@pytest.mark.parametrize("weights", [{"a": 0.7, "b": 0.4}, {"a": -0.1}, {"a": 1.5}, {"": 0.5}])
def test_what_are_no_shares_is_refused(weights: dict[str, float]):
    with pytest.raises(RequestError):
        VariantMix(weights)
