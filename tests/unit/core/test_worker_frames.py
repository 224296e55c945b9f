"""Messages between control and workers share frames, but for KV that would make one too big."""

from __future__ import annotations

import pytest

from wingbeat.core import worker_protocol
from wingbeat.core.worker_protocol import (
    Abort,
    Generate,
    Heartbeat,
    MovedOut,
    decode_from_control,
    decode_from_worker,
    encode_frames,
)


def test_kv_is_spread_over_frames_and_the_order_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_protocol, "MAX_KV_PER_FRAME", 10)
    messages = [Heartbeat(), MovedOut("a", b"123456"), MovedOut("b", b"1234"), MovedOut("c", b"1"), MovedOut("d")]
    frames = [decode_from_worker(frame) for frame in encode_frames(messages)]
    assert frames == [messages[:3], messages[3:]]
    big = Generate("e", "solver", b"", 1, kv=b"x" * 50)
    to_worker = [Abort("f"), big, Abort("g"), big]
    assert [decode_from_control(frame) for frame in encode_frames(to_worker)] == [to_worker[:3], to_worker[3:]]


def test_what_has_no_kv_is_one_frame() -> None:
    assert len(list(encode_frames([Heartbeat()] * 1000))) == 1
