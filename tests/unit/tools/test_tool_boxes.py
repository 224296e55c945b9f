"""Shell, Python and file tools on a real box."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from wingbeat.resources import ResourceFailed, ResourceLost, Resources, SandboxSpec, SubprocessSpec
from wingbeat.resources.backends.limits_homes import MEMORY, find_homes
from wingbeat.resources.boxes import Box, Finished
from wingbeat.tools import EpisodeTools, Fault, Toolbox, ToolResult, file_tools, python_tool, shell_tool

README = "one\ntwo\nthree\ntwo\n"
SPEC = SubprocessSpec(network=True, files={"README.md": README, "src/a.py": "VALUE = 1\n"})


@pytest.fixture
async def tools(tmp_path: Path) -> AsyncIterator[EpisodeTools]:
    toolbox = Toolbox([shell_tool(SPEC), python_tool(SPEC), *file_tools(SPEC)])
    async with Resources(ledger=tmp_path) as pool, toolbox.for_owner(pool, "test") as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@pytest.mark.skipif(MEMORY not in find_homes(), reason="nothing holds a limit of memory here")
async def test_the_same_tools_work_in_a_sandbox(tmp_path: Path) -> None:
    spec = SandboxSpec(files={"README.md": README}, memory_mb=256, pids=32, command_timeout_s=30)
    toolbox = Toolbox([shell_tool(spec), python_tool(spec), *file_tools(spec)])
    async with Resources(ledger=tmp_path) as pool, toolbox.for_owner(pool, "test") as tools:
        assert await told(tools, "python", code="open('README.md').read().count('two')") == "2"
        stopped = await tools.call("python", json.dumps({"code": "print('x' * 3_000_000)"}))
        assert stopped.is_error and "[stopped by the limit: output, after " in stopped.content
        assert await told(tools, "replace_in_file", path="README.md", old="three", new="3")
        assert await told(tools, "search_files", pattern="3") == "./README.md:3:3"
        assert "outside the working folder" in await refused(tools, "read_file", path="/etc/passwd")


async def told(tools: Toolbox, name: str, **arguments: Any) -> str:
    result = await tools.call(name, json.dumps(arguments))
    assert not result.is_error, result.content
    return result.content


async def refused(tools: Toolbox, name: str, **arguments: Any) -> str:
    result = await tools.call(name, json.dumps(arguments))
    assert result.is_error and result.fault is Fault.RAISED
    return result.content.removeprefix("error: ")


async def test_a_shell_shows_output_errors_and_exit_code(tools: EpisodeTools) -> None:
    assert await told(tools, "shell", command="cat src/a.py; echo oops >&2; exit 3") == (
        "VALUE = 1\n[stderr]\noops\n[exit code 3]"
    )
    assert await told(tools, "shell", command="true") == "[no output]"
    result = await tools.call("shell", '{"command": "grep nothing README.md"}')
    assert isinstance(result.data, Finished) and result.data.exit_code == 1


async def test_a_command_that_a_limit_stops_is_told_with_the_limit(tmp_path: Path) -> None:
    toolbox = Toolbox([shell_tool(SPEC, timeout_s=0.2)])
    async with Resources(ledger=tmp_path) as pool, toolbox.for_owner(pool, "test") as tools:
        result = await tools.call("shell", '{"command": "echo begun; sleep 60"}')
    assert result.is_error and result.content.startswith("begun\n[stopped by the limit: timeout, after ")


@pytest.mark.slow
async def test_python_shows_prints_the_last_value_and_the_programs_own_traceback(tools: EpisodeTools) -> None:
    assert await told(tools, "python", code="print('a')\nx = 6\nx * 7") == "a\n42"
    assert await told(tools, "python", code="import src.a\nsrc.a.VALUE") == "1"
    lines = (await told(tools, "python", code="def f():\n    return 1 / 0\nf()")).splitlines()
    assert lines[:3] == ["[stderr]", "Traceback (most recent call last):", '  File "<code>", line 3, in <module>']
    assert lines[-2:] == ["ZeroDivisionError: division by zero", "[exit code 1]"]
    assert "    return 1 / 0" in lines and not any("<string>" in line for line in lines)
    assert "SyntaxError" in await told(tools, "python", code="1 +")
    assert await told(tools, "python", code="import sys\nsys.exit(4 if not sys.stdin.read() else 5)") == "[exit code 4]"


@pytest.mark.slow
async def test_files_stay_between_calls_and_variables_do_not(tools: EpisodeTools) -> None:
    assert await told(tools, "python", code="kept = 1\nopen('f', 'w').write('kept')") == "4"
    assert "NameError" in await told(tools, "python", code="kept")
    assert await told(tools, "shell", command="cat f") == "kept"


async def test_files_are_read_in_ranges(tools: EpisodeTools) -> None:
    assert await told(tools, "read_file", path="README.md") == "1\tone\n2\ttwo\n3\tthree\n4\ttwo"
    assert await told(tools, "read_file", path="README.md", first_line=2, last_line=3) == "2\ttwo\n3\tthree"
    assert await told(tools, "read_file", path="README.md", first_line=4, last_line=99) == "4\ttwo"
    assert await refused(tools, "read_file", path="README.md", first_line=5) == (
        "first_line: expected at most 4, the lines of README.md, got 5"
    )
    assert "at least first_line" in await refused(tools, "read_file", path="README.md", first_line=3, last_line=2)


async def test_lines_are_counted_as_other_programs_count_them(tools: EpisodeTools) -> None:
    await tools.lease("box").value.write("odd.py", "a\x0cb\r\nc\u2028d\ne".encode())
    assert await told(tools, "read_file", path="odd.py") == "1\ta\x0cb\r\n2\tc\u2028d\n3\te"
    assert await told(tools, "search_files", pattern="e", path="odd.py") == "odd.py:3:e"
    assert await told(tools, "read_file", path="odd.py", first_line=3) == "3\te"
    assert await told(tools, "write_file", path="odd.py", content="\x0c\n\x85") == "wrote 2 lines to odd.py"


async def test_commands_that_no_program_can_get_are_told(tools: EpisodeTools) -> None:
    assert "without zero bytes" in await refused(tools, "shell", command="echo a\0b")
    assert "without zero bytes" in await refused(tools, "search_files", pattern="a\0b")
    assert (await told(tools, "shell", command=f"echo {'x' * 200_000}")).endswith("[exit code 126]")
    assert await told(tools, "shell", command="echo fine") == "fine"


async def test_files_are_written_and_a_passage_is_replaced_exactly_once(tools: EpisodeTools) -> None:
    assert await told(tools, "write_file", path="new/b.txt", content="ä\nb\n") == "wrote 2 lines to new/b.txt"
    assert await told(tools, "replace_in_file", path="new/b.txt", old="ä\nb", new="c") == (
        "replaced 1 passage of new/b.txt, at line 1"
    )
    assert await told(tools, "shell", command="cat new/b.txt") == "c"
    assert await refused(tools, "replace_in_file", path="README.md", old="two", new="2") == (
        "old: expected a passage that occurs once in README.md, got one that occurs 2 times (lines 2, 4);"
        " take in more of the lines around it"
    )
    assert "one that does not occur there" in await refused(tools, "replace_in_file", path="README.md", old="2", new="")
    await told(tools, "write_file", path="a.txt", content="a" * 1_000_000)  # it would take minutes to find them all
    assert "occurs more than 8 times" in await refused(
        tools, "replace_in_file", path="a.txt", old="a" * 100_000, new="b"
    )
    assert (await tools.lease("box").value.read("README.md")).decode() == README


async def test_folders_are_listed_and_searched(tools: EpisodeTools) -> None:
    assert await told(tools, "list_files") == "README.md\nsrc/"
    assert await told(tools, "search_files", pattern="^t(wo|hree)", path="README.md") == (
        "README.md:2:two\nREADME.md:3:three\nREADME.md:4:two"
    )
    await told(tools, "write_file", path=".git/packed", content="VALUE = 2")
    await tools.lease("box").value.write("compiled", b"VALUE\0")
    assert await told(tools, "search_files", pattern="VALUE") == "./src/a.py:1:VALUE = 1"
    assert await told(tools, "search_files", pattern="-e nothing") == "no line matches in ."
    assert "nowhere" in await refused(tools, "search_files", pattern="x", path="nowhere")
    assert await refused(tools, "search_files", pattern="(") != ""


async def test_wrong_paths_are_told(tools: EpisodeTools) -> None:
    assert await refused(tools, "read_file", path="missing") == "path: there is no missing"
    assert await refused(tools, "read_file", path="src") == "path: expected a file, got the folder src"
    assert "expected a folder, got README.md" in await refused(tools, "list_files", path="README.md")
    for outside in ("../up", "/etc/passwd"):
        assert "path: " in await refused(tools, "read_file", path=outside)
    await told(tools, "shell", command=r"printf '\377\376' > binary")
    assert "which is no UTF-8" in await refused(tools, "read_file", path="binary")


async def test_calls_on_one_box_run_in_the_order_of_the_model(tools: EpisodeTools) -> None:
    calls = [
        {"id": "1", "function": {"name": "shell", "arguments": '{"command": "sleep 0.05; echo 1 > order"}'}},
        {"id": "2", "function": {"name": "read_file", "arguments": '{"path": "order"}'}},
    ]
    results = await tools.call_all(calls)
    assert results[1].content == "1\t1"


class Standing:
    """A box that ends in a given way: the real one cannot be asked to be gone."""

    workdir = "/work"

    def __init__(self, end: ResourceLost | Finished) -> None:
        self.end = end

    async def run(self, *_: Any, **__: Any) -> Finished:
        if isinstance(self.end, ResourceLost):
            raise self.end
        return self.end


async def on(box: Any, name: str, **arguments: Any) -> ToolResult:
    standing: Box = box
    toolbox = Toolbox([shell_tool(standing), python_tool(standing), *file_tools(standing)])
    return await toolbox.call(name, json.dumps(arguments))


async def test_a_box_that_is_gone_is_no_observation() -> None:
    with pytest.raises(ResourceLost, match="killed"):
        await on(Standing(ResourceLost("the box was killed")), "shell", command="ls")


async def test_a_box_without_the_program_is_no_observation() -> None:
    missing = Finished(exit_code=127, stdout=b"", stderr=b"python3: not found", seconds=0.0)
    with pytest.raises(ResourceFailed, match="the box has no program 'python3'"):
        await on(Standing(missing), "python", code="1")
    assert (await on(Standing(missing), "shell", command="python3")).content.endswith("[exit code 127]")


async def test_a_program_that_ends_as_a_missing_one_would_is_an_observation(tools: EpisodeTools) -> None:
    """Else a policy could have its episode dropped whenever it is not going well."""
    assert await told(tools, "python", code="import sys; sys.exit(127)") == "[exit code 127]"


async def test_what_a_limit_took_is_told() -> None:
    cut = Finished(exit_code=0, stdout=b"begun", stderr=b"", seconds=0.0, truncated=True)
    assert (await on(Standing(cut), "shell", command="yes")).content == (
        "begun\n[more output than the box keeps; the rest is gone]"
    )
    stopped = Finished(exit_code=1, stdout=b"", stderr=b"", seconds=2.0, stopped_by="timeout")
    found = await on(Standing(stopped), "search_files", pattern="x")
    assert (found.content, found.is_error) == ("[stopped by the limit: timeout, after 2.0 s]", True), "not: no match"
    missing = Finished(exit_code=127, stdout=b"", stderr=b"", seconds=0.0, stopped_by="pids")
    assert "pids" in (await on(Standing(missing), "python", code="1")).content, "nor: the box has no program"
