"""Names that nobody has: syllables put together, so that no question can be answered from what a model has read."""

from __future__ import annotations

import itertools
import random

_FIRST_HEADS = ("Al", "Bre", "Cor", "Da", "El", "Fen", "Gi", "Hal", "Is", "Jo", "Ka", "Lor", "Mi", "Ne", "Or", "Pel")
_FIRST_TAILS = ("dric", "la", "mund", "nis", "ra", "so", "thea", "vin")
_LAST_HEADS = ("Arken", "Bol", "Crey", "Dun", "Esk", "Fal", "Grim", "Holt", "Iver", "Kest", "Lam", "Mor", "Nor", "Ost")
_LAST_TAILS = ("bach", "dale", "feld", "gard", "lund", "mire", "quist", "stone", "wick")
_TOWN_HEADS = (
    "Ash",
    "Birn",
    "Cald",
    "Drom",
    "Ever",
    "Fros",
    "Glen",
    "Hask",
    "Ing",
    "Keld",
    "Loth",
    "Marn",
    "Oben",
    "Ravn",
)
_TOWN_TAILS = ("bury", "fjord", "haven", "holm", "mouth", "port", "stead", "ton", "vale")
_FIRM_HEADS = (
    "Auro",
    "Belo",
    "Cinta",
    "Dexo",
    "Ferro",
    "Gala",
    "Helio",
    "Kappa",
    "Luma",
    "Nova",
    "Orbi",
    "Pyra",
    "Tero",
)
_FIRM_TAILS = ("crest", "dyne", "form", "lith", "mark", "plex", "sail", "works", "yard")
_TITLE_HEADS = (
    "The Silent",
    "The Broken",
    "The Golden",
    "The Last",
    "A Distant",
    "A Borrowed",
    "The Hidden",
    "The Salt",
)
_TITLE_TAILS = ("Bridge", "Garden", "Harbour", "Ladder", "Lantern", "Mirror", "Orchard", "River", "Tower", "Winter")

REGIONS = ("Ambria", "Costrel", "Dravany", "Elmarch", "Farrowland", "Gathria", "Hollin", "Ildermark", "Jorvik Sound")
RIVERS = ("Asper", "Brenn", "Calder", "Dove Water", "Erl", "Fenn", "Greave", "Hythe", "Ivel", "Kerr", "Lodden", "Mease")
PROFESSIONS = (
    "architect", "baker", "botanist", "carpenter", "chemist", "glazier", "historian", "judge", "mapmaker", "nurse",
    "painter", "pilot", "printer", "sculptor", "surveyor", "tailor", "teacher", "violinist", "weaver", "welder",
)  # fmt: skip
PRODUCTS = (
    "bicycles", "bricks", "candles", "clocks", "compasses", "furniture", "glassware", "lenses", "paper", "pianos",
    "pumps", "rope", "sails", "scales", "soap", "stoves", "tiles", "toys", "umbrellas", "wagons",
)  # fmt: skip

FIRST_NAMES = tuple(map("".join, itertools.product(_FIRST_HEADS, _FIRST_TAILS)))
LAST_NAMES = tuple(map("".join, itertools.product(_LAST_HEADS, _LAST_TAILS)))
TOWNS = tuple(map("".join, itertools.product(_TOWN_HEADS, _TOWN_TAILS)))
FIRMS = tuple(map("".join, itertools.product(_FIRM_HEADS, _FIRM_TAILS)))
TITLES = tuple(map(" ".join, itertools.product(_TITLE_HEADS, _TITLE_TAILS)))


def draw_people(rng: random.Random, count: int) -> list[str]:
    """So many different full names."""
    numbers = rng.sample(range(len(FIRST_NAMES) * len(LAST_NAMES)), count)
    return [f"{FIRST_NAMES[n // len(LAST_NAMES)]} {LAST_NAMES[n % len(LAST_NAMES)]}" for n in numbers]
