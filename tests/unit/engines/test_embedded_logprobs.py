"""Whatever is batched, chunked or reused, logprobs are those of a plain forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

FAMILIES = ["qwen3", "llama", "gemma3"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_concurrent_requests_of_different_lengths_in_chunks(harness: Any, kind: str) -> None:
    model = harness.make_model(kind)
    engine = harness.engine(model, prefill_tokens=40)
    prompts = {f"r{i}": harness.prompt(3 + 11 * i, seed=i) for i in range(12)}
    for name, prompt in prompts.items():
        engine.submit(harness.request(name, prompt, 30, temperature=0.7))
    replies = harness.drain(engine)
    for name, prompt in prompts.items():
        reply = replies[name]
        assert len(reply.token_ids) == 30
        harness.assert_close(reply.logprobs, harness.reference(model, prompt, reply.token_ids, temperature=0.7))
    assert engine.stats().prefilled_tokens == sum(map(len, prompts.values()))


@pytest.mark.parametrize("kind", FAMILIES)
def test_turns_that_extend_each_other_reuse_their_kv(harness: Any, kind: str) -> None:
    model = harness.make_model(kind)
    engine = harness.engine(model)
    conversations = {f"e{i}": harness.prompt(20 + 5 * i, seed=i) for i in range(4)}
    expected_reuse = 0
    for turn in range(4):
        prompts = {key: tuple(tokens) for key, tokens in conversations.items()}
        for key, prompt in prompts.items():
            engine.submit(harness.request(f"{key}.{turn}", prompt, 12, cache_key=key))
        replies = harness.drain(engine)
        for key, prompt in prompts.items():
            reply = replies[f"{key}.{turn}"]
            harness.assert_close(reply.logprobs, harness.reference(model, prompt, reply.token_ids))
            conversations[key] = [*prompt, *reply.token_ids, *harness.prompt(7, seed=100 + turn)]
            if turn < 3:
                expected_reuse += len(prompt) + 11
    assert engine.stats().reused_tokens == expected_reuse


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_prompt_longer_than_a_step_is_fed_in_chunks_beside_decoding(harness: Any, kind: str) -> None:
    model = harness.make_model(kind)
    engine = harness.engine(model, prefill_tokens=16)
    short, long = harness.prompt(5, seed=1), harness.prompt(150, seed=2)
    engine.submit(harness.request("short", short, 40))
    harness.record(engine.step())
    engine.submit(harness.request("long", long, 10))
    before = len(harness.replies["short"].token_ids)
    harness.record(engine.step())
    assert len(harness.replies["short"].token_ids) == before + 1
    assert "long" not in harness.replies
    replies = harness.drain(engine)
    for name, prompt in (("short", short), ("long", long)):
        harness.assert_close(replies[name].logprobs, harness.reference(model, prompt, replies[name].token_ids))


@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_that_outgrow_their_place_move_with_their_kv(harness: Any, kind: str) -> None:
    model = harness.make_model(kind)
    engine = harness.engine(model, row_headroom_tokens=1)
    prompts = [harness.prompt(10 + i, seed=i) for i in range(5)]
    for i, prompt in enumerate(prompts):
        engine.submit(harness.request(str(i), prompt, 90))
    replies = harness.drain(engine)
    for i, prompt in enumerate(prompts):
        harness.assert_close(replies[str(i)].logprobs, harness.reference(model, prompt, replies[str(i)].token_ids))


def test_greedy_follows_the_argmax_and_reports_untempered_logprobs(harness: Any) -> None:
    model = harness.make_model("qwen3")
    engine = harness.engine(model)
    prompt = harness.prompt(9, seed=4)
    engine.submit(harness.request("g", prompt, 15, temperature=0.0))
    reply = harness.drain(engine)["g"]
    expected = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=15, do_sample=False)[
        0, len(prompt) :
    ].tolist()
    assert reply.token_ids == expected
    harness.assert_close(reply.logprobs, harness.reference(model, prompt, reply.token_ids))


def test_bfloat16_models_run_and_give_float32_logprobs(harness: Any) -> None:
    model = harness.make_model("gemma3").to(torch.bfloat16)
    engine = harness.engine(model)
    for i in range(4):
        engine.submit(harness.request(str(i), harness.prompt(8 + 9 * i, seed=i), 20))
    replies = harness.drain(engine)
    for i in range(4):
        prompt = harness.prompt(8 + 9 * i, seed=i)
        expected = harness.reference(model, prompt, replies[str(i)].token_ids)
        assert torch.tensor(replies[str(i)].logprobs).sub(torch.tensor(expected)).abs().mean() < 0.1


def test_no_step_waits_for_cudnn_to_plan_its_attention(harness: Any) -> None:
    """Torch prefers it on Hopper, and it plans anew for every length of the keys."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    harness.engine(harness.make_model("qwen3"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
