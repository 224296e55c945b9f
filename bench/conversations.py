"""The conversations that the gateway benchmark holds: fixed in advance, so that requests are built before time counts.

A conversation is a history of about the wanted size, then turns of a scripted reply and a short message.  The
tokenizer is a byte-level BPE trained on the same kind of words, so that a token is about four characters, as
with real models.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from wingbeat.environments.calculator.tokenizer import CHAT_TEMPLATE, CONTROL_TOKENS, END_TOKEN, TOOL_TOKENS

MODEL = "solver"
VOCABULARY = 8192
REPLY_CHARS = 200
MESSAGE_CHARS = 80
LATER_TURNS = 8
HISTORY_MESSAGES = 9
"""A system message, then documents as user messages: the engine tells turns by the assistant's messages."""
SYLLABLES = tuple(a + b for a in "bcdfghklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "ot", "ul"))
NUM_WORDS = 4000


def words(rng: random.Random) -> list[str]:
    """A language's words, common ones first."""
    return ["".join(rng.choices(SYLLABLES, k=rng.choice((1, 2, 2, 3, 3, 4)))) for _ in range(NUM_WORDS)]


class Writer:
    """Writes text of a wanted length; word frequencies fall as in natural language."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._words = words(random.Random(0))
        self._weights = [1 / (rank + 3) for rank in range(NUM_WORDS)]

    def text(self, chars: int) -> str:
        written: list[str] = []
        count = 0
        while count < chars:
            chosen = self._rng.choices(self._words, self._weights, k=64)
            written += chosen
            count += sum(map(len, chosen)) + len(chosen)
        return " ".join(written)[:chars].strip()


def replies() -> list[str]:
    """What the engine says, turn by turn."""
    writer = Writer(1)
    return [writer.text(REPLY_CHARS) for _ in range(LATER_TURNS + 1)]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one episode sends, turn by turn."""

    bodies: tuple[bytes, ...]
    """The requests' bodies, not streamed."""
    streamed: tuple[bytes, ...]
    """The same, streamed."""
    expected: tuple[bytes, ...]
    """What must be in the reply that is not streamed."""

    @classmethod
    def write(cls, body_bytes: int, *, seed: int) -> Conversation:
        """``body_bytes`` is the mean size of the later turns' bodies."""
        writer, said = Writer(seed), replies()
        growth = (LATER_TURNS + 1) / 2 * (REPLY_CHARS + MESSAGE_CHARS + 70)
        share = max(20, int((body_bytes - growth - 60 * HISTORY_MESSAGES) / HISTORY_MESSAGES))
        roles = ["system", *("user",) * (HISTORY_MESSAGES - 1)]
        messages = [{"role": role, "content": writer.text(share)} for role in roles]
        messages.append({"role": "user", "content": writer.text(MESSAGE_CHARS)})
        bodies: list[bytes] = []
        streamed: list[bytes] = []
        for reply in said:
            body = {"model": MODEL, "messages": messages, "max_tokens": 256}
            bodies.append(json.dumps({**body, "stream": False}).encode())
            streamed.append(json.dumps({**body, "stream": True}).encode())
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": writer.text(MESSAGE_CHARS)})
        return cls(tuple(bodies), tuple(streamed), tuple(reply.encode() for reply in said))


def write_word_model(folder: Path) -> Path:
    """A model folder (tokenizer and template) of that language."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(CONTROL_TOKENS),
        show_progress=False,
    )
    writer = Writer(2)
    tokenizer.train_from_iterator((writer.text(1000) for _ in range(300)), trainer=trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END_TOKEN, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    return folder
