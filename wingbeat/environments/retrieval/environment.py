"""Retrieval QA: an agent with a search tool answers questions about an invented world.

The documents of one world are one corpus (SQLite FTS5), built once on each machine and named by its content.  The facts
of held-out questions are in it, as everything is; the questions, and all others about the same entity, are not in
training.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from wingbeat import Task
from wingbeat.environments import Options, OutOfContext, ask, read_options, read_split
from wingbeat.environments.retrieval.questions import Question, make_questions, split_subjects
from wingbeat.environments.retrieval.scoring import exact_match, extract, token_f1
from wingbeat.environments.retrieval.world import World, make_world
from wingbeat.tools import Corpus, Document, Toolbox, corpus_search

if TYPE_CHECKING:
    from wingbeat import Episode

SOURCE = "retrieval"
INSTRUCTION = "Search the documents, then answer with a name, a word or a year and nothing else.\n"


class RetrievalOptions(Options):
    """Which world, which questions, and how they are scored."""

    seed: int = Field(default=0, ge=0, description="Draws the world, the split and the questions.")
    num_people: int = Field(
        default=2000, ge=50, le=15000, description="People in the world; it has a sixth as many other documents."
    )
    hops: list[int] = Field(default=[1, 2], min_length=1, description="Facts that a question needs: 1, 2, or both.")
    size: int = Field(default=1000, ge=1, description="Questions to train on.")
    eval_size: int = Field(default=200, ge=1, description="Held-out questions.")
    reward: Literal["exact", "f1"] = Field(default="exact", description="Exact match, or F1 of words.")
    results: int = Field(default=3, ge=1, le=20, description="Documents that a search shows.")
    max_turns: int = Field(default=8, ge=1, description="Model calls of an episode.")
    max_tokens: int | None = Field(default=None, ge=1, description="Of a reply; unset: what the policy allows.")

    @field_validator("hops")
    @classmethod
    def _hops_are_one_or_two(cls, hops: list[int]) -> list[int]:
        if not set(hops) <= {1, 2} or len(set(hops)) < len(hops):
            raise ValueError("expected 1, 2, or both")
        return hops


class RetrievalEnvironment:
    """Questions whose answers stand in a corpus."""

    name = SOURCE

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = read = read_options(RetrievalOptions, options or {}, environment=self.name)
        self.world = make_world(seed=read.seed, num_people=read.num_people)
        train, heldout = split_subjects(self.world, seed=read.seed)
        self._tasks = {
            split: tuple(map(to_task, self._questions(subjects, size=size, split=split)))
            for split, subjects, size in (("train", train, read.size), ("eval", heldout, read.eval_size))
        }

    def tasks(self, split: str) -> Sequence[Task]:
        """No entity that a held-out question names is named by a training question."""
        return self._tasks[read_split(split).value]

    def score(self, task: Task, answer: str) -> float:
        """What an answer earns; of a longer text, what follows its last ``Answer:``."""
        measure = exact_match if self.options.reward == "exact" else token_f1
        return measure(extract(answer), task.payload["answer"])

    async def play(self, episode: Episode) -> float:
        """Let the policy search until it answers; without an answer within its turns it earns 0."""
        options, task = self.options, episode.task
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.payload["question"]}]
        async with self._toolbox.for_episode(episode) as tools:
            for _ in range(options.max_turns):
                try:
                    reply = await ask(episode, messages, tools=tools.schemas(), max_tokens=options.max_tokens)
                except OutOfContext:
                    return 0.0
                if not reply.tool_calls:
                    return self.score(task, reply.content or "")
                messages.append(reply.model_dump(exclude_none=True))
                messages += await tools.answer(reply.tool_calls)
        return 0.0

    @cached_property
    def _toolbox(self) -> Toolbox:
        """Made with the first episode: who only lists tasks needs no corpus."""
        return Toolbox([corpus_search(open_corpus(self.world), limit=self.options.results)])

    def _questions(self, subjects: Sequence[Any], *, size: int, split: str) -> list[Question]:
        rng = random.Random(f"questions {self.options.seed} {split}")
        try:
            return make_questions(self.world, subjects, hops=self.options.hops, size=size, rng=rng)
        except ValueError as error:
            fields = {"size": self.options.size, "eval_size": self.options.eval_size}
            raise ValueError(f"{self.name}: {error} ({fields}); raise `num_people`, or ask for fewer") from error


def to_task(question: Question) -> Task:
    """A question as JSON data."""
    payload = {
        "question": INSTRUCTION + question.text,
        "answer": question.answer,
        "hops": len(question.relations),
    }
    return Task(SOURCE, question.id, payload)


def documents(world: World) -> list[Document]:
    """One for each entity; its number is its id."""
    entities = world.entities.values()
    return [Document(str(number), entity.text, title=entity.name) for number, entity in enumerate(entities, start=1)]


def open_corpus(world: World, folder: Path | None = None) -> Corpus:
    """The corpus of a world, built if this machine does not have it.

    ``folder`` replaces ``$WINGBEAT_CACHE`` (else ``~/.cache/wingbeat``).
    """
    texts = documents(world)
    digest = hashlib.sha256("\n".join(f"{text.title}\t{text.text}" for text in texts).encode()).hexdigest()
    if folder is None:
        folder = Path(os.environ.get("WINGBEAT_CACHE") or Path.home() / ".cache" / "wingbeat").expanduser()
    path = folder / "corpora" / f"{SOURCE}-{digest[:16]}.sqlite"
    if path.exists():
        return Corpus(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return Corpus.build(path, texts)
