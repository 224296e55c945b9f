"""What no kind of box takes for a command: one check, one wording."""

from __future__ import annotations

import math
from typing import Any

import pytest

from wingbeat.resources import SubprocessSpec
from wingbeat.resources.backends.container_box import ContainerBox
from wingbeat.resources.backends.container_threads import Threads
from wingbeat.resources.backends.subprocess import SubprocessBackend
from wingbeat.resources.boxes import check_run
from wingbeat.resources.specs import BoxSpec

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"command": ["ls", 3]}, TypeError, r"command: expected texts, got int at 1: 3; str\(\.\.\.\) makes one"),
    ({"command": b"ls"}, TypeError, "command: expected a line of shell, or a program .*, got bytes"),
    ({"command": None}, TypeError, "command: expected a line of shell, or a program .*, got NoneType"),
    ({"command": []}, ValueError, r"command: expected a program and its arguments, got \[\]"),
    ({"command": ["", "x"]}, ValueError, "command: expected a program and its arguments"),
    ({"command": ["ls", "a\0b"]}, ValueError, r"command: expected texts without zero bytes, got 'a\\x00b'"),
    ({"command": "echo \ud800"}, ValueError, "command: expected texts that can be encoded"),
    ({"stdin": "text"}, TypeError, r"stdin: expected bytes, as of text.encode\(\), got str"),
    ({"timeout_s": 0}, ValueError, "timeout_s: expected a finite time above 0, got 0"),
    ({"timeout_s": math.inf}, ValueError, "timeout_s: expected a finite time above 0, got inf"),
    ({"timeout_s": math.nan}, ValueError, "timeout_s: expected a finite time above 0, got nan"),
    ({"timeout_s": "5"}, TypeError, "timeout_s: expected a number of seconds, got str"),
    ({"timeout_s": True}, TypeError, "timeout_s: expected a number of seconds, got bool"),
    ({"cwd": 3}, TypeError, "cwd: expected a path as text, got int"),
    ({"env": ["A=b"]}, TypeError, "env: expected names and values, as of a dict, got list"),
    ({"env": {"A": 3}}, TypeError, "env: expected texts, got 'A' with a value of type int"),
    ({"env": {"A-B": ""}}, ValueError, "env: expected names of letters, digits and _ .*, got 'A-B'"),
    ({"env": {"A": "secret\0"}}, ValueError, "env: expected names and values without zero bytes, got 'A'$"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=lambda value: str(value)[:40])
async def test_a_wrong_call_is_refused_before_anything_is_sent(
    call: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_run(**{"command": "true", **call})
    container: Any = None
    with pytest.raises(error, match=message):
        await ContainerBox(BoxSpec(kind="docker"), container, Threads("none")).run(**{"command": "true", **call})


async def test_a_box_lives_on_after_wrong_calls() -> None:
    backend = SubprocessBackend()
    instance = await backend.start(SubprocessSpec(network=True), started=lambda _: None)
    try:
        for call, error, message in WRONG:
            with pytest.raises(error, match=message):
                await instance.value.run(**{"command": "true", **call})
        with pytest.raises(TypeError, match="data: expected bytes"):
            await instance.value.write("a.txt", "text")  # pyright: ignore[reportArgumentType]
        assert (await instance.value.run(("echo", "on"), timeout_s=30, env={"_A1": "b"})).stdout == b"on\n"
    finally:
        await instance.close()
        await backend.close()


def test_a_line_is_given_to_the_shell_and_words_to_nobody() -> None:
    assert check_run("a b") == ["/bin/sh", "-c", "a b"]
    assert check_run(iter(["a", "b c"])) == ["a", "b c"]
