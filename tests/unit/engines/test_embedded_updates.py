"""New weights between steps: running requests survive, versions never mix, stale KV never serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wingbeat.core.errors import ModelSourceError
from wingbeat.core.types import FinishReason


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_recompute_continues_running_requests_exactly_under_the_new_weights(harness: Any, kind: str) -> None:
    old, new = harness.make_model(kind, seed=0), harness.make_model(kind, seed=1)
    engine = harness.engine(old, version=3, prefill_tokens=48)
    prompts = {f"r{i}": harness.prompt(10 + 7 * i, seed=i) for i in range(6)}
    for name, prompt in prompts.items():
        engine.submit(harness.request(name, prompt, 24))
    for _ in range(12):
        harness.record(engine.step())
    engine.update_weights(_weights(new), policy_version=4)
    replies = harness.drain(engine)
    for name, prompt in prompts.items():
        reply = replies[name]
        assert reply.ends == [FinishReason.LENGTH]
        split = reply.versions.index(4)
        assert 0 < split < 24
        assert reply.versions == [3] * split + [4] * (24 - split)
        before = harness.reference(old, prompt, reply.token_ids)
        after = harness.reference(new, prompt, reply.token_ids)
        harness.assert_close(reply.logprobs, before[:split] + after[split:])


def test_keep_continues_running_requests_on_their_old_kv(harness: Any) -> None:
    old, new = harness.make_model(seed=0), harness.make_model(seed=1)
    engine = harness.engine(old, kv_on_update="keep")
    prompt = harness.prompt(30, seed=3)
    engine.submit(harness.request("r", prompt, 20, cache_key="e"))
    for _ in range(10):
        harness.record(engine.step())
    prefilled = engine.stats().prefilled_tokens
    engine.update_weights(_weights(new), policy_version=1)
    reply = harness.drain(engine)["r"]
    assert reply.versions == [0] * 10 + [1] * 10
    assert engine.stats().prefilled_tokens == prefilled
    fresh = torch.tensor(harness.reference(new, prompt, reply.token_ids)[10:])
    assert (torch.tensor(reply.logprobs[10:]) - fresh).abs().max() > 1e-3


def test_keep_never_lends_mixed_kv_to_another_request(harness: Any) -> None:
    old, new = harness.make_model(seed=0), harness.make_model(seed=1)
    engine = harness.engine(old, kv_on_update="keep")
    prompt = harness.prompt(40, seed=3)
    engine.submit(harness.request("first", prompt, 20, cache_key="e"))
    for _ in range(5):
        harness.record(engine.step())
    engine.update_weights(_weights(new), policy_version=1)
    engine.submit(harness.request("beside", prompt, 6, cache_key="e"))
    first = harness.drain(engine)["first"]
    engine.submit(harness.request("after", [*prompt, *first.token_ids], 6, cache_key="e"))
    replies = harness.drain(engine)
    harness.assert_close(replies["beside"].logprobs, harness.reference(new, prompt, replies["beside"].token_ids))
    following = [*prompt, *first.token_ids]
    harness.assert_close(replies["after"].logprobs, harness.reference(new, following, replies["after"].token_ids))


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_idle_caches_of_old_weights_never_serve_even_under_the_same_version(harness: Any, mode: str) -> None:
    old, new = harness.make_model(seed=0), harness.make_model(seed=1)
    engine = harness.engine(old, kv_on_update=mode)
    prompt = harness.prompt(50, seed=5)
    engine.submit(harness.request("a", prompt, 4, cache_key="e"))
    harness.drain(engine)
    engine.update_weights(_weights(new), policy_version=0)
    engine.submit(harness.request("b", prompt, 4, cache_key="e"))
    reply = harness.drain(engine)["b"]
    assert engine.stats().reused_tokens == 0
    harness.assert_close(reply.logprobs, harness.reference(new, prompt, reply.token_ids))


def test_recomputing_a_group_feeds_the_shared_prompt_once(harness: Any) -> None:
    old, new = harness.make_model(seed=0), harness.make_model(seed=1)
    engine = harness.engine(old, prefill_tokens=512)
    prompt = harness.prompt(100, seed=5)
    for i in range(8):
        engine.submit(harness.request(str(i), prompt, 12))
    for _ in range(6):
        harness.record(engine.step())
    before = engine.stats().prefilled_tokens
    engine.update_weights(_weights(new), policy_version=1)
    replies = harness.drain(engine)
    assert engine.stats().prefilled_tokens - before < 2 * len(prompt)
    for i in range(8):
        reply = replies[str(i)]
        split = reply.versions.index(1)
        harness.assert_close(reply.logprobs[split:], harness.reference(new, prompt, reply.token_ids)[split:])


def test_updates_while_prompts_are_half_fed(harness: Any) -> None:
    models = [harness.make_model(seed=s) for s in range(4)]
    engine = harness.engine(models[0], prefill_tokens=16)
    prompts = [harness.prompt(70, seed=i) for i in range(3)]
    for i, prompt in enumerate(prompts):
        engine.submit(harness.request(str(i), prompt, 10))
    for version in (1, 2, 3):
        for _ in range(2):
            harness.record(engine.step())
        engine.update_weights(_weights(models[version]), policy_version=version)
    replies = harness.drain(engine)
    for i, prompt in enumerate(prompts):
        assert replies[str(i)].versions == [3] * 10
        harness.assert_close(replies[str(i)].logprobs, harness.reference(models[3], prompt, replies[str(i)].token_ids))


def _broken(weights: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    if how == "missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    elif how == "unexpected":
        weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    elif how == "shape":
        weights["model.norm.weight"] = torch.zeros(7)
    else:
        weights["model.norm.weight"] = weights["model.norm.weight"].long()
    return weights


@pytest.mark.parametrize("how", ["missing", "unexpected", "shape", "dtype"])
def test_wrong_weights_are_refused_whole(harness: Any, how: str) -> None:
    old = harness.make_model(seed=0)
    engine = harness.engine(old, version=7)
    with pytest.raises(ModelSourceError, match=r"model\."):
        engine.update_weights(_broken(_weights(harness.make_model(seed=1)), how), policy_version=8)
    assert engine.policy_version == 7
    prompt = harness.prompt(12, seed=1)
    engine.submit(harness.request("r", prompt, 5))
    reply = harness.drain(engine)["r"]
    harness.assert_close(reply.logprobs, harness.reference(old, prompt, reply.token_ids))


def test_tied_weights_come_under_either_name_but_may_not_contradict(harness: Any) -> None:
    old, new = harness.make_model("qwen3-tied", seed=0), harness.make_model("qwen3-tied", seed=1)
    engine = harness.engine(old)
    weights = _weights(new)
    del weights["lm_head.weight"]
    engine.update_weights(weights, policy_version=1)
    prompt = harness.prompt(12, seed=1)
    engine.submit(harness.request("r", prompt, 5))
    reply = harness.drain(engine)["r"]
    harness.assert_close(reply.logprobs, harness.reference(new, prompt, reply.token_ids))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    with pytest.raises(ModelSourceError, match="tied"):
        engine.update_weights(weights, policy_version=2)


def test_non_finite_weights_end_requests_with_an_error_and_good_ones_heal_the_engine(harness: Any) -> None:
    model = harness.make_model(seed=0)
    engine = harness.engine(model, kv_on_update="keep")
    broken = _weights(model)
    broken["model.layers.0.mlp.up_proj.weight"].fill_(torch.nan)
    engine.update_weights(broken, policy_version=1)
    engine.submit(harness.request("bad", harness.prompt(20, seed=1), 5))
    bad = harness.drain(engine)["bad"]
    assert bad.ends == [FinishReason.ERROR]
    assert "non-finite" in bad.error
    engine.update_weights(_weights(model), policy_version=2)
    prompts = [harness.prompt(10 + 15 * i, seed=i) for i in range(3)]
    for i, prompt in enumerate(prompts):
        engine.submit(harness.request(str(i), prompt, 8))
    replies = harness.drain(engine)
    for i, prompt in enumerate(prompts):
        harness.assert_close(replies[str(i)].logprobs, harness.reference(model, prompt, replies[str(i)].token_ids))
