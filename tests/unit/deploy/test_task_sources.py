"""What `wingbeat train` reads of [tasks] and [agents], and what it starts for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from wingbeat.core.config import Config
from wingbeat.core.errors import ConfigError
from wingbeat.core.types import Split, Task
from wingbeat.dataflow.evaluation import EvaluationResult, EvaluationSpec, SourceScore
from wingbeat.deploy.checks import check_agents
from wingbeat.deploy.local import absolute_paths
from wingbeat.deploy.tasks import load_tasks, put_tasks, training_sources
from wingbeat.deploy.training import TrainingResult, agent_specs

TASKS = """
from wingbeat import Task
def train_tasks(): return [Task("mine", "1"), Task("mine", "2")]
def eval_tasks(): return [Task("mine", "3", {"held": "out"})]
"""


def config(**sections: Any) -> Config:
    return Config.model_validate({"policies": {"solver": {"model": "m"}}, **sections})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "agent.py").write_text("")
    return tmp_path


def test_several_sources_are_dealt_under_their_names(folder: Path) -> None:
    sources = {"sums": {"environment": "calculator", "options": {"seed": 1}}, "own": {"file": "tasks.py"}}
    ratios = {"sums": 0.5, "own": 0.25, "brought by a client": 0.25}
    tasks = load_tasks(config(tasks={"sources": sources, "ratios": ratios}), folder)
    assert {key: len(members) for key, members in tasks.items()} == {
        ("sums", Split.TRAIN): 195,
        ("sums", Split.EVAL): 105,
        ("own", Split.TRAIN): 2,
        ("own", Split.EVAL): 1,
    }
    assert tasks[("own", Split.EVAL)] == [Task("own", "3", {"held": "out"})]
    assert training_sources(tasks) == ["own", "sums"]


def test_the_short_form_keeps_the_names_of_the_tasks(folder: Path) -> None:
    tasks = load_tasks(config(tasks={"file": "tasks.py"}), folder)
    assert {source for source, _ in tasks} == {"mine"}
    with pytest.raises(ConfigError, match=r"`tasks`: `ratios` leave out the source 'mine' \(they name 'other'"):
        load_tasks(config(tasks={"file": "tasks.py", "ratios": {"other": 1.0}}), folder)
    with pytest.raises(ConfigError, match="`ratios` name 'miine', which is no source; did you mean 'mine'"):
        load_tasks(config(tasks={"file": "tasks.py", "ratios": {"miine": 1.0}}), folder)


def test_agents_for_sources_that_nobody_brings_are_refused(folder: Path) -> None:
    def check(source: str, **tasks: Any) -> None:
        load_tasks(config(agents={"a": {"path": "agent.py", "sources": [source]}}, tasks=tasks), folder)

    own = {"sources": {"own": {"file": "tasks.py"}}}
    with pytest.raises(ConfigError, match=r"agents\.a\.sources: .* \(own\), got 'onw'; did you mean 'own'\?"):
        check("onw", **own)
    check("own", **own)
    check("a client's", **own, ratios={"own": 0.5, "a client's": 0.5})
    check("a client's")


def test_ids_that_clash_in_one_source_are_told_before_anything_starts(folder: Path) -> None:
    (folder / "tasks.py").write_text(TASKS.replace('Task("mine", "2")', 'Task("other", "1")'))
    load_tasks(config(tasks={"file": "tasks.py"}), folder)
    with pytest.raises(ConfigError, match="source 'own': task ids must be unique, got '1' twice"):
        load_tasks(config(tasks={"sources": {"own": {"file": "tasks.py"}}}), folder)


async def test_training_may_begin_with_the_last_source_and_finds_all_eval_tasks() -> None:
    put: list[tuple[str, Split]] = []

    class FakeSwarm:
        async def put_tasks(self, source: str, tasks: list[Task], *, split: Split) -> None:
            put.append((source, split))

    tasks = {(source, split): [Task(source, "1")] for source in ("a", "b") for split in Split}
    await put_tasks(FakeSwarm(), tasks)  # type: ignore[arg-type]
    assert [split for _, split in put] == [Split.EVAL, Split.EVAL, Split.TRAIN, Split.TRAIN]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tasks": {"sources": {"a": {}}}}, "set `environment` or `file`"),
        ({"tasks": {"sources": {"a": {"file": "t.py", "environment": "calculator"}}}}, "not both"),
        ({"tasks": {"sources": {"a": {"file": "t.py", "options": {"x": 1}}}}}, "`options` belong to"),
        ({"tasks": {"sources": {"a": {"file": "t.py"}}, "file": "t.py"}}, "or several"),
        ({"tasks": {"sources": {"a": {"file": "t.py"}}, "ratios": {"b": 1.0}}}, "leave out the source 'a'"),
        ({"tasks": {"ratios": {"a": 0.5, "b": 0.4}}}, "sum to 1, got a = 0.5, b = 0.4, which sums to 0.9"),
        ({"agents": {"a": {}}}, r"agents\.a\.path"),
        ({"agents": {"a": {"path": "a.py"}}, "agent": {"path": "b.py"}}, "or several"),
        ({"agents": {"a/b": {"path": "a.py"}}}, "agent name 'a/b'"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**sections)


def test_local_paths_become_absolute(folder: Path) -> None:
    (folder / "teacher").mkdir()
    trainer = {"algorithm": "distill", "teacher": "teacher"}
    made = absolute_paths(
        Config.model_validate(
            {
                "policies": {"solver": {"model": "pypi:m", "trainer": trainer}},
                "tasks": {"sources": {"own": {"file": "tasks.py"}}},
                "agents": {
                    "a": {"path": "agent.py", "python": "venv/bin/python"},
                    "b": {"path": "a.py", "python": "py"},
                },
                "dataflow": {"operators": [{"use": "mine.py:Filter", "limit": 3}]},
            }
        ),
        folder,
    )
    assert made.tasks.sources["own"].file == str(folder / "tasks.py")
    assert made.agents["a"].path == str(folder / "agent.py")
    assert (made.agents["a"].python, made.agents["b"].python) == (str(folder / "venv/bin/python"), "py")
    assert made.policies["solver"].trainer.teacher == str(folder / "teacher")
    assert made.dataflow.operators[0].use == f"{folder / 'mine.py'}:Filter"
    assert made.dataflow.operators[0].options == {"limit": 3}


def test_every_agent_runs_as_its_own_processes(folder: Path) -> None:
    several = {
        "sums": {"path": "agent.py", "processes": 2, "concurrency": 4, "sources": ["a", "b"], "python": sys.executable},
        "echo": {"path": "agent.py", "label": "loud", "watch": True, "processes": 3},
    }
    made = absolute_paths(config(agents=several), folder)
    check_agents(made, folder)
    specs = {spec.name: list(spec.command) for spec in agent_specs(made, url="http://here", key="k", run_dir=folder)}
    assert list(specs) == ["agent-sums-0", "agent-sums-1", "agent-echo-0"]
    command = specs["agent-sums-1"]
    assert command[:5] == [sys.executable, "-m", "wingbeat.cli", "rollout", str(folder / "agent.py")]
    assert command[5:11] == ["--server", "http://here", "--source", "a", "--source", "b"]
    assert command[11:] == ["--concurrency", "4", "--grace-s", "3", "--label", "sums"]
    watched = specs["agent-echo-0"]
    assert "--source" not in watched and watched[-5:] == ["--label", "loud", "--watch", "--processes", "3"]
    single = absolute_paths(config(agent={"path": "agent.py:solve"}), folder)
    check_agents(single, folder)
    assert [spec.name for spec in agent_specs(single, url="http://here", key="k", run_dir=folder)] == ["agent-0"]
    assert agent_specs(config(), url="http://here", key="k", run_dir=folder) == []


def test_what_an_agent_lacks_is_told_before_anything_starts(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"agents\.a\.path: no file .*none\.py"):
        check_agents(config(agents={"a": {"path": "none.py"}}), folder)
    with pytest.raises(ConfigError, match=r"agent\.path: no file .*none\.py"):
        check_agents(config(agent={"path": "none.py:solve"}), folder)
    with pytest.raises(ConfigError, match=r"agents\.a\.python: no program .*make the environment first"):
        check_agents(config(agents={"a": {"path": "agent.py", "python": "/no/such/python"}}), folder)


def test_a_result_shows_before_and_after_by_source(tmp_path: Path) -> None:
    def done(name: str, mean: float, policy: str = "solver") -> EvaluationResult:
        scores = {"a": SourceScore(mean, 0.1, 2), "b": SourceScore(1.0, None, 1)}
        rewards = {"a/1": (mean,), "a/2": (mean,), "b/1": (1.0,)}
        spec = EvaluationSpec("id", policy, 0, name=name)
        return EvaluationResult(spec, True, 3, 3, {}, mean, 0.1, rewards, sources=scores)

    data = TrainingResult(tmp_path, True, {}, (done("before", 0.25), done("after", 0.75)), 1.0).as_dict()
    assert data["before_by_source"] == {"a": 0.25, "b": 1.0}
    assert data["after_by_source"] == {"a": 0.75, "b": 1.0}
    assert data["difference"]["mean"] == pytest.approx((0.5 + 0.5 + 0.0) / 3)
    both = (done("before", 0.25), done("before", 0.5, "judge"), done("after", 0.75), done("after", 0.5, "judge"))
    data = TrainingResult(tmp_path, True, {}, both, 1.0).as_dict()
    assert {policy: found["after_mean"] for policy, found in data["policies"].items()} == {"solver": 0.75, "judge": 0.5}
    assert data["policies"]["judge"]["difference"]["mean"] == 0.0 and "before" not in data
    assert "policies" not in TrainingResult(tmp_path, False, {}, (), 1.0).as_dict()
