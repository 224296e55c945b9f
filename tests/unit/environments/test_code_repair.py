"""The parts of code repair that run no program: base programs, mutations, splits, and the judge's reading."""

from __future__ import annotations

import ast
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.client.blame import explain_failure
from wingbeat.core.errors import ConfigError
from wingbeat.core.types import Cause
from wingbeat.environments.code_repair.actions import act
from wingbeat.environments.code_repair.index import all_bugs, expected_answers
from wingbeat.environments.code_repair.judge import read_report, score_box
from wingbeat.environments.code_repair.mutations import KINDS, mutants
from wingbeat.environments.code_repair.programs import parse_program, programs
from wingbeat.environments.code_repair.tasks import chosen_bugs, split_bugs, to_task
from wingbeat.environments.registry import make_environment
from wingbeat.resources import ResourceFailed, ResourceLost
from wingbeat.resources.boxes import Finished

MODULE = """\
def clip(value, low=0, high=9):
    if value < low:
        return low
    return min(value, high) + 0 * len([1, 2][0:1])


def pick(items, index):
    return items[0] if not items else items[index - 1]
"""


def mutated(kind: str) -> list[str]:
    """The lines that one kind of mutation changes in MODULE."""
    lines = MODULE.splitlines()
    found = []
    for mutant in mutants(MODULE):
        if mutant.kind == kind:
            changed = mutant.source.splitlines()
            found.append(next((new for old, new in zip(lines, changed, strict=False) if old != new), "").strip())
    return found


def test_there_are_enough_programs_and_kinds_of_bugs() -> None:
    assert len(programs()) >= 12
    assert len({bug.kind for bug in all_bugs()}) >= 8
    for program in programs().values():
        assert len(program.modules) >= 2 and len(program.tests) >= 2 and len(program.cases) >= 6
        assert all(case in expected_answers(program.name) for case in program.cases)


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("wrong_comparison", ["if value <= low:"]),
        ("wrong_arithmetic", ["return min(value, high) - 0 * len([1, 2][0:1])"]),
        ("swapped_arguments", ["return min(high, value) + 0 * len([1, 2][0:1])"]),
        ("wrong_default", ["def clip(value, low=1, high=9):", "def clip(value, low=0, high=10):"]),
        ("missing_edge_case", ["return min(value, high) + 0 * len([1, 2][0:1])"]),
        ("inverted_condition", ["return items[0] if items else items[index - 1]"]),
        ("wrong_element", ["return items[-1] if not items else items[index - 1]"]),
        ("missing_return", ["low", "min(value, high) + 0 * len([1, 2][0:1])"]),
    ],
)
def test_a_mutation_makes_its_kind_of_mistake(kind: str, lines: list[str]) -> None:
    assert [line for line in mutated(kind) if line][: len(lines)] == lines


def test_mutants_are_modules_in_a_fixed_order() -> None:
    first, again = mutants(MODULE), mutants(MODULE)
    assert first == again
    assert {mutant.kind for mutant in first} <= set(KINDS)
    for mutant in first:
        ast.parse(mutant.source)
        assert mutant.source != MODULE
        assert 1 <= mutant.line <= len(MODULE.splitlines())


def test_every_bug_of_the_index_is_there_and_has_a_name_of_its_own() -> None:
    bugs = all_bugs()
    assert len({bug.id for bug in bugs}) == len(bugs) >= 400
    for bug in bugs:
        assert bug.source() != programs()[bug.program].modules[bug.path]
        assert bug.failing


@pytest.mark.parametrize("held_out", ["pairs", "programs"])
@pytest.mark.parametrize("seed", [0, 1])
def test_splits_share_no_mistake_of_a_program(held_out: str, seed: int) -> None:
    bugs = chosen_bugs(None, None)
    train, heldout = split_bugs(bugs, seed=seed, held_out=held_out)
    assert len(train) + len(heldout) == len(bugs) and len(heldout) > len(bugs) // 8
    assert not {(bug.program, bug.kind) for bug in train} & {(bug.program, bug.kind) for bug in heldout}
    shared = {bug.program for bug in train} & {bug.program for bug in heldout}
    assert bool(shared) == (held_out == "pairs")
    sources = {(bug.path, bug.source()) for bug in train}
    assert not [bug.id for bug in heldout if (bug.path, bug.source()) in sources], "the same source by another way"
    assert split_bugs(bugs, seed=seed, held_out=held_out) == (train, heldout)


def test_a_payload_holds_what_an_agent_may_see_and_nothing_else() -> None:
    for bug in all_bugs()[::25]:
        task = to_task(bug)
        program = programs()[bug.program]
        assert json.loads(json.dumps(task.payload)) == task.payload
        assert set(task.payload) == {"question", "program", "files"}
        files = task.payload["files"]
        assert files[bug.path] == bug.source()
        assert {**files, bug.path: program.modules[bug.path]} == {**files, **program.modules, **program.tests}
        assert "case_" not in json.dumps(task.payload)
        assert all(name in task.payload["question"] for name in bug.failing)


def test_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"programs.*no 'nothing'"):
        make_environment("code-repair", {"programs": ["nothing"]})
    with pytest.raises(ConfigError, match=r"kinds.*no 'typo'"):
        make_environment("code-repair", {"kinds": ["typo"]})
    with pytest.raises(ConfigError, match="reward"):
        make_environment("code-repair", {"reward": "half"})


def test_options_choose_programs_and_kinds() -> None:
    made = make_environment("code-repair", {"programs": ["ledger", "dates"], "kinds": ["off_by_one", "wrong_default"]})
    tasks = [*made.tasks("train"), *made.tasks("eval")]
    assert {task.payload["program"] for task in tasks} == {"ledger", "dates"}
    assert {task.id.split("/")[2] for task in tasks} == {"off_by_one", "wrong_default"}
    assert made.score(tasks[0], "done") == 0.0


def test_a_program_without_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden cases"):
        parse_program("p", "One.\n--- p/a.py\nx = 1\n--- tests/test_a.py\n")


class FakeBox:
    """Says what came of the runner."""

    workdir = "/work"

    def __init__(
        self,
        *,
        exit_code: int = 0,
        report: Mapping[str, Any] | str = "",
        stopped_by: str | None = None,
        has_python: bool = True,
    ):
        self.exit_code, self.report, self.stopped_by, self.has_python = exit_code, report, stopped_by, has_python
        self.done: list[str] = []

    async def end_processes(self) -> None:
        self.done.append("end")

    async def run(self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        if not stdin:
            assert command[-1] == "", "only whether it runs"
            return Finished(0 if self.has_python else 127, b"", b"sh: no python3", 0.1)
        self.done.append("run")
        request = json.loads(stdin)
        assert "expected" not in stdin.decode()
        report = self.report if isinstance(self.report, str) else f"{request['nonce']} {json.dumps(self.report)}\n"
        output = report.replace("NONCE", request["nonce"]).encode()
        return Finished(self.exit_code, output, b"sh: no python3", 0.1, stopped_by=self.stopped_by)


def right() -> dict[str, Any]:
    return dict(expected_answers("ledger"))


async def judged(box: FakeBox) -> float:
    box_port: Any = box
    return await score_box(box_port, programs()["ledger"])


async def test_processes_end_before_the_cases_run() -> None:
    box = FakeBox(report=right())
    assert await judged(box) == 1.0
    assert box.done == ["end", "run"]


async def test_only_a_whole_report_of_a_clean_end_counts() -> None:
    answers = right()
    assert await judged(FakeBox(report=answers, exit_code=1)) == 0.0
    assert await judged(FakeBox(report=answers, stopped_by="timeout")) == 0.0
    assert await judged(FakeBox(report=json.dumps(answers))) == 0.0, "without the nonce"
    assert await judged(FakeBox(report="NONCE {half")) == 0.0
    assert await judged(FakeBox(report="NONCE [1]")) == 0.0
    first, *others = answers
    assert await judged(FakeBox(report={**answers, first: {"broken": "timeout"}})) == len(others) / len(answers)
    assert await judged(FakeBox(report={first: answers[first]})) == 1 / len(answers)


async def test_a_box_without_python_or_without_a_box_is_no_reward() -> None:
    with pytest.raises(ResourceFailed, match="no python3"):
        await judged(FakeBox(exit_code=127, has_python=False))
    assert await judged(FakeBox(exit_code=127)) == 0.0, "an exit code that the code under test has made"

    class Lost(FakeBox):
        async def end_processes(self) -> None:
            raise ResourceLost("the box is gone")

    with pytest.raises(ResourceLost):
        await judged(Lost())


def test_a_report_is_the_line_with_the_nonce() -> None:
    assert read_report(b'noise\nabc {"a": 1}\n', "abc") == {"a": 1}
    assert read_report(b'xyz {"a": 1}\n', "abc") == {}
    assert read_report(b"\xff\xfe", "abc") == {}
    assert read_report(b"abc " + b"[" * 200_000, "abc") == {}, "deeper than can be read"


async def test_an_action_that_cannot_be_read_is_told() -> None:
    tools: Any = None
    for action in ("[" * 200_000, "7", "null", "{}", '{"name"'):
        result = await act(f"```action\n{action}\n```", tools)
        assert result.is_error and "expected a JSON object" in result.content


def test_a_sandbox_too_small_for_its_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 0, or at least 128"):
        make_environment("code-repair", {"memory_mb": 64})


async def test_a_repository_that_cannot_be_made_is_no_task() -> None:
    class Full:
        async def write(self, path: str, data: bytes) -> None: ...

        async def run(self, command: str, *, env: Mapping[str, str]) -> Finished:
            return Finished(128, b"", b"fatal: no space", 0.1)

    environment: Any = make_environment("code-repair", {"programs": ["ledger"]})
    with pytest.raises(ResourceFailed, match="cannot be made: fatal: no space"):
        await environment.place(environment.tasks("eval")[0], Full())


async def test_a_box_without_git_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Plain:
        async def write(self, path: str, data: bytes) -> None: ...

        async def run(self, command: str, *, env: Mapping[str, str]) -> Finished:
            assert "git init" in command and env["ANSWERS"].endswith("index.json")
            return Finished(78, b"", b"", 0.1)

    environment: Any = make_environment("code-repair", {"programs": ["ledger"]})
    for task in environment.tasks("eval")[:2]:
        await environment.place(task, Plain())
    assert [record.message for record in caplog.records] == [
        "code-repair: there is no git in its boxes, so repositories are plain folders"
    ]


@pytest.mark.slow  # loads the SDK
async def test_an_episode_whose_sandbox_is_lost_is_infrastructures_failure(open_episode: Any) -> None:
    """Whatever the agent did until then: no reward, not even 0."""

    class LostBox(FakeBox):
        async def write(self, path: str, data: bytes) -> None:
            self.done.append(path)

        async def run(self, command: Any, **options: Any) -> Finished:
            return Finished(0, b"", b"", 0.1)

        async def end_processes(self) -> None:
            raise ResourceLost("the sandbox is gone")

    class Pool:
        def prefetch(self, specs: Any, *, owner: str) -> None:
            assert specs.kind == "sandbox" and owner

        @asynccontextmanager
        async def lease_all(
            self, specs: Mapping[str, Any], *, owner: str, wait_s: float | None = None
        ) -> AsyncIterator[Mapping[str, Any]]:
            yield {name: SimpleNamespace(name=name, value=LostBox(), owner=owner) for name in specs}

        async def release_owner(self, owner: str) -> int:
            return 0

    environment: Any = make_environment("code-repair", {"programs": ["ledger"]})
    task = environment.tasks("train")[0]
    async with open_episode(task, lambda body: {"content": "done"}, resources=Pool()) as episode:
        with pytest.raises(ResourceLost) as caught:
            await environment.play(episode)
        assert explain_failure(caught.value, server=episode.base_url)[0] is Cause.INFRASTRUCTURE_ERROR
