"""Operators by name, options, import path and file; everything wrong is said before the run starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from wingbeat.core.config import Config, dump_toml, load_config
from wingbeat.core.errors import ConfigError
from wingbeat.core.samples import EpisodeSamples
from wingbeat.dataflow.operators import BUILT_IN, absolute_use, build_chain, check_operators
from wingbeat.dataflow.records import ReadyGroup

pytestmark = pytest.mark.unit

MINE = """
from __future__ import annotations

from pydantic import Field

from wingbeat.dataflow.operators import Decision, EpisodeView, GroupView, Operator, OperatorOptions


class Options(OperatorOptions):
    most: int = Field(ge=1)


class Brevity(Operator[Options]):
    options_type = Options

    def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
        return episode.drop("long") if episode.num_sampled > self.options.most else None


class Plain(Operator[OperatorOptions]):
    def __init__(self, options, context):
        super().__init__(options, context)
        if context.group_size > 8:
            raise ValueError("it is for small groups")

    def observe(self, group):
        pass


class Misspelt(Operator[OperatorOptions]):
    def on_episodes(self, episode, group):
        return episode.drop("never")


class Idle(Operator[OperatorOptions]):
    def metrics(self):
        return {}


SOMETHING = 3
"""


def config_of(*operators: Mapping[str, Any], **more: Any) -> Config:
    policies = {"solver": {"model": "m"}, "verifier": {"model": "m"}, "judge": {"model": "m", "trainable": False}}
    return Config.model_validate({"policies": policies, "dataflow": {"operators": list(operators), **more}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    return tmp_path


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"use": "zero_varianc_filter"}, r"'zero_varianc_filter'; did you mean 'zero_variance_filter'\?"),
        ({"use": "quite_something"}, "built in are failure_filter, length_filter"),
        ({"use": "mix"}, r"set `\[tasks\] ratios`"),
        ({"use": "length_filter", "max_token": 3}, r"unknown option `max_token`; did you mean 'max_tokens'\?"),
        ({"use": "zero_variance_filter", "most": 3}, "unknown option `most`; it has none"),
        ({"use": "length_filter"}, "set at least one of `min_tokens`"),
        ({"use": "length_filter", "max_tokens": "many"}, r"option `max_tokens`: .*valid integer.* \(got 'many'\)"),
        ({"use": "length_filter", "min_turns": 3, "max_turns": 2}, "bound of turns is above the upper one: 3 > 2"),
        ({"use": "overlong_shaping", "max_tokens": 3}, "option `buffer_tokens` is missing"),
        ({"use": "reward_clip"}, "set `min`, `max` or both"),
        ({"use": "reward_scale", "factor": 0.0}, "nothing could be learnt"),
        ({"use": "reward_shaping", "metrics": {"steps": 0.0}}, "something other than 0"),
        ({"use": "failure_filter", "truncated": False}, "nothing would fail"),
        ({"use": "deduplicate", "tokens": False}, "nothing would be a repetition"),
        ({"use": "dynamic_sampling", "above": 0.5, "below": 0.5}, "`above` must be less than `below`"),
        ({"use": "replay", "max_staleness": 2}, "`max_staleness` is 2, above dataflow.max_staleness, 1"),
        ({"use": "replay", "ratio": 0.1}, "set it to 0.125 or more"),
        ({"use": "group_floor", "members": 9}, "every group would be dropped"),
        ({"use": "greso", "policies": ["solvr"]}, r"'solvr', which is no policy that trains; did you mean 'solver'\?"),
        ({"use": "greso", "policies": ["judge"]}, "no policy that trains"),
        ({"use": "greso", "policies": []}, "leave it out for all that train"),
        ({"use": "nothing_here:Thing"}, "cannot import 'nothing_here'"),
        ({"use": "json:JSONDecoder"}, "must be a class that extends wingbeat.dataflow.operators.Operator"),
        ({"use": "mine.py:Brevty", "most": 1}, r"no class 'Brevty'; did you mean 'Brevity'\? it has Brevity, Plain, "),
        ({"use": "mine.py:SOMETHING"}, "must be a class that extends"),
        ({"use": "mine.py:Brevity"}, "option `most` is missing"),
        ({"use": "mine.py:Misspelt"}, "no hook.*did you mean 'on_episode' where it has 'on_episodes'"),
        ({"use": "mine.py:Idle"}, "overrides no hook, so it would do nothing; hooks are should_issue, observe"),
        ({"use": "broken.py:Thing"}, "broken.py fails when imported: ModuleNotFoundError"),
        ({"use": "gone.py:Thing"}, "gone.py, got no such file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(folder: Path, entry: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^dataflow\.operators\[1\] \({entry['use']}\).*{says}"):
        check_operators(config_of({"use": "failure_filter"}, entry), folder)


def test_an_operator_of_ones_own_may_refuse_the_run(folder: Path) -> None:
    check_operators(config_of({"use": "mine.py:Plain"}), folder)
    with pytest.raises(ConfigError, match=r"mine.py:Plain.*does not fit this run: it is for small groups"):
        check_operators(config_of({"use": "mine.py:Plain"}, group_size=9), folder)


def test_replay_needs_staleness() -> None:
    with pytest.raises(ConfigError, match=r"set dataflow.max_staleness to 1 or more"):
        check_operators(config_of({"use": "replay"}, max_staleness=0))


def test_chains_hold_the_operators_of_their_policy_in_order_under_names_of_their_own(folder: Path) -> None:
    config = config_of(
        {"use": "length_filter", "max_tokens": 9},
        {"use": "mine.py:Brevity", "most": 3, "policies": ["solver"]},
        {"use": "length_filter", "max_turns": 9},
    )
    assert build_chain(config, "solver", config_dir=folder).labels == ("length_filter", "Brevity", "length_filter-2")
    assert build_chain(config, "verifier", config_dir=folder).labels == ("length_filter", "length_filter-2")
    assert build_chain(config, "judge", config_dir=folder).labels == ()


def test_paths_become_absolute_so_that_a_run_resumes_from_anywhere(folder: Path) -> None:
    use = absolute_use("mine.py:Brevity", folder)
    assert use == f"{folder}/mine.py:Brevity"
    assert absolute_use(use, Path("/elsewhere")) == use
    assert absolute_use("greso", folder) == "greso"
    assert absolute_use("package.module:Class", folder) == "package.module:Class"
    check_operators(config_of({"use": use, "most": 2}))


def test_operators_survive_the_saved_configuration(folder: Path) -> None:
    config = config_of(
        {"use": "reward_shaping", "metrics": {"steps": -0.01, "a b": 2.0}, "on_error": "stop", "policies": ["solver"]}
    )
    (folder / "config.toml").write_text(dump_toml(config))
    assert load_config(folder / "config.toml") == config


def test_every_built_in_is_documented_with_its_options() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operators.md").read_text(encoding="utf-8")
    for name, kind in BUILT_IN.items():
        assert f"`{name}`" in page, name
        for option, field in kind.options_type.model_fields.items():
            rows = [line for line in page.splitlines() if line.startswith(f"| `{option}` |")]
            assert any(row.endswith(f"| {field.description} |") for row in rows), f"{name}: {option}"


def test_the_worked_example_of_the_documentation_runs(folder: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operators.md").read_text(encoding="utf-8")
    code = page.split("```python\n", 1)[1].split("```", 1)[0]
    (folder / "filters.py").write_text(code)
    head = page.split("```toml\n", 1)[1].split("```", 1)[0]
    (folder / "config.toml").write_text(f'[policies.solver]\nmodel = "m"\n{head}')
    config = load_config(folder / "config.toml")
    check_operators(config, folder)
    chain = build_chain(config_of({"use": "filters.py:BestAndWorst", "keep": 3}), "solver", config_dir=folder)
    members = tuple(
        EpisodeSamples(f"e{i}", 1, "g", "solver", "", reward, ()) for i, reward in enumerate((0.5, 0.0, 1.0, 0.2, 0.9))
    )
    outcome = chain.on_group(ReadyGroup("g", "solver", floor_version=0, size=5, members=members))
    assert [tuple(dropped) for dropped in outcome.dropped] == [
        ("e3", 1, "BestAndWorst:middle"),
        ("e0", 1, "BestAndWorst:middle"),
    ]
    assert chain.metrics()["operator/BestAndWorst/groups"] == 1.0
    again = build_chain(config_of({"use": "filters.py:BestAndWorst", "keep": 3}), "solver", config_dir=folder)
    again.load_state_dict(chain.state_dict())
    assert again.metrics() == chain.metrics()
