"""Tiny models: their recipes show no held-out task, their tokenizers are exact, and a build is a whole folder."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wingbeat.core.errors import ConfigError
from wingbeat.environments.registry import make_environment
from wingbeat.environments.retrieval.world import make_world
from wingbeat.environments.tiny_recipes import RECIPES, builder_of, builtin_names, load_recipe

OWN = {
    "code-repair": {},
    "retrieval": {"num_people": 400, "hops": [1], "size": 800, "eval_size": 200},
    "game": {"num_heaps": 2, "max_heap": 5},
}
"""Environments of this package -> the options of their presets that say which tasks there are."""


def test_models_have_builders() -> None:
    assert builder_of("calculator") == ["wingbeat.environments.calculator.model"]
    assert builder_of("game") == ["wingbeat.environments.tiny_model", "game"]
    assert set(RECIPES) | {"calculator"} == set(builtin_names())
    with pytest.raises(ConfigError, match=r"unknown built-in model 'chess'.*`builtin:game`"):
        builder_of("chess")


@pytest.mark.parametrize("name", OWN)
def test_demonstrations_follow_from_their_seed_and_show_no_held_out_task(name: str) -> None:
    recipe = load_recipe(name)
    shown = [recipe.demonstrate(random.Random(seed)) for seed in range(200)]
    assert shown[:5] == [recipe.demonstrate(random.Random(seed)) for seed in range(5)]
    asked = {messages[0]["content"] for messages in shown}
    heldout = {task.payload["question"] for task in make_environment(name, OWN[name]).tasks("eval")}
    trained = {task.payload["question"] for task in make_environment(name, OWN[name]).tasks("train")}
    if name == "retrieval":
        assert len(asked) > 190, "somebody new each time: see the next test"
    else:
        assert asked & trained and not asked & (heldout - trained)


def test_demonstrations_of_retrieval_state_no_fact_of_the_world() -> None:
    """Names may occur again by chance; what is said of them is not what the world says."""
    world = make_world(seed=0, num_people=400)
    recipe = load_recipe("retrieval")
    texts = {entity.text for entity in world.entities.values()}
    shown = [recipe.demonstrate(random.Random(seed)) for seed in range(300)]
    assert not [messages for messages in shown if messages[2]["content"].partition("\n")[2] in texts]


@pytest.mark.slow  # loads torch and transformers
@pytest.mark.parametrize("name", OWN)
def test_a_tokenizer_is_exact_and_marks_what_the_assistant_wrote(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from wingbeat.environments.tiny_model import encode, write_tokenizer

    recipe = load_recipe(name)
    write_tokenizer(tmp_path, recipe)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(0)
    for _ in range(20):
        messages = recipe.demonstrate(rng)
        ids, imitated = encode(tokenizer, recipe, messages)
        text = tokenizer.decode(ids)
        assert text.endswith("<|im_end|>\n")
        written = tokenizer.decode([token for token, mark in zip(ids, imitated, strict=True) if mark])
        assert written.count("<|im_end|>") == sum(message["role"] == "assistant" for message in messages)
        assert all(str(message["content"]) in text for message in messages if message["content"])
        assert sum(imitated) < len(ids) / 2 + 8, "most of a phrase is one token"


@pytest.mark.slow
def test_a_build_writes_a_whole_folder_and_is_reproducible(tmp_path: Path) -> None:
    from wingbeat.environments.tiny_model import write_model

    recipe = replace(load_recipe("game"), steps=3, batch=2)
    stats = [write_model(tmp_path / name, recipe, seed=1) for name in ("a", "b")]
    assert stats[0]["parameters"] > 50_000
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {path.name for path in (tmp_path / "a").iterdir()}
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_demonstration_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    from wingbeat.environments.tiny_model import write_model

    with pytest.raises(ValueError, match="max_tokens = 8"):
        write_model(tmp_path, replace(load_recipe("game"), max_tokens=8), seed=0)
