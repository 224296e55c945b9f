"""Code repair in the real sandbox: what an agent can do there, and what none of its tricks earns."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from wingbeat.environments.code_repair import environment
from wingbeat.environments.code_repair.environment import ANSWERS, CodeRepairEnvironment
from wingbeat.environments.code_repair.judge import score_box
from wingbeat.environments.code_repair.programs import programs
from wingbeat.resources import Box, Mount, ResourceFailed, Resources
from wingbeat.resources.backends.limits_homes import find_homes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]

LEDGER = programs()["ledger"]
GIVEN = {"programs": ["ledger"], "memory_mb": 256 if "memory" in find_homes() else 0}
ENVIRONMENT = CodeRepairEnvironment(GIVEN)
TASK = next(task for task in ENVIRONMENT.tasks("train") if task.id.startswith("ledger/account/"))


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Resources]:
    async with Resources(ledger=tmp_path) as resources:
        yield resources


@pytest.fixture
async def box(pool: Resources) -> AsyncIterator[Box]:
    async with pool.lease(ENVIRONMENT.spec, name="box", owner="test") as lease:
        await ENVIRONMENT.place(TASK, lease.value)
        yield lease.value


async def repair(box: Box) -> None:
    for path, text in ENVIRONMENT.solution(TASK).items():
        await box.write(path, text.encode())


async def test_the_repository_is_one_commit_whose_tests_fail_until_it_is_repaired(box: Box) -> None:
    assert not (await box.run(["test", "-e", ANSWERS])).ok
    log = await box.run("git log --oneline && git status --short")
    if shutil.which("git") is not None:
        assert log.stdout.decode().count("\n") == 1 and log.ok
    tests = ["python3", "-m", "unittest", "discover", "-s", "tests"]
    assert (await box.run(tests)).exit_code == 1
    assert await ENVIRONMENT.score_box(TASK, box) == 0.0
    assert 0.0 < await score_box(box, LEDGER) < 1.0
    await repair(box)
    assert (await box.run(tests)).exit_code == 0
    assert await ENVIRONMENT.score_box(TASK, box) == 1.0
    assert await box.list(".") == [*([".git/"] if shutil.which("git") else []), "README.md", "ledger/", "tests/"]


async def test_a_plain_folder_serves_where_there_is_no_sandbox(pool: Resources) -> None:
    environment = CodeRepairEnvironment({**GIVEN, "box": "subprocess"})
    async with pool.lease(environment.spec, name="box", owner="test") as lease:
        await environment.place(TASK, lease.value)
        assert await environment.score_box(TASK, lease.value) == 0.0
        await repair(lease.value)
        assert await environment.score_box(TASK, lease.value) == 1.0


async def test_a_sandbox_that_shows_the_answers_is_refused(pool: Resources, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "/opt/code_repair/index.json"  # where they are need not be a place that a box can show
    monkeypatch.setattr(environment, "ANSWERS", shown)
    mount = Mount(source=str(Path(ANSWERS).parent), target=str(Path(shown).parent))
    async with pool.lease(ENVIRONMENT.spec.model_copy(update={"mounts": (mount,)}), name="box", owner="test") as lease:
        assert (await lease.value.run(["test", "-e", shown])).ok
        with pytest.raises(ResourceFailed, match="shows its agents the answers"):
            await ENVIRONMENT.place(TASK, lease.value)


ALWAYS_EQUAL = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __iter__(self): return iter([])
Account = totals = running = largest = lowest_balance = Yes()
"""
PATCHED = """
import json, os, sys, unittest
unittest.TestCase.run = lambda self, result=None: None
json.dumps = lambda *a, **k: '{"value": null}'
main = sys.modules.get("__main__")
for name in dir(main):
    if callable(getattr(main, name)): setattr(main, name, lambda *a, **k: {})
"""
FORGED = """
import os
for fd in range(3, 64):
    try: os.write(fd, b'{"value": true}')
    except OSError: pass
for fd in ("/proc/%d/fd/1" % os.getppid(), "/proc/1/fd/1"):
    try: open(fd, "w").write("0 {}")
    except OSError: pass
os._exit(0)
"""

DEEP = """
import os, sys
frame = sys._getframe()
while "request" not in frame.f_locals: frame = frame.f_back
with open("/proc/%d/fd/1" % os.getppid(), "w") as report:
    report.write(frame.f_locals["request"]["nonce"] + " " + "[" * 200000 + chr(10))
"""

MODULE_TRICKS = {
    "sys.exit(0)": "import sys\nsys.exit(0)\n",
    "os._exit(0)": "import os\nos._exit(0)\n",
    "kills the runner": "import os\nos.kill(os.getppid(), 9)\n",
    "kills all": "import os\nos.kill(-1, 9)\n",
    "infinite loop": "while True: pass\n",
    "sleeps": "import time\ntime.sleep(1000)\n",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
    "memory": "x = 'x' * 10**10\n",
    "always equal": ALWAYS_EQUAL,
    "patches unittest and the runner": PATCHED,
    "forges reports": FORGED,
    "a report that cannot be read": DEEP,
    "prints the nonce's place": "import sys\nsys.stdout.write('{}')\nraise SystemExit\n",
}
SHELL_TRICKS = {
    "conftest and sitecustomize": (
        "for f in conftest sitecustomize usercustomize hidden_cases json unittest; do"
        " echo 'import os; os._exit(0)' > $f.py; cp $f.py ledger/$f.py; done"
    ),
    "replaced tests": "rm -r tests && mkdir tests && echo 'import unittest' > tests/test_account.py",
    "no package": "rm -r ledger",
    "the package is a link": "mv ledger other && ln -s other ledger",
    "modules are links": "mv ledger/account.py a && ln -s ../a ledger/account.py",
    "compiled only": "python3 -m compileall -q -b ledger; rm ledger/*.py",
    "python in the way": "printf '#!/bin/sh\\nexit 0\\n' > python3; chmod +x python3; mkdir -p ~/bin; cp python3 ~/bin",
    "a locked folder": "chmod 000 .",
    "a daemon": "(while :; do cp /dev/null ledger/account.py; done) >/dev/null 2>&1 &",
}


@pytest.mark.parametrize("trick", MODULE_TRICKS)
async def test_no_trick_in_a_module_scores(box: Box, trick: str) -> None:
    await box.write("ledger/account.py", MODULE_TRICKS[trick].encode())
    await box.write("ledger/statement.py", MODULE_TRICKS[trick].encode())
    assert await score_box(box, LEDGER, seconds=1.0) <= 1 / len(LEDGER.cases)


@pytest.mark.parametrize("trick", SHELL_TRICKS)
async def test_no_trick_in_the_folder_scores(box: Box, trick: str) -> None:
    await box.run(SHELL_TRICKS[trick])
    assert await score_box(box, LEDGER, seconds=2.0) < 1.0


async def test_a_right_package_scores_beside_files_that_are_in_the_way(box: Box) -> None:
    await repair(box)
    await box.run(SHELL_TRICKS["conftest and sitecustomize"])
    await box.run(SHELL_TRICKS["replaced tests"])
    await box.run(SHELL_TRICKS["python in the way"])
    assert await score_box(box, LEDGER) == 1.0


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": f"c-{name}", "type": "function", "function": function}]}


async def test_an_agent_with_tools_repairs_it(pool: Resources, open_episode: Any) -> None:
    seen: list[str] = []

    def says(body: dict[str, Any]) -> dict[str, Any]:
        last = body["messages"][-1]
        seen.append(str(last["content"]))
        match len(seen):
            case 1:
                assert [entry["function"]["name"] for entry in body["tools"]][:2] == ["shell", "read_file"]
                return call("shell", command="python3 -m unittest discover -s tests")
            case 2:
                return call("write_file", path="ledger/account.py", content=LEDGER.modules["ledger/account.py"])
            case _:
                return {"content": "It is repaired."}

    async with open_episode(TASK, says, resources=pool) as episode:
        assert await ENVIRONMENT.play(episode) == 1.0
    assert "[exit code 1]" in seen[1] and seen[2].startswith("wrote ")


async def test_an_agent_without_tools_acts_in_text(pool: Resources, open_episode: Any) -> None:
    environment = CodeRepairEnvironment({**GIVEN, "actions": "text", "max_turns": 3})
    seen: list[str] = []

    def says(body: dict[str, Any]) -> dict[str, Any]:
        assert "tools" not in body
        seen.append(str(body["messages"][-1]["content"]))
        match len(seen):
            case 1:
                assert "replace_in_file" in body["messages"][0]["content"]
                return {"content": "First\n```action\n{not json}\n```"}
            case 2:
                arguments = {"path": "ledger/account.py", "content": LEDGER.modules["ledger/account.py"]}
                action = json.dumps({"name": "write_file", "arguments": arguments})
                return {"content": f"Now:\n```action\n{action}\n```"}
            case _:
                return {"content": "done"}

    async with open_episode(TASK, says, resources=pool) as episode:
        assert await environment.play(episode) == 1.0
    assert seen[1].startswith("error: expected a JSON object") and seen[2].startswith("wrote ")


async def test_an_agent_that_does_nothing_earns_nothing(pool: Resources, open_episode: Any) -> None:
    share = CodeRepairEnvironment({**GIVEN, "reward": "share"})

    def says(body: dict[str, Any]) -> dict[str, Any]:
        return {"content": "It looks right to me."}

    async with open_episode(TASK, says, resources=pool) as episode:
        assert await ENVIRONMENT.play(episode) == 0.0
    async with open_episode(TASK, says, resources=pool) as episode:
        assert 0.0 < await share.play(episode) < 1.0
