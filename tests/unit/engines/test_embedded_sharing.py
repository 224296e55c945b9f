"""Prefixes are computed once, memory pressure queues or preempts, and ended requests free what they held."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wingbeat.core.errors import ConfigError, ConflictError, ModelSourceError
from wingbeat.core.types import FinishReason
from wingbeat.engines.embedded import EmbeddedEngine, EngineOptions

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute


def test_a_group_submitted_at_once_prefills_its_prompt_once(harness: Any) -> None:
    model = harness.make_model()
    engine = harness.engine(model)
    prompt = harness.prompt(60, seed=1)
    for i in range(8):
        engine.submit(harness.request(str(i), prompt, 10, cache_key=f"episode-{i}"))
    replies = harness.drain(engine)
    stats = engine.stats()
    assert stats.prefilled_tokens == 60 + 7
    assert stats.reused_tokens == 7 * 59
    assert len({tuple(replies[str(i)].token_ids) for i in range(8)}) > 1
    for i in range(8):
        harness.assert_close(replies[str(i)].logprobs, harness.reference(model, prompt, replies[str(i)].token_ids))


def test_a_shared_prompt_fed_in_chunks_is_waited_for_without_holding_others_up(harness: Any) -> None:
    engine = harness.engine(harness.make_model(), prefill_tokens=32)
    prompt = harness.prompt(90, seed=1)
    engine.submit(harness.request("a", prompt, 4))
    engine.submit(harness.request("b", prompt, 4))
    engine.submit(harness.request("other", harness.prompt(8, seed=2), 4))
    replies = harness.drain(engine)
    assert engine.stats().prefilled_tokens == 90 + 1 + 8
    assert all(len(replies[name].token_ids) == 4 for name in ("a", "b", "other"))


def test_a_running_row_lends_its_prefix(harness: Any) -> None:
    model = harness.make_model()
    engine = harness.engine(model)
    prompt = harness.prompt(40, seed=1)
    engine.submit(harness.request("a", prompt, 30))
    for _ in range(10):
        harness.record(engine.step())
    forked = [*prompt, *harness.replies["a"].token_ids[:6], 5, 6, 7]
    engine.submit(harness.request("b", forked, 10))
    replies = harness.drain(engine)
    assert engine.stats().reused_tokens >= 46
    for name, tokens in (("a", prompt), ("b", forked)):
        harness.assert_close(replies[name].logprobs, harness.reference(model, tokens, replies[name].token_ids))


def test_nobody_waits_for_an_idle_row_that_is_passed_over_for_its_own(harness: Any) -> None:
    """It shares just too little more to be worth a copy, and will never hold more than it does."""
    engine = harness.engine(harness.make_model())
    begin, middle = harness.prompt(40, seed=1), harness.prompt(16, seed=2)
    for name, prompt in (("mine", begin), ("theirs", [*begin, *middle])):
        engine.submit(harness.request(name, prompt, 1, cache_key=name))
        harness.drain(engine)
    engine.submit(harness.request("next", [*begin, *middle, 1, 2, 3], 2, cache_key="mine"))
    for _ in range(10):
        harness.record(engine.step())
    assert len(harness.replies["next"].token_ids) == 2


def test_a_short_fork_does_not_destroy_a_long_row_of_the_same_episode(harness: Any) -> None:
    engine = harness.engine(harness.make_model())
    system = harness.prompt(20, seed=1)
    long = [*system, *harness.prompt(150, seed=2)]
    engine.submit(harness.request("main", long, 4, cache_key="e"))
    main = harness.drain(engine)["main"]
    engine.submit(harness.request("side", [*system, *harness.prompt(10, seed=3)], 4, cache_key="e"))
    harness.drain(engine)
    before = engine.stats().reused_tokens
    engine.submit(harness.request("next", [*long, *main.token_ids, 1, 2], 4, cache_key="e"))
    harness.drain(engine)
    assert engine.stats().reused_tokens - before == len(long) + 3


def test_eviction_makes_room_for_new_requests(harness: Any) -> None:
    model = harness.make_model()
    engine = harness.engine(model, kv_tokens=256, row_headroom_tokens=16)
    for i in range(20):
        prompt = harness.prompt(40, seed=i)
        engine.submit(harness.request(str(i), prompt, 8))
        reply = harness.drain(engine)[str(i)]
        harness.assert_close(reply.logprobs, harness.reference(model, prompt, reply.token_ids))
    assert engine.stats().kv_tokens_free == 256


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_more_work_than_memory_queues_and_preempts_but_every_request_ends_right(harness: Any, kind: str) -> None:
    model = harness.make_model(kind)
    engine = harness.engine(model, kv_tokens=256, row_headroom_tokens=1, max_running=8)
    prompts = [harness.prompt(20 + 3 * i, seed=i) for i in range(10)]
    for i, prompt in enumerate(prompts):
        engine.submit(harness.request(str(i), prompt, 100))
    replies = harness.drain(engine)
    for i, prompt in enumerate(prompts):
        reply = replies[str(i)]
        assert reply.ends == [FinishReason.LENGTH]
        assert len(reply.token_ids) == 100
        harness.assert_close(reply.logprobs, harness.reference(model, prompt, reply.token_ids))
    assert engine.stats().kv_tokens_free == 256


def test_a_request_that_can_never_fit_ends_with_a_clear_error(harness: Any) -> None:
    engine = harness.engine(harness.make_model(), kv_tokens=128)
    engine.submit(harness.request("r", harness.prompt(100, seed=1), 29))
    engine.submit(harness.request("fits", harness.prompt(100, seed=1), 28))
    replies = harness.drain(engine)
    assert replies["r"].ends == [FinishReason.ERROR]
    assert "context of 128 tokens" in replies["r"].error
    assert replies["fits"].ends == [FinishReason.LENGTH]


def test_abort_frees_running_and_waiting_requests(harness: Any) -> None:
    engine = harness.engine(harness.make_model(), max_running=2)
    for i in range(4):
        engine.submit(harness.request(str(i), harness.prompt(30, seed=i), 50))
    harness.record(engine.step())
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (2, 2)
    for i in range(4):
        engine.abort(str(i))
    engine.abort("unknown")
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens_free) == (0, 0, 4096)
    replies = harness.drain(engine)
    assert all(replies[str(i)].ends == [FinishReason.ABORT] for i in range(4))


def test_an_aborted_request_leaves_its_prefix_to_others(harness: Any) -> None:
    engine = harness.engine(harness.make_model())
    prompt = harness.prompt(50, seed=1)
    engine.submit(harness.request("a", prompt, 50))
    harness.record(engine.step())
    engine.abort("a")
    engine.submit(harness.request("b", prompt, 3))
    harness.drain(engine)
    assert engine.stats().reused_tokens == 49


def test_pause_stops_computing_and_resume_goes_on(harness: Any) -> None:
    engine = harness.engine(harness.make_model())
    engine.submit(harness.request("r", harness.prompt(10, seed=1), 6))
    harness.record(engine.step())
    engine.pause()
    assert not engine.has_work()
    assert engine.step() == []
    engine.abort("none")
    engine.submit(harness.request("bad", [], 6))
    assert engine.has_work()
    harness.record(engine.step())
    assert harness.replies["bad"].ends == [FinishReason.ERROR]
    engine.resume()
    assert len(harness.drain(engine)["r"].token_ids) == 6


def test_a_live_id_cannot_be_used_twice_but_an_ended_one_can(harness: Any) -> None:
    engine = harness.engine(harness.make_model())
    engine.submit(harness.request("r", [1, 2, 3], 2))
    with pytest.raises(ConflictError, match="still live"):
        engine.submit(harness.request("r", [1, 2, 3], 2))
    engine.abort("r")
    engine.submit(harness.request("r", [1, 2, 3], 2))
    reply = harness.drain(engine)["r"]
    assert reply.ends == [FinishReason.LENGTH]
    assert len(reply.token_ids) == 2


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("at least one token", {"prompt": []}),
        ("token ids must lie", {"prompt": [1, 96]}),
        ("token ids must lie", {"prompt": [-1]}),
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": float("nan")}),
        ("top_p", {"top_p": 0.0}),
        ("top_k", {"top_k": -1}),
    ],
)
def test_requests_that_make_no_sense_end_with_an_error(harness: Any, fault: str, change: dict[str, Any]) -> None:
    engine = harness.engine(harness.make_model())
    fields = {"prompt": [1, 2, 3], "max_tokens": 4, **change}
    engine.submit(harness.request("r", fields.pop("prompt"), **fields))
    reply = harness.drain(engine)["r"]
    assert reply.ends == [FinishReason.ERROR]
    assert fault in reply.error


def test_options_that_cannot_be_honoured_are_refused(harness: Any) -> None:
    with pytest.raises(ConfigError, match="max_running"):
        EngineOptions(max_running=0)
    with pytest.raises(ConfigError, match="kv_on_update"):
        EngineOptions(kv_on_update="forget")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="context_tokens"):
        harness.engine(harness.make_model(), context_tokens=513)
    with pytest.raises(ConfigError, match="context_tokens"):
        harness.engine(harness.make_model(), kv_tokens=100, context_tokens=65)


def test_models_with_features_we_lack_are_refused_by_name() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_logit_softcapping=50.0,
    )
    with pytest.raises(ModelSourceError, match="softcap"):
        EmbeddedEngine(Gemma2ForCausalLM(config), device="cpu")


def test_the_pool_grows_with_use_and_keeps_what_it_holds(harness: Any) -> None:
    model = harness.make_model("gemma3")
    engine = harness.engine(model, kv_tokens=32768, max_running=4)
    prompts = [harness.prompt(60 + i, seed=i) for i in range(24)]
    for i, prompt in enumerate(prompts):
        engine.submit(harness.request(f"first-{i}", prompt, 260 if i < 12 else 3, cache_key=str(i)))
    harness.drain(engine)
    reused = engine.stats().reused_tokens
    for i, prompt in enumerate(prompts):
        engine.submit(harness.request(f"again-{i}", [*prompt, 1, 2, 3], 5, cache_key=str(i)))
    replies = harness.drain(engine)
    assert engine.stats().reused_tokens - reused == sum(map(len, prompts))
    for i, prompt in enumerate(prompts):
        reply = replies[f"again-{i}"]
        harness.assert_close(reply.logprobs, harness.reference(model, [*prompt, 1, 2, 3], reply.token_ids))


def test_the_device_defaults_to_what_the_machine_has(harness: Any) -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    expected = found.type if found is not None else "cpu"
    model = harness.make_model()
    engine = EmbeddedEngine(model)
    assert model.device.type == expected
    engine.submit(harness.request("r", [1, 2, 3], 4))
    assert len(harness.drain(engine)["r"].token_ids) == 4
