"""Supports as bytes: both forms give back what went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.support import WHOLE_VOCABULARY, decode_support, encode_support, listed_support

VOCABULARY = 200


@given(tokens=st.sets(st.integers(0, VOCABULARY - 1), min_size=1))
def test_round_trip(tokens: set[int]) -> None:
    allowed_V = np.zeros(VOCABULARY, np.bool_)
    allowed_V[sorted(tokens)] = True
    blob = encode_support(allowed_V)
    assert np.array_equal(decode_support(blob, vocabulary=VOCABULARY), allowed_V)
    listed = listed_support(blob, vocabulary=VOCABULARY)
    assert listed is None or listed.tolist() == sorted(tokens)
    assert (blob == WHOLE_VOCABULARY) == (len(tokens) == VOCABULARY)
    assert (listed is not None) or len(tokens) > 8


def test_few_tokens_are_listed() -> None:
    blob = encode_support(np.arange(VOCABULARY) < 5)
    listed = listed_support(blob, vocabulary=VOCABULARY)
    assert listed is not None
    assert listed.tolist() == [0, 1, 2, 3, 4]


def test_a_support_of_a_larger_vocabulary_is_refused() -> None:
    few, many = encode_support(np.arange(VOCABULARY) == 150), encode_support(np.arange(VOCABULARY) != 3)
    for decode in (decode_support, listed_support):
        with pytest.raises(ValueError, match="names token 150"):
            decode(few, vocabulary=100)
    with pytest.raises(ValueError, match="beyond the vocabulary of 100"):
        decode_support(many, vocabulary=100)
