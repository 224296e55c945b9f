"""What is drawn, how often, and how reproducibly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from wingbeat.core.types import FinishReason
from wingbeat.engines.embedded.sampler import Draw, sample


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_logprobs_are_those_of_the_tempered_truncated_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).log_softmax(1)
    # T = 2 halves the logits: weights e^1, e^.5, 1 (top-k 3) of which the first two hold
    # (2.71828 + 1.64872) / (2.71828 + 1.64872 + 1) = 0.8137 >= 0.8, so top-p 0.8 keeps those two.
    draw = Draw(temperature=2.0, top_p=0.8, top_k=3)
    expected = {0: math.log(math.e / (math.e + math.exp(0.5))), 1: math.log(math.exp(0.5) / (math.e + math.exp(0.5)))}
    tokens, logprobs = sample(logits.repeat(200, 1), [draw] * 200, generator=_generator())
    assert set(tokens.tolist()) == {0, 1}
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(expected[token], abs=1e-6)


def test_top_k_one_and_tiny_top_p_are_deterministic_with_logprob_zero() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits, [Draw(top_k=1), Draw(top_p=1e-6)], generator=_generator())
    assert tokens.tolist() == [1, 1]
    assert logprobs.tolist() == [0.0, 0.0]


def test_ties_at_the_edge_of_top_k_keep_exactly_k_tokens() -> None:
    tokens, logprobs = sample(torch.zeros(300, 5), [Draw(top_k=2)] * 300, generator=_generator())
    assert len(set(tokens.tolist())) == 2
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 300)


def test_greedy_ignores_truncation_and_is_untempered() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    tokens, logprobs = sample(logits, [Draw(temperature=0.0, top_k=1)], generator=_generator())
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(logits.log_softmax(1)[0, 1].item(), abs=1e-6)


def test_rows_of_one_batch_are_drawn_each_in_its_own_way() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(4, 1)
    draws = [Draw(temperature=0.0), Draw(temperature=0.5), Draw(top_k=2), Draw(generator=_generator(5))]
    tokens, logprobs = sample(logits, draws, generator=_generator())
    assert tokens[0] == 2
    tempered = (logits[1] / 0.5).log_softmax(0)
    assert logprobs[1].item() == pytest.approx(tempered[tokens[1]].item(), abs=1e-6)
    assert tokens[2] in (1, 2)
    assert logprobs[3].item() == pytest.approx(logits[3].log_softmax(0)[tokens[3]].item(), abs=1e-6)


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    draws = 20_000
    tokens, _ = sample(logits.repeat(draws, 1), [Draw()] * draws, generator=_generator(1))
    counts = torch.bincount(tokens, minlength=4).double()
    expected = draws * logits.exp().double()
    # Chi-squared with 3 degrees of freedom: 16.3 is the 0.999 quantile; the seed is fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 16.3


def test_the_same_seed_gives_the_same_tokens_alone_or_in_company(harness: Any) -> None:
    model = harness.make_model()
    prompt = harness.prompt(20, seed=1)
    alone = harness.engine(model, seed=1)
    alone.submit(harness.request("alone", prompt, 25, seed=42))
    crowded = harness.engine(model, seed=2)
    for i in range(5):
        crowded.submit(harness.request(f"other{i}", harness.prompt(10 + 9 * i, seed=9 + i), 30))
    crowded.submit(harness.request("crowded", prompt, 25, seed=42))
    crowded.submit(harness.request("different", prompt, 25, seed=43))
    harness.drain(alone)
    replies = harness.drain(crowded)
    assert replies["alone"].token_ids == replies["crowded"].token_ids
    assert replies["different"].token_ids != replies["crowded"].token_ids


def test_the_engine_seed_decides_unseeded_requests(harness: Any) -> None:
    model = harness.make_model()
    results: list[list[int]] = []
    for i, seed in enumerate((1, 1, 2)):
        engine = harness.engine(model, seed=seed)
        engine.submit(harness.request(f"r{i}", harness.prompt(20, seed=1), 25))
        results.append(harness.drain(engine)[f"r{i}"].token_ids)
    assert results[0] == results[1] != results[2]


def test_stop_tokens_end_a_request_and_are_part_of_it(harness: Any) -> None:
    engine = harness.engine(harness.make_model())
    prompt = harness.prompt(12, seed=2)
    engine.submit(harness.request("free", prompt, 30, temperature=0.0))
    free = harness.drain(engine)["free"].token_ids
    stop = free[7]
    engine.submit(harness.request("stopped", prompt, 30, temperature=0.0, stop_token_ids=(stop,)))
    reply = harness.drain(engine)["stopped"]
    assert reply.token_ids == free[: free.index(stop) + 1]
    assert reply.ends == [FinishReason.STOP]


def test_one_token_requests_end_with_length_after_one_step(harness: Any) -> None:
    engine = harness.engine(harness.make_model())
    engine.submit(harness.request("r", [1, 2, 3], 1))
    harness.record(engine.step())
    assert harness.replies["r"].ends == [FinishReason.LENGTH]
    assert not engine.has_work()


def test_large_vocabularies_are_drawn_by_weight_and_never_outside_it() -> None:
    # Three tokens of different blocks carry all the mass; everything else is impossible.
    logits = torch.full((1, 5003), -torch.inf)
    logits[0, [3, 700, 5002]] = torch.tensor([0.5, 0.2, 0.3]).log()
    draws = 20_000
    tokens, logprobs = sample(logits.expand(draws, -1), [Draw()] * draws, generator=_generator(2))
    counts = torch.stack([(tokens == t).sum() for t in (3, 700, 5002)]).double()
    assert counts.sum() == draws
    expected = draws * torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    # Chi-squared with 2 degrees of freedom: 13.8 is the 0.999 quantile; the seed is fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 13.8
    assert logprobs[tokens == 700].tolist() == pytest.approx([math.log(0.2)] * int(counts[1]), abs=1e-6)


def test_non_finite_logits_give_non_finite_logprobs_and_valid_tokens() -> None:
    logits = torch.zeros(3, 600)
    logits[0, 5] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    tokens, logprobs = sample(logits, [Draw()] * 3, generator=_generator())
    assert not logprobs.isfinite().any()
    assert ((tokens >= 0) & (tokens < 600)).all()
