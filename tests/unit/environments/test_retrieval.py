"""Retrieval QA: the invented world, its questions, their splits, scores and the agent with its search."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import ConfigError
from wingbeat.environments.registry import make_environment
from wingbeat.environments.retrieval.environment import RetrievalEnvironment, documents, open_corpus
from wingbeat.environments.retrieval.questions import make_questions, split_subjects
from wingbeat.environments.retrieval.scoring import exact_match, extract, normalise, token_f1
from wingbeat.environments.retrieval.world import RELATIONS, Kind, make_world

SMALL = {"num_people": 60, "size": 40, "eval_size": 12}


def test_a_world_follows_from_its_seed() -> None:
    world = make_world(seed=3, num_people=60)
    assert make_world.__wrapped__(seed=3, num_people=60) == world
    assert make_world(seed=4, num_people=60).entities.keys() != world.entities.keys()
    for entity in world.entities.values():
        assert entity.facts.keys() == RELATIONS[entity.kind].keys()
        assert all(value in entity.text for value in (entity.name, *entity.facts.values()))
        for relation, kind in RELATIONS[entity.kind].items():
            assert kind is None or world.entities[entity.facts[relation]].kind is kind


def test_the_default_corpus_has_a_few_thousand_documents() -> None:
    world = make_world(seed=0, num_people=2000)
    texts = documents(world)
    assert 2000 < len(texts) < 4000
    assert len({text.title for text in texts}) == len(texts) == len({text.id for text in texts})
    assert max(len(text.text) for text in texts) < 200


def test_questions_lead_to_their_answers() -> None:
    world = make_world(seed=1, num_people=80)
    subjects = list(world.entities.values())
    for question in make_questions(world, subjects, hops=(1, 2), size=100, rng=random.Random(0)):
        found = question.subject
        assert found in question.text
        for relation in question.relations:
            found = world.entities[found].facts[relation]
        assert found == question.answer
        assert len(question.relations) == 1 or question.answer not in question.text


def test_splits_share_no_question_and_no_subject() -> None:
    world = make_world(seed=0, num_people=200)
    train, heldout = split_subjects(world, seed=0)
    assert not {entity.name for entity in train} & {entity.name for entity in heldout}
    assert {entity.kind for entity in heldout} == set(Kind)
    made = RetrievalEnvironment({"num_people": 200, "size": 400, "eval_size": 80})
    asked = {split: {task.payload["question"] for task in made.tasks(split)} for split in ("train", "eval")}
    assert len(asked["train"]) == 400 and len(asked["eval"]) == 80
    assert not asked["train"] & asked["eval"]
    for task in made.tasks("eval"):
        assert not [entity.name for entity in train if entity.name == task.id.split("/")[0]]
    assert [task.payload["hops"] for task in made.tasks("eval")].count(1) == 40
    assert made.tasks("train") == RetrievalEnvironment({"num_people": 200, "size": 400, "eval_size": 80}).tasks("train")


def test_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="hops"):
        make_environment("retrieval", {"hops": [3]})
    with pytest.raises(ConfigError, match="num_people"):
        make_environment("retrieval", {"num_people": 60, "eval_size": 5000})


@pytest.mark.parametrize(
    ("answer", "expected", "exact", "f1"),
    [
        ("Caldholm", "Caldholm", 1, 1),
        ("  caldholm. ", "Caldholm", 1, 1),
        ("The Broken Bridge", "broken bridge", 1, 1),
        ("It is Caldholm", "Caldholm", 0, 0.5),
        ("Mira Holtdale", "Mira Grimwick", 0, 0.5),
        ("", "Caldholm", 0, 0),
        ("1844", "1845", 0, 0),
        ("I think so.\nAnswer: Caldholm", "Caldholm", 1, 1),
        ("Answer: Ashport\nFinal answer: Caldholm", "Caldholm", 1, 1),
        ("I think so.\n\n Answer:\n Caldholm", "Caldholm", 1, 1),
        ("\n" * 100_000 + "Answer: Caldholm", "Caldholm", 1, 1),
        ("x x x x", "x", 0, 0.4),
    ],
)
def test_scores(answer: str, expected: str, exact: float, f1: float) -> None:
    assert exact_match(extract(answer), expected) == exact
    assert token_f1(extract(answer), expected) == pytest.approx(f1)


@given(st.text(), st.text())
def test_scores_are_from_0_to_1_and_symmetric(left: str, right: str) -> None:
    assert 0.0 <= token_f1(left, right) <= 1.0
    assert token_f1(left, right) == token_f1(right, left)
    assert exact_match(left, left) == 1.0
    assert normalise(normalise(left)) == normalise(left)


def test_a_corpus_is_built_once_and_finds_every_entity(tmp_path: Path) -> None:
    world = make_world(seed=0, num_people=60)
    corpus = open_corpus(world, tmp_path)
    written = corpus.path.stat().st_mtime_ns
    assert open_corpus(world, tmp_path).path.stat().st_mtime_ns == written
    assert open_corpus(make_world(seed=1, num_people=60), tmp_path).path != corpus.path
    for name in world.entities:
        assert corpus.search(name, limit=1)[0].title == name


@pytest.mark.slow  # loads the SDK
async def test_an_agent_searches_and_answers(
    tmp_path: Path, open_episode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINGBEAT_CACHE", str(tmp_path))
    made = RetrievalEnvironment({**SMALL, "max_turns": 2})
    task = next(task for task in made.tasks("eval") if task.payload["hops"] == 1)
    subject = task.id.split("/")[0]
    seen: list[str] = []

    def says(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(str(body["messages"][-1]["content"]))
        if len(seen) > 1:
            return {"content": f"Answer: {task.payload['answer']}"}
        function = {"name": "search", "arguments": json.dumps({"query": subject})}
        return {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}

    async with open_episode(task, says) as episode:
        assert await made.play(episode) == 1.0
    assert task.payload["answer"] in seen[1], "the fact stands in the corpus"

    def searches_for_ever(body: dict[str, Any]) -> dict[str, Any]:
        function = {"name": "search", "arguments": "{}"}
        return {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}

    async with open_episode(task, searches_for_ever) as episode:
        assert await made.play(episode) == 0.0
