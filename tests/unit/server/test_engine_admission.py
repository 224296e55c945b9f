"""Which engines may join, and what is said of those that run something else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from wingbeat import __version__
from wingbeat.core.events import EventLog
from wingbeat.core.worker_protocol import PROTOCOL_VERSION, Refused, Register
from wingbeat.server.calls.flights import EngineLink
from wingbeat.server.workers.admission import EngineAdmission
from wingbeat.server.workers.software import differences, own_software

OURS = {"wingbeat": "0.1.0", "torch": "2.13.0", "python": "3.11.9"}


def admission(mismatch: Any = "warn", log: list[dict[str, Any]] | None = None) -> EngineAdmission:
    events = EventLog(None)
    events.subscribe((log if log is not None else []).append)
    return EngineAdmission(("solver", "judge"), mismatch, 10.0, events, OURS)


def register(name: str = "gpu-2", *, host: str = "there", pid: int = 7, **fields: Any) -> Register:
    return Register(PROTOCOL_VERSION, "engine", name, host, pid, **fields)


def said(refusal: Refused | None) -> str:
    assert refusal is not None
    return refusal.reason


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        ({"torch": "2.13.1+cu130", "wingbeat": "0.1.7", "python": "3.13.0"}, []),
        ({"torch": "2.12.0"}, ["torch 2.12.0, the server has 2.13.0"]),
        (
            {"wingbeat": "0.2.0", "torch": "3.0"},
            ["wingbeat 0.2.0, the server has 0.1.0", "torch 3.0, the server has 2.13.0"],
        ),
        ({}, []),
    ],
)
def test_another_minor_release_is_a_difference_and_another_build_is_none(
    theirs: dict[str, str], found: list[str]
) -> None:
    assert differences(theirs, OURS) == found


def test_the_server_knows_its_own_software() -> None:
    assert own_software()["wingbeat"] == __version__ and set(own_software()) >= {"torch", "python"}


def test_another_release_is_told_or_refused_as_configured() -> None:
    log: list[dict[str, Any]] = []
    other = register(software={"torch": "2.12.0", "wingbeat": "0.1.0"})
    assert admission("warn", log).refusal(other, ()) is None
    assert [(e["event"], e["differences"]) for e in log] == [
        ("engine_differs", ["torch 2.12.0, the server has 2.13.0"])
    ]
    refusal = admission("refuse").refusal(other, ())
    assert "torch 2.12.0, the server has 2.13.0: install the same on both" in said(refusal)
    link = EngineLink("gpu-2", "there", lambda message: None, software=other.software)
    (warning,) = admission().warnings([link])
    assert "'gpu-2' has torch 2.12.0" in warning and "mismatch_kl" in warning


def test_a_trainer_of_another_release_is_told_or_refused_too() -> None:
    log: list[dict[str, Any]] = []
    other = msgspec.structs.replace(register(software={"torch": "2.12.0"}), role="trainer")
    assert admission("warn", log).refusal_of_software(other) is None
    assert [event["event"] for event in log] == ["trainer_differs"]
    assert "torch 2.12.0" in said(admission("refuse").refusal_of_software(other))
    assert "trainer 'trainer-solver' has torch 2.12.0" in admission().trainer_warning("trainer-solver", other.software)
    assert admission().trainer_warning("trainer-solver", {"torch": "2.13.1"}) == ""


def test_policies_and_names_must_fit() -> None:
    link = EngineLink("gpu-2", "there", lambda message: None, pid=7)
    assert admission().refusal(register(policies=("solver",)), [link]) is None, "it comes back"
    assert "no policy 'other' here, only solver, judge" in said(admission().refusal(register(policies=("other",)), ()))
    for other in (register(pid=8), register(host="elsewhere")):
        refusal = admission().refusal(other, [link])
        assert "named 'gpu-2' is connected already" in said(refusal) and "within 30 s" in said(refusal)
        assert refusal is not None and refusal.for_now
