"""Environments by name, import path and file; and the built-in agent, from the configuration to the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from wingbeat.cli.environments import read_played, read_settings
from wingbeat.client.plans import RolloutPlan, dump_plan, load_plan, plan_agent
from wingbeat.core.config import AgentConfig, Config, validate_config
from wingbeat.core.errors import ConfigError, DependencyMissing, SetupError
from wingbeat.core.types import Task
from wingbeat.deploy.checks import check_agents
from wingbeat.deploy.paths import absolute_paths
from wingbeat.deploy.played import command_line, played_by
from wingbeat.environments import environment_names, make_environment
from wingbeat.environments.playing import MAKER, Played, agent_settings
from wingbeat.environments.presets import BASE, merged, preset_config, preset_data
from wingbeat.environments.registry import absolute_spec, make_played

OWN = '''
from wingbeat import Task


class Echo:
    """Say what you are told."""

    name = "echo"

    def __init__(self, options):
        self.reward = options.get("reward", 1.0)

    def tasks(self, split):
        return [Task("echo", f"{split}-{n}", {"say": f"{split} {n}"}) for n in range(2)]

    def score(self, task, answer):
        return self.reward * (answer == task.payload["say"])


class PlayedEcho(Echo):
    preset = {"run": {"steps": 3}, "policies": {"solver": {"context_tokens": 99}}}

    async def play(self, episode):
        return self.score(episode.task, episode.task.payload["say"])


def broken(options):
    raise RuntimeError("no such mood")


def nothing(options):
    return 3


NUMBER = 3
'''


class Episode:
    def __init__(self, task: Task) -> None:
        self.task = task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_echo.py").write_text(OWN)
    return tmp_path


@pytest.fixture
def module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "own_echo", raising=False)
    return "own_echo"


def test_a_third_partys_environment_is_named_by_import_path_or_file(folder: Path, module: str) -> None:
    for spec in (f"{module}:Echo", "own_echo.py:Echo", f"{folder}/own_echo.py:Echo"):
        made = make_environment(spec, {"reward": 0.5}, folder=folder)
        assert made.score(made.tasks("train")[0], "train 0") == 0.5
    assert absolute_spec("own_echo.py:Echo", folder) == f"{folder}/own_echo.py:Echo"
    assert [absolute_spec(spec, folder) for spec in ("calculator", "a.b:C")] == ["calculator", "a.b:C"]


def test_an_installed_package_can_name_environments(folder: Path, module: str) -> None:
    info = folder / "echoes-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echoes\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[wingbeat.environments]\nechoes = own_echo:PlayedEcho\nlost = own_echo:Nope\naway = no_such_module:X\n"
    )
    assert {"echoes", "calculator"} <= set(environment_names())
    assert make_played("echoes").name == "echo"
    assert preset_data("echoes")["run"] == {"steps": 3}
    with pytest.raises(ConfigError, match="echoes:x"):
        make_environment("echoes:x")
    with pytest.raises(ConfigError, match=r"lost \(own_echo:Nope\) cannot be loaded"):
        make_environment("lost")
    with pytest.raises(DependencyMissing, match="away needs 'no_such_module'"):
        make_environment("away")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("calculatr", "did you mean calculator"),
        ("no_module:X", "nor is there a module 'no_module'"),
        ("own_echo:Nope", "has no 'Nope'"),
        ("own_echo:NUMBER", "to be a class or function of the options"),
        ("own_echo:broken", "RuntimeError: no such mood"),
        ("own_echo:nothing", "to make an environment"),
        ("gone.py:Echo", "no such file"),
    ],
)
def test_what_is_no_environment_is_refused(folder: Path, module: str, spec: str, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        make_environment(spec, folder=folder)


def test_an_environment_without_an_agent_has_none_built_in(module: str) -> None:
    with pytest.raises(ConfigError, match="own_echo:Echo has no agent of its own"):
        make_played("own_echo:Echo")


async def test_a_plan_with_environments_travels_as_data_and_plays_each_source(module: str) -> None:
    played = (Played("own_echo:PlayedEcho", {"reward": 0.25}, source="a"), Played("own_echo:PlayedEcho"))
    plan = RolloutPlan("builtin", maker=MAKER, settings=agent_settings(played))
    agent = plan_agent(load_plan(dump_plan(plan)))
    assert agent.sources == ("a", "echo")
    tasks = [Task(source, "0", {"say": "x"}) for source in agent.sources]
    assert [await agent(Episode(task)) for task in tasks] == [0.25, 1.0]


def test_two_environments_of_one_source_are_refused(module: str) -> None:
    with pytest.raises(ConfigError, match="two for 'echo'"):
        plan_agent(RolloutPlan("builtin", maker=MAKER, settings=agent_settings([Played("own_echo:PlayedEcho")] * 2)))


# --- the configuration ------------------------------------------------------------------------


def config_of(**sections: Any) -> Config:
    data = {"policies": {"solver": {"model": "builtin:calculator"}}, "agent": {"path": "builtin"}}
    return validate_config({**data, **sections})


def test_what_an_agent_plays_survives_the_command_line() -> None:
    options = {"size": 5, "word": "x = 1", "deep": {"on": True, "list": [1, "b"]}, "rate": 0.5}
    one = played_by(config := config_of(tasks={"environment": "calculator", "options": options}), config.agent)
    sources = {"sums": {"environment": "calculator"}, "b.c": {"environment": "a.b:C", "options": options}}
    several = played_by(config := config_of(tasks={"sources": sources}), config.agent)
    for played in (one, several):
        line = command_line(played)
        pairs = list(zip(line[::2], line[1::2], strict=True))
        environments = [value for name, value in pairs if name == "--environment"]
        assert read_played(environments, [value for name, value in pairs if name == "--options"]) == played


def test_a_built_in_agent_needs_environments_to_play(folder: Path, module: str) -> None:
    for tasks, says in (
        ({}, "names none"),
        ({"file": "tasks.py"}, "names none"),
        (
            {"sources": {"a": {"environment": "calculator"}, "b": {"file": "b.py"}}},
            r"tasks\.sources\.b are from a file",
        ),
        ({"environment": "own_echo:Echo"}, "has no agent of its own"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_agents(config_of(tasks=tasks), folder)
    both = {"sources": {"a": {"environment": "calculator"}, "b": {"file": "b.py"}}}
    (folder / "mine.py").write_text("")
    agents = {"own": {"path": "mine.py", "sources": ["b"]}, "theirs": {"path": "builtin", "sources": ["a"]}}
    config = config_of(tasks=both, agent={}, agents=agents)
    check_agents(config, folder)
    assert [played.source for played in played_by(config, config.agents["theirs"])] == ["a"]


def test_a_built_in_agent_has_no_file_to_watch_or_to_make_absolute(folder: Path) -> None:
    with pytest.raises(ValueError, match="`watch` is of an agent's file"):
        AgentConfig(path="builtin", watch=True)
    config = absolute_paths(config_of(tasks={"environment": "own_echo.py:PlayedEcho"}), folder)
    assert (config.agent.path, config.tasks.environment) == ("builtin", f"{folder}/own_echo.py:PlayedEcho")


@pytest.mark.parametrize(
    ("environments", "options", "says"),
    [
        (["a", "b"], [], "each is SOURCE=NAME"),
        (["a=calculator"], ["size=3"], r"SOURCE\.KEY=VALUE"),
        (["calculator"], ["size"], "expected KEY=VALUE, got 'size'"),
        (["calculator"], ["a=1", "a.b=2"], "'a' is a value already"),
    ],
)
def test_wrong_options_of_a_command_line_are_refused(environments: list[str], options: list[str], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        read_played(environments, options)


def test_settings_of_a_command_line_are_toml_where_they_parse() -> None:
    given = ["size=3", "name=a b", "on=true", "game.turns=4", 'game.list=["x"]', "empty="]
    expected = {"size": 3, "name": "a b", "on": True, "game": {"turns": 4, "list": ["x"]}, "empty": ""}
    assert read_settings(given) == expected


# --- presets ----------------------------------------------------------------------------------


def test_a_preset_lies_over_the_base_table_by_table(module: str) -> None:
    config = preset_config("own_echo:PlayedEcho", {"run": {"seed": 7}})
    policy = config.policies["solver"]
    assert (config.run.steps, config.run.seed, policy.context_tokens) == (3, 7, 99)
    assert policy.model == BASE["policies"]["solver"]["model"]
    assert (config.tasks.environment, config.agent.path) == ("own_echo:PlayedEcho", "builtin")


def test_the_base_preset_sets_nothing_that_is_default_anyway() -> None:
    config = validate_config(merged(BASE, {"run": {"steps": 1}}))
    policy = config.policies["solver"]
    for section, name in ((config.engine, "engine"), (config.dataflow, "dataflow"), (config.eval, "eval")):
        for key, value in BASE[name].items():
            assert type(section).model_fields[key].default != value, f"{name}.{key}"
    for key in BASE["policies"]["solver"]["trainer"]:
        assert type(policy.trainer).model_fields[key].default != getattr(policy.trainer, key), key
