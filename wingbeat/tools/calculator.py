"""A calculator: arithmetic that a policy writes, without running it as Python.

Whole numbers stay exact; time, memory and the length of a result are bounded whatever is
asked, ``9**9**9`` for one.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from wingbeat.tools.results import ToolError
from wingbeat.tools.tool import tool

MAX_EXPRESSION_CHARS = 200
MAX_DEPTH = 50
"""Of nested operations: bounds the recursion."""
MAX_BITS = 2048
"""Of a whole number: about 600 digits."""

Number = int | float

_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)
_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "abs": abs,
        "round": round,
        "min": min,
        "max": max,
        **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan")},
        **{name: getattr(math, name) for name in ("floor", "ceil", "gcd", "lcm", "factorial", "comb")},
    }
)
_CONSTANTS: Mapping[str, float] = MappingProxyType({"pi": math.pi, "e": math.e})
_GROWS = frozenset({"factorial", "comb"})
_MAX_GROWING = 300
"""The largest argument of functions whose result grows faster than its argument."""


@tool(timeout_s=5.0)
def calculator(expression: Annotated[str, Field(max_length=MAX_EXPRESSION_CHARS)]) -> str:
    """Evaluate arithmetic: + - * / // % and ^ or **, parentheses, pi, e, sqrt, log, sin, min, factorial and the like.

    Args:
        expression: for example (3 + 8) * 2 ** 10 or sqrt(2) / 3
    """
    return evaluate(expression)


def evaluate(expression: str) -> str:
    """The value as text.  Raises ToolError for what is no arithmetic, or too large."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ToolError(f"expression: expected at most {MAX_EXPRESSION_CHARS} characters, got {len(expression)}")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"expression: expected arithmetic such as (3 + 8) * 2, got {expression!r}") from None
    try:
        value = _evaluate(tree.body, 0)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(f"expression: {expression!r} has no value: {error}") from None
    return str(value)


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ToolError(f"expression: expected at most {MAX_DEPTH} nested operations")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, depth + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_evaluate(left, depth + 1), _evaluate(right, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_evaluate(left, depth + 1), _evaluate(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _apply(name, [_evaluate(argument, depth + 1) for argument in arguments])
        case _:
            raise ToolError(
                f"expression: expected numbers, + - * / // % **, parentheses, {', '.join((*_CONSTANTS, *_FUNCTIONS))};"
                f" got {ast.unparse(node)!r}"
            )


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base).bit_length() * abs(exponent) > MAX_BITS:
        raise ToolError("expression: the result is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ToolError("expression: the result is no real number")
    return _bounded(result)


def _apply(name: str, arguments: list[Number]) -> Number:
    if name in _GROWS and any(abs(value) > _MAX_GROWING for value in arguments):
        raise ToolError(f"expression: expected at most {_MAX_GROWING} in {name}")
    if name == "round" and any(abs(digits) > _MAX_GROWING for digits in arguments[1:]):
        raise ToolError(f"expression: expected at most {_MAX_GROWING} digits in round")  # it computes 10 ** digits
    return _bounded(_FUNCTIONS[name](*arguments))


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("expression: the result is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("expression: the result is no finite number")
    return value
