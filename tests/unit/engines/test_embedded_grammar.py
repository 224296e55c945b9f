"""Replies under a grammar: what may come is sampled, what may not never is, and what failed is one request."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

from wingbeat.core.errors import ModelSourceError
from wingbeat.core.support import decode_support
from wingbeat.core.types import FinishReason
from wingbeat.engines.embedded import GrammarCompiler

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

STOPS = ("<|end|>", "<|eot|>")
PIECES = ('{"', '":', '", "', '"}', "}}", "true", "abc")
PADDED = 320
"""Logits of the model; the tokenizer has fewer tokens, as where a vocabulary is padded for speed."""
LETTERS = "start: /[a-z]{3,9}/"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["Schnee", "雪", "é\n"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "sizes", "inner"],
    "additionalProperties": False,
}
OBJECT = "start: %json " + json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})


def build_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in STOPS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PIECES])
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def grammars(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(folder)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.fixture(scope="module")
def stops(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode("".join(STOPS)).ids)


@pytest.fixture
def model(harness: Any) -> PreTrainedModel:
    return harness.make_model(vocabulary=PADDED)


Oracle = Callable[[str, Sequence[int]], list[set[int]]]


@pytest.fixture(scope="module")
def oracle(tokenizer: Tokenizer, stops: tuple[int, ...]) -> Oracle:
    """What a grammar allows before each token of a reply and after the last, told by a matcher of its own."""
    index = LLTokenizer(tokenizer.to_str(), eos_token=list(stops))

    def allowed(grammar: str, token_ids: Sequence[int]) -> list[set[int]]:
        matcher = LLMatcher(index, grammar, log_level=0)
        found: list[set[int]] = []
        for token in (*token_ids, None):
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            here = {i for i in range(index.vocab_size) if bits >> i & 1} - set(index.eos_tokens)
            found.append(here | set(stops) if matcher.is_accepting() else here - set(stops))
            if token is None or token in stops:
                break
            assert matcher.consume_token(token)
        return found

    return allowed


def support(blob: bytes) -> set[int]:
    return set(decode_support(blob, vocabulary=PADDED).nonzero()[0].tolist())


def test_replies_match_the_grammar_and_every_support_is_what_it_allowed(
    harness: Any,
    model: PreTrainedModel,
    grammars: GrammarCompiler,
    tokenizer: Tokenizer,
    stops: tuple[int, ...],
    oracle: Oracle,
) -> None:
    engine = harness.engine(model, grammars=grammars, max_running=32)
    for i in range(24):
        engine.submit(harness.request(str(i), harness.prompt(5 + i, seed=i), 150, grammar=OBJECT, stop_token_ids=stops))
    replies = harness.drain(engine)
    ended = [reply for reply in replies.values() if reply.ends == [FinishReason.STOP]]
    assert len(ended) >= 20
    for reply in replies.values():
        assert reply.ends[0] in (FinishReason.STOP, FinishReason.LENGTH) and not reply.error
        allowed = oracle(OBJECT, reply.token_ids)
        assert [support(blob) for blob in reply.supports] == allowed[: len(reply.token_ids)]
    for reply in ended:
        assert reply.token_ids[-1] in stops and not set(reply.token_ids[:-1]) & set(stops)
        jsonschema.validate(json.loads(tokenizer.decode(reply.token_ids[:-1])), SCHEMA)
    assert {reply.token_ids[-1] for reply in ended} == set(stops)


def test_an_end_that_must_come_is_sampled_among_all_stops(
    harness: Any, model: PreTrainedModel, grammars: GrammarCompiler, stops: tuple[int, ...]
) -> None:
    engine = harness.engine(model, grammars=grammars)
    engine.submit(harness.request("r", [1, 2, 3], 9, grammar='start: "{\\"abc"', stop_token_ids=stops))
    reply = harness.drain(engine)["r"]
    assert reply.ends == [FinishReason.STOP] and reply.token_ids[-1] in stops
    assert support(reply.supports[-1]) == set(stops)
    assert reply.logprobs[-1] < 0


def test_padding_and_stops_are_never_allowed_where_the_text_must_go_on(
    harness: Any, model: PreTrainedModel, grammars: GrammarCompiler, tokenizer: Tokenizer, stops: tuple[int, ...]
) -> None:
    # A head that wants nothing but padding and the ends: the grammar still gets its letters.
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    engine = harness.engine(model, grammars=grammars)
    for i in range(8):
        engine.submit(harness.request(str(i), [1 + i], 30, grammar=LETTERS, stop_token_ids=stops, temperature=0.5))
    for reply in harness.drain(engine).values():
        text = tokenizer.decode(reply.token_ids[:-1])
        assert reply.ends == [FinishReason.STOP] and 3 <= len(text) <= 9 and text.isalpha()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_logprobs_are_those_over_the_support_for_every_way_of_drawing(
    harness: Any, grammars: GrammarCompiler, stops: tuple[int, ...], kind: str
) -> None:
    model = harness.make_model(kind, vocabulary=PADDED)
    engine = harness.engine(model, grammars=grammars, max_running=32)
    ways = list(product(("", OBJECT), (1.0, 0.8), (0, 7), (1.0, 0.6, 1.7)))
    for i, (grammar, top_p, top_k, temperature) in enumerate(ways):
        sampling = {"top_p": top_p, "top_k": top_k, "temperature": temperature, "stop_token_ids": stops}
        engine.submit(harness.request(str(i), harness.prompt(4 + i, seed=i), 40, grammar=grammar, **sampling))
    replies = harness.drain(engine)
    for i, (grammar, top_p, top_k, temperature) in enumerate(ways):
        reply = replies[str(i)]
        scores_TV = harness.scores(
            model, harness.prompt(4 + i, seed=i), reply.token_ids, temperature=temperature
        ).double()
        for scores_V, token, blob, logprob in zip(
            scores_TV, reply.token_ids, reply.supports, reply.logprobs, strict=True
        ):
            allowed_V = torch.from_numpy(decode_support(blob, vocabulary=PADDED))
            expected = scores_V.masked_fill(~allowed_V, -torch.inf).log_softmax(0)[token].item()
            assert logprob == pytest.approx(expected, abs=1e-5)
            if not grammar and top_p == 1.0 and not top_k:
                assert blob == b""
            if top_k:
                assert 1 <= int(allowed_V.sum()) <= top_k


def test_the_nucleus_is_taken_from_what_the_grammar_allows(
    harness: Any, model: PreTrainedModel, grammars: GrammarCompiler, stops: tuple[int, ...], oracle: Oracle
) -> None:
    engine = harness.engine(model, grammars=grammars)
    prompt = harness.prompt(11, seed=3)
    engine.submit(harness.request("r", prompt, 80, grammar=OBJECT, stop_token_ids=stops, top_p=0.7, temperature=1.3))
    reply = harness.drain(engine)["r"]
    scores_TV = harness.scores(model, prompt, reply.token_ids, temperature=1.3)
    for scores_V, blob, allowed in zip(scores_TV, reply.supports, oracle(OBJECT, reply.token_ids), strict=False):
        order = sorted(allowed, key=lambda token: -scores_V[token].item())
        probs = scores_V[order].softmax(0)
        kept = support(blob)
        assert kept == set(order[: len(kept)])
        assert probs[: len(kept)].sum() >= 0.7 - 1e-5
        assert probs[: len(kept) - 1].sum() < 0.7 + 1e-5


def test_greedy_takes_the_best_allowed_token_and_carries_no_support(
    harness: Any, model: PreTrainedModel, grammars: GrammarCompiler, stops: tuple[int, ...], oracle: Oracle
) -> None:
    engine = harness.engine(model, grammars=grammars)
    prompt = harness.prompt(7, seed=5)
    engine.submit(harness.request("r", prompt, 50, grammar=OBJECT, stop_token_ids=stops, temperature=0.0))
    reply = harness.drain(engine)["r"]
    scores_TV = harness.scores(model, prompt, reply.token_ids)
    allowed = oracle(OBJECT, reply.token_ids)
    assert reply.token_ids == [
        max(here, key=lambda token: scores_V[token].item()) for scores_V, here in zip(scores_TV, allowed, strict=False)
    ]
    assert not any(reply.supports)
    harness.assert_close(reply.logprobs, harness.reference(model, prompt, reply.token_ids))


def test_a_seeded_reply_is_the_same_alone_and_beside_free_and_other_grammars(
    harness: Any, model: PreTrainedModel, grammars: GrammarCompiler, stops: tuple[int, ...]
) -> None:
    prompt = harness.prompt(20, seed=1)
    settings = {"grammar": OBJECT, "stop_token_ids": stops, "top_p": 0.9, "seed": 42}
    alone = harness.engine(model, grammars=grammars, seed=1)
    alone.submit(harness.request("alone", prompt, 60, **settings))
    crowded = harness.engine(model, grammars=grammars, seed=2)
    crowded.submit(harness.request("free", harness.prompt(13, seed=2), 60))
    crowded.submit(harness.request("letters", prompt, 60, grammar=LETTERS, stop_token_ids=stops))
    crowded.submit(harness.request("crowded", prompt, 60, **settings))
    harness.drain(alone)
    replies = harness.drain(crowded)
    assert replies["alone"].token_ids == replies["crowded"].token_ids
    assert not any(replies["free"].supports) and all(replies["letters"].supports)


def test_a_reply_begun_elsewhere_goes_on_where_its_grammar_stood(
    harness: Any, model: PreTrainedModel, grammars: GrammarCompiler, stops: tuple[int, ...]
) -> None:
    prompt = harness.prompt(6, seed=8)
    settings = {"grammar": OBJECT, "stop_token_ids": stops, "temperature": 0.0}
    engine = harness.engine(model, grammars=grammars)
    engine.submit(harness.request("whole", prompt, 40, **settings))
    whole = harness.drain(engine)["whole"].token_ids
    for begun in (1, 2, 5, len(whole) - 1):
        name = f"from {begun}"
        resumed = harness.request(name, [*prompt, *whole[:begun]], 40 - begun, resumed_tokens=begun, **settings)
        engine.submit(resumed)
        assert harness.drain(engine)[name].token_ids == whole[begun:]


def test_resumed_tokens_that_break_the_grammar_or_exceed_the_prompt_are_errors(
    harness: Any, model: PreTrainedModel, grammars: GrammarCompiler, stops: tuple[int, ...]
) -> None:
    engine = harness.engine(model, grammars=grammars)
    engine.submit(harness.request("broken", [1, 2, 3], 9, grammar=OBJECT, stop_token_ids=stops, resumed_tokens=2))
    engine.submit(harness.request("too many", [1, 2, 3], 9, grammar=OBJECT, stop_token_ids=stops, resumed_tokens=4))
    replies = harness.drain(engine)
    assert replies["broken"].ends == replies["too many"].ends == [FinishReason.ERROR]
    assert "do not follow the grammar" in replies["broken"].error
    assert "resumed_tokens must lie in [0, 3]" in replies["too many"].error


def test_preempted_replies_keep_their_place_in_the_grammar(
    harness: Any, model: PreTrainedModel, grammars: GrammarCompiler, stops: tuple[int, ...], oracle: Oracle
) -> None:
    engine = harness.engine(model, grammars=grammars, kv_tokens=256, row_headroom_tokens=1)
    for i in range(6):
        settings = {"grammar": OBJECT, "stop_token_ids": stops, "seed": i}
        engine.submit(harness.request(str(i), harness.prompt(10, seed=i), 60, **settings))
    preempted = False

    def watch() -> None:
        nonlocal preempted
        preempted = preempted or (engine.stats().waiting > 0 and bool(harness.replies))

    for reply in harness.drain(engine, after_step=watch).values():
        allowed = oracle(OBJECT, reply.token_ids)
        assert [support(blob) for blob in reply.supports] == allowed[: len(reply.token_ids)]
    assert preempted


def test_a_dead_end_is_an_error_of_one_request(
    harness: Any, grammars: GrammarCompiler, tokenizer: Tokenizer, stops: tuple[int, ...]
) -> None:
    # The model has no logits for the last two pieces of the tokenizer.
    model = harness.make_model(vocabulary=tokenizer.get_vocab_size() - 2)
    last = tokenizer.token_to_id("abc")
    engine = harness.engine(model, grammars=grammars)
    dead = f'start: "{{" <[{last}]>'
    engine.submit(harness.request("dead", [1, 2, 3], 30, grammar=dead, stop_token_ids=stops))
    engine.submit(harness.request("alive", [1, 2, 3], 30, grammar=LETTERS, stop_token_ids=stops))
    engine.submit(harness.request("free", [1, 2, 3], 12))
    replies = harness.drain(engine)
    assert replies["dead"].ends == [FinishReason.ERROR] and len(replies["dead"].token_ids) == 1
    assert "allows no token of this model" in replies["dead"].error
    assert replies["alive"].ends == [FinishReason.STOP]
    harness.assert_close(replies["free"].logprobs, harness.reference(model, [1, 2, 3], replies["free"].token_ids))
    engine.submit(harness.request("later", [1, 2, 3], 12))  # the KV that the dead one left is sound
    later = harness.drain(engine)["later"]
    harness.assert_close(later.logprobs, harness.reference(model, [1, 2, 3], later.token_ids))


def test_supports_stay_with_their_requests_where_another_s_logits_are_broken(
    harness: Any, model: PreTrainedModel
) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan  # pyright: ignore[reportIndexIssue, reportArgumentType, reportOptionalSubscript]
    engine = harness.engine(model)
    engine.submit(harness.request("broken", [5, 7], 8, top_k=3))
    engine.submit(harness.request("few", [1, 2, 3], 8, top_k=3))
    replies = harness.drain(engine)
    assert "non-finite" in replies["broken"].error
    assert len(replies["few"].token_ids) == 8
    for token, blob in zip(replies["few"].token_ids, replies["few"].supports, strict=True):
        assert token in support(blob) and len(support(blob)) == 3


def test_a_text_that_is_no_grammar_is_an_error_every_time(
    harness: Any, model: PreTrainedModel, grammars: GrammarCompiler, stops: tuple[int, ...]
) -> None:
    engine = harness.engine(model, grammars=grammars)
    for name in ("first", "second"):
        engine.submit(harness.request(name, [1], 5, grammar="start: nothing_here", stop_token_ids=stops))
        reply = harness.drain(engine)[name]
        assert reply.ends == [FinishReason.ERROR] and "the grammar cannot be used" in reply.error
    engine.submit(harness.request("good", [1], 30, grammar=LETTERS, stop_token_ids=stops))
    assert harness.drain(engine)["good"].ends == [FinishReason.STOP]


def test_engines_without_a_tokenizer_or_requests_without_an_end_refuse_grammars(
    harness: Any, model: PreTrainedModel, grammars: GrammarCompiler, stops: tuple[int, ...]
) -> None:
    engine = harness.engine(model)
    engine.submit(harness.request("r", [1], 5, grammar=LETTERS, stop_token_ids=stops))
    assert "this engine has none" in harness.drain(engine)["r"].error
    engine = harness.engine(model, grammars=grammars)
    engine.submit(harness.request("endless", [1], 5, grammar=LETTERS, stop_token_ids=(PADDED + 1,)))
    assert "needs stop tokens" in harness.drain(engine)["endless"].error


@pytest.mark.parametrize("content", [None, "{", "words"])
def test_a_tokenizer_that_cannot_serve_grammars_is_named(
    harness: Any, model: PreTrainedModel, tmp_path: Path, stops: tuple[int, ...], content: str | None
) -> None:
    if content == "words":
        Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    elif content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    engine = harness.engine(model, grammars=GrammarCompiler(tmp_path))
    engine.submit(harness.request("r", [1], 5, grammar=LETTERS, stop_token_ids=stops))
    engine.submit(harness.request("free", [1], 5))
    replies = harness.drain(engine)
    assert replies["r"].ends == [FinishReason.ERROR] and "tokenizer" in replies["r"].error
    assert replies["free"].ends == [FinishReason.LENGTH]


def test_a_failure_is_not_remembered(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path)
    with pytest.raises(ModelSourceError):
        compiler.compile(LETTERS).result()
    build_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert not compiler.compile(LETTERS).result().is_error()


def test_only_the_grammars_used_last_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wingbeat.engines.embedded.grammar.MAX_COMPILED", 2)
    compiler = GrammarCompiler(folder)
    first, second = compiler.compile("start: /a/"), compiler.compile("start: /b/")
    assert compiler.compile("start: /a/") is first
    compiler.compile("start: /c/")
    assert compiler.compile("start: /a/") is first and compiler.compile("start: /b/") is not second


class SlowCompiler(GrammarCompiler):
    """Compiles when told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.promised: dict[str, Future[LLMatcher]] = {}

    def compile(self, grammar: str) -> Future[LLMatcher]:
        return self.promised.setdefault(grammar, Future())

    def deliver(self, grammar: str) -> None:
        self.promised[grammar].set_result(super().compile(grammar).result())


def test_others_are_decoded_while_a_grammar_is_compiled(
    harness: Any, model: PreTrainedModel, folder: Path, stops: tuple[int, ...]
) -> None:
    slow = SlowCompiler(folder)
    engine = harness.engine(model, grammars=slow)
    engine.submit(harness.request("bound", [1], 30, grammar=LETTERS, stop_token_ids=stops))
    engine.submit(harness.request("gone", [1], 30, grammar=OBJECT, stop_token_ids=stops))
    engine.submit(harness.request("free", [1], 6))
    for _ in range(4):
        harness.record(engine.step())
    assert len(harness.replies["free"].token_ids) == 4 and "bound" not in harness.replies
    engine.abort("gone")
    slow.deliver(LETTERS)
    replies = harness.drain(engine)
    assert replies["bound"].ends == [FinishReason.STOP]
    assert replies["gone"].ends == [FinishReason.ABORT] and not replies["gone"].token_ids
    assert replies["free"].ends == [FinishReason.LENGTH]


def test_held_requests_count_as_work_and_can_be_aborted_alone(
    harness: Any, model: PreTrainedModel, folder: Path, stops: tuple[int, ...]
) -> None:
    engine = harness.engine(model, grammars=SlowCompiler(folder))
    engine.submit(harness.request("r", [1], 30, grammar=LETTERS, stop_token_ids=stops))
    assert engine.has_work()
    assert engine.step() == []  # gives the driver its turn, however long the grammar takes
    engine.abort("r")
    assert harness.drain(engine)["r"].ends == [FinishReason.ABORT]
    assert not engine.has_work()
