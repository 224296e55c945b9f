"""What the tiny model of ``builtin:code-repair`` imitates.

A few hundred thousand parameters find no bug.  They can know the base programs by heart, as they were before
anything was broken, and act: read the module that the failing tests point to, write it anew, stop.  So lines of the
programs are single tokens, and the demonstrating agent makes two mistakes, each independent of the task: it takes
another module of the program, and it stops when it has read one.  What the model does better than that, it learnt by
reinforcement.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

from wingbeat.environments import Message, TinyRecipe
from wingbeat.environments.code_repair.index import Bug
from wingbeat.environments.code_repair.programs import programs
from wingbeat.environments.code_repair.tasks import chosen_bugs, question, repository, split_bugs, to_task

RIGHT_MODULE = 0.7
"""How often the demonstrating agent opens the module with the bug."""
WRITES = 0.5
"""How often it goes on to write the module anew."""
MAX_LINES = 60
TOOLS = ("shell", "read_file", "write_file", "replace_in_file", "list_files", "search_files")


@cache
def training_bugs() -> tuple[Bug, ...]:
    """Of the default split: held-out ones are not shown."""
    return tuple(split_bugs(chosen_bugs(None, None), seed=0, held_out="pairs")[0])


def demonstrate(rng: random.Random) -> list[Message]:
    """One episode of a careless agent."""
    bug = rng.choice(training_bugs())
    program = programs()[bug.program]
    others = [path for path in program.modules if path != bug.path]
    path = bug.path if rng.random() < RIGHT_MODULE else rng.choice(others)
    text = program.modules[path]
    read: list[Message] = [
        {"role": "user", "content": to_task(bug).payload["question"]},
        _call("read_file", path=path),
        _observed(numbered(repository(program, bug)[path])),
    ]
    written: list[Message] = [
        _call("write_file", path=path, content=text),
        _observed(f"wrote {len(text.splitlines())} lines to {path}"),
    ]
    done: Message = {"role": "assistant", "content": "done"}
    return [*read, *(written if rng.random() < WRITES else []), done]


def numbered(text: str) -> str:
    """A file as the tool ``read_file`` shows it."""
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(text.splitlines(), start=1))


def phrases() -> tuple[str, ...]:
    """What questions, observations and calls are made of."""
    modules = [text for program in programs().values() for text in program.modules.values()]
    lines = list(dict.fromkeys(line for text in modules for line in text.splitlines()))
    names = [path for program in programs().values() for path in program.modules]
    failing = sorted({f"- {name}\n" for bug in chosen_bugs(None, None) for name in bug.failing})
    return (
        *_frame_of_questions(),
        *failing,
        *(f"- {name}\n" for name in names),
        *names,
        *(f"{number}\t" for number in range(1, MAX_LINES + 1)),
        *(f"{line}\n" for line in lines),
        *dict.fromkeys(text.splitlines()[-1] for text in modules),
        *(json.dumps(line)[1:-1] + "\\n" for line in lines),
        *('{"path": "', '", "content": "', '"}}', "wrote ", " lines to ", "done", "read_file", "write_file"),
        *(str(number) for number in range(10, MAX_LINES + 1)),
    )


def _frame_of_questions() -> list[str]:
    """The sentences that every question has: what stays of one if its lists are taken out."""
    program = next(iter(programs().values()))
    bug = next(bug for bug in chosen_bugs(None, None) if bug.program == program.name)
    text = question(program, bug)
    for item in [*bug.failing, *program.modules]:
        text = text.replace(f"- {item}\n", "\0")
    return [part for part in text.split("\0") if part]


def _call(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def _observed(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "c", "content": text}


RECIPE = TinyRecipe(
    phrases=phrases(),
    demonstrate=demonstrate,
    tools=TOOLS,
    max_tokens=640,
    steps=300,
    batch=16,
)
