"""Bugs: one known kind of mistake put into one place of a module's source.

``mutants`` lists every place where a kind applies, in a fixed order, so that a mutant has a durable name: kind and
number. Sources are edited as text at the places that their syntax tree names; everything else, comments and layout
included, stays. Whether a mutant is a bug at all (some change nothing that a test can see) is found by running
the tests: :mod:`.verify`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Edit = tuple[int, int, str]
"""From and to (offsets into the source) and what stands there instead."""

LEAVING = (ast.Return, ast.Raise)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one bug."""

    kind: str
    number: int
    """Of the place, among those of its kind in this module."""
    line: int
    """Where the bug is, from 1."""
    source: str


class Source:
    """A module's text with its syntax tree, and offsets of both."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.nodes = sorted(
            (node for node in ast.walk(self.tree) if isinstance(node, ast.expr | ast.stmt)),
            key=lambda node: (node.lineno, node.col_offset, -(node.end_lineno or 0), -(node.end_col_offset or 0)),
        )

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr) -> str:
        return self.text[self.start(node) : self.end(node)]

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return self.start(node), self.end(node), text

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Edit]:
        """Replace an operator that stands between two expressions."""
        first, last = self.end(left), self.start(right)
        gap = self.text[first:last]
        if gap.count(old) == 1:
            yield first, last, gap.replace(old, new)


_COMPARISONS: Mapping[str, str] = MappingProxyType(
    {"<=": "<", ">=": ">", "<": "<=", ">": ">=", "==": "!=", "!=": "==", " in ": " not in ", " is not ": " is "}
)
_ARITHMETIC: Mapping[str, str] = MappingProxyType({"+": "-", "-": "+", "//": "*", "*": "+", "%": "//", "/": "*"})


def wrong_comparison(source: Source) -> Iterator[Edit]:
    for node in source.nodes:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            gap = source.text[source.end(node.left) : source.start(node.comparators[0])]
            for old, new in _COMPARISONS.items():
                if old in gap:
                    yield from source.between(node.left, node.comparators[0], old, new)
                    break


def wrong_arithmetic(source: Source) -> Iterator[Edit]:
    for node in source.nodes:
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitOr):
            gap = source.text[source.end(node.left) : source.start(node.right)].strip()
            if gap in _ARITHMETIC:
                yield from source.between(node.left, node.right, gap, _ARITHMETIC[gap])
        elif isinstance(node, ast.AugAssign):
            gap = source.text[source.end(node.target) : source.start(node.value)].strip()
            if gap[:-1] in _ARITHMETIC:
                yield from source.between(node.target, node.value, gap, _ARITHMETIC[gap[:-1]] + "=")


def off_by_one(source: Source) -> Iterator[Edit]:
    """A whole number in an expression, one too large."""
    defaults = {id(node) for function in _functions(source) for node in _defaults(function)}
    for node in source.nodes:
        if isinstance(node, ast.Constant) and type(node.value) is int and id(node) not in defaults:
            yield source.replace(node, str(node.value + 1))


def wrong_variable(source: Source) -> Iterator[Edit]:
    """A name read in a function becomes the next one, in alphabetical order, that the function has."""
    for function in _functions(source):
        stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and _is_stored(node)}
        names = sorted((stored | {argument.arg for argument in function.args.args}) - {"self", "_"})
        for node in _ordered(source, function):
            if isinstance(node, ast.Name) and not _is_stored(node) and node.id in names and len(names) > 1:
                yield source.replace(node, names[(names.index(node.id) + 1) % len(names)])


def missing_return(source: Source) -> Iterator[Edit]:
    for node in source.nodes:
        if isinstance(node, ast.Return) and node.value is not None:
            yield source.start(node), source.start(node.value), ""


def swapped_arguments(source: Source) -> Iterator[Edit]:
    for node in source.nodes:
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            first, second = node.args[:2]
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                gap = source.text[source.end(first) : source.start(second)]
                if source.of(first) != source.of(second) and ast.dump(first) != ast.dump(second):
                    yield source.start(first), source.end(second), source.of(second) + gap + source.of(first)


def wrong_default(source: Source) -> Iterator[Edit]:
    for function in _functions(source):
        for node in _defaults(function):
            if isinstance(node, ast.Constant):
                yield source.replace(node, _other_constant(node.value))


def wrong_connective(source: Source) -> Iterator[Edit]:
    """``and`` for ``or``, and the reverse."""
    for node in source.nodes:
        if isinstance(node, ast.BoolOp) and len(node.values) == 2:
            old, new = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
            yield from source.between(node.values[0], node.values[1], old, new)


def inverted_condition(source: Source) -> Iterator[Edit]:
    for node in source.nodes:
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            test = node.test
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                yield source.replace(test, source.of(test.operand))
            elif isinstance(test, ast.Name | ast.Call | ast.Attribute):
                yield source.replace(test, f"not {source.of(test)}")


def missing_edge_case(source: Source) -> Iterator[Edit]:
    """The guard at the head of a function that leaves it early is gone."""
    for function in _functions(source):
        for node in function.body[:2]:
            is_guard = (
                isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Return | ast.Raise)
            )
            if is_guard:
                assert node.end_lineno is not None
                first = source.text.rfind("\n", 0, source.start(node)) + 1
                yield first, source.end(node) + 1, ""


def wrong_element(source: Source) -> Iterator[Edit]:
    """The last for the first, and the reverse."""
    for node in source.nodes:
        if isinstance(node, ast.Subscript):
            match source.of(node.slice):
                case "0":
                    yield source.replace(node.slice, "-1")
                case "-1":
                    yield source.replace(node.slice, "0")
                case _:
                    pass


KINDS: Mapping[str, Callable[[Source], Iterator[Edit]]] = MappingProxyType(
    {
        "inverted_condition": inverted_condition,
        "missing_edge_case": missing_edge_case,
        "missing_return": missing_return,
        "off_by_one": off_by_one,
        "swapped_arguments": swapped_arguments,
        "wrong_arithmetic": wrong_arithmetic,
        "wrong_comparison": wrong_comparison,
        "wrong_connective": wrong_connective,
        "wrong_default": wrong_default,
        "wrong_element": wrong_element,
        "wrong_variable": wrong_variable,
    }
)
"""The kinds of mistakes, by name."""


def mutants(text: str) -> list[Mutant]:
    """Every mutant of a module that is still a Python module, kind by kind, from top to bottom."""
    source = Source(text)
    found: list[Mutant] = []
    for kind, places in KINDS.items():
        for number, (first, last, new) in enumerate(places(source)):
            mutated = text[:first] + new + text[last:]
            if mutated != text and _parses(mutated):
                found.append(Mutant(kind, number, text.count("\n", 0, first) + 1, mutated))
    return found


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _functions(source: Source) -> list[FunctionNode]:
    return [node for node in source.nodes if isinstance(node, FunctionNode)]


def _defaults(function: FunctionNode) -> list[ast.expr]:
    return [*function.args.defaults, *(node for node in function.args.kw_defaults if node is not None)]


def _ordered(source: Source, function: FunctionNode) -> list[ast.expr | ast.stmt]:
    inside = {id(node) for statement in function.body for node in ast.walk(statement)}
    return [node for node in source.nodes if id(node) in inside]


def _is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _other_constant(value: object) -> str:
    match value:
        case bool():
            return repr(not value)
        case int():
            return repr(value + 1)
        case None:
            return "0"
        case _:
            return "None"
