"""A small invented world: people, towns, firms and books, with facts that refer to one another.

Everything follows from a seed and a size: the same everywhere, with nothing to download.  Each entity has one short
document that states its facts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType

from wingbeat.environments.retrieval import names


class Kind(StrEnum):
    """What an entity is."""

    PERSON = "person"
    TOWN = "town"
    FIRM = "firm"
    BOOK = "book"


RELATIONS: Mapping[Kind, Mapping[str, Kind | None]] = MappingProxyType(
    {
        Kind.PERSON: MappingProxyType(
            {"birthplace": Kind.TOWN, "birth_year": None, "profession": None, "employer": Kind.FIRM}
        ),
        Kind.TOWN: MappingProxyType({"region": None, "river": None, "founded": None}),
        Kind.FIRM: MappingProxyType({"founder": Kind.PERSON, "seat": Kind.TOWN, "product": None}),
        Kind.BOOK: MappingProxyType({"author": Kind.PERSON, "setting": Kind.TOWN, "published": None}),
    }
)
"""Of each kind of entity: its facts, and the kind of entity that a fact names (None: a value)."""

TEXTS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        Kind.PERSON: (
            "{name} was born in {birthplace} in {birth_year}. The profession of {name} is {profession}, the employer"
            " {employer}.",
            "{name} works as {profession} for {employer}. The place of birth is {birthplace}, the year {birth_year}.",
        ),
        Kind.TOWN: (
            "{name} is a town in {region}. It lies on the river {river} and was founded in {founded}.",
            "The town of {name}, founded in {founded}, stands on the river {river} in {region}.",
        ),
        Kind.FIRM: (
            "{name} makes {product}. Its seat is in {seat}, and its founder was {founder}.",
            "Founded by {founder}, the firm {name} of {seat} makes {product}.",
        ),
        Kind.BOOK: (
            "{name} is a novel by {author}, published in {published} and set in {setting}.",
            "In {published} {author} published the novel {name}, which is set in {setting}.",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Entity:
    """Somebody or something with facts."""

    kind: Kind
    name: str
    facts: Mapping[str, str]
    """Relation -> the name or value that it has."""
    form: int
    """Which way its document is written."""

    @property
    def text(self) -> str:
        """Its document."""
        return TEXTS[self.kind][self.form].format(name=self.name, **self.facts)


@dataclass(frozen=True, slots=True)
class World:
    """All entities, by name."""

    entities: Mapping[str, Entity]

    def of_kind(self, kind: Kind) -> list[Entity]:
        return [entity for entity in self.entities.values() if entity.kind is kind]


@dataclass(frozen=True, slots=True)
class Pools:
    """The names that facts are drawn from."""

    people: Sequence[str]
    towns: Sequence[str]
    firms: Sequence[str]
    books: Sequence[str]

    def of_kind(self, kind: Kind) -> Sequence[str]:
        return {Kind.PERSON: self.people, Kind.TOWN: self.towns, Kind.FIRM: self.firms, Kind.BOOK: self.books}[kind]


def draw_entity(kind: Kind, name: str, pools: Pools, rng: random.Random) -> Entity:
    """An entity with facts at random."""
    values: Mapping[str, Sequence[str] | range] = {
        "birth_year": range(1820, 1980),
        "profession": names.PROFESSIONS,
        "region": names.REGIONS,
        "river": names.RIVERS,
        "founded": range(1100, 1800),
        "product": names.PRODUCTS,
        "published": range(1840, 2000),
    }
    facts = {
        relation: str(rng.choice(values[relation] if target is None else pools.of_kind(target)))
        for relation, target in RELATIONS[kind].items()
    }
    return Entity(kind, name, MappingProxyType(facts), rng.randrange(len(TEXTS[kind])))


@cache
def make_world(*, seed: int, num_people: int) -> World:
    """The world of a seed: so many people, and towns, firms and books in proportion."""
    rng = random.Random(f"world {seed} {num_people}")
    count = max(8, num_people // 16)
    pools = Pools(
        people=names.draw_people(rng, num_people),
        towns=rng.sample(names.TOWNS, min(len(names.TOWNS), count)),
        firms=rng.sample(names.FIRMS, min(len(names.FIRMS), count)),
        books=rng.sample(names.TITLES, min(len(names.TITLES), count)),
    )
    found = [draw_entity(kind, name, pools, rng) for kind in Kind for name in pools.of_kind(kind)]
    return World(MappingProxyType({entity.name: entity for entity in found}))
