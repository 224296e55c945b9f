"""One trainer's connection that serves several policies: each hears what is about it, all hear of the end."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, call

import pytest

from wingbeat.core.worker_protocol import (
    PROTOCOL_VERSION,
    CheckpointSaved,
    Failed,
    Heartbeat,
    Register,
    Shutdown,
    StepDone,
    Tokens,
    WorkerMessage,
)
from wingbeat.server.policies.trainer_link import TrainerLink
from wingbeat.server.workers.sessions import TrainerSession

REGISTER = Register(PROTOCOL_VERSION, "trainer", "trainers-team", "host", 1, ("planner", "coder"))


@pytest.fixture
def hosts() -> list[Any]:
    made = [Mock(), Mock()]
    for host, name in zip(made, REGISTER.policies, strict=True):
        host.name = name
    return made


def test_each_policy_hears_what_is_about_it_and_all_of_the_end(hosts: list[Any]) -> None:
    planner, coder = (host.trainer for host in hosts)
    send = Mock()
    session = TrainerSession(hosts, REGISTER, send)
    done = StepDone("planner", "planner-1", 1, {}, {}, 0.0, 1.0)
    failed, saved = Failed("coder", "train_step", "no"), CheckpointSaved("coder", 3, "path")
    for message in (Heartbeat(), done, failed, saved):
        session.receive(message)
    session.closed()
    joined, left = call.joined(send, worker_id="trainers-team", software={}), call.left(send, expected=False)
    asked = call.is_from(send)
    assert planner.method_calls == [joined, asked, call.step_done(done), left]
    assert coder.method_calls == [joined, asked, call.failed(failed), asked, call.checkpoint_saved(saved), left]


@pytest.mark.parametrize("message", [Failed("stranger", "train_step", "no"), Tokens(())])
def test_what_is_of_no_policy_of_it_reaches_none(
    hosts: list[Any], message: WorkerMessage, caplog: pytest.LogCaptureFixture
) -> None:
    session = TrainerSession(hosts, REGISTER, Mock())
    for host in hosts:
        host.trainer.reset_mock()
    session.receive(message)
    assert all(host.trainer.method_calls == [] for host in hosts)
    assert "the trainer of planner, coder sent" in caplog.text


def test_a_former_trainer_that_lives_on_is_told_to_end_and_nothing_it_says_counts(
    hosts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A cluster that gave a node up starts the trainer elsewhere, while the node's own still talks to control."""
    host, register = hosts[0], Register(PROTOCOL_VERSION, "trainer", "trainer-planner", "lost", 1, ("planner",))
    host.trainer, pending = TrainerLink(host), host.loop.pending
    pending.batch_id = "planner-7"
    sends = [Mock(), Mock()]
    former, present = (TrainerSession([host], register, send) for send in sends)
    (told,) = (one.args[0] for one in sends[0].call_args_list)
    assert isinstance(told, Shutdown)
    done = StepDone("planner", "planner-7", 7, {}, {}, 0.0, 1.0)
    former.receive(done)
    host.count_step.assert_not_called()
    assert "a former trainer of planner says StepDone" in caplog.text
    former.closed()
    assert host.trainer.is_connected and not sends[1].called
    present.receive(done)
    host.count_step.assert_called_once_with(done)
