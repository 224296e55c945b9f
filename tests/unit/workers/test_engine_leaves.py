"""An engine that is told to go: it takes no more, ends what it has in its time, and hands the rest over."""

from __future__ import annotations

import queue
from collections import deque
from typing import Any

import numpy as np
import pytest

from wingbeat.core.ports import EngineStats, GenerateRequest, TokenEvent
from wingbeat.core.types import FinishReason
from wingbeat.core.weight_protocol import Manifest, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import Drain, Generate, Leave, PolicySpec, Tokens, Welcome
from wingbeat.workers import engine as engine_module
from wingbeat.workers.engine import EngineWorker
from wingbeat.workers.link import Connected, DrainAsked, Inbound


class OneToken:
    """A model host that samples one token per step and request, and ends after ``max_tokens``."""

    policy_version, lineage = 0, 0

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.closed = False

    def submit(self, request: GenerateRequest) -> None:
        self.requests[request.request_id] = request.sampling.max_tokens

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for request_id in tuple(self.requests):
            self.requests[request_id] -= 1
            finish = None if self.requests[request_id] else FinishReason.STOP
            events.append(TokenEvent(request_id, (7,), (-0.5,), 0, finish_reason=finish))
            if finish:
                del self.requests[request_id]
        return events

    def stats(self) -> EngineStats:
        raise AssertionError("not asked")

    def serve(self, manifest: Any, weights: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("message", [Drain(1e9), DrainAsked(1e9), Drain(0.0)], ids=["control", "signal", "at-once"])
def test_what_has_time_ends_and_the_rest_is_handed_over(message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host, sent = OneToken(), []
    inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
    worker = EngineWorker("host", lambda *messages: sent.extend(messages), inbox.put)
    monkeypatch.setattr(engine_module, "build_backend", lambda *a, **k: Backend(host))
    prompt = np.arange(3, dtype="<i4").tobytes()
    manifest = Manifest("solver", 0, "full", "", "", "base", 0, (), base_model="m")
    inbox.put(Connected(Welcome("e", 1.0, (PolicySpec("solver", "m", 64, {}),), "run", 0)))
    inbox.put(UpdateWeights(manifest))
    requests = [Generate("short", "solver", prompt, 2), Generate("long", "solver", prompt, 50)]
    script = deque([[*requests], [message]])

    def receive(*, block: bool) -> list[Inbound]:
        if any(isinstance(m, WeightsServed) for m in sent):
            assert script or not block, "it waits for nothing while it leaves"
            return script.popleft() if script else []
        return [inbox.get(timeout=10)] if block else []

    worker.run(receive)
    (leave,) = [m for m in sent if isinstance(m, Leave)]
    assert leave.drain_s == message.drain_s and host.closed and not host.requests
    chunks = [chunk for m in sent if isinstance(m, Tokens) for chunk in m.chunks]
    ended = {chunk.request_id: (len(chunk.token_ids), chunk.finish) for chunk in chunks}
    if message.drain_s:
        assert ended == {"short": (2, FinishReason.STOP), "long": (50, FinishReason.STOP)}
    else:  # a step is taken in the loop that hears of it
        assert ended == {"short": (2, FinishReason.STOP), "long": (2, None)}


class Backend:
    def __init__(self, host: OneToken) -> None:
        self._host = host

    def load(self, spec: PolicySpec, *, pinned: bool = False) -> OneToken:
        return self._host

    def close(self) -> None: ...
