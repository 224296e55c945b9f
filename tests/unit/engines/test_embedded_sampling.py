"""What is drawn, how often, and how reproducibly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.core.support import encode_support
from wingbeat.core.types import FinishReason
from wingbeat.engines.embedded.sampler import CANDIDATES, Draw, Masks, sample
from wingbeat.engines.embedded.supports import MAX_REMEMBERED, SupportEncoder


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_logprobs_are_those_of_the_tempered_truncated_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).log_softmax(1)
    # T = 2 halves the logits: weights e^1, e^.5, 1 (top-k 3) of which the first two hold
    # (2.71828 + 1.64872) / (2.71828 + 1.64872 + 1) = 0.8137 >= 0.8, so top-p 0.8 keeps those two.
    draw = Draw(temperature=2.0, top_p=0.8, top_k=3)
    expected = {0: math.log(math.e / (math.e + math.exp(0.5))), 1: math.log(math.exp(0.5) / (math.e + math.exp(0.5)))}
    drawn = sample(logits.repeat(200, 1), [draw] * 200, generator=_generator())
    tokens, logprobs = drawn.tokens_B, drawn.logprobs_B
    assert set(tokens.tolist()) == {0, 1}
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(expected[token], abs=1e-6)


def test_top_k_one_and_tiny_top_p_are_deterministic_with_logprob_zero() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    drawn = sample(logits, [Draw(top_k=1), Draw(top_p=1e-6)], generator=_generator())
    tokens, logprobs = drawn.tokens_B, drawn.logprobs_B
    assert tokens.tolist() == [1, 1]
    assert logprobs.tolist() == [0.0, 0.0]


def test_ties_at_the_edge_of_top_k_keep_exactly_k_tokens() -> None:
    drawn = sample(torch.zeros(300, 5), [Draw(top_k=2)] * 300, generator=_generator())
    tokens, logprobs = drawn.tokens_B, drawn.logprobs_B
    assert len(set(tokens.tolist())) == 2
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 300)


def test_greedy_ignores_truncation_and_is_untempered() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    drawn = sample(logits, [Draw(temperature=0.0, top_k=1)], generator=_generator())
    tokens, logprobs = drawn.tokens_B, drawn.logprobs_B
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(logits.log_softmax(1)[0, 1].item(), abs=1e-6)


def test_rows_of_one_batch_are_drawn_each_in_its_own_way() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(4, 1)
    draws = [Draw(temperature=0.0), Draw(temperature=0.5), Draw(top_k=2), Draw(generator=_generator(5))]
    drawn = sample(logits, draws, generator=_generator())
    tokens, logprobs = drawn.tokens_B, drawn.logprobs_B
    assert tokens[0] == 2
    tempered = (logits[1] / 0.5).log_softmax(0)
    assert logprobs[1].item() == pytest.approx(tempered[tokens[1]].item(), abs=1e-6)
    assert tokens[2] in (1, 2)
    assert logprobs[3].item() == pytest.approx(logits[3].log_softmax(0)[tokens[3]].item(), abs=1e-6)


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    draws = 20_000
    tokens = sample(logits.repeat(draws, 1), [Draw()] * draws, generator=_generator(1)).tokens_B
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
    drawn = sample(logits.expand(draws, -1), [Draw()] * draws, generator=_generator(2))
    tokens, logprobs = drawn.tokens_B, drawn.logprobs_B
    counts = torch.stack([(tokens == t).sum() for t in (3, 700, 5002)]).double()
    assert counts.sum() == draws
    expected = draws * torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    # Chi-squared with 2 degrees of freedom: 13.8 is the 0.999 quantile; the seed is fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 13.8
    assert logprobs[tokens == 700].tolist() == pytest.approx([math.log(0.2)] * int(counts[1]), abs=1e-6)


@pytest.mark.parametrize("draw", [Draw(), Draw(top_p=0.9), Draw(top_k=3)])
def test_non_finite_logits_give_non_finite_logprobs_and_valid_tokens(draw: Draw) -> None:
    logits = torch.zeros(3, 600)
    logits[0, 5] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    drawn = sample(logits, [draw] * 3, generator=_generator())
    assert not drawn.logprobs_B.isfinite().any()
    assert ((drawn.tokens_B >= 0) & (drawn.tokens_B < 600)).all()


def test_a_mask_a_nucleus_and_a_temperature_together_follow_the_renormalised_frequencies() -> None:
    # T = 0.5 squares the weights 8, 7, 6, 5, 4 to 64, 49, 36, 25, 16. The mask takes the best, so 49, 36, 25, 16 of
    # 126 are left: .389, .675, .873, 1. Top-p 0.7 keeps the first three, with 49, 36 and 25 of 110.
    logits = torch.tensor([8.0, 7.0, 6.0, 5.0, 4.0]).log()
    count = 20_000
    allowed = torch.tensor([False, True, True, True, True]).expand(count, -1)
    drawn = sample(
        logits.repeat(count, 1),
        [Draw(temperature=0.5, top_p=0.7)] * count,
        generator=_generator(4),
        masks=Masks(range(count), allowed),
    )
    assert drawn.allowed_RV is not None and drawn.allowed_RV.unique(dim=0).tolist() == [
        [False, True, True, True, False]
    ]
    counts = torch.bincount(drawn.tokens_B, minlength=5).double()
    expected = count * torch.tensor([0, 49, 36, 25, 0], dtype=torch.float64) / 110
    assert counts[0] == counts[4] == 0
    # Chi-squared with 2 degrees of freedom: 13.8 is the 0.999 quantile; the seed is fixed.
    assert ((counts - expected)[1:4] ** 2 / expected[1:4]).sum() < 13.8
    shares = torch.tensor([1.0, 49 / 110, 36 / 110, 25 / 110, 1.0]).log()
    assert drawn.logprobs_B.tolist() == pytest.approx(shares[drawn.tokens_B].tolist(), abs=1e-6)


def test_masks_touch_their_rows_only_and_change_nobody_s_noise() -> None:
    logits = torch.randn(4, 50, generator=_generator(3))
    draws = [Draw(), Draw(top_p=0.8), Draw(temperature=0.0), Draw()]
    free = sample(logits, draws, generator=_generator(9))
    assert free.restricted == [1]
    everything = torch.ones(2, 50, dtype=torch.bool)
    wide = sample(logits, draws, generator=_generator(9), masks=Masks([0, 2], everything))
    assert wide.tokens_B.tolist() == free.tokens_B.tolist()
    assert wide.restricted == [0, 1]
    narrow = everything.clone()
    narrow[0, free.tokens_B[0]] = narrow[1, free.tokens_B[2]] = False
    bound = sample(logits, draws, generator=_generator(9), masks=Masks([0, 2], narrow))
    assert bound.tokens_B[[1, 3]].tolist() == free.tokens_B[[1, 3]].tolist()
    assert bound.tokens_B[0] != free.tokens_B[0]
    assert bound.tokens_B[2] == logits[2].topk(2).indices[1]
    assert bound.logprobs_B[2].item() == pytest.approx(logits[2].log_softmax(0)[bound.tokens_B[2]].item(), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.01, 1.0, 6.0]),
    ways=st.lists(st.tuples(st.sampled_from([0, 1, 40, 256, 300, 5000]), st.floats(0.01, 1.0)), min_size=1, max_size=4),
    masked=st.booleans(),
)
def test_a_large_vocabulary_keeps_what_sorting_all_of_it_would(
    seed: int, scale: float, ways: list[tuple[int, float]], masked: bool
) -> None:
    vocabulary = 4 * CANDIDATES[0] + 500
    logits = scale * torch.randn(len(ways), vocabulary, generator=_generator(seed))
    draws = [Draw(top_k=top_k, top_p=top_p) for top_k, top_p in ways]
    allowed = torch.rand(len(ways), vocabulary, generator=_generator(seed)) < (0.05 if masked else 2.0)
    drawn = sample(logits, draws, generator=_generator(seed), masks=Masks(range(len(ways)), allowed))
    assert drawn.allowed_RV is not None
    for row, (top_k, top_p) in enumerate(ways):
        order = torch.where(allowed[row], logits[row], -torch.inf).argsort(descending=True)
        order = order[: min(top_k or vocabulary, int(allowed[row].sum()))]
        probs = logits[row][order].double().softmax(0)
        kept = drawn.allowed_RV[row].nonzero().squeeze(1)
        assert set(kept.tolist()) == set(order[: len(kept)].tolist())
        assert probs[: len(kept)].sum() >= top_p - 1e-5
        assert len(kept) == 1 or top_p == 1.0 or probs[: len(kept) - 1].sum() < top_p + 1e-5
        assert top_p < 1.0 or len(kept) == len(order)
        (expected,) = logits[row].double()[kept].log_softmax(0)[kept == drawn.tokens_B[row]].tolist()
        assert drawn.logprobs_B[row].item() == pytest.approx(expected, abs=1e-5)


def test_supports_are_the_blobs_of_their_rows_however_many_came_before() -> None:
    encoder = SupportEncoder()
    rng = np.random.default_rng(0)
    for _ in range(3):
        rows = rng.random((MAX_REMEMBERED // 2 + 3, 700)) < rng.random((MAX_REMEMBERED // 2 + 3, 1))
        rows[:, 5] = True
        rows[3] = rows[1]
        rows[0] = True
        assert encoder.encode(torch.from_numpy(rows)) == [encode_support(row) for row in rows]
