"""Tokens drawn from part of the vocabulary are scored over that part: at equal weights their ratio is 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.support import encode_support
from wingbeat.trainer.logprobs import LogprobModel, Targets
from wingbeat.trainer.rows import build_rows
from wingbeat.trainer.single import PolicyTrainer

VOCAB = 48
MakeTrainer = Callable[..., PolicyTrainer]


def _scored(
    model: Any, hidden_NH: Tensor, targets_N: Tensor, allowed: list[np.ndarray | None], *, chunk: int
) -> tuple[Tensor, Tensor]:
    blobs = [b"" if mask is None else encode_support(mask) for mask in allowed]
    table = sorted({blob for blob in blobs if blob})
    places = np.asarray([table.index(blob) if blob else -1 for blob in blobs], np.int64)
    temperatures_N = torch.linspace(0.5, 1.5, len(targets_N))
    return LogprobModel(model, chunk_tokens=chunk).score(
        hidden_NH, Targets(targets_N, temperatures_N, places, tuple(table))
    )


@pytest.mark.parametrize("chunk", [2, 3, 100])
def test_logprob_entropy_and_gradient_are_those_of_the_renormalised_distribution(
    chunk: int, build_model: Callable[..., Any]
) -> None:
    """With and without supports in one call, in an order that the chunks cut through."""
    model = build_model("llama")
    rng = np.random.default_rng(0)
    hidden_NH = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets_N = torch.from_numpy(rng.integers(0, VOCAB, 9))
    allowed: list[np.ndarray | None] = [None if n % 3 == 0 else rng.random(VOCAB) < 0.3 for n in range(9)]
    for mask, target in zip(allowed, targets_N.tolist(), strict=True):
        if mask is not None:
            mask[target] = True
    allowed[4] = allowed[2]
    if allowed[4] is not None:
        targets_N[4] = targets_N[2]
    got, entropy = _scored(model, hidden_NH, targets_N, allowed, chunk=chunk)
    (gradient,) = torch.autograd.grad(got.sum(), hidden_NH)
    logits_NV = model.lm_head(hidden_NH) / torch.linspace(0.5, 1.5, 9)[:, None]
    masks_NV = torch.from_numpy(np.stack([np.ones(VOCAB, bool) if mask is None else mask for mask in allowed]))
    wanted_NV = logits_NV.masked_fill(~masks_NV, -math.inf).log_softmax(-1)
    wanted = wanted_NV.gather(1, targets_N[:, None])[:, 0]
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), hidden_NH, retain_graph=True)
    wanted_entropy = -(wanted_NV.exp() * wanted_NV).nan_to_num(0.0).sum(-1)
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, wanted_entropy.detach(), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, wanted_gradient, atol=2e-6, rtol=1e-5)


def _top_p(logits_V: Tensor) -> Tensor:
    ordered, order = logits_V.softmax(-1).sort(descending=True)
    kept = ordered.cumsum(0) - ordered < 0.8
    return torch.zeros(VOCAB, dtype=torch.bool).scatter(0, order, kept)


def _top_k(logits_V: Tensor) -> Tensor:
    return logits_V >= logits_V.topk(5).values[-1]


def _grammar(logits_V: Tensor) -> Tensor:
    """Almost everything, so that the blob is a bitset."""
    return torch.arange(VOCAB) != int(logits_V.argmax())


@torch.no_grad()
def _sampled_batch(trainer: PolicyTrainer, support: Callable[[Tensor], Tensor], *, temperature: float) -> TrainingBatch:
    """Two episodes on one prompt, sampled by the trainer's own weights as an engine would."""
    generator = torch.Generator().manual_seed(0)
    episodes: list[EpisodeSamples] = []
    for episode in range(2):
        tokens, logprobs, table, index = [3, 7, 5], [0.0] * 3, list[bytes](), [-1] * 3
        for _ in range(8):
            logits_V = trainer.model(input_ids=torch.tensor([tokens])).logits[0, -1].float() / temperature
            allowed_V = support(logits_V)
            distribution_V = logits_V.masked_fill(~allowed_V, -math.inf).log_softmax(-1)
            token = int(torch.multinomial(distribution_V.exp(), 1, generator=generator))
            blob = encode_support(allowed_V.numpy())
            table += [blob] if blob not in table else []
            tokens.append(token)
            logprobs.append(float(distribution_V[token]))
            index.append(table.index(blob))
        sampled = np.asarray([0] * 3 + [1] * 8, np.uint8)
        sample = TrainingSample.build(
            f"s{episode}",
            token_ids=np.asarray(tokens, np.int32),
            sampled=sampled,
            sampling_logprobs=np.asarray(logprobs, np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            temperature=temperature,
            support_table=tuple(table),
            support_index=np.asarray(index, np.int32),
        )
        episodes.append(EpisodeSamples(f"e{episode}", 1, "g", "p", "", float(episode), (sample,)))
    return TrainingBatch("b", "p", 1, tuple(episodes), seed=0)


@pytest.mark.parametrize("prefix_tree", ["off", "on"])
@pytest.mark.parametrize("support", [_top_p, _top_k, _grammar])
def test_at_equal_weights_the_ratio_is_one(
    support: Callable[[Tensor], Tensor], prefix_tree: str, make_trainer: MakeTrainer
) -> None:
    batch = _sampled_batch(make_trainer(), support, temperature=0.7)
    metrics = make_trainer(prefix_tree=prefix_tree).train_step(batch).metrics
    assert metrics["max_abs_logprob_diff"] <= 1e-5
    assert metrics["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert metrics["excluded_tokens"] == 0


@pytest.mark.parametrize("support", [_top_p, _top_k, _grammar])
def test_a_trainer_that_ignores_the_support_is_seen(
    support: Callable[[Tensor], Tensor], make_trainer: MakeTrainer
) -> None:
    """The mutant: the same samples without their supports."""
    batch = _sampled_batch(make_trainer(), support, temperature=0.7)
    episodes = tuple(
        msgspec.structs.replace(
            episode,
            samples=tuple(
                msgspec.structs.replace(sample, support_table=(), support_index=b"") for sample in episode.samples
            ),
        )
        for episode in batch.episodes
    )
    metrics = make_trainer().train_step(msgspec.structs.replace(batch, episodes=episodes)).metrics
    assert metrics["max_abs_logprob_diff"] > 1e-3


def test_a_token_outside_of_its_own_support_cannot_train() -> None:
    """Its logprob and its support are not of one distribution, so it is excluded and counted."""
    sample = TrainingSample.build(
        "s",
        token_ids=np.asarray([1, 2, 3], np.int32),
        sampled=np.asarray([0, 1, 1], np.uint8),
        sampling_logprobs=np.asarray([0, -1, -1], np.float32),
        versions=np.asarray([-1, 0, 0], np.int32),
        support_table=(encode_support(np.arange(VOCAB) < 3),),
        support_index=np.asarray([-1, 0, 0], np.int32),
    )
    (row,) = build_rows([EpisodeSamples("e", 1, "g", "p", "", 1.0, (sample,))], vocabulary=VOCAB)
    assert (row.targets_N.tolist(), row.num_excluded) == ([1], 1)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ((b"\x07nonsense",), "unknown support encoding"),
        ((b"\x01",), "names no token"),
        ((), "expected supports below 0"),
    ],
)
def test_a_damaged_support_is_refused(table: tuple[bytes, ...], reason: str) -> None:
    sample = TrainingSample.build(
        "s",
        token_ids=np.asarray([1, 2], np.int32),
        sampled=np.asarray([0, 1], np.uint8),
        sampling_logprobs=np.asarray([0, -1], np.float32),
        versions=np.asarray([-1, 0], np.int32),
        support_table=table,
        support_index=np.asarray([-1, 0], np.int32),
    )
    with pytest.raises(ValueError, match=reason):
        build_rows([EpisodeSamples("e", 1, "g", "p", "", 1.0, (sample,))], vocabulary=VOCAB)
