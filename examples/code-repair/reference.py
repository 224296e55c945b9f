"""The environment without a model: `python reference.py` plays held-out tasks with two scripted agents.

The reference agent knows the answer: it runs the tests, writes the module as it was before the bug, and runs them
again; it earns 1. The idle agent does nothing and earns 0. Both work in the real sandbox, with the tools that a model
gets, and are scored as a model is.
"""

import asyncio
import json
import sys
import time

from wingbeat import Task
from wingbeat.environments import make_environment
from wingbeat.resources import Resources
from wingbeat.tools import EpisodeTools

NUM_TASKS = 12
AT_ONCE = 4
TESTS = json.dumps({"command": "python3 -m unittest discover -s tests"})
ENVIRONMENT = make_environment("code-repair")


async def reference(task: Task, tools: EpisodeTools) -> None:
    before = await tools.call("shell", TESTS)
    for path, text in ENVIRONMENT.solution(task).items():
        await tools.call("write_file", json.dumps({"path": path, "content": text}))
    after = await tools.call("shell", TESTS)
    assert "FAILED" in before.content and after.content.endswith("OK"), after.content


async def idle(task: Task, tools: EpisodeTools) -> None:
    return


async def play(pool: Resources, agent, task: Task, slots: asyncio.Semaphore) -> float:
    """One episode: lease a sandbox, let the agent work in it, score what it left there."""
    async with slots, ENVIRONMENT.toolbox.for_owner(pool, f"{agent.__name__} {task.id}") as tools:
        box = tools.lease("box").value
        await ENVIRONMENT.place(task, box)
        await agent(task, tools)
        return await ENVIRONMENT.score_box(task, box)


async def main() -> bool:
    tasks = ENVIRONMENT.tasks("eval")[:NUM_TASKS]
    slots = asyncio.Semaphore(AT_ONCE)
    right = True
    async with Resources() as pool:
        for agent, expected in ((reference, 1.0), (idle, 0.0)):
            started = time.perf_counter()
            rewards = await asyncio.gather(*(play(pool, agent, task, slots) for task in tasks))
            mean = sum(rewards) / len(rewards)
            seconds = time.perf_counter() - started
            sys.stdout.write(f"{agent.__name__}: mean reward {mean:g} of {len(tasks)} tasks, {seconds:.1f} s\n")
            right = right and mean == expected
    return right


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
