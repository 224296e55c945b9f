"""How right an answer is: normalised exact match and token F1, as question answering has measured it since SQuAD.

Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016, section 6.1.
"""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER = re.compile(r"^[ \t]*(?:final[ \t]+)?answer[ \t]*:\s*(.+)$", re.IGNORECASE | re.MULTILINE)


def extract(reply: str) -> str:
    """What a reply answers: what follows its last ``Answer:``, or all of it."""
    marked = _ANSWER.findall(reply)
    return str(marked[-1]) if marked else reply


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and needless spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, expected: str) -> float:
    """1 if both are the same but for case, punctuation, articles and spaces."""
    return float(normalise(answer) == normalise(expected))


def token_f1(answer: str, expected: str) -> float:
    """The harmonic mean of precision and recall of words; 0 where they share none."""
    given, wanted = normalise(answer).split(), normalise(expected).split()
    shared = sum((Counter(given) & Counter(wanted)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(given), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
