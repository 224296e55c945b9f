"""What comes out of a box is not believed: whatever is no answer ends the box, at once."""

from __future__ import annotations

import asyncio
import socket

import pytest

from wingbeat.resources.backends.sandbox_channel import MAX_MESSAGE_BYTES, Channel
from wingbeat.resources.specs import ResourceLost


@pytest.mark.parametrize(
    "said",
    [
        b"x\n",
        b"1\n1",
        b"-1 2\nok",
        b"1 %d\n1" % MAX_MESSAGE_BYTES,
        b"1 " * 5000,
        b"1 1 " + b"0 " * 20 + b"\n",
        b"1 3\n1odd",
        b"1 7\n1refused",
        b"1 6\n1failed",
        b"1 5 1\n1error5",
        b"1 5 1 1\n1errorxy",
        b"",
    ],
)
async def test_no_answer_ends_the_box(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours)
    with theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ResourceLost, match=r"no message|ended|hung up"):
            await channel.call(b"check", within_s=30)
        with pytest.raises(ResourceLost):
            channel.post(b"check")
    await channel.close()


async def test_answers_find_those_who_asked_and_nobody_else() -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours)
    with theirs:
        first, one = channel.post(b"list", b".")
        second, two = channel.post(b"list", b"x")
        theirs.sendall(b"1 2\n9ok" + b"1 2 3\n%bokyes" % second + b"1 2 3\n%bokno!" % second + b"1 2 2\n%bokno" % first)
        async with asyncio.timeout(30):
            assert (await two, await one) == ([b"yes"], [b"no"])
    await channel.close()
