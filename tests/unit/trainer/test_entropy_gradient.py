"""The entropy's own gradient, against autograd over whole logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from wingbeat.core.support import encode_support
from wingbeat.trainer.logprobs import LogprobModel, Targets

VOCAB = 48
MakeTrainer = Callable[..., Any]


def _case(model: Any, *, supports: bool) -> tuple[Tensor, Targets, Tensor]:
    """Hidden states, targets, and which tokens are allowed [N, V]."""
    rng = np.random.default_rng(0)
    count = 7
    targets_N = torch.from_numpy(rng.integers(0, VOCAB, count))
    allowed_NV = np.ones((count, VOCAB), np.bool_)
    places_N = np.full(count, -1, np.int64)
    table: list[bytes] = []
    for n in range(0, count if supports else 0, 2):
        allowed_NV[n] = rng.random(VOCAB) < 0.3
        allowed_NV[n, targets_N[n]] = True
        places_N[n] = len(table)
        table.append(encode_support(allowed_NV[n]))
    dtype = model.get_input_embeddings().weight.dtype
    hidden_NH = torch.randn(count, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    return (
        hidden_NH,
        Targets(targets_N, torch.linspace(0.5, 1.5, count), places_N, tuple(table)),
        torch.tensor(allowed_NV),
    )


@pytest.mark.parametrize("supports", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("chunk", [2, 100])
def test_gradient_of_entropies_and_logprobs(
    chunk: int, kind: str, supports: bool, build_model: Callable[..., Any]
) -> None:
    model = build_model(kind).double()
    hidden_NH, targets, allowed_NV = _case(model, supports=supports)
    scorer = LogprobModel(model, chunk_tokens=chunk, entropy_gradient=True)
    weights_N = torch.linspace(-1, 1, 7, dtype=torch.float64)
    logprobs_N, entropy_N = scorer.score(hidden_NH, targets)
    (got,) = torch.autograd.grad((weights_N * entropy_N + 0.3 * logprobs_N).sum(), hidden_NH)
    logits_NV = scorer._transform(model.lm_head(hidden_NH)) / targets.temperatures_N[:, None].double()
    plain_NV = torch.where(allowed_NV, logits_NV, -math.inf).log_softmax(-1)
    terms_NV = torch.where(allowed_NV, plain_NV.exp() * torch.where(allowed_NV, plain_NV, 0.0), 0.0)
    wanted_logprobs = plain_NV.gather(1, targets.targets_N[:, None])[:, 0]
    (wanted,) = torch.autograd.grad((weights_N * -terms_NV.sum(-1) + 0.3 * wanted_logprobs).sum(), hidden_NH)
    torch.testing.assert_close(entropy_N, -terms_NV.sum(-1), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-10)


def test_entropies_have_no_gradient_unless_asked_for(build_model: Callable[..., Any]) -> None:
    model = build_model("llama")
    hidden_NH, targets, _ = _case(model, supports=True)
    assert not LogprobModel(model, chunk_tokens=3).score(hidden_NH, targets)[1].requires_grad
    assert LogprobModel(model, chunk_tokens=3, entropy_gradient=True).score(hidden_NH, targets)[1].requires_grad


def test_another_models_vocabulary(build_model: Callable[..., Any]) -> None:
    """Padding of a larger head is left out; tokens that a smaller head lacks are impossible."""
    model = build_model("llama")
    hidden_NH, targets, _ = _case(model, supports=False)
    logits_NV = model.lm_head(hidden_NH) / targets.temperatures_N[:, None]
    fewer = Targets(targets.targets_N.clamp(max=39), targets.temperatures_N, targets.supports_N)
    got, _ = LogprobModel(model, chunk_tokens=3, vocabulary=40).score(hidden_NH, fewer)
    wanted = logits_NV[:, :40].log_softmax(-1).gather(1, fewer.targets_N[:, None])[:, 0]
    torch.testing.assert_close(got, wanted)
    more = Targets(torch.tensor([47, 48, 50, 1, 2, 3, 4]), targets.temperatures_N, targets.supports_N)
    with torch.no_grad():
        got, _ = LogprobModel(model, chunk_tokens=3, vocabulary=51).score(hidden_NH, more)
    assert got[1:3].tolist() == [-math.inf, -math.inf]
    wanted = logits_NV.log_softmax(-1).gather(1, more.targets_N.clamp(max=47)[:, None])[:, 0]
    torch.testing.assert_close(got[[0, 3, 4, 5, 6]], wanted[[0, 3, 4, 5, 6]])


def test_a_bonus_raises_the_entropy(make_trainer: MakeTrainer, make_batch: Callable[..., Any]) -> None:
    """Groups without any signal: the entropy is all that is trained."""
    trainer = make_trainer(entropy_coef=1.0, learning_rate=3e-3)
    found: list[float] = []
    for step in range(1, 6):
        metrics = trainer.train_step(make_batch(step=step, rewards=[1.0] * 8)).metrics
        assert metrics["grad_norm"] > 0
        found.append(metrics["entropy"])
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.01
