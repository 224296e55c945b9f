"""Whose turn it is where one trainer hosts several policies."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.samples import TrainingBatch
from wingbeat.core.weight_protocol import ReleaseVersion
from wingbeat.core.worker_protocol import SaveCheckpoint, Shutdown, TrainStep
from wingbeat.workers.link import Disconnected, Inbound
from wingbeat.workers.turns import FairInbox, policy_of


def step(policy: str, number: int) -> TrainStep:
    return TrainStep(TrainingBatch(f"{policy}-{number}", policy, number, (), seed=0))


def taken(inbox: FairInbox) -> list[Inbound]:
    found: list[Inbound] = []
    while inbox:
        found.append(inbox.take())
    return found


def test_a_step_does_not_wait_for_the_whole_replay_of_another_policy() -> None:
    inbox = FairInbox()
    inbox.extend([*(step("a", n) for n in range(1, 5)), step("b", 1), SaveCheckpoint("b", 1), step("c", 1)])
    order = [(policy_of(m), type(m).__name__) for m in taken(inbox)]
    assert [policy for policy, _ in order] == ["a", "b", "c", "a", "b", "a", "a"]
    assert order[4] == ("b", "SaveCheckpoint")


def test_what_is_of_no_policy_overtakes_nothing() -> None:
    inbox = FairInbox()
    inbox.extend([step("a", 1), step("a", 2), Shutdown(), step("b", 1)])
    assert [policy_of(m) for m in taken(inbox)] == ["a", "a", None, "b"]


def test_what_makes_room_is_taken_out_at_once() -> None:
    inbox, release = FairInbox(), ReleaseVersion("a", 1)
    inbox.extend([step("a", 1), release])
    inbox.remove(release)
    assert taken(inbox) == [step("a", 1)]


@given(st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=30), st.lists(st.booleans(), max_size=30))
def test_every_message_comes_once_in_the_order_of_its_policy(names: Sequence[str], pauses: Sequence[bool]) -> None:
    """And a policy that waits has its turn before any other has a second one."""
    messages: list[Inbound] = [step(name, i) if name else Disconnected() for i, name in enumerate(names)]
    inbox, found = FairInbox(), []
    for message, pause in zip(messages, [*pauses, *[False] * len(messages)], strict=False):
        inbox.extend([message])
        if pause:
            found.append(inbox.take())
    waiting = list(inbox)
    rest = taken(inbox)
    found += rest
    for name in ("a", "b", "c"):
        assert [m for m in found if policy_of(m) == name] == [m for m in messages if policy_of(m) == name]
    assert len(found) == len(messages)
    head = [policy_of(m) for m in waiting]
    until = head.index(None) if None in head else len(head)
    distinct = len(set(head[:until]))
    assert len({policy_of(m) for m in rest[:distinct]}) == distinct
