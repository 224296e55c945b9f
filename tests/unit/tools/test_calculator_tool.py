"""Arithmetic that a policy writes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.tools import Toolbox, ToolError, calculator
from wingbeat.tools.calculator import MAX_EXPRESSION_CHARS, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3+8", "11"),
        (" (2 + 3) * -4 ", "-20"),
        ("7 // 2 + 7 % 4", "6"),
        ("1 / 4", "0.25"),
        ("2 ^ 10", "1024"),
        ("2 ** -1", "0.5"),
        ("sqrt(16) + abs(-1)", "5.0"),
        ("max(1, 2, 3) - min(4, 5)", "-1"),
        ("round(2.567, 2)", "2.57"),
        ("factorial(20)", "2432902008176640000"),
        ("floor(-pi)", "-4"),
        ("123456789012345678901234567890 * 10", "1234567890123456789012345678900"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("9**9**9", "the result is too large"),
        ("(10**600) * (10**600)", "the result is too large"),
        ("factorial(10**9)", "expected at most 300 in factorial"),
        ("round(5, -10**9)", "expected at most 300 digits in round"),
        ("1e308 * 10", "the result is no finite number"),
        ("1 / 0", "division by zero"),
        ("sqrt(-1)", "math domain error"),
        ("(-8) ** 0.5", "no real number"),
        ("__import__('os').system('ls')", "expected numbers"),
        ("(1).real", "expected numbers"),
        ("[1, 2]", "expected numbers"),
        ("round(x=1)", "expected numbers"),
        ("True", "expected numbers"),
        ("pow(2, 3)", "expected numbers"),
        ("1 +", "expected arithmetic"),
        ("", "expected arithmetic"),
        ("-" * 150 + "1", "nested"),
        ("1" * (MAX_EXPRESSION_CHARS + 1), "characters"),
    ],
)
def test_what_has_no_value_is_told(expression: str, words: str) -> None:
    with pytest.raises(ToolError, match=words.replace("(", r"\(")):
        evaluate(expression)


@given(st.text(alphabet="0123456789.+-*/%() eE,^pisqrtlogfac_", max_size=60) | st.text(max_size=60))
def test_no_text_does_harm(text: str) -> None:
    try:
        value = evaluate(text)
    except ToolError as error:
        assert str(error)
    else:
        assert math.isfinite(float(value)) or len(value) > 300
        assert len(value) < 700


async def test_it_is_a_tool() -> None:
    toolbox = Toolbox([calculator])
    assert (await toolbox.call("calculator", '{"expression": "6*7"}')).content == "42"
    assert "at most 200 characters" in (await toolbox.call("calculator", f'{{"expression": "{"1" * 999}"}}')).content
