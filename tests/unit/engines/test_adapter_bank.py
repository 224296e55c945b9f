"""Adapters of different ranks over one model: each request is sampled by its own, and by nothing of the others."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from wingbeat.core.errors import ModelSourceError
from wingbeat.core.weight_protocol import AdapterInfo
from wingbeat.engines.embedded import AdapterMerger, AdapterWeights, EmbeddedEngine

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _adapted(model: Any, *, rank: int, seed: int, targets: list[str] | None = None) -> tuple[Any, AdapterWeights]:
    """What PEFT computes with an adapter that matters, and the adapter as it is published."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=6, target_modules=targets or ALL)
    adapted = get_peft_model(copy.deepcopy(model), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return adapted.eval(), AdapterWeights(weights, AdapterInfo(rank, 6.0))


def _ask(harness: Any, engine: EmbeddedEngine, name: str, prompt: list[int], adapter: str, *, tokens: int = 8) -> None:
    engine.submit(replace(harness.request(name, prompt, tokens), adapter=adapter))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_batch_of_adapters_samples_what_peft_and_merged_weights_compute(harness: Any, kind: str) -> None:
    """Prompts long enough to be computed alone and short ones that share a call; the model itself among them."""
    model = harness.make_model(kind)
    engine = harness.engine(model)
    small, small_weights = _adapted(model, rank=4, seed=1)
    large, large_weights = _adapted(model, rank=8, seed=2, targets=["q_proj", "down_proj"])
    third, third_weights = _adapted(model, rank=3, seed=3)
    references = {"small": small, "large": large, "third": third, "": model}
    for name, weights in (("small", small_weights), ("large", large_weights), ("third", third_weights)):
        engine.put_adapter(name, weights)
    asked: dict[str, tuple[str, list[int]]] = {}
    for i, (adapter, length) in enumerate(
        [("small", 60), ("large", 9), ("", 20), ("third", 7), ("small", 5), ("large", 11), ("", 3)]
    ):
        asked[str(i)] = (adapter, harness.prompt(length, seed=i))
        _ask(harness, engine, str(i), asked[str(i)][1], adapter)
    replies = harness.drain(engine)
    for name, (adapter, prompt) in asked.items():
        reply = replies[name]
        harness.assert_close(reply.logprobs, harness.reference(references[adapter], prompt, reply.token_ids))
    merged = harness.engine(model)
    merged.update_weights(
        AdapterMerger(model, adapter=small_weights.info).merge(small_weights.tensors), policy_version=1, partial=True
    )
    prompt = asked["0"][1]
    merged.submit(harness.request("merged", prompt, 8, temperature=0.0))
    engine.submit(replace(harness.request("unmerged", prompt, 8, temperature=0.0), adapter="small"))
    one, other = harness.drain(merged)["merged"], harness.drain(engine)["unmerged"]
    assert one.token_ids == other.token_ids
    harness.assert_close(one.logprobs, other.logprobs)


def test_prefixes_are_shared_within_an_adapter_only(harness: Any) -> None:
    model = harness.make_model()
    engine = harness.engine(model)
    adapted = {name: _adapted(model, rank=4, seed=seed) for seed, name in enumerate(("a", "b"), start=1)}
    for name, (_, weights) in adapted.items():
        engine.put_adapter(name, weights)
    references = {"": model} | {name: peft for name, (peft, _) in adapted.items()}
    prompt = harness.prompt(40, seed=0)
    for turn in range(2):  # together in a batch, then from what idle rows hold
        for adapter in reversed(references) if turn else references:  # so that the oldest row is another adapter's
            _ask(harness, engine, f"{adapter}{turn}", prompt, adapter)
        harness.drain(engine)
        assert engine.stats().reused_tokens == turn * 3 * 39
    for adapter, reference in references.items():
        for turn in range(2):
            reply = harness.replies[f"{adapter}{turn}"]
            harness.assert_close(reply.logprobs, harness.reference(reference, prompt, reply.token_ids))


def test_a_swap_reaches_the_running_requests_of_its_adapter_and_nothing_else(harness: Any) -> None:
    model = harness.make_model()
    engine = harness.engine(model)
    (before, first), (after, second) = (_adapted(model, rank=rank, seed=rank) for rank in (4, 6))
    other, other_weights = _adapted(model, rank=8, seed=9)
    engine.put_adapter("swapped", first)
    engine.put_adapter("other", other_weights)
    prompt = harness.prompt(30, seed=1)
    for adapter in ("swapped", "other", ""):
        _ask(harness, engine, adapter or "base", prompt, adapter, tokens=12)
    for _ in range(4):
        harness.record(engine.step())
    computed = engine.stats().prefilled_tokens
    engine.put_adapter("swapped", second)  # of another rank: it moves to other columns
    replies = harness.drain(engine)
    assert engine.stats().prefilled_tokens - computed == 30 + 4, "of the swapped adapter alone, everything again"
    for name, reference in (("other", other), ("base", model)):
        reply = replies[name]
        harness.assert_close(reply.logprobs, harness.reference(reference, prompt, reply.token_ids))
    reply = replies["swapped"]
    harness.assert_close(reply.logprobs[:4], harness.reference(before, prompt, reply.token_ids)[:4])
    harness.assert_close(reply.logprobs[4:], harness.reference(after, prompt, reply.token_ids)[4:])


def test_columns_are_used_again_and_leave_no_trace(harness: Any) -> None:
    """Adapters come and go in random order; whoever stands where others stood computes what it is."""
    model = harness.make_model()
    engine = harness.engine(model)
    made = [
        _adapted(model, rank=rank, seed=rank, targets=[ALL[rank % 7], ALL[(rank + 3) % 7]]) for rank in (1, 5, 9, 2)
    ]
    generator = torch.Generator().manual_seed(0)
    held: dict[str, Any] = {}
    prompt = harness.prompt(10, seed=1)
    for turn in range(24):
        place, which = torch.randint(0, 4, (2,), generator=generator).tolist()
        if f"{place}" in held and which == 0:
            del held[f"{place}"]
            engine.drop_adapter(f"{place}")
        else:
            held[f"{place}"], weights = made[which]
            engine.put_adapter(f"{place}", weights)
        for name in held:
            _ask(harness, engine, f"{turn}-{name}", prompt, name, tokens=2)
        replies = harness.drain(engine)
        for name, peft in held.items():
            reply = replies[f"{turn}-{name}"]
            harness.assert_close(reply.logprobs, harness.reference(peft, prompt, reply.token_ids))


def test_an_adapter_of_the_head_sees_the_tokens_that_are_sampled(harness: Any) -> None:
    model = harness.make_model()
    engine = harness.engine(model)
    adapted, weights = _adapted(model, rank=4, seed=1, targets=["lm_head", "q_proj"])
    engine.put_adapter("a", weights)
    asked = {name: harness.prompt(length, seed=length) for name, length in (("x", 12), ("y", 50))}
    for name, prompt in asked.items():
        _ask(harness, engine, name, prompt, "a")
    _ask(harness, engine, "base", asked["x"], "")
    replies = harness.drain(engine)
    for name, prompt in asked.items():
        harness.assert_close(replies[name].logprobs, harness.reference(adapted, prompt, replies[name].token_ids))
    harness.assert_close(replies["base"].logprobs, harness.reference(model, asked["x"], replies["base"].token_ids))


def test_an_adapter_that_diverged_harms_nobody_else(harness: Any) -> None:
    model = harness.make_model()
    engine = harness.engine(model)
    peft, good = _adapted(model, rank=4, seed=1)
    engine.put_adapter("good", good)
    _, bad = _adapted(model, rank=4, seed=2)
    engine.put_adapter("bad", bad)
    broken = {name: tensor.clone() for name, tensor in bad.tensors.items()}
    next(iter(broken.values()))[0, 0] = float("nan")
    with pytest.raises(ModelSourceError, match="not finite"):
        engine.put_adapter("bad", AdapterWeights(broken, bad.info))
    steep = AdapterWeights({name: tensor * 1e38 for name, tensor in bad.tensors.items()}, AdapterInfo(4, 400.0))
    with pytest.raises(ModelSourceError, match="not finite"):
        engine.put_adapter("bad", steep)  # finite, until it is multiplied with its scale
    huge = {name: tensor * 1e30 for name, tensor in bad.tensors.items()}
    engine.put_adapter("bad", AdapterWeights(huge, bad.info))  # finite, and overflows in a forward
    prompt = harness.prompt(12, seed=1)
    for adapter in ("good", "bad", ""):
        _ask(harness, engine, adapter or "base", prompt, adapter)
    replies = harness.drain(engine)
    assert "non-finite logits with adapter 'bad'" in replies["bad"].error
    for name, reference in (("good", peft), ("base", model)):
        assert len(replies[name].token_ids) == 8
        harness.assert_close(replies[name].logprobs, harness.reference(reference, prompt, replies[name].token_ids))


def _lone(module: str) -> AdapterWeights:
    names = (f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight")
    return AdapterWeights({names[0]: torch.ones(2, 6), names[1]: torch.ones(6, 2)}, AdapterInfo(2, 2.0))


def test_what_cannot_be_an_adapter_is_refused_by_name_and_changes_nothing(harness: Any) -> None:
    model = harness.make_model()
    engine = harness.engine(model)
    _, weights = _adapted(model, rank=4, seed=1)
    with pytest.raises(ModelSourceError, match="shapes"):
        engine.put_adapter("a", AdapterWeights(weights.tensors, AdapterInfo(5, 6.0)))
    _ask(harness, engine, "r", harness.prompt(5, seed=1), "a")
    model.unused = torch.nn.Linear(6, 6)  # as an expert that the router did not choose
    with pytest.raises(ModelSourceError, match=r"'unused', which sees \[\] of 16 tokens"):
        harness.engine(model).put_adapter("a", _lone("unused"))
    assert "no adapter 'a'" in harness.drain(engine)["r"].error


def test_bfloat16_agrees_with_peft_as_well_as_the_model_itself_does(harness: Any) -> None:
    model = harness.make_model().to(torch.bfloat16)
    engine = harness.engine(model)
    peft, weights = _adapted(model, rank=4, seed=1)
    assert all(tensor.dtype is torch.float32 for tensor in weights.tensors.values()), "adapters are kept in float32"
    engine.put_adapter("a", weights)
    prompt = harness.prompt(20, seed=1)
    for adapter in ("a", ""):
        _ask(harness, engine, adapter or "base", prompt, adapter)
    replies = harness.drain(engine)
    gaps = {}
    for name, reference in (("a", peft), ("base", model)):
        expected = torch.tensor(harness.reference(reference, prompt, replies[name].token_ids))
        gaps[name] = float((torch.tensor(replies[name].logprobs) - expected).abs().mean())
    assert gaps["a"] <= max(0.02, 2 * gaps["base"]), gaps


def test_kv_of_an_adapter_does_not_leave_the_engine(harness: Any) -> None:
    """Its weights have versions of their own, which an export does not name: the tokens move, and are fed again."""
    model = harness.make_model()
    engine = harness.engine(model)
    engine.put_adapter("own", _adapted(model, rank=4, seed=1)[1])
    for adapter in ("own", ""):
        _ask(harness, engine, f"r{adapter}", harness.prompt(20, seed=1), adapter)
    engine.step()
    assert engine.export_kv("rown") is None and engine.kv_bytes("rown") == 0
    assert engine.export_kv("r") is not None
