"""A running request goes on in another engine: with its KV, or with less where that does not fit."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

from wingbeat.core.errors import UnavailableError
from wingbeat.core.ports import KvExport
from wingbeat.engines.embedded import EmbeddedEngine
from wingbeat.engines.embedded.kv_moves import decode_kv, encode_kv, usable_tokens

PROMPT_TOKENS, SAMPLED, TOTAL = 40, 9, 30


def _begun(harness: Any, engine: EmbeddedEngine, *, steps: int = SAMPLED) -> tuple[list[int], KvExport]:
    """A greedy request after some steps: what it sampled, and its export."""
    engine.submit(harness.request("r", harness.prompt(PROMPT_TOKENS, seed=3), TOTAL, temperature=0.0, cache_key="e"))
    for _ in range(steps):
        harness.record(engine.step())
    export = engine.export_kv("r")
    assert export is not None
    engine.abort("r")
    return harness.replies.pop("r").token_ids, export


def _goes_on(harness: Any, engine: EmbeddedEngine, sampled: list[int], export: KvExport) -> tuple[int, list[int]]:
    prompt = [*harness.prompt(PROMPT_TOKENS, seed=3), *sampled]
    request = harness.request("r", prompt, TOTAL - len(sampled), temperature=0.0, cache_key="e")
    usable = engine.import_kv(request, export)
    return usable, harness.drain(engine)["r"].token_ids


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_the_continuation_is_the_same_and_nothing_is_fed_twice(harness: Any, kind: str) -> None:
    model = harness.make_model(kind)
    source, target = harness.engine(model, prefill_tokens=16), harness.engine(model)
    steps = SAMPLED + 2  # two of them feed the first 32 tokens of the prompt
    sampled, export = _begun(harness, source, steps=steps)
    assert len(sampled) == SAMPLED and export.tokens == (*harness.prompt(PROMPT_TOKENS, seed=3), *sampled[:-1])
    assert source.kv_bytes("r") == 0, "it was aborted"
    usable, rest = _goes_on(harness, target, sampled, decode_kv(encode_kv(export)))
    assert usable == len(export.tokens)
    assert target.stats().prefilled_tokens == 1 and target.stats().reused_tokens == usable
    reply = harness.replies.pop("r")
    prompt = harness.prompt(PROMPT_TOKENS, seed=3)
    harness.assert_close(reply.logprobs, harness.reference(model, [*prompt, *sampled], rest))
    alone = harness.engine(model)
    alone.submit(harness.request("r", prompt, TOTAL, temperature=0.0))
    assert harness.drain(alone)["r"].token_ids == [*sampled, *rest]


@pytest.mark.parametrize(
    "misfit",
    [
        {"policy_version": 1},
        {"lineage": 1},
        {"model": "LlamaForCausalLM"},
        {"tokens": (95, 94, 93)},
        {"layers": ()},
    ],
    ids=lambda misfit: next(iter(misfit)),
)
def test_kv_that_does_not_fit_is_computed_anew(harness: Any, misfit: dict[str, Any]) -> None:
    model = harness.make_model()
    sampled, export = _begun(harness, harness.engine(model))
    expected = _goes_on(harness, harness.engine(model), sampled, export)[1]
    harness.replies.clear()
    target = harness.engine(model)
    usable, rest = _goes_on(harness, target, sampled, replace(export, **misfit))
    assert usable == 0 and rest == expected
    assert target.stats().prefilled_tokens == PROMPT_TOKENS + SAMPLED


def test_kv_of_another_dtype_is_computed_anew(harness: Any) -> None:
    model = harness.make_model()
    sampled, export = _begun(harness, harness.engine(model))
    target = harness.engine(model.to(torch.bfloat16))
    assert _goes_on(harness, target, sampled, export)[0] == 0


def test_values_of_another_dtype_than_the_keys_do_not_fit(harness: Any) -> None:
    model = harness.make_model()
    sampled, export = _begun(harness, harness.engine(model))
    mixed = replace(export, layers=tuple((keys, values.bfloat16()) for keys, values in export.layers))
    assert _goes_on(harness, harness.engine(model), sampled, mixed)[0] == 0


def test_the_last_token_of_a_prompt_is_always_left_to_compute(harness: Any) -> None:
    _, export = _begun(harness, harness.engine(harness.make_model()))
    tokens = list(export.tokens)
    assert [usable_tokens(export, prompt) for prompt in (tokens, [*tokens, 1], tokens[:1], [])] == [
        *(len(tokens) - 1, len(tokens), 0, 0),
    ]


def test_only_the_common_prefix_is_used(harness: Any) -> None:
    model = harness.make_model()
    sampled, export = _begun(harness, harness.engine(model))
    sampled[2] = (sampled[2] + 1) % harness.vocabulary
    usable, rest = _goes_on(harness, harness.engine(model), sampled, export)
    assert usable == PROMPT_TOKENS + 2
    prompt = [*harness.prompt(PROMPT_TOKENS, seed=3), *sampled]
    harness.assert_close(harness.replies["r"].logprobs, harness.reference(model, prompt, rest))


def test_kv_of_two_versions_is_not_exported(harness: Any) -> None:
    engine = harness.engine(harness.make_model(), kv_on_update="keep")
    engine.submit(harness.request("r", harness.prompt(PROMPT_TOKENS, seed=3), TOTAL))
    for _ in range(4):
        engine.step()
    assert engine.kv_bytes("r") == 3 * 2 * 2 * 8 * 4 * (PROMPT_TOKENS + 3)  # layers, K and V, heads, size, float32
    engine.update_weights(harness.make_model(seed=1).state_dict(), policy_version=1)
    assert engine.export_kv("r") is None and engine.kv_bytes("r") == 0
    assert engine.export_kv("another") is None


def test_a_full_engine_takes_the_tokens_only(harness: Any) -> None:
    model = harness.make_model()
    sampled, export = _begun(harness, harness.engine(model))
    target = harness.engine(model, kv_tokens=128)
    target.submit(harness.request("big", harness.prompt(60, seed=1), 68))
    harness.record(target.step())
    usable, rest = _goes_on(harness, target, sampled, export)
    assert usable == 0 and len(rest) == TOTAL - SAMPLED


@pytest.mark.parametrize("damage", ["torn", "no file", "other file", "header"])
def test_damaged_bytes_are_refused(harness: Any, damage: str) -> None:
    _, export = _begun(harness, harness.engine(harness.make_model()))
    data = encode_kv(export)
    broken = {
        "torn": data[:-5],
        "no file": b"",
        "other file": struct.pack("<Q", 2) + b"{}",
        "header": data[:8] + b"\xff" * 40 + data[48:],
    }[damage]
    with pytest.raises(UnavailableError, match="not KV"):
        decode_kv(broken)
