"""An evaluation whose episodes do not end says what it waits for."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.core.errors import UnavailableError
from wingbeat.core.protocol import EvaluationReply
from wingbeat.deploy.evaluating import Progress, tell_stalls


class Server:
    """Its status: what a run waits for, or that it is away."""

    def __init__(self, *answers: list[str] | Exception) -> None:
        self._answers = list(answers)

    async def status(self) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(blockers=answer)


def reply(num_finished: int) -> EvaluationReply:
    return EvaluationReply(
        evaluation_id="e", policy="solver", version=0, state="running", num_expected=8, num_finished=num_finished
    )


async def test_what_does_not_move_is_told_and_what_moves_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "agent-0.log"
    log.write_text("the game thinks\n")
    server = Server(["no engine is connected"], [], UnavailableError("the server is away"))
    seen: list[EvaluationReply] = []
    progress = Progress(seen.append)
    progress(reply(2))
    naps = 0

    async def nap(_: float) -> None:
        nonlocal naps
        naps += 1
        if naps == 2:
            progress(reply(3))

    monkeypatch.setattr("wingbeat.deploy.evaluating.asyncio", SimpleNamespace(sleep=nap))
    swarm: Any = server
    with caplog.at_level(logging.WARNING), pytest.raises(IndexError):  # the fourth time it has no answer
        await tell_stalls(swarm, progress, log)
    told = [record.message for record in caplog.records]
    assert [reply.num_finished for reply in seen] == [2, 3]
    assert len(told) == 3 and naps == 5
    assert all("the game thinks" in message and "episode_timeout_s" in message for message in told)
    assert "2 of 8 episodes have ended): no engine is connected" in told[0]
    assert "3 of 8 episodes have ended): episodes run, and none ends" in told[1]
    assert "the server is away" in told[2]
