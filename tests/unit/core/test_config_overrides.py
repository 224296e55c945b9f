"""Settings on the command line."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from wingbeat.core.config.dataflow import DataflowConfig
from wingbeat.core.config.load import parse_overrides, validate_config
from wingbeat.core.errors import ConfigError


def test_dashes_stand_for_underscores_but_not_in_a_policy_s_name() -> None:
    overrides = parse_overrides(["--policies.my-solver.context-tokens=64", "--server.admin-key=a-b"])
    assert overrides == [(("policies", "my-solver", "context_tokens"), 64), (("server", "admin_key"), "a-b")]


@pytest.mark.parametrize("argument", ["server.port=1", "--server.port", "--server..port=1", "--=1"])
def test_what_is_no_override_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"overrides look like --section\.key=value"):
        parse_overrides([argument])


def test_groups_of_one_cannot_be_sampled_dynamically() -> None:
    with pytest.raises(ValidationError, match="no batch would ever fill"):
        DataflowConfig(group_size=1, dynamic_sampling=True)


def configure(policy: dict[str, Any] | None = None, **sections: Any) -> None:
    validate_config({"policies": {"solver": {"model": "m", **(policy or {})}}, **sections})


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"algorithm": "rloo"},
        {"algorithm": "maxrl", "credit": "turn"},
        {"kl_coef": 0.1, "kl_in": "reward"},
    ],
)
def test_groups_of_one_need_an_algorithm_without_a_baseline_per_group(trainer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"policies\.solver\.trainer\.algorithm: .* set group_size to 2 or more"):
        configure({"trainer": trainer}, dataflow={"group_size": 1})
    configure({"trainer": trainer}, dataflow={"group_size": 2})


@pytest.mark.parametrize(
    "policy",
    [
        {"trainer": {"algorithm": "reinforce"}},
        {"trainer": {"algorithm": "ppo"}},
        {"trainer": {"sft_coef": 0.1}},
        {"trainer": {"credit": "step_groups"}},
        {"trainable": False},
    ],
)
def test_groups_of_one_train_without_one(policy: dict[str, Any]) -> None:
    configure(policy, dataflow={"group_size": 1})


def test_a_share_of_0_is_a_ratio() -> None:
    configure(tasks={"ratios": {"a": 1.0, "b": 0.0}})
    for ratios in ({"a": 1.5, "b": -0.5}, {"a": 0.0}, {"a": float("nan")}):
        with pytest.raises(ConfigError, match="must be 0 or more and sum to 1"):
            configure(tasks={"ratios": ratios})


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({"wrods": 1.0}, "`ratios` name 'wrods', which is no source; did you mean 'words'?"),
        ({"sums": 1.0}, "`ratios` leave out the source 'words' (they name 'sums', which is none of the configuration)"),
    ],
)
def test_ratios_of_unknown_sources_name_both(ratios: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(tasks={"sources": {"words": {"file": "words.py"}}, "ratios": ratios})
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("policy", "sections", "message"),
    [
        (
            {"trainer": {"algorithm": "ppo", "critic": {"value_clip": -1}}},
            {},
            "`policies.solver.trainer.critic.value_clip`: expected a number above 0 or 'unlimited', got -1",
        ),
        (
            {"trainer": {"credit": "turns"}},
            {},
            "`policies.solver.trainer.credit`: expected 'episode', 'turn' or 'step_groups', got 'turns'; did you mean"
            " 'turn'?",
        ),
        ({"lora": {"targets": ["q", 3]}}, {}, "`policies.solver.lora.targets[1]`: expected text, got 3"),
        ({"lora": {"rnk": 3}}, {}, "unknown key `policies.solver.lora.rnk`; did you mean 'rank'?"),
        ({"sampling": []}, {}, "`policies.solver.sampling`: expected a table, got []"),
        ({"trainer": {"betas": [0.9]}}, {}, "`policies.solver.trainer.betas[1]` is missing"),
        (
            {},
            {"dataflow": {"straggler_wait_s": "forever"}},
            "`dataflow.straggler_wait_s`: expected a number of at least 0 or 'unlimited', got 'forever'",
        ),
        ({}, {"dataflow": {"operators": [{"limit": 3}]}}, "`dataflow.operators[0].use` is missing"),
        (
            {},
            {"dataflow": {"operators": [{"use": ""}]}},
            "`dataflow.operators[0].use`: expected text that is not empty, got ''",
        ),
        ({}, {"dataflow": {"operators": {"use": "x"}}}, "`dataflow.operators`: expected a list, got a table"),
        ({}, {"tasks": {"ratios": {"constrained-float": "x"}}}, "`tasks.ratios.constrained-float`: expected a number"),
        (
            {},
            {"run": {"seed": "x", "steps": -1}},
            "`run.seed`: expected a whole number of at least 0, got 'x'; `run.steps`: expected a whole number of at"
            " least 0, got -1",
        ),
        ({}, {"run": {"name": "a b"}}, "`run.name`: String should match pattern"),
    ],
)
def test_faults_are_told_by_key_in_words(policy: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(policy, **sections)
    assert raised.value.message.startswith(message)


def test_a_misspelt_algorithm_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"expected 'reinforce', .* or 'distill', got 'grp'; did you mean 'grpo'\?$"):
        configure({"trainer": {"algorithm": "grp"}})


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"trainable": False, "trainer": {"learning_rate": 1.0}}, "`trainer.learning_rate` is of training"),
        ({"snapshot_every": 3}, "`snapshot_every` is of `snapshot_of`"),
        ({"trainer": {"updates_per_batch": 3}}, "groups_per_step = 2; expected at most 2, got 3"),
    ],
)
def test_keys_without_effect_are_refused(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(policy, dataflow={"groups_per_step": 2})
    assert message in raised.value.message
    configure({"trainable": False, "trainer": {"algorithm": "grpo"}, "snapshot_every": 10})
    configure({"trainer": {"updates_per_batch": 2}}, dataflow={"groups_per_step": 2})
