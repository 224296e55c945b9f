"""Tools on a box: a shell, Python, and files.

Each takes a box that is already there, or the spec of one, which is then leased for each episode under the name
``box``. Tools of one name share one box, and so does a reward that asks for it:

    toolbox = Toolbox([shell_tool(SPEC), *file_tools(SPEC)])
    async with toolbox.for_episode(episode) as tools:
        ...
        tests = await tools.lease("box").value.run("pytest -q")

A command that fails is an observation with its exit code, and no error of the tool. A box that is gone is
infrastructure's fault and raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from wingbeat.resources import ResourceFailed, Spec
from wingbeat.resources.boxes import Box, Finished
from wingbeat.tools.results import ToolError, ToolResult
from wingbeat.tools.tool import Tool, tool

BOX = "box"
"""The name of the lease, unless another is given."""

MAX_PLACES = 8
"""Of a passage that is not unique, told to the model."""

_NOT_FOUND = 127

RUN_CODE = """\
import ast, linecache, sys, traceback
source = sys.stdin.buffer.read().decode("utf-8", "replace")
sys.stdin = open("/dev/null")
name = "<code>"
linecache.cache[name] = (len(source), None, source.splitlines(True), name)
scope = {"__name__": "__main__", "__builtins__": __builtins__}
try:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), scope)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
        if value is not None:
            print(repr(value))
except SystemExit:
    raise
except BaseException as error:
    traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
    sys.exit(1)
"""
"""Runs standard input as a program, and shows the value of its last line as a notebook does."""


def shell_tool(box: Box | Spec, *, resource: str = BOX, timeout_s: float | None = None) -> Tool:
    """``shell(command)``: a command line for ``sh``; ``timeout_s`` replaces that of the box."""

    @tool(name="shell", resources={BOX: _SOME}, timeout_s=None)
    async def shell(command: Annotated[str, Field(min_length=1)], box: Box) -> ToolResult:
        """Run a command line with sh and see its output and exit code. Files stay from one call to the next.

        Args:
            command: the command line, for example: ls -la && cat README.md
        """
        return _told(await box.run(command, timeout_s=timeout_s))

    return _on(shell, box, resource)


def python_tool(
    box: Box | Spec, *, resource: str = BOX, timeout_s: float | None = None, python: str = "python3"
) -> Tool:
    """``python(code)``: each call is a program of its own.

    Files stay from one call to the next, variables do not: a program that is killed takes nothing along that a later
    call counts on, and every observation is explained by the call that it answers.  ``python`` is a program of the box.
    """

    @tool(name="python", resources={BOX: _SOME}, timeout_s=None)
    async def run(code: Annotated[str, Field(min_length=1)], box: Box) -> ToolResult:
        """Run a Python program and see what it prints, and the value of its last line.

        Each call starts anew: variables are gone with the next call, files stay.

        Args:
            code: the program
        """
        return _told(await _run_program(box, [python, "-c", RUN_CODE], stdin=code.encode(), timeout_s=timeout_s))

    return _on(run, box, resource)


def file_tools(box: Box | Spec, *, resource: str = BOX) -> list[Tool]:
    """``read_file``, ``write_file``, ``replace_in_file``, ``list_files`` and ``search_files``."""
    return [_on(each, box, resource) for each in (read_file, write_file, replace_in_file, list_files, search_files)]


_SOME = Spec(kind="box")
"""Stands in the declarations below until :func:`_on` puts the real one there."""

_on_box: Callable[..., Any] = partial(tool, resources={BOX: _SOME}, timeout_s=None)


@_on_box()
async def read_file(
    path: str,
    box: Box,
    first_line: Annotated[int, Field(ge=1)] = 1,
    last_line: Annotated[int, Field(ge=1)] | None = None,
) -> str:
    """Read a text file, with line numbers.

    Args:
        path: of the file
        first_line: where to begin
        last_line: where to end; null for the end of the file
    """
    lines = _lines(await _text(box, path))
    if first_line > max(len(lines), 1):
        raise ToolError(f"first_line: expected at most {len(lines)}, the lines of {path}, got {first_line}")
    if last_line is not None and last_line < first_line:
        raise ToolError(f"last_line: expected at least first_line, {first_line}, got {last_line}")
    shown = lines[first_line - 1 : last_line]
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(shown, start=first_line))


@_on_box()
async def write_file(path: str, content: str, box: Box) -> str:
    """Write a text file; one that is there is replaced, and folders are made.

    Args:
        path: of the file
        content: all of it
    """
    with _file_errors(path):
        await box.write(path, content.encode("utf-8", "replace"))
    count = len(_lines(content))
    return f"wrote {count} line{'' if count == 1 else 's'} to {path}"


@_on_box()
async def replace_in_file(path: str, old: Annotated[str, Field(min_length=1)], new: str, box: Box) -> str:
    """Replace a passage of a text file. It must occur exactly once.

    Args:
        path: of the file
        old: the passage as it stands there, with its spaces and line breaks and without line numbers
        new: what stands there afterwards
    """
    text = await _text(box, path)
    starts = _occurrences(text, old)
    if not starts:
        raise ToolError(
            f"old: expected a passage of {path}, got one that does not occur there; compare it with read_file"
        )
    if len(starts) > 1:
        lines = ", ".join(str(text.count("\n", 0, start) + 1) for start in starts[:MAX_PLACES])
        count = f"{len(starts)} times" if len(starts) <= MAX_PLACES else f"more than {MAX_PLACES} times"
        raise ToolError(
            f"old: expected a passage that occurs once in {path}, got one that occurs {count}"
            f" (lines {lines}); take in more of the lines around it"
        )
    changed = text[: starts[0]] + new + text[starts[0] + len(old) :]
    with _file_errors(path):
        await box.write(path, changed.encode("utf-8", "replace"))
    return f"replaced 1 passage of {path}, at line {text.count(chr(10), 0, starts[0]) + 1}"


@_on_box()
async def list_files(box: Box, path: str = ".") -> str:
    """List a folder. The names of folders end with a slash.

    Args:
        path: of the folder
    """
    with _file_errors(path):
        return "\n".join(await box.list(path)) or f"{path} is empty"


@_on_box()
async def search_files(pattern: Annotated[str, Field(min_length=1)], box: Box, path: str = ".") -> ToolResult:
    """Search files for a regular expression, and see the lines with their files and numbers.

    Args:
        pattern: an extended regular expression, as grep -E takes it
        path: a file, or a folder to search with all folders in it
    """
    command = ["grep", "-rnIHE", "--exclude-dir=.git", "-e", pattern, "--", path]
    done = await _run_program(box, command)
    if done.exit_code == 1 and done.stopped_by is None:
        return ToolResult(f"no line matches in {path}", data=done)
    if done.exit_code > 1 and not done.stdout and done.stopped_by is None:
        raise ToolError(done.stderr.decode("utf-8", "replace").strip())
    return _told(done)


def _on(declared: Tool, box: Box | Spec, resource: str) -> Tool:
    """A tool of this module on a box that is there, or on one that each episode leases."""
    if isinstance(box, Spec):
        return declared.leasing(resource, box)
    return declared.filled({BOX: box}, None)


def _told(done: Finished) -> ToolResult:
    """What a command printed, and how it ended where that was not with exit code 0."""
    parts = [done.stdout.decode("utf-8", "replace").rstrip("\n")]
    if done.stderr.strip():
        parts += ["[stderr]", done.stderr.decode("utf-8", "replace").rstrip("\n")]
    if done.truncated:
        parts.append("[more output than the box keeps; the rest is gone]")
    if done.stopped_by:
        parts.append(f"[stopped by the limit: {done.stopped_by}, after {done.seconds:.1f} s]")
    elif done.exit_code:
        parts.append(f"[exit code {done.exit_code}]")
    return ToolResult("\n".join(filter(None, parts)) or "[no output]", is_error=bool(done.stopped_by), data=done)


async def _run_program(
    box: Box, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None
) -> Finished:
    """Run a program that the tool needs.  Raises ResourceFailed if the box has none: no model could help that."""
    done = await box.run(command, stdin=stdin, timeout_s=timeout_s)
    if done.exit_code == _NOT_FOUND and not done.stdout:
        probe = await box.run(f'command -v "{command[0]}"')
        if not probe.ok and probe.stopped_by is None:
            raise ResourceFailed(
                f"the box has no program {command[0]!r}, which this tool runs: use an image that has it"
            )
    return done


async def _text(box: Box, path: str) -> str:
    with _file_errors(path):
        data = await box.read(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ToolError(f"path: expected a text file, got {path}, which is no UTF-8") from None


@contextmanager
def _file_errors(path: str) -> Iterator[None]:
    """Errors about a path, in words for the model."""
    try:
        yield
    except FileNotFoundError:
        raise ToolError(f"path: there is no {path}") from None
    except IsADirectoryError:
        raise ToolError(f"path: expected a file, got the folder {path}") from None
    except NotADirectoryError:
        raise ToolError(f"path: expected a folder, got {path}, which is or goes through a file") from None
    except ValueError as error:
        raise ToolError(f"path: {error}") from None


def _lines(text: str) -> list[str]:
    """As ``grep -n`` and ``sed`` count them; Python alone would also part them at form feeds and the like."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def _occurrences(text: str, part: str) -> list[int]:
    """Where the first of them begin, overlapping ones too: a passage that overlaps itself is no single place either.

    Not all: a file of one letter would have millions, and looking for them would hold up everything else.
    """
    starts: list[int] = []
    start = text.find(part)
    while start >= 0 and len(starts) <= MAX_PLACES:
        starts.append(start)
        start = text.find(part, start + 1)
    return starts
