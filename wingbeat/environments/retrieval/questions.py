"""Questions about a world: of one fact, or of two that must be found one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from wingbeat.environments.retrieval.world import RELATIONS, Entity, Kind, World

ONE_HOP: Mapping[tuple[Kind, str], str] = MappingProxyType(
    {
        (Kind.PERSON, "birthplace"): "In which town was {name} born?",
        (Kind.PERSON, "birth_year"): "In which year was {name} born?",
        (Kind.PERSON, "profession"): "What is the profession of {name}?",
        (Kind.PERSON, "employer"): "Which firm does {name} work for?",
        (Kind.TOWN, "region"): "In which region is the town of {name}?",
        (Kind.TOWN, "river"): "On which river does the town of {name} lie?",
        (Kind.TOWN, "founded"): "In which year was the town of {name} founded?",
        (Kind.FIRM, "founder"): "Who founded the firm {name}?",
        (Kind.FIRM, "seat"): "In which town is the seat of the firm {name}?",
        (Kind.FIRM, "product"): "What does the firm {name} make?",
        (Kind.BOOK, "author"): "Who wrote the novel {name}?",
        (Kind.BOOK, "setting"): "In which town is the novel {name} set?",
        (Kind.BOOK, "published"): "In which year was the novel {name} published?",
    }
)

_BRIDGES: Mapping[tuple[Kind, str], str] = MappingProxyType(
    {
        (Kind.PERSON, "birthplace"): "the town where {name} was born",
        (Kind.PERSON, "employer"): "the firm that {name} works for",
        (Kind.FIRM, "founder"): "the founder of the firm {name}",
        (Kind.FIRM, "seat"): "the town where the firm {name} has its seat",
        (Kind.BOOK, "author"): "the author of the novel {name}",
        (Kind.BOOK, "setting"): "the town where the novel {name} is set",
    }
)

_SECOND: Mapping[tuple[Kind, str], str] = MappingProxyType(
    {
        (Kind.PERSON, "birthplace"): "In which town was {bridge} born?",
        (Kind.PERSON, "birth_year"): "In which year was {bridge} born?",
        (Kind.PERSON, "profession"): "What is the profession of {bridge}?",
        (Kind.PERSON, "employer"): "Which firm does {bridge} work for?",
        (Kind.TOWN, "region"): "In which region is {bridge}?",
        (Kind.TOWN, "river"): "On which river does {bridge} lie?",
        (Kind.TOWN, "founded"): "In which year was {bridge} founded?",
        (Kind.FIRM, "founder"): "Who founded {bridge}?",
        (Kind.FIRM, "seat"): "In which town is the seat of {bridge}?",
        (Kind.FIRM, "product"): "What does {bridge} make?",
    }
)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and the way to the answer."""

    id: str
    text: str
    answer: str
    subject: str
    """The entity that the question names: its split is the question's."""
    relations: tuple[str, ...]
    """One for each hop."""


def split_subjects(world: World, *, seed: int) -> tuple[list[Entity], list[Entity]]:
    """Entities that training questions name, and those of held-out ones: one in five of each kind."""
    rng = random.Random(f"split {seed}")
    train: list[Entity] = []
    heldout: list[Entity] = []
    for kind in Kind:
        members = world.of_kind(kind)
        rng.shuffle(members)
        cut = len(members) // 5
        heldout += members[:cut]
        train += members[cut:]
    return train, heldout


def make_questions(
    world: World, subjects: Sequence[Entity], *, hops: Sequence[int], size: int, rng: random.Random
) -> list[Question]:
    """So many different questions, as many of each number of hops as of any other.

    Raises ValueError if there are not so many.
    """
    drawn: list[Question] = []
    for place, number in enumerate(hops):
        count = size // len(hops) + (place < size % len(hops))
        pool = [question for entity in subjects for question in _about(world, entity, number)]
        if len(pool) < count:
            raise ValueError(f"there are only {len(pool)} questions of {number} hops, expected {count}")
        drawn += rng.sample(pool, count)
    rng.shuffle(drawn)
    return drawn


def _about(world: World, entity: Entity, hops: int) -> Iterator[Question]:
    return _one_hop(entity) if hops == 1 else _two_hops(world, entity)


def _one_hop(entity: Entity) -> Iterator[Question]:
    for relation in RELATIONS[entity.kind]:
        text = ONE_HOP[entity.kind, relation].format(name=entity.name)
        yield Question(f"{entity.name}/{relation}", text, entity.facts[relation], entity.name, (relation,))


def _two_hops(world: World, entity: Entity) -> Iterator[Question]:
    for first, kind in RELATIONS[entity.kind].items():
        if kind is None:
            continue
        bridge = world.entities[entity.facts[first]]
        words = _BRIDGES[entity.kind, first].format(name=entity.name)
        for second in RELATIONS[kind]:
            if bridge.facts[second] != entity.name:
                text = _SECOND[kind, second].format(bridge=words)
                answer = bridge.facts[second]
                yield Question(f"{entity.name}/{first}/{second}", text, answer, entity.name, (first, second))
