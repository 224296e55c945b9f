"""What ``bench.weights --live`` calls a pause."""

from __future__ import annotations

import pytest

from bench.weights_live import _pause


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([(1.0, 1), (2.0, 1), (3.0, 1), (8.0, 2), (9.0, 2), (99.0, 2)], 4.0),
        ([(1.0, 1), (2.0, 1), (3.0, 1), (5.0, 1), (5.0, 1), (8.0, 2)], 2.0),  # old tokens were still on their way
        ([(1.0, 1), (1.0, 1), (1.0, 1), (3.0, 1), (3.0, 1), (8.0, 2)], 3.0),  # tokens that come together
        ([(3.0, 1), (3.0, 1), (8.0, 2)], 5.0),
        ([(1.0, 1), (3.0, 1), (4.0, 2)], 0.0),
    ],
)
def test_a_pause_is_the_longest_silence_beyond_the_usual(tokens: list[tuple[float, int]], expected: float) -> None:
    assert _pause(tokens, version=2, began=3.5) == expected
